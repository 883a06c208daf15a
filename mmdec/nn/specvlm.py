"""SpecVLM: EAGLE-2's network with an input norm and an image compressor that depends on the question (arXiv
2509.11815).

A column is visual if the token that it reads, t + 1, is. The visual columns of each image are compressed together and
enter the drafter's cache once, at their positions in the text; text columns are EAGLE's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor

from mmdec.nn.compressor import Grid, spans
from mmdec.nn.draft_config import DraftConfig
from mmdec.nn.draft_network import DraftNetwork, Prompted
from mmdec.nn.elastic import CHOICES, ElasticCompressor, QuestionGate, Variant, top_choice
from mmdec.types import InputError

MOST_RATIO = 4096


@dataclass(frozen=True)
class SpecVLMConfig(DraftConfig):
    """Sizes of the network. Ratios and queries are the paper's defaults; it gives no gate size, temperature or grid."""

    input_norm: bool = True  # the paper's one change to EAGLE's layer; see `fc_norm` for the other possible reading
    variant: Variant = "select"
    compressors: tuple[str, ...] = CHOICES  # choices of "select"; a single one needs no gate
    prune_ratio: int = 20
    pool_ratio: int = 20
    conv_ratio: int = 3
    mixed_ratio: int = 3  # ratio of all three compressors of "weighted"; the paper goes up to 5
    queries: int = 2
    pruning: str = "random"  # or "strided"; see `mmdec.nn.compressor.Prune`
    depthwise: bool = True  # see `mmdec.nn.elastic.ElasticCompressor`
    grid: Grid | None = None  # rows and columns of an image's tokens, if all images have the same
    gate_size: int = 64
    gate_temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "compressors", tuple(self.compressors))
        if self.grid is not None:
            object.__setattr__(self, "grid", tuple(self.grid))
        for name in ("prune_ratio", "pool_ratio", "conv_ratio", "mixed_ratio", "queries", "gate_size"):
            _check_size(name, getattr(self, name))
        if self.grid is not None:
            if len(self.grid) != 2:
                raise InputError(f"`grid` must be rows and columns, but is {self.grid!r:.60}. Leave it out.")
            for size in self.grid:
                _check_size("grid", size)
        if self.variant not in ("select", "weighted", "concat"):
            raise InputError(f"`variant` must be select, weighted or concat, but is {self.variant!r:.60}. Choose one.")
        if not self.compressors or not set(self.compressors) <= set(CHOICES):
            raise InputError(f"`compressors` must be of {', '.join(CHOICES)}, but is {self.compressors!r:.80}.")
        if self.pruning not in ("random", "strided"):
            raise InputError(f"`pruning` must be random or strided, but is {self.pruning!r:.60}. Choose one.")
        if type(self.depthwise) is not bool:
            raise InputError(f"`depthwise` must be true or false, but is {self.depthwise!r:.60}. Choose one.")
        if type(self.gate_temperature) not in (int, float) or not 1e-3 <= self.gate_temperature <= 1e3:
            raise InputError(f"`gate_temperature` must be in 0.001 .. 1000, but is {self.gate_temperature!r:.60}.")


