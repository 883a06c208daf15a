"""Trains FLASH: a pass over all slots, with refiners that read earlier tokens."""

from __future__ import annotations

from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdec.drafters.flash.network import FlashNetwork
from mmdec.drafters.networks.training.module import DraftModule
from mmdec.drafters.networks.training.unroll import UnrollInputs, additive_mask
from mmdec.errors import InputError


@final
class FlashModule(DraftModule):
    """Trains FLASH (arXiv 2505.12728): a pass drafts k tokens, one in each slot.

    The loss is summed over the slots: SmoothL1 + 0.1 cross-entropy.

    The refiner of a slot reads the tokens of earlier slots. These are tokens of the text, but a share of them are the
    slots' own predictions (scheduled sampling).

    Args:
        sampled: This share at the end.
        sampled_from: Number of epochs in which it is 0.
        sampled_over: Number of epochs in which it then rises.
    """

    system: ClassVar[str] = "flash"

    def __init__(
        self,
        units: list[str] | None = None,
        sampled: float = 0.2,
        sampled_from: int = 4,
        sampled_over: int = 36,
        **options: Any,
    ) -> None:
        super().__init__(units, **options)
        if not 0 <= sampled <= 1:
            raise InputError(f"`sampled` must be from 0 to 1, but is {sampled}. 0.2 is the published one.")
        self.sampled, self.sampled_from, self.sampled_over = sampled, sampled_from, sampled_over
        self.hparams.update(sampled=sampled, sampled_from=sampled_from, sampled_over=sampled_over)

    @property
    def depth(self) -> int:
        """The number of slots; the loss compares all of them."""
        return cast(FlashNetwork, self.network).slots

    @property
    def chain(self) -> int:
        """The number of tokens of the chains that validation simulates: one for each slot."""
        return min(self.options.chain, self.depth)

    def share(self, epoch: int) -> float:
        """Return the share of the refiners' input tokens that are predictions of the slots.

        Args:
            epoch: From 0.
        """
        return self.sampled * min(1.0, max(0.0, (epoch + 1 - self.sampled_from) / max(self.sampled_over, 1)))

    def steps(self, columns: UnrollInputs, count: int) -> list[Tensor]:
        """Draft with `count` slots from each of the N answer tokens as a root.

        Returns:
            For each slot s from 0 its features (B, N - s, H); features that predict a token beyond the answers' end are
            left out.
        """
        network = cast(FlashNetwork, self.network)
        slots = raw_slots(network, columns)
        embeds = text_embeds(columns, network.slots)
        share = self.share(self.current_epoch) if self.training else 0.0
        if share:
            embeds = self._mix_predictions(slots, embeds, share)
        preceding, hidden = torch.zeros_like(slots[:, :, 0]), [slots[:, :, 0]]
        for slot in range(1, count):
            preceding = preceding + embeds[:, :, slot - 1]
            hidden.append(network.refine_slot(slots[:, :, slot], preceding, slot))
        length = slots.shape[1]
        return [states[:, : length - slot] for slot, states in enumerate(hidden[:length])]

    def _mix_predictions(self, slots: Tensor, embeds: Tensor, share: float) -> Tensor:
        with torch.no_grad():
            slot_embeds = self.teacher.embed(self.teacher.logits(slots[:, :, :-1]).argmax(-1)).to(embeds.dtype)
            is_mixed = torch.rand(embeds.shape[:-1], device=embeds.device) < share
        return torch.where(is_mixed[..., None], slot_embeds, embeds)


def raw_slots(network: FlashNetwork, columns: UnrollInputs) -> Tensor:
    """Compute the states (B, N, k, H) of the k slots at each of N answer tokens, before the refiners.

    Slot i at a token attends to the prompt, to slot 0 at earlier tokens, and to slots 0 ... i at the same token.
    """
    states = network.fuse(columns.embeds, columns.features)
    rows, length, count = *states.shape[:2], network.slots
    spread = network.slot_states(states).flatten(1, 2)
    device = states.device
    slots = torch.arange(count, device=device)
    positions = (columns.positions[..., None] + slots).flatten(1)
    layer = network.layer(0)
    _, keys, values = layer.project(columns.states, columns.prompt_positions)
    queries, own_keys, own_values = layer.project(spread, positions)
    column = torch.arange(length, device=device).repeat_interleave(count)
    slot = slots.repeat(length)
    visible = (slot == 0) & (column < column[:, None]) | (column == column[:, None]) & (slot <= slot[:, None])
    prompt = columns.prompt_mask[:, None].expand(-1, len(column), -1)
    mask = additive_mask(torch.cat([prompt, visible.expand(rows, -1, -1)], 2), states.dtype)
    hidden = layer.attend(spread, queries, torch.cat([keys, own_keys], 2), torch.cat([values, own_values], 2), mask)
    return network.finish(hidden.view(rows, length, count, -1), columns.features)


def text_embeds(columns: UnrollInputs, slots: int) -> Tensor:
    """Return the embeddings of the k - 1 answer tokens after each of N answer tokens: (B, N, k - 1, H).

    After token c come c + 1 ... c + k - 1; embeddings beyond the answer's end are zero.

    Args:
        slots: k.
    """
    padded = pad(columns.embeds, (0, 0, 0, slots))
    length, device = columns.embeds.shape[1], padded.device
    positions = torch.arange(length, device=device)[:, None] + torch.arange(1, slots, device=device)
    return padded[:, positions]
