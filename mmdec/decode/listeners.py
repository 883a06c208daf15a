"""Listeners: record the scores that pass through each row's logits processors.

A node's processors run only when the verifier visits the node. So a listener receives, at each position of the text,
what plain decoding would produce there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from mmdec.decode.sampling import Processor


@final
class ScoreRecorder:
    """Records the scores (V,) at every position of every row. If a position is visited twice, the last scores count."""

    def __init__(self, rows: int, start: int) -> None:
        """rows: of the batch. start: columns of the prompt."""
        self._start = start
        self._kept: list[dict[int, Tensor]] = [{} for _ in range(rows)]

    def __call__(self, row: int, ids: Tensor, scores: Tensor) -> None:
        # a copy: later processors may write to their input
        self._kept[row][ids.shape[1] - self._start] = scores[0].clone()

    def row_steps(self, row: int, count: int) -> tuple[Tensor, ...]:
        """A row's first `count` scores, (1, V) each."""
        return tuple(self._kept[row][step][None] for step in range(count))

    def steps(self, lengths: Sequence[int]) -> tuple[Tensor, ...]:
        """Scores (B, V) for each new token of the longest row; zeros after a row's end."""
        blank = torch.zeros_like(self._kept[0][0])
        return tuple(
            torch.stack([row[step] if step < size else blank for row, size in zip(self._kept, lengths, strict=True)])
            for step in range(max(lengths))
        )


@final
@dataclass
class BatchCollector:
    """Collects the first scores of all rows, then shows a processor the whole batch once."""

    processor: Processor
    rows: int
    start: int  # columns of the prompt
    _kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=lambda: {})

    def __call__(self, row: int, ids: Tensor, scores: Tensor) -> None:
        if ids.shape[1] != self.start or row in self._kept:
            return
        self._kept[row] = ids, scores.clone()
        if len(self._kept) == self.rows:
            parts = [self._kept[row] for row in range(self.rows)]
            self.processor(torch.cat([ids for ids, _ in parts]), torch.cat([scores for _, scores in parts]))
