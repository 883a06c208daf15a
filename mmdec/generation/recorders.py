"""Listeners that record logits while a batch is decoded, for outputs and for processors that read the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from mmdec.core.sampling import Processor


@final
class ScoreRecorder:
    """A listener that records the logits (V,) at every position of every batch row.

    If a position is visited again, the new logits replace the old ones.

    Args:
        rows: Number of rows in the batch.
        start: Number of tokens of a prompt, padding included.
    """

    def __init__(self, rows: int, start: int) -> None:
        self._start = start
        self._recorded: list[dict[int, Tensor]] = [{} for _ in range(rows)]

    def __call__(self, row: int, ids: Tensor, scores: Tensor) -> None:
        # copy the logits, because later processors may change this tensor in place
        self._recorded[row][ids.shape[1] - self._start] = scores[0].clone()

    def row_steps(self, row: int, count: int) -> tuple[Tensor, ...]:
        """Return the recorded logits (1, V) at the positions of a batch row's first `count` new tokens.

        Args:
            row: Index of the batch row.
        """
        return tuple(self._recorded[row][step][None] for step in range(count))

    def steps(self, lengths: Sequence[int]) -> tuple[Tensor, ...]:
        """Return one tensor of recorded logits (B, V) for each new token of the longest row; zeros after a row's end.

        Args:
            lengths: Each row's number of new tokens.
        """
        blank = torch.zeros_like(self._recorded[0][0])
        return tuple(
            torch.stack(
                [row[step] if step < size else blank for row, size in zip(self._recorded, lengths, strict=True)]
            )
            for step in range(max(lengths))
        )


@final
@dataclass
class BatchCollector:
    """A listener that collects the logits of all rows at the first new position.

    When it has the logits of every row, it calls `processor` once with the whole batch: ids (B, P), logits (B, V).
    """

    processor: Processor
    rows: int  # number of rows in the batch
    start: int  # number of tokens of a prompt, padding included; ids of this length are at the first new position
    _recorded: dict[int, tuple[Tensor, Tensor]] = field(default_factory=lambda: {})

    def __call__(self, row: int, ids: Tensor, scores: Tensor) -> None:
        if ids.shape[1] != self.start or row in self._recorded:
            return
        self._recorded[row] = ids, scores.clone()
        if len(self._recorded) == self.rows:
            parts = [self._recorded[row] for row in range(self.rows)]
            self.processor(torch.cat([ids for ids, _ in parts]), torch.cat([scores for _, scores in parts]))
