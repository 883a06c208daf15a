"""FLASH (arXiv 2505.12728): an image compressor and a head that drafts k tokens in a pass.

The compressor has learned latents; the head is semi-autoregressive.

The head is one decoder layer as in EAGLE, with other inputs. At a text position t the input is SiLU(fc_gate x) * fc_up
x with x = [embedding of token t + 1; feature of token t]. An image's positions hold the target's features of its
tokens, compressed by learned latents. Each position is read k times, as k slots. Slot i has its own embedding (zero for
slot 0) and the RoPE position t + i. It attends to slot 0 of all earlier positions and to the slots 0 .. i of its own
position. It predicts the feature of token t + 1 + i, from which the LM head predicts token t + 2 + i. A residual gate
adds the position's feature to each slot. Slots do not read each other's tokens. Instead, refiner i corrects slot i by
the tokens that the slots before it drafted.

Two things differ from the published code. There, refiner i reads the token one position later in decoding than in
training; here both read the tokens of slots 0 .. i - 1, which are t + 2 .. t + 1 + i. The published code computes the
whole text again in each round; here keys and values of slot 0 are cached, because later positions see no other slot.

Letters in shapes: B rows, L tokens, k slots, H channels, m latents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast, final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, silu

from mmdec.drafters.networks.compressors import LatentAttention, image_spans, separate_positions
from mmdec.drafters.networks.config import DraftConfig
from mmdec.drafters.networks.draft_network import DraftNetwork, PromptInput
from mmdec.drafters.networks.layers import DraftLayer, RMSNorm
from mmdec.drafters.networks.weights import check_size
from mmdec.drafters.registry import built_in_network
from mmdec.errors import InputError
from mmdec.types import Drafter

MAX_SLOTS, MAX_LATENTS = 32, 4096


@dataclass(frozen=True)
class FlashConfig(DraftConfig):
    """Sizes and options of a FLASH network.

    The paper has 4 or 5 slots, 64 latents for LLaVA's 576 image tokens, and 36 for Qwen2.5-VL's 324.
    """

    input_norm: bool = True
    slots: int = 4  # number of tokens that one pass drafts
    latents: int = 64  # number of states to which an image is compressed
    bottleneck: int = 8  # a refiner's inner layer has H / bottleneck channels
    refine: bool = True  # whether the network has refiners
    tree: bool = False  # whether to draft a tree from the slots (not in the paper, whose draft is a chain)
    # input at text positions before an image: True: the feature alone, without fc, as in the published code; False: the
    # same as at other text positions
    plain_prefix: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds = {"slots": MAX_SLOTS, "latents": MAX_LATENTS, "bottleneck": self.hidden_size}
        for name, maximum in bounds.items():
            check_size(name, getattr(self, name), maximum)
        if len(self.layers) != 1:
            raise InputError(f"`layers` must name one layer, but is {self.layers!r:.60}. (-1,) is the published one.")


class Refiner(nn.Module):
    """Corrects the state of one slot by the tokens that earlier slots drafted.

    It is initialised so that it changes nothing.
    """

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(2 * size, inner), nn.Linear(inner, size)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, slot: Tensor, preceding: Tensor) -> Tensor:
        """Correct the states (..., H) of one slot.

        Args:
            preceding: (..., H), the sum of the embeddings of the tokens that earlier slots drafted.
        """
        return slot + self.up(silu(self.down(torch.cat([preceding, slot], -1))))


@built_in_network("flash", note="FLASH: reads a picture shortened by attention, and drafts several tokens at once.")
@final
class FlashNetwork(DraftNetwork):
    """FLASH's network. Holds the decoder layer, the image compressor, the slot embeddings and the refiners."""

    config_class: ClassVar[type[DraftConfig]] = FlashConfig

    # a slot's output is refined before it is a feature
    continues_features: ClassVar[bool] = False

    def build(self, config: DraftConfig) -> None:
        sizes, size, count = cast(FlashConfig, config), config.hidden_size, cast(FlashConfig, config).slots
        if config.fc_norm:
            self.fc_norm = RMSNorm(2 * size, config.rms_norm_eps)
        self.layers = nn.ModuleList([DraftLayer(config)])
        self.fc_gate = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.fc_up = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.compressor = LatentAttention(size, sizes.latents)
        self.slot_embeddings = nn.Parameter(torch.randn(count - 1, size) * size**-0.5)  # embeddings of slots 1 .. k - 1
        self.residual_gate = nn.Parameter(torch.zeros(count))
        inner = max(1, size // sizes.bottleneck)
        self.refiners = nn.ModuleList(Refiner(size, inner) for _ in range(count - 1 if sizes.refine else 0))

    def make_drafter(self, embedding: nn.Module, output: nn.Linear) -> Drafter:
        from mmdec.drafters.flash.drafter import FlashDrafter

        return FlashDrafter(self, embedding, output)

    @property
    def slots(self) -> int:
        return cast(FlashConfig, self.config).slots

    def fuse(self, embeds: Tensor, features: Tensor) -> Tensor:
        """Compute the layer's input (..., H) at a text position t.

        Args:
            embeds: (..., H), embedding of token t + 1.
            features: (..., H), of token t.
        """
        inputs = torch.cat([embeds, features], -1)
        if self.config.fc_norm:
            inputs = self.fc_norm(inputs)
        gate = silu(linear(inputs, self.fc_gate.weight, self.fc_gate.bias))
        return gate * linear(inputs, self.fc_up.weight, self.fc_up.bias)

    def prompt(self, embeds: Tensor, features: Tensor, visual: Tensor) -> PromptInput:
        """Compute the layer's input for the prompt of one row, without padding; images are compressed.

        Position t counts as visual if token t + 1 is visual.

        Args:
            embeds: (L, H).
            features: (L, H).
            visual: (L,) bool, True at visual tokens.
        """
        images = image_spans(visual[1:])
        text = (~visual[1:]).nonzero()[:, 0]
        fused = self.fuse(embeds[1:][text], features[:-1][text])
        if not images:
            return PromptInput(fused, text)
        if cast(FlashConfig, self.config).plain_prefix:
            fused = torch.where((text < images[0][0])[:, None], features[:-1][text], fused)
        states, columns = [fused], [text]
        # position t reads token t + 1, so no position reads the first token
        weights = [features.new_zeros(1)] if bool(visual[0]) else []
        for begin, end in images:
            compressed = self.compressor(features[1:][begin:end])
            states.append(compressed.states)
            columns.append(separate_positions(compressed.positions, end - begin) + begin)
            weights.append(compressed.visual_weights)
        order = torch.cat(columns).argsort()
        return PromptInput(torch.cat(states)[order], torch.cat(columns)[order], None, torch.cat(weights), "latents")

    def slot_states(self, states: Tensor) -> Tensor:
        """Compute the inputs (..., k, H) of all k slots from the layer's input at some positions (..., H)."""
        return states[..., None, :] + pad(self.slot_embeddings, (0, 0, 1, 0))

    def finish(self, hidden: Tensor, features: Tensor) -> Tensor:
        """Apply the residual gate: add the positions' features, scaled, to each slot.

        Args:
            hidden: (..., n, H), the layer's output at the first n slots.
            features: (..., H).

        Returns:
            (..., n, H), before refinement.
        """
        return hidden + self.residual_gate[: hidden.shape[-2], None] * features[..., None, :]

    def refine_slot(self, slot: Tensor, preceding: Tensor, index: int) -> Tensor:
        """Correct the state `slot` (..., H) of slot number `index` by the tokens that earlier slots drafted.

        Args:
            preceding: (..., H), the sum of these tokens' embeddings. Slot 0 has no earlier slots and is returned
                unchanged.
        """
        return self.refiners[index - 1](slot, preceding) if index and len(self.refiners) else slot
