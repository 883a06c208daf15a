"""Reads a CTC head's frames with an n-gram of its pieces: a prefix beam search (Hannun et al. 2014).

A head that was trained on little sound hears what was said and spells it wrongly. An n-gram of pieces, which text alone
trains, knows the spelling. It is a trigram whose probabilities are stored in 8 bits: 160,000
entries take 0.7 MB.
"""

from __future__ import annotations

import math
from typing import final

import numpy as np
import torch
from torch import Tensor

from mmdec.nn.ctc_head import BLANK, Heard, best_pieces, pad_places
from mmdec.types import InputError

WIDTH = 16  # texts that the search keeps
CHOICES = 16  # pieces of a frame that it considers
LEAST = -8.0  # their log-probability at least
WEIGHT, BONUS = 0.8, 2.5  # weight of the n-gram's log-probability; score added for each piece
SHARE = 0.3  # of what a frame's other pieces weigh beside the chosen one
NEVER = -1e9


@final
class PieceNGram:
    """A trigram of a head's pieces, with back-off. `arrays` is what is stored.

    pieces: number of pieces; a sentence's start is the id `pieces`, its end `pieces + 1`.
    arrays: `unigrams` (pieces + 2,) and `backoff` (pieces + 2,) float32; of the bigrams, in order, `bigram_counts`
        (pieces + 2,) for each first piece, `bigram_pieces`, `bigrams` and `bigram_backoff`; of the trigrams
        `trigram_counts` for each bigram, `trigram_pieces` and `trigrams`. Log-probabilities other than the unigrams'
        are numbers from 0 to 255, to be multiplied by `steps` (3,): bigrams, their back-off, trigrams.
    """

    def __init__(self, pieces: int, arrays: dict[str, Tensor]) -> None:
        self.pieces, self.arrays, base = pieces, arrays, pieces + 2
        try:
            found = {name: value.numpy() for name, value in arrays.items()}
            steps = found["steps"].astype(np.float64)
            first = np.repeat(np.arange(base), found["bigram_counts"])
            bigrams = first.astype(np.int64) * base + found["bigram_pieces"]
            trigrams = np.repeat(bigrams, found["trigram_counts"]) * base + found["trigram_pieces"]
            bigram_values, backoffs, trigram_values = (
                (found[name] * step).tolist()
                for name, step in zip(("bigrams", "bigram_backoff", "trigrams"), steps, strict=True)
            )
            self.unigrams: list[float] = found["unigrams"].tolist()
            self.backoff: list[float] = found["backoff"].tolist()
            self.bigrams = dict(zip(bigrams.tolist(), bigram_values, strict=True))
            self.bigram_backoff = dict(zip(bigrams.tolist(), backoffs, strict=True))
            self.trigrams = dict(zip(trigrams.tolist(), trigram_values, strict=True))
        except (KeyError, ValueError, TypeError) as error:
            raise InputError(
                f"`ngram` must hold a trigram of pieces, but does not ({error}). Fetch it again."
            ) from None
        whole = [*self.unigrams, *self.backoff, *steps]
        if len(self.unigrams) != base or len(self.backoff) != base or not np.isfinite(whole).all():
            raise InputError(f"`ngram` must have a number for each of {base} pieces, but has not. Fetch it again.")

    def score(self, before: int, last: int, piece: int) -> float:
        """ln P(piece | before, last): ids of pieces; `pieces` for the sentence's start."""
        base = self.pieces + 2
        known = last * base + piece
        found = self.trigrams.get((before * base + last) * base + piece)
        if found is not None:
            return found
        weight = self.bigram_backoff.get(before * base + last, 0.0)
        found = self.bigrams.get(known)
        if found is not None:
            return weight + found
        return weight + self.backoff[last] + self.unigrams[piece]


