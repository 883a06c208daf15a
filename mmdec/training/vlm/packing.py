"""Several questions about one picture in one row: it is seen once, and each question sees it and itself alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmdec.training.vlm.encoded import NOWHERE

IGNORED = -100
MASKED = -1e4  # added to a score


@dataclass
class Batch:
    """B rows of L tokens. pixels: (B, 3, H, W) uint8; labels: the next token, or IGNORED; turns: 0 for the picture's
    prefix, then the number of the question, -1 for padding; patches: (B, L) uint8, what the next token reads, see
    `Encoded`; cells: (B, P, cells, kinds) uint8."""

    pixels: Tensor
    tokens: Tensor
    labels: Tensor
    turns: Tensor
    positions: Tensor
    patches: Tensor
    cells: Tensor

    @property
    def rows(self) -> Tensor:
        return self.tokens


def pack(
    prefix: np.ndarray, turns: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], length: int, pad: int
) -> tuple[np.ndarray, ...]:
    """One row of tokens, labels, turns, positions and patches, each (length,). turns: as of `Encoded`, as many as fit;
    positions start again after the prefix."""
    tokens = np.full(length, pad, np.int64)
    labels = np.full(length, IGNORED, np.int64)
    owners = np.full(length, -1, np.int64)
    positions = np.zeros(length, np.int64)
    patches = np.full(length, NOWHERE, np.uint8)
    end = len(prefix)
    tokens[:end], owners[:end], positions[:end] = prefix, 0, np.arange(end)
    number = 0
    for question, answer, read in turns:
        size = len(question) + len(answer)
        if end + size > length:
            continue
        number += 1
        begin, answer_at, stop = end, end + len(question), end + size
        tokens[begin:answer_at], tokens[answer_at:stop] = question, answer
        labels[answer_at - 1 : stop - 1], patches[answer_at - 1 : stop - 1] = answer, read
        owners[begin:stop] = number
        positions[begin:stop] = len(prefix) + np.arange(size)
        end = stop
    return tokens, labels, owners, positions, patches


def turn_mask(turns: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(B, L) -> (B, 1, L, L), 0 where a token may look and MASKED elsewhere: back, at the prefix and its own turn."""
    same = turns[:, :, None] == turns[:, None, :]
    prefix = (turns == 0)[:, None, :] & (turns >= 0)[:, :, None]
    length = turns.shape[1]
    back = torch.ones(length, length, dtype=torch.bool, device=turns.device).tril()
    return torch.where((same | prefix) & back, 0.0, MASKED).to(dtype)[:, None]
