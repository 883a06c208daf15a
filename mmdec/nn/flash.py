"""FLASH: a latent-aware compressor and a semi-autoregressive head, k tokens a pass (arXiv 2505.12728).

The head is one layer of EAGLE's kind over other inputs. A text column t is SiLU(fc_gate x) * fc_up x with x =
[embedding of token t + 1; feature of token t]; the target's features of an image's tokens, compressed by learned
latents, stand in the image's stead. Each column is read k times: slot i has its own embedding (that of slot 0 is zero)
and RoPE position t + i, sees slot 0 of all earlier columns and the slots up to i of its own, and gives the feature of
token t + 1 + i, from which the LM head reads token t + 2 + i. A residual gate adds the column's own feature to each
slot. Slots do not read each other's tokens: refiner i corrects slot i by the tokens of the slots before it.

The published decoding feeds refiner i the token one position later than its training did; here both read the tokens of
slots 0 .. i - 1, t + 2 .. t + 1 + i. And since later columns see slot 0 alone, its keys and values can be kept: the
published one runs over the whole text each round.

B rows, L columns, k slots, H channels, m latents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, silu

from mmdec.nn.compressor import LatentAttention, separate, spans
from mmdec.nn.draft_config import DraftConfig
from mmdec.nn.draft_network import DraftNetwork, Prompted
from mmdec.types import InputError

MOST_SLOTS, MOST_LATENTS = 32, 4096


@dataclass(frozen=True)
class FlashConfig(DraftConfig):
    """Shape of the network: 4 or 5 slots as published; 64 latents for LLaVA's 576 tokens, 36 for Qwen2.5-VL's 324."""

    input_norm: bool = True
    slots: int = 4
    latents: int = 64
    bottleneck: int = 8  # a refiner's inner size is H / bottleneck
    refine: bool = True
    tree: bool = False  # slots lifted to a tree (ours); the paper's draft is a chain
    plain_prefix: bool = False  # published: text before an image is its feature alone, past fc; else as all text

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds = {"slots": MOST_SLOTS, "latents": MOST_LATENTS, "bottleneck": self.hidden_size}
        for name, most in bounds.items():
            size = getattr(self, name)
            if type(size) is not int or not 1 <= size <= most:
                raise InputError(f"`{name}` must be an integer from 1 to {most}, but is {size!r:.60}. Choose another.")
        for name in ("refine", "tree", "plain_prefix"):
            if type(getattr(self, name)) is not bool:
                raise InputError(f"`{name}` must be true or false, but is {getattr(self, name)!r:.60}. Choose one.")
        if len(self.layers) != 1:
            raise InputError(f"`layers` must name one layer, but is {self.layers!r:.60}. (-1,) is the published one.")


class Refiner(nn.Module):
    """Corrects one slot by the tokens of those before it; begins as no correction."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(2 * size, inner), nn.Linear(inner, size)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, slot: Tensor, preceding: Tensor) -> Tensor:
        """slot (..., H), preceding (..., H): sum of the embeddings of the tokens before -> (..., H)."""
        return slot + self.up(silu(self.down(torch.cat([preceding, slot], -1))))


@final
class FlashNetwork(DraftNetwork):
    """The head, the compressor and the refiners."""

    system: ClassVar[str] = "flash"
    config_class: ClassVar[type[DraftConfig]] = FlashConfig

    def __init__(self, config: FlashConfig) -> None:
        super().__init__(config)
        del self.fc
        size, count = config.hidden_size, config.slots
        self.fc_gate = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.fc_up = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.compressor = LatentAttention(size, config.latents)
        self.slot_embeddings = nn.Parameter(torch.randn(count - 1, size) * size**-0.5)  # of slots 1 .. k - 1
        self.residual_gate = nn.Parameter(torch.zeros(count))
        inner = max(1, size // config.bottleneck)
        self.refiners = nn.ModuleList(Refiner(size, inner) for _ in range(count - 1 if config.refine else 0))

    @property
    def slots(self) -> int:
        return cast(FlashConfig, self.config).slots

    def fuse(self, embeds: Tensor, features: Tensor, carry: Any = None) -> Tensor:
        """embeds (..., H) of token t + 1, features (..., H) of token t -> (..., H)."""
        joined = torch.cat([embeds, features], -1)
        if self.config.fc_norm:
            joined = self.fc_norm(joined)
        gate = silu(linear(joined, self.fc_gate.weight, self.fc_gate.bias))
        return gate * linear(joined, self.fc_up.weight, self.fc_up.bias)

    def prompt(self, embeds: Tensor, features: Tensor, visual: Tensor, carry: Any = None) -> Prompted:
        """One row's columns, an image's compressed; see `DraftNetwork.prompt`. A column is visual where the token that
        it reads is visual."""
        images = spans(visual[1:])
        text = (~visual[1:]).nonzero()[:, 0]
        fused = self.fuse(embeds[1:][text], features[:-1][text])
        if not images:
            return Prompted(fused, text)
        if cast(FlashConfig, self.config).plain_prefix:
            fused = torch.where((text < images[0][0])[:, None], features[:-1][text], fused)
        states, columns = [fused], [text]
        kept = [features.new_zeros(1)] if bool(visual[0]) else []  # no column reads the first token
        for begin, end in images:
            compressed = self.compressor(features[1:][begin:end])
            states.append(compressed.states)
            columns.append(separate(compressed.positions, end - begin) + begin)
            kept.append(compressed.kept)
        order = torch.cat(columns).argsort()
        return Prompted(torch.cat(states)[order], torch.cat(columns)[order], None, torch.cat(kept), "latents")

    def slot_states(self, states: Tensor) -> Tensor:
        """states (..., H) of columns -> (..., k, H), what each slot's layer reads."""
        return states[..., None, :] + pad(self.slot_embeddings, (0, 0, 1, 0))

    def finish(self, hidden: Tensor, features: Tensor) -> Tensor:
        """The layer's output (..., n, H) of the first n slots and the columns' features (..., H) -> (..., n, H), before
        refining."""
        return hidden + self.residual_gate[: hidden.shape[-2], None] * features[..., None, :]

    def refined(self, slot: Tensor, preceding: Tensor, index: int) -> Tensor:
        """Slot `index` (..., H), and preceding (..., H), the sum of the embeddings of the tokens of the slots before
        it -> (..., H). Slot 0 has none before it."""
        return self.refiners[index - 1](slot, preceding) if index and len(self.refiners) else slot
