"""What a model said about its pictures, and what that cost. It knows nothing of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mmdec.decode.summary import rounds_line, three_lines


@dataclass(frozen=True)
class Description:
    """The answer to one question.

    timings: seconds of `read` (the processor: pixels and text become tensors), `vision` (the vision encoder), `prompt`
    (the rest of the prompt's pass), `decoder` (all later passes of the model), `drafter`, `core` (verification, cache)
    and `total`, which holds the rest, too. Where questions were answered together each has its own share, and over a
    batch they add up to what was spent: vision by images, a round divided equally among those that share it, the rest
    in equal parts.
    """

    text: str
    tokens: list[int] = field(repr=False)  # as `generate` returns them, end of text included, without padding
    rounds: int  # the prompt's pass and every later pass that this question took part in
    tokens_per_round: float  # correction or bonus and end of text included; the prompt's pass is not counted
    timings: Mapping[str, float] = field(repr=False)
    drafted: int = 0  # tokens that the drafter proposed
    accepted: int = 0  # drafted tokens that were accepted
    lossless: bool = True  # False for typical acceptance
    compressor: str | None = None  # how the drafter shortened the image, where it did
    confidence: float = 0.0  # 0 to 1: how likely the answer is right, see `mmdec.pipelines.confidence`
    evidence: Mapping[str, float] = field(
        default_factory=lambda: {}, repr=False
    )  # what the confidence was computed from
    kept: list[float] | None = field(
        default=None, repr=False
    )  # for each visual token the weight, 0 to 1, that the compressor gave it

    def __str__(self) -> str:
        """Three lines: the text, in how many rounds, in how many seconds."""
        return three_lines(self.text, rounds_line(self.rounds, self.tokens_per_round, self.lossless), self.timings)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and texts."""
        content = asdict(self) | {"timings": dict(self.timings)}
        del content["evidence"]
        return content