def read_pieces(logits: Tensor, lengths: Tensor, model: PieceNGram, best: int = 8) -> Heard:
    """As `best_pieces`, by a beam search with an n-gram: logits (B, F, V), lengths (B,), F frames.

    best: how many alternatives each place gets. The chosen piece weighs the more, the surer the head was of it.
    """
    plain = best_pieces(logits, lengths, best)
    rows = []
    for row, count in zip(logits.float().log_softmax(-1).cpu(), lengths.tolist(), strict=True):
        pieces, frames = likeliest(row[:count].numpy(), model)
        chosen, chances = torch.tensor(pieces, dtype=torch.long), row[frames].exp()
        chances[:, BLANK] = 0
        total = chances.sum(-1, keepdim=True).clamp(min=1e-9)
        chances[torch.arange(len(pieces)), chosen] = 0
        weights, others = chances.topk(best - 1, -1)
        weights = weights / total * SHARE
        rows.append(
            (
                torch.cat([chosen[:, None], others], 1),
                torch.cat([1 - weights.sum(-1, keepdim=True), weights], 1),
                torch.tensor(frames, dtype=torch.long),
            )
        )
    pieces, weights, frames = (part.to(logits.device) for part in pad_places(rows))
    found = torch.tensor([len(frames) for _, _, frames in rows], device=logits.device)
    return Heard(pieces, weights, found, frames, plain.logprobs, plain.counts)


def likeliest(logprobs: np.ndarray, model: PieceNGram) -> tuple[list[int], list[int]]:
    """The likeliest text of frames (F, V): its pieces, and the frame at which each is surest."""
    start, end = model.pieces, model.pieces + 1
    # Each text: log-probabilities of its paths that end in a blank and in its last piece, what the n-gram says of it,
    # and the frames at which its pieces were first heard.
    kept: dict[tuple[int, ...], tuple[float, float, float, tuple[int, ...]]] = {(): (0.0, NEVER, 0.0, ())}
    for frame, row in enumerate(logprobs):
        likely = np.argpartition(row, -CHOICES)[-CHOICES:] if len(row) > CHOICES else range(len(row))
        choices = [(int(piece), float(row[piece])) for piece in likely if piece != BLANK and row[piece] > LEAST]
        silent = float(row[BLANK])
        grown: dict[tuple[int, ...], tuple[float, float, float, tuple[int, ...]]] = {}
        for text, (ended, held, gain, frames) in kept.items():
            both, last = _sum(ended, held), text[-1] if text else start
            before = text[-2] if len(text) > 1 else start
            stays = held + float(row[last]) if text else NEVER
            other = grown.get(text, (NEVER, NEVER, gain, frames))
            grown[text] = (_sum(other[0], both + silent), _sum(other[1], stays), gain, other[3])
            for piece, logprob in choices:
                path = (ended if piece == last else both) + logprob
                if path < NEVER / 2:
                    continue
                longer = (*text, piece)
                known = grown.get(longer)
                if known is not None:
                    grown[longer] = (known[0], _sum(known[1], path), known[2], known[3])
                else:
                    more = gain + WEIGHT * model.score(before, last, piece) + BONUS
                    grown[longer] = (NEVER, path, more, (*frames, frame))
        best = sorted(grown.items(), key=lambda entry: -_sum(entry[1][0], entry[1][1]) - entry[1][2])
        kept = dict(best[:WIDTH])
    totals = {
        text: _sum(ended, held)
        + gain
        + WEIGHT * model.score(text[-2] if len(text) > 1 else start, text[-1] if text else start, end)
        for text, (ended, held, gain, _) in kept.items()
    }
    text = max(totals, key=totals.__getitem__)
    begun = [*kept[text][3], len(logprobs)]
    surest = [
        at + int(np.argmax(logprobs[at : max(until, at + 1), piece]))
        for piece, at, until in zip(text, begun, begun[1:], strict=False)
    ]
    return list(text), surest


def _sum(one: float, other: float) -> float:
    """ln(e^one + e^other)."""
    if one < other:
        one, other = other, one
    return one if other <= NEVER / 2 else one + math.log1p(math.exp(other - one))
