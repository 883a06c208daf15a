"""The training modules of EAGLE, MSD, SpecVLM, ViSpec and FLASH: each adds the loss and drafting steps of its paper to
`DraftModule`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdec.drafters.eagle.specvlm import SpecVLM, expected_kept_share
from mmdec.drafters.eagle.training.module import DraftModule, LossWeights
from mmdec.drafters.eagle.training.teacher import TargetFeatures
from mmdec.drafters.eagle.training.unroll import UnrollInputs, additive_mask
from mmdec.drafters.flash.network import FlashNetwork
from mmdec.errors import InputError
from mmdec.training.optim import token_weight


@final
class EagleModule(DraftModule):
    """Trains EAGLE (Li et al. 2024, arXiv 2401.15077): SmoothL1 + 0.1 cross-entropy. EAGLE-2 is trained the same way.

    The paper's settings are `unroll` 1 and `noise` 0.1.
    """

    system: ClassVar[str] = "eagle"


@final
class MsdModule(DraftModule):
    """Trains MSD (Lin et al. 2025, arXiv 2505.14260): EAGLE's loss, in two stages.

    At visual tokens the network reads only embeddings, no features.

    The stages are given by the data module's `ramp`: only text in the first half of the epochs, then more and more
    pictures. The paper takes its text samples from ShareGPT. If a corpus has only questions with pictures, these are
    also used without their pictures. The paper's settings are `unroll` 1, `noise` 0.1 and a `ramp` over all epochs.
    """

    system: ClassVar[str] = "msd"


@final
class SpecVlmModule(DraftModule):
    """Trains SpecVLM (arXiv 2509.11815): SmoothL1 + 0.1 cross-entropy. A gate chooses how each image is compressed.

    In the paper only the drafting loss trains the gate.

    Args:
        cost: Weight of an additional loss, the expected share of visual tokens after compression; 0: as in the paper.
    """

    system: ClassVar[str] = "specvlm"

    def __init__(self, units: list[str] | None = None, cost: float = 0.0, **options: Any) -> None:
        super().__init__(units, **options)
        self.cost = cost
        self.hparams.update(cost=cost)

    def compare(self, columns: UnrollInputs, texts: list[TargetFeatures]) -> Mapping[str, Tensor]:
        """Return name -> value: the batch's "loss", which includes the gate's loss if `cost` is not 0, and values for
        the log."""
        parts = dict(super().compare(columns, texts))
        network = cast(SpecVLM, self.network)
        if not self.cost or network.gate is None:
            return parts
        costs = []
        for text in texts:
            visual = text.visual[: text.prompt]
            if bool(visual.any()):
                question = ~visual & (visual.cumsum(0) > 0)
                logits = network.gate_logits(text.embeds[: text.prompt], text.features[: text.prompt], question)
                costs.append(expected_kept_share(logits, cast(Any, network.config), int(visual.sum())))
        weight = token_weight(torch.tensor(len(costs), device=columns.states.device))
        if costs:
            parts["kept"] = torch.stack(costs).mean()
            parts["loss"] = parts["loss"] + self.cost * weight * parts["kept"]
        return parts


@final
class ViSpecModule(DraftModule):
    """Trains ViSpec (Kang et al. 2025, arXiv 2509.15235): 10 L1 between distributions + 0.1 ListMLE of the ten best
    tokens.

    Its first stage is EAGLE's training on text (`EagleModule` with `ranks` 0.1). This class is its second stage:
    samples with pictures and long answers by the target, and a second drafting step, which reads the network's own
    predictions (`unroll` 2 here, `mtp_steps` 1 in the paper's code). With `start` it begins from the network of the
    first stage.
    """

    system: ClassVar[str] = "vispec"
    weights: ClassVar[LossWeights] = LossWeights(features=0.0, tokens=0.0, distribution=10.0, ranks=0.1)


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

    def steps(self, columns: UnrollInputs, texts: list[TargetFeatures], count: int) -> list[Tensor]:
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
    _, keys, values = network.project(columns.states, columns.prompt_positions)
    queries, own_keys, own_values = network.project(spread, positions)
    column = torch.arange(length, device=device).repeat_interleave(count)
    slot = slots.repeat(length)
    visible = (slot == 0) & (column < column[:, None]) | (column == column[:, None]) & (slot <= slot[:, None])
    prompt = columns.prompt_mask[:, None].expand(-1, len(column), -1)
    mask = additive_mask(torch.cat([prompt, visible.expand(rows, -1, -1)], 2), states.dtype)
    hidden = network.attend(spread, queries, torch.cat([keys, own_keys], 2), torch.cat([values, own_values], 2), mask)
    return network.finish(hidden.view(rows, length, count, -1), columns.features)


def text_embeds(columns: UnrollInputs, slots: int) -> Tensor:
    """Return for each of N answer tokens c the embeddings of answer tokens c + 1 ... c + k - 1: (B, N, k - 1, H), zero
    beyond the answer's end.

    Args:
        slots: K.
    """
    padded = pad(columns.embeds, (0, 0, 0, slots))
    length, device = columns.embeds.shape[1], padded.device
    positions = torch.arange(length, device=device)[:, None] + torch.arange(1, slots, device=device)
    return padded[:, positions]
