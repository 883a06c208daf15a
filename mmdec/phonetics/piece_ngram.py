"""A back-off n-gram of subword pieces in tensors, with values in 8 bits: 470,000 n-grams of up to four take 2 MB."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from mmdec.errors import InputError
from mmdec.phonetics.ngram import END, START, NGram

LEVELS = 255  # a log-probability is stored in one byte, as 0 to 255 times a step


@final
class PieceNGram:
    """A back-off n-gram language model of a vocabulary of pieces.

    Args:
        pieces: Number of pieces V. The id V stands for a sentence's start, V + 1 for its end.
        arrays: The model as it is stored. `unigrams` and `backoff`: (V + 2,) float32, natural logarithms for single
            pieces. For each order k from 2, the n-grams of k pieces, sorted: `counts_k`: for each n-gram of order k -
            1, how many n-grams of order k begin with it; `pieces_k`: the last piece of each n-gram; `values_k` and,
            below the highest order, `backoff_k`: integers 0 to 255, which multiplied by the two numbers `steps_k` give
            the natural logarithms of the probability and of the back-off weight.
    """

    def __init__(self, pieces: int, arrays: dict[str, Tensor]) -> None:
        self.pieces, self.arrays, base = pieces, arrays, pieces + 2
        self.order = max((int(name[7:]) for name in arrays if re.fullmatch(r"pieces_[2-5]", name)), default=1)
        # One entry for each order from 2: n-grams, coded as numbers and sorted; their ln P; their ln back-off weights.
        # An n-gram is found by bisection. A dict would be faster, but making one of a million n-grams takes half a
        # second.
        self._entries: list[tuple[array[int], array[float], array[float] | None]] = []
        try:
            tables = {name: value.numpy() for name, value in arrays.items()}
            above = np.arange(base, dtype=np.int64)
            for order in range(2, self.order + 1):
                counts = tables[f"counts_{order}"]
                if len(counts) != len(above):
                    raise ValueError(f"counts_{order} has {len(counts)} numbers")
                above = np.repeat(above, counts) * base + tables[f"pieces_{order}"]
                step, weight = tables[f"steps_{order}"].astype(np.float64)
                columns = [tables[f"values_{order}"] * step]
                if order < self.order:
                    columns.append(tables[f"backoff_{order}"] * weight)
                if any(len(column) != len(above) or not np.isfinite(column).all() for column in columns):
                    raise ValueError(f"order {order} has too few numbers")
                values, *weights = (array("d", column.tobytes()) for column in columns)
                self._entries.append((array("q", above.tobytes()), values, weights[0] if weights else None))
            self._unigrams: list[float] = tables["unigrams"].tolist()
            self._backoff: list[float] = tables["backoff"].tolist()
        except (KeyError, ValueError, TypeError) as error:
            raise InputError(
                f"`ngram` must hold an n-gram of pieces, but does not ({error}). Download it again."
            ) from None
        ends = [*self._unigrams, *self._backoff]
        if len(self._unigrams) != base or len(self._backoff) != base or not np.isfinite(ends).all():
            raise InputError(f"`ngram` must have a number for each of {base} pieces, but does not. Download it again.")

    @classmethod
    def pack(cls, model: NGram, pieces: int) -> PieceNGram:
        """Convert an n-gram from dicts to tensors, with log-probabilities in 8 bits.

        Args:
            model: An n-gram whose tokens are piece ids, written as text.
            pieces: Number of pieces.
        """
        number = {START: pieces, END: pieces + 1}
        number |= {token: int(token) for token in model.successors[""] if token not in number}
        arrays = {"unigrams": torch.full((pieces + 2,), model.unknown), "backoff": torch.zeros(pieces + 2)}
        for token, value in model.successors[""].items():
            arrays["unigrams"][number[token]] = value
        for token, piece in number.items():
            arrays["backoff"][piece] = model.backoff.get(token, 0.0)
        orders: list[dict[tuple[int, ...], tuple[float, float]]] = [{} for _ in range(model.order + 1)]
        for context, followers in model.successors.items():
            known = tuple(number[token] for token in context.split())
            for token, value in followers.items():
                weight = model.backoff.get(f"{context} {token}", 0.0)
                orders[len(known) + 1][*known, number[token]] = value, weight
        above: list[tuple[int, ...]] = [(piece,) for piece in range(pieces + 2)]
        for order in range(2, model.order + 1):
            entries = sorted(orders[order])
            following = Counter(entry[:-1] for entry in entries)
            counts = torch.tensor([following[entry] for entry in above])
            small = torch.uint8 if int(counts.max()) <= LEVELS else torch.int16
            arrays |= {
                f"counts_{order}": counts.to(small),
                f"pieces_{order}": torch.tensor([entry[-1] for entry in entries], dtype=torch.int16),
            }
            steps = torch.full((2,), -1e-9)
            for at, name in enumerate(("values", "backoff") if order < model.order else ("values",)):
                column = torch.tensor([orders[order][entry][at] for entry in entries])
                if len(column):
                    steps[at] = min(float(column.min()) / LEVELS, -1e-9)
                arrays[f"{name}_{order}"] = (column / steps[at]).round().clamp(0, LEVELS).to(torch.uint8)
            arrays[f"steps_{order}"], above = steps, entries
        return cls(pieces, arrays)

    def after(self, context: Sequence[int]) -> Callable[[int], float]:
        """Return the function that maps a piece id to ln P(piece | context).

        Args:
            context: Ids of the pieces before this piece; at the beginning of a sentence the first id is `self.pieces`.
                Only the last order - 1 ids matter.
        """
        base, total = self.pieces + 2, 0.0
        context = context[max(len(context) - self.order + 1, 0) :]
        # for each order from the highest, the n-grams that begin with the context's last pieces: first index; end
        # index; code of these pieces * base; codes of all n-grams; values of all n-grams; ln of the back-off weights of
        # higher orders
        rows: list[tuple[int, int, int, array[int], array[float], float]] = []
        for begin in range(len(context)):
            code = 0
            for unit in context[begin:]:
                code = code * base + unit
            entries, values, _ = self._entries[len(context) - begin - 1]
            low = bisect_left(entries, code * base)
            high = bisect_left(entries, (code + 1) * base, low)
            if high > low:
                rows.append((low, high, code * base, entries, values, total))
            total += self._weight(code, len(context) - begin)
        cache: dict[int, float] = {}

        def score(piece: int) -> float:
            if (logprob := cache.get(piece)) is None:
                logprob = total + self._unigrams[piece]
                for low, high, code, entries, values, weight in rows:
                    at = bisect_left(entries, code + piece, low, high)
                    if at < high and entries[at] == code + piece:
                        logprob = weight + values[at]
                        break
                cache[piece] = logprob
            return logprob

        return score

    def _weight(self, code: int, order: int) -> float:
        """Return the natural logarithm of an n-gram's back-off weight; 0 if the n-gram is missing.

        Args:
            code: The n-gram's pieces, coded as one number.
            order: Number of its pieces.
        """
        if order == 1:
            return self._backoff[code]
        entries, _, weights = self._entries[order - 2]
        at = bisect_left(entries, code)
        return weights[at] if weights is not None and at < len(entries) and entries[at] == code else 0.0
