"""The scores of a large vocabulary by a product of 8-bit integers, exact wherever the largest score may be.

An output layer of 51,865 words is read from memory whole, for one column or for ten; in 8 bits that is a quarter of the
bytes. The error of each score is bounded, so that only the words whose score may be the largest (one to four, mostly)
have to be computed again in float32.

For a row w = w' + e of the layer (w' in 8 bits) and a state h = h' + r (h' a sum of two vectors in 8 bits),
|w.h - w'.h'| = |e.h + w'.r| <= |e| |h| + |w'| |r|, by Cauchy and Schwarz. Sums of integers are exact; what float32
rounds is below `ROUNDING` |w'| |h|.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from mmdec.nn.int8 import levels, pack, product, quantise_rows, whole_numbers

PARTS = 2  # vectors in 8 bits that a state is the sum of: one loses what is small beside an outlying channel
NEAR = 8.0  # scores so far below the largest are exact, too: the sum of all probabilities is then right to 1e-4
MANY = 400  # words of a state to be computed again from which on the whole product is no dearer
BLOCK = 4096  # rows of the layer handled at once


@final
class Int8Scores:
    """Scores of an output layer without a bias, on a CPU that has the kernels of `int8`."""

    def __init__(self, weight: Tensor) -> None:
        """weight: (V, H) float32, which is read later, too. Raises InputError if this CPU has no such kernel."""
        self._levels = levels()
        self._weight = weight.detach()
        integers, scales = quantise_rows(self._weight)
        self._packed = pack(integers, scales)
        errors, norms = list[Tensor](), list[Tensor]()
        for rows, whole, scale in zip(*(part.split(BLOCK) for part in (self._weight, integers, scales)), strict=True):
            rounded = whole * scale[:, None]
            norms.append(torch.linalg.vector_norm(rounded, dim=1))
            errors.append(torch.linalg.vector_norm(rows - rounded, dim=1))
        # norms and products of H terms are rounded, too
        self._rounding = (weight.shape[1] + 16) * 2.0**-23
        self._errors, self._norms = torch.cat(errors) * (1 + self._rounding), torch.cat(norms) * (1 + self._rounding)

    def __call__(self, states: Tensor, barred: Tensor, exact: slice) -> Tensor:
        """Scores (N, V) of states (N, H): within their bounds all, exact those that may be the largest.

        barred: (V,) bool, words that are never chosen: their scores may be larger than the largest. exact: words whose
            scores are all exact. Among the others, neither barred nor of `exact`, each row's largest score is exact,
            and all inexact ones are below it.
        """
        scores, bounds = self._estimated(states)
        least = (scores - bounds).masked_fill_(barred, -torch.inf).amax(1, keepdim=True)
        near = scores >= scores.amax(1, keepdim=True) - NEAR
        unsure = (scores + bounds >= least).masked_fill_(barred, False).logical_or_(near)
        rows, words = unsure.nonzero(as_tuple=True)
        if len(rows) > MANY * len(states):
            return torch.mm(self._weight, states.t()).t().contiguous()
        scores[rows, words] = (self._weight[words] * states[rows]).sum(1)
        scores[:, exact] = torch.mm(self._weight[exact], states.t()).t()
        return scores

    def _estimated(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (N, V) by the product of integers, and how far each may be from the true one."""
        rest, parts, scales = states, list[Tensor](), list[Tensor]()
        for _ in range(PARTS):
            whole, scale = whole_numbers(rest, self._levels)
            rest = rest - whole * scale
            parts.append(whole)
            scales.append(scale)
        products = product(torch.cat(parts), self._packed).split(len(states))
        scores = products[0] * scales[0]
        for more, scale in zip(products[1:], scales[1:], strict=True):
            scores.addcmul_(more, scale)
        size, left = (torch.linalg.vector_norm(part, dim=1) for part in (states, rest))
        bounds = torch.outer(size, self._errors)
        bounds.addr_(left + size * self._rounding, self._norms)
        return scores, bounds
