"""Ears for listeners among the processors: they hear what each row's processors are shown on the way.

A node's processors run when the walk visits it and for no other node: what is heard at a place of the text is what
plain decoding would have had there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from mmdec.decode.sampling import Processor


@final
class Record:
    """The scores (V,) of every place of every row. What is heard twice at a place counts as heard last."""

    def __init__(self, rows: int, start: int) -> None:
        """start: columns of the prompt."""
        self._start = start
        self._heard: list[dict[int, Tensor]] = [{} for _ in range(rows)]

    def __call__(self, row: int, ids: Tensor, scores: Tensor) -> None:
        self._heard[row][ids.shape[1] - self._start] = scores[0].clone()  # a later processor may write to its input

    def steps(self, lengths: Sequence[int]) -> tuple[Tensor, ...]:
        """One (B, V) for each new token of the longest row; zeros after a row's end."""
        blank = torch.zeros_like(self._heard[0][0])
        return tuple(
            torch.stack([row[step] if step < size else blank for row, size in zip(self._heard, lengths, strict=True)])
            for step in range(max(lengths))
        )


@final
@dataclass
class Assembly:
    """Waits until all rows were heard at the text's beginning, then shows a processor the whole batch, once."""

    processor: Processor
    rows: int
    start: int  # columns of the prompt
    _heard: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, row: int, ids: Tensor, scores: Tensor) -> None:
        if ids.shape[1] != self.start or row in self._heard:
            return
        self._heard[row] = ids, scores.clone()
        if len(self._heard) == self.rows:
            parts = [self._heard[place] for place in range(self.rows)]
            self.processor(torch.cat([ids for ids, _ in parts]), torch.cat([scores for _, scores in parts]))
