"""`Description`: the answer to a question about images, and its cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mmdec.decode.summary import rounds_line, three_lines


@dataclass(frozen=True)
class Description:
    """The answer to one question.

    timings: stage -> seconds: `read` (the processor makes tensors of pixels and text), `vision` (the vision encoder),
        `prompt` (the rest of the prompt's pass), `decoder` (all later passes), `drafter`, `core` (verification, cache)
        and `total`, which includes other time. In a batch each question has a share, and the shares sum to the batch's
        time: vision is divided by images, a round equally among its rows, everything else equally.
    """

    text: str
    tokens: list[int] = field(repr=False)  # as `generate` returns them, end of text included, without padding
    rounds: int  # passes that this question took part in, the prompt's included
    tokens_per_round: float  # correction or bonus and end of text included; without the prompt's pass
    timings: Mapping[str, float] = field(repr=False)
    drafted: int = 0  # tokens that the drafter proposed
    accepted: int = 0  # drafted tokens that were accepted
    lossless: bool = True  # False for typical acceptance
    compressor: str | None = None  # how the drafter compressed the image, if it did
    confidence: float = 0.0  # in [0, 1]: how likely the answer is right, see `mmdec.pipelines.confidence`
    evidence: Mapping[str, float] = field(default_factory=lambda: {}, repr=False)  # the evidence for the confidence
    kept: list[float] | None = field(
        default=None, repr=False
    )  # in [0, 1]: the compressor's weight of each visual token

    def __str__(self) -> str:
        """Three lines: the text, the number of rounds, the seconds."""
        return three_lines(self.text, rounds_line(self.rounds, self.tokens_per_round, self.lossless), self.timings)

    def to_dict(self) -> dict[str, Any]:
        """All fields except `evidence`, as plain lists, numbers and text."""
        content = asdict(self) | {"timings": dict(self.timings)}
        del content["evidence"]
        return content