@final
class SpecVLM(DraftNetwork):
    """EAGLE's layer after the elastic compressor."""

    system: ClassVar[str] = "specvlm"
    config_class: ClassVar[type[DraftConfig]] = SpecVLMConfig

    def __init__(self, config: SpecVLMConfig) -> None:
        super().__init__(config)
        mixed = config.variant == "weighted"
        heads = config.num_attention_heads if config.hidden_size % config.num_attention_heads == 0 else 1
        ratios, shared = (config.prune_ratio, config.pool_ratio, config.conv_ratio), config.mixed_ratio
        self.compressor = ElasticCompressor(
            (self.fc.in_features, config.hidden_size),
            config.variant,
            config.compressors,
            (shared, shared, shared) if mixed else ratios,
            (config.queries, heads),
            grid=config.grid,
            pruning=cast(Any, config.pruning),
            depthwise=config.depthwise,
        )
        choices = len(self.compressor.choices)
        gated = mixed or (config.variant == "select" and choices > 1)
        features = config.hidden_size * len(config.layers)
        self.gate = QuestionGate(config.hidden_size, features, config.gate_size, choices) if gated else None

    def gate_logits(self, embeds: Tensor, features: Tensor, question: Tensor) -> Tensor:
        """The gate's scores (C,) for one row: embeds (L, H), features (L, k * H), question (L,) bool.

        The paper has no loss on them; training may add one. Raises: InputError if the network has no gate.
        """
        if self.gate is None:
            raise InputError("`compressors` must be two or more for a gate, but there is one. Name more of them.")
        if not bool(question.any()):
            question = torch.ones_like(question)
        return self.gate(embeds[question].mean(0), features[question][-1])

    def prompt(self, embeds: Tensor, features: Tensor, visual: Tensor, carry: Any = None) -> Prompted:
        """One row's prompt with compressed images, see `DraftNetwork.prompt`. The gate reads all text after the first
        image."""
        config = cast(SpecVLMConfig, self.config)
        joined = torch.cat([embeds[1:], features[:-1]], -1)  # (L - 1, J)
        images = spans(visual[1:], config.grid)
        if not images:
            return Prompted(self._fc(joined), torch.arange(len(joined), device=joined.device))
        choice, factor, weights = 0, None, None
        if self.gate is not None:
            logits = self.gate_logits(embeds, features, asking(visual))
            if config.variant == "weighted":
                weights = logits.softmax(-1)
            else:
                choice, factor = top_choice(logits, config.gate_temperature, self.training)
        text = (~visual[1:]).nonzero()[:, 0]
        states, columns = [self._fc(joined[text])], [text]
        # no column reads the first token (column t reads token t + 1)
        kept = [joined.new_zeros(1)] if bool(visual[0]) else []
        matrix = None if config.fc_norm else self.fc.weight
        for begin, end in images:
            compressed = self.compressor(joined[begin:end], self._fc, weights, choice, matrix)
            states.append(compressed.states if factor is None else compressed.states * factor)
            columns.append(compressed.positions + begin)
            kept.append(compressed.kept)
        order = torch.cat(columns).argsort()
        name = self.compressor.choices[choice] if config.variant == "select" else config.variant
        return Prompted(torch.cat(states)[order], torch.cat(columns)[order], None, torch.cat(kept), name)

    def _fc(self, joined: Tensor) -> Tensor:
        size = self.config.hidden_size
        return self.fuse(joined[..., :size], joined[..., size:])


def asking(visual: Tensor) -> Tensor:
    """The question's tokens: visual (L,) bool -> (L,) bool, text after the first image; all text without an image."""
    after = visual.cumsum(0) > 0
    return ~visual & after if bool(visual.any()) else ~visual


def _check_size(name: str, size: object) -> None:
    if type(size) is not int or not 1 <= size <= MOST_RATIO:
        raise InputError(f"`{name}` must be an integer from 1 to {MOST_RATIO}, but is {size!r:.60}. Choose another.")


def expected_kept(logits: Tensor, config: SpecVLMConfig, length: int) -> Tensor:
    """Expected share of `length` visual tokens that the gate's choices, with logits (C,), keep.

    Training may add it to the loss as a cost (not in the paper, whose ratios are fixed).
    """
    if config.variant == "weighted":  # all three compressors keep the same number
        return logits.new_tensor(1 / config.mixed_ratio)
    shares: dict[str, float] = {
        "prune": 1 / config.prune_ratio,
        "pool": 1 / config.pool_ratio,
        "conv": 1 / config.conv_ratio,
        "resampler": config.queries / length,
        "text-only": 0.0,
    }
    return logits.softmax(-1) @ logits.new_tensor([min(1.0, shares[name]) for name in config.compressors])
