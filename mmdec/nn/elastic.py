"""SpecVLM's elastic compressor: several ways to compress an image, and a gate that chooses by the question (arXiv
2509.11815, section 3.2).

V visual tokens of one image, M outputs, J channels before fc, H after fc, C choices. The paper compresses the
projector's output and does not say what happens to the target's features of dropped tokens; here the pair [embedding;
feature] is compressed. If possible this happens before fc, which then runs on fewer columns: dropping, averaging and
attention commute with an affine fc, and a depthwise convolution is applied before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, final

import torch
from torch import Tensor, nn

from mmdec.nn.compressor import Compressed, Convolution, Grid, Pool, Prune, Pruning, Resampler, TextOnly, separate
from mmdec.types import InputError

Fc = Callable[[Tensor], Tensor]
Variant = Literal["select", "weighted", "concat"]
CHOICES = ("prune", "pool", "conv", "resampler", "text-only")
MIXED = ("prune", "pool", "conv")  # compressors of the "weighted" variant
JOINED = ("prune", "pool", "conv", "resampler")  # compressors of the "concat" variant


@final
class QuestionGate(nn.Module):
    """Scores the choices from the question and the target's state. Two layers; the paper gives no sizes."""

    def __init__(self, embeds: int, features: int, inner: int, choices: int) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(embeds + features, inner), nn.Linear(inner, choices)

    def forward(self, question: Tensor, feature: Tensor) -> Tensor:
        """Scores (..., C) from the question's mean embedding (..., E) and the target's feature of its last token (...,
        F)."""
        return self.out(nn.functional.silu(self.hidden(torch.cat([question, feature], -1))))


def top_choice(logits: Tensor, temperature: float, training: bool) -> tuple[int, Tensor | None]:
    """Choose by logits (C,). In training also returns a factor of value 1 that carries the gate's gradient.

    Evaluation takes the best choice. Training takes Gumbel's top-1 with a straight-through gradient. The choices'
    outputs differ in length and cannot be summed, so the gradient is that of the chosen output times its relaxed
    probability (not in the paper, which gives no formula). "text-only" has no output and so passes no gradient.
    """
    if not training:
        return int(logits.argmax()), None
    noise = -torch.empty_like(logits).exponential_().log()
    soft = ((logits + noise) / temperature).softmax(-1)
    choice = int(soft.argmax())
    return choice, 1 + soft[choice] - soft[choice].detach()


@final
class ElasticCompressor(nn.Module):
    """The compressor in its three variants.

    "select": the gate chooses one. "weighted": prune, pool and conv at one shared ratio, mixed by the gate. "concat":
    prune, pool, conv and resampler, concatenated.
    """

    def __init__(
        self,
        sizes: tuple[int, int],
        variant: Variant = "select",
        choices: Sequence[str] = CHOICES,
        ratios: tuple[int, int, int] = (20, 20, 3),
        resampler: tuple[int, int] = (2, 1),
        *,
        grid: Grid | None = None,
        pruning: Pruning = "random",
        depthwise: bool = True,
    ) -> None:
        """sizes: (J, H). variant, choices: see above.
        ratios: of prune, pool and conv; the defaults are the paper's; "weighted" uses 3 for each.
        resampler: its queries and heads. grid: rows and columns of an image's tokens. pruning: see `Prune`.
        depthwise: whether the convolution (in the paper "vanilla") runs per channel and before fc. False: H x H x ratio
            weights after fc has read all columns, which costs three quarters of what an image costs EAGLE.
        """
        super().__init__()
        self.variant: Variant = variant
        self.choices = tuple(choices) if variant == "select" else MIXED if variant == "weighted" else JOINED
        if not self.choices or not set(self.choices) <= set(CHOICES):
            raise InputError(f"`choices` must be some of {', '.join(CHOICES)}, but is {self.choices!r:.80}.")
        prune, pool, conv = ratios
        if variant == "weighted":
            if len(set(ratios)) > 1:
                raise InputError(f"`ratios` must be equal to be mixed, but are {ratios}. 3 is the paper's.")
            grid = None  # windows of a grid may differ in number from the other two's outputs
        makers: dict[str, Callable[[], nn.Module]] = {
            "prune": lambda: Prune(prune, pruning),
            "pool": lambda: Pool(pool, grid),
            "conv": lambda: Convolution(sizes[0] if depthwise else sizes[1], conv, depthwise),
            "resampler": lambda: Resampler(sizes[1], *resampler),
            "text-only": TextOnly,
        }
        self.before = {"prune", "pool", "text-only"} | ({"conv"} if depthwise else set())
        self.parts = nn.ModuleDict({name: makers[name]() for name in self.choices})

    def forward(
        self, joined: Tensor, fc: Fc, weights: Tensor | None = None, choice: int = 0, matrix: Tensor | None = None
    ) -> Compressed:
        """Compress one image.

        joined: (V, J). fc: (..., J) -> (..., H). weights: (C,), for "weighted". choice: for "select". matrix: (H, J) of
            an affine fc.
        Returns: states with sorted, distinct positions. An image with fewer tokens than outputs is not compressed.
        """
        if self.variant == "select":
            compressed = self._part(self.choices[choice], joined, fc, matrix)
        elif self.variant == "weighted":
            assert weights is not None
            parts = [self._part(name, joined, fc, matrix) for name in self.choices]
            compressed = Compressed(
                torch.stack([weight * part.states for weight, part in zip(weights, parts, strict=True)]).sum(0),
                parts[1].positions,
                torch.stack([w * part.kept for w, part in zip(weights.detach(), parts, strict=True)]).sum(0),
            )
        else:
            parts = [self._part(name, joined, fc, matrix) for name in self.choices]
            compressed = Compressed(
                torch.cat([part.states for part in parts]),
                torch.cat([part.positions for part in parts]),
                torch.stack([part.kept for part in parts]).amax(0),
            )
        length = len(joined)
        if len(compressed.states) > length:
            positions = torch.arange(length, device=joined.device)
            return Compressed(fc(joined), positions, torch.ones(length, device=joined.device, dtype=joined.dtype))
        order = compressed.positions.argsort(stable=True)
        return Compressed(compressed.states[order], separate(compressed.positions[order], length), compressed.kept)

    def _part(self, name: str, joined: Tensor, fc: Fc, matrix: Tensor | None) -> Compressed:
        part = self.parts[name]
        if name in self.before:
            compressed = part(joined)
            return Compressed(fc(compressed.states), compressed.positions, compressed.kept)
        if name == "resampler" and matrix is not None:
            return part(joined, (matrix, fc))
        return part(fc(joined))
