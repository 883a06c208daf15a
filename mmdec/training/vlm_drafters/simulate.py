"""Ranks of a text's own tokens among the drafter's, root by root: what simulated decoding needs, exactly.

A draft follows the text as long as it is accepted, so the drafter's own features along the text, root by root, are
those that decoding would make: the steps of the unroll, or FLASH's slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mmdec.drafters.medusa import WIDTH
from mmdec.training.vlm_drafters.teacher import Reading
from mmdec.training.vlm_drafters.unroll import Columns


@torch.no_grad()
def rank_texts(
    columns: Columns, steps: Sequence[Tensor], logits: Callable[[Tensor], Tensor], texts: Sequence[Reading]
) -> list[Tensor]:
    """steps: step d (B, N - d, H) of columns d ... N - 1, without noise; logits: their tokens' (..., V).

    For each text of A tokens (A - 1, depth) int64, on the CPU: in row r, where token r is the root, the rank of token
    r + 1 + d at depth d, at most WIDTH; WIDTH beyond the text's end.
    """
    lengths = columns.mask.sum(1).tolist()
    rows, width = columns.mask.shape
    tokens = torch.zeros(rows, width, dtype=torch.long)
    for row, text in enumerate(texts):
        tokens[row, : lengths[row]] = torch.tensor(text.answer[1:])
    tokens = tokens.to(columns.mask.device)
    ranks = torch.full((rows, width, len(steps)), WIDTH)
    for depth, hidden in enumerate(steps):
        scores = logits(hidden)
        own_scores = scores.gather(-1, tokens[:, depth:, None])
        step_ranks = (scores > own_scores).sum(-1).clamp(max=WIDTH)  # (B, N - depth): of the roots 0 ... N - depth - 1
        ranks[:, : width - depth, depth] = step_ranks.masked_fill(~columns.mask[:, depth:], WIDTH).cpu()
    return [ranks[row, :length] for row, length in enumerate(lengths)]
