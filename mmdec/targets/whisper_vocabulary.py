"""Whisper's output layer on a CPU: the product with 51,865 words is the dearest of a small decoder's pass.

A greedy run needs the largest score of each column alone. After some passes an 8-bit copy of the layer is made, which
finds it in a third of the time (`nn/int8_scores.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from mmdec.decode.sampling import Suppression
from mmdec.nn.int8_scores import Int8Scores
from mmdec.ops.onednn import linear
from mmdec.targets.hf_target import plain_linear
from mmdec.types import InputError

FEW = range(2, 6)  # numbers of columns for which a large vocabulary's product is fastest transposed
LARGE = 2**14  # minimum number of tokens in a large vocabulary
PAYS = 64  # passes after which the 8-bit copy is made: it costs as much as 80 passes save
MOST = 32  # columns for which it is used


@final
@dataclass(frozen=True)
class GreedyWords:
    """What a greedy run asks of scores: the largest one after processors that forbid words, alone or by Whisper's rules
    for timestamps."""

    barred: Tensor  # (V,) bool: never chosen
    exact: slice  # words that the rules compare, forbid or leave alone: all their scores are exact


def greedy_words(
    processors: Sequence[object], columns: int, vocabulary: int, device: torch.device
) -> GreedyWords | None:
    """What a greedy run asks of the scores behind its prompt; None if any processor may ask for more.

    processors: of the run. columns: of the prompt.
    """
    barred, exact = torch.zeros(vocabulary, dtype=torch.bool, device=device), slice(vocabulary, None)
    for each in processors:
        if type(each) is Suppression:
            if each.only_at is None:
                barred[each.tokens] = True
            elif each.only_at > columns:
                return None
        elif type(each) is WhisperTimeStampLogitsProcessor:
            ends: Any = each.eos_token_id
            if not isinstance(ends, int) or ends > each.timestamp_begin:
                return None
            exact = slice(ends, None)  # a rule may forbid all words, and leave the end and what is behind it
        else:
            return None
    barred[exact] = True
    return GreedyWords(barred, exact)


def alike(runs: Sequence[GreedyWords | None]) -> GreedyWords | None:
    """The greedy choice that all runs of a shared pass ask for; None if they differ, or one needs all scores."""
    first, *others = runs
    if first is None:
        return None
    same = all(one is not None and one.exact == first.exact and torch.equal(one.barred, first.barred) for one in others)
    return first if same else None


@dataclass
class _Copy:
    """The 8-bit copy of an output layer, or how many passes it had without one."""

    state: tuple[int, int]  # of the weights
    passes: int = 0
    scores: Int8Scores | None = None


_copies: WeakKeyDictionary[nn.Module, _Copy] = WeakKeyDictionary()
_lock = threading.Lock()


def _copy_of(output: nn.Linear) -> Int8Scores | None:
    """The layer's 8-bit copy; None if it is not made yet, or cannot be."""
    weight = output.weight
    if weight.is_inference():  # changes of its values cannot be seen
        return None
    state = weight.data_ptr(), weight._version
    with _lock:
        copy = _copies.get(output)
        if copy is None or copy.state != state:
            copy = _copies[output] = _Copy(state)
        copy.passes += 1
        if copy.passes == PAYS:
            try:
                copy.scores = Int8Scores(weight)
            except InputError:  # this CPU has no kernel
                copy.scores = None
        return copy.scores


def vocabulary_scores(output: nn.Module, states: Tensor, greedy: GreedyWords | None = None) -> Tensor:
    """Apply the output layer to states (B, N, H) -> logits (B, N, V).

    greedy: of the run; None: all logits are float32's own. Else those that a greedy run reads are, and the others are
        within 1 % or so.

    On a CPU and in float32, the product for a few columns is computed transposed, as (W hT)T: matrix libraries split
    that product along the vocabulary. For more columns oneDNN computes it. Measured on an EPYC, one thread, 51,865
    tokens of 512 channels, 1 / 2 / 4 / 8 / 16 columns: 7 / 15 / 14 / 16 / 21 ms by torch, 7 / 5 / 5 / 9 / 22
    transposed, 7 / 7 / 7 / 8 / 10 by oneDNN, 1.9 / 2.1 / 2.5 / 4.4 ms by the 8-bit copy for up to 8. The sums have
    another order, so logits differ by up to 1e-5.
    """
    columns = states.shape[0] * states.shape[1]
    plain = plain_linear(output) and output.bias is None
    if plain and columns <= MOST and states.device.type == "cpu" and states.dtype == torch.float32:
        weight = cast(nn.Linear, output).weight
        if len(weight) >= LARGE and weight.dtype == torch.float32:
            rows = states.reshape(columns, -1)
            copy = None if greedy is None else _copy_of(cast(nn.Linear, output))
            if copy is not None and greedy is not None and bool(rows.isfinite().all()):
                return copy(rows, greedy.barred, greedy.exact).view(*states.shape[:2], -1)
            if columns in FEW:
                return torch.mm(weight, rows.t()).t().contiguous().view(*states.shape[:2], -1)
    return linear(states, cast(nn.Linear, output).weight) if plain else output(states)
