"""Decodes the output of a CTC head by prefix beam search with an n-gram language model of its pieces.

A head that was trained on little speech recognises the sounds, but misspells words. An n-gram of pieces, trained only
on text, corrects the spelling.

References:
    Hannun et al. 2014: prefix beam search.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mmdec.drafters.ctc.network import BLANK, CtcTranscripts, best_pieces, pad_places
from mmdec.phonetics.piece_ngram import PieceNGram

BEAM_WIDTH = 16  # number of hypotheses (texts) that are kept after each frame
MAX_FRAME_PIECES = 16  # maximum number of pieces with which a hypothesis is extended at one frame
MIN_PIECE_LOGPROB = -8.0  # in nats: pieces of a lower log-probability at a frame are not tried at this frame
NGRAM_WEIGHT = 0.8  # factor on the n-gram's log-probability
PIECE_BONUS = 2.5  # score in nats that is added for each piece
# factor on the probabilities of alternatives at a position, so that the piece which the n-gram chose weighs most
ALTERNATIVES_SHARE = 0.3
IMPOSSIBLE_LOGPROB = -1e9  # log-probability of a path that is impossible


def decode_pieces(logits: Tensor, lengths: Tensor, model: PieceNGram, best: int = 8) -> CtcTranscripts:
    """Transcribe the logits of a CTC head by beam search with an n-gram.

    Args:
        logits: (B, F, V), of V pieces at F frames.
        lengths: (B,), numbers of frames.
        model: The n-gram.
        best: Number of pieces at each position of the transcript: the chosen piece and its most probable alternatives.
            An alternative's weight is 0.3 times its probability by the head (without the blank); the chosen piece gets
            the rest.
    """
    plain = best_pieces(logits, lengths, best)
    rows = []
    for row, count in zip(logits.float().log_softmax(-1).cpu(), lengths.tolist(), strict=True):
        pieces, frames = beam_search(row[:count].numpy(), model)
        chosen, probabilities = torch.tensor(pieces, dtype=torch.long), row[frames].exp()
        probabilities[:, BLANK] = 0
        total = probabilities.sum(-1, keepdim=True).clamp(min=1e-9)
        probabilities[torch.arange(len(pieces)), chosen] = 0
        weights, others = probabilities.topk(best - 1, -1)
        weights = weights / total * ALTERNATIVES_SHARE
        rows.append(
            (
                torch.cat([chosen[:, None], others], 1),
                torch.cat([1 - weights.sum(-1, keepdim=True), weights], 1),
                torch.tensor(frames, dtype=torch.long),
            )
        )
    pieces, weights, frames = (part.to(logits.device) for part in pad_places(rows))
    counts = torch.tensor([len(frames) for _, _, frames in rows], device=logits.device)
    return CtcTranscripts(pieces, weights, counts, frames, plain.logprobs, plain.counts)


def beam_search(logprobs: np.ndarray, model: PieceNGram) -> tuple[list[int], list[int]]:
    """Find the most probable text by beam search.

    Args:
        logprobs: (F, V), log-probability of each of V pieces at each of F frames.
        model: A language model of pieces.

    Returns:
        The text's piece ids, and for each piece the frame at which it is most probable.
    """
    start, end = model.pieces, model.pieces + 1
    # cache: the last pieces of a text -> function that gives ln P of the next piece
    scores: dict[tuple[int, ...], Callable[[int], float]] = {}

    def after(text: tuple[int, ...]) -> Callable[[int], float]:
        last = (start, *text)[-max(model.order - 1, 1) :]
        if (score := scores.get(last)) is None:
            score = scores[last] = model.after(last)
        return score

    # hypothesis -> (ln P of its paths that end in a blank, ln P of its paths that end in its last piece, score by the
    # n-gram, frame at which each piece begins)
    beam: dict[tuple[int, ...], tuple[float, float, float, tuple[int, ...]]] = {(): (0.0, IMPOSSIBLE_LOGPROB, 0.0, ())}
    for frame, row in enumerate(logprobs):
        likely = (
            np.argpartition(row, -MAX_FRAME_PIECES)[-MAX_FRAME_PIECES:]
            if len(row) > MAX_FRAME_PIECES
            else range(len(row))
        )
        choices = [
            (int(piece), float(row[piece])) for piece in likely if piece != BLANK and row[piece] > MIN_PIECE_LOGPROB
        ]
        silent = float(row[BLANK])
        extended: dict[tuple[int, ...], tuple[float, float, float, tuple[int, ...]]] = {}
        for text, (ended, unended, gain, frames) in beam.items():
            both, last = _sum(ended, unended), text[-1] if text else start
            stays, score = unended + float(row[last]) if text else IMPOSSIBLE_LOGPROB, after(text)
            other = extended.get(text, (IMPOSSIBLE_LOGPROB, IMPOSSIBLE_LOGPROB, gain, frames))
            extended[text] = (_sum(other[0], both + silent), _sum(other[1], stays), gain, other[3])
            for piece, logprob in choices:
                path = (ended if piece == last else both) + logprob
                if path < IMPOSSIBLE_LOGPROB / 2:
                    continue
                longer = (*text, piece)
                stored = extended.get(longer)
                if stored is not None:
                    extended[longer] = (stored[0], _sum(stored[1], path), stored[2], stored[3])
                else:
                    more = gain + NGRAM_WEIGHT * score(piece) + PIECE_BONUS
                    extended[longer] = (IMPOSSIBLE_LOGPROB, path, more, (*frames, frame))
        best = sorted(extended.items(), key=lambda entry: -_sum(entry[1][0], entry[1][1]) - entry[1][2])
        beam = dict(best[:BEAM_WIDTH])
    totals = {
        text: _sum(ended, unended) + gain + NGRAM_WEIGHT * after(text)(end)
        for text, (ended, unended, gain, _) in beam.items()
    }
    text = max(totals, key=totals.__getitem__)
    piece_frames = [*beam[text][3], len(logprobs)]
    best_frames = [
        at + int(np.argmax(logprobs[at : max(until, at + 1), piece]))
        for piece, at, until in zip(text, piece_frames, piece_frames[1:], strict=False)
    ]
    return list(text), best_frames


def _sum(one: float, other: float) -> float:
    """Return ln(e^one + e^other)."""
    if one < other:
        one, other = other, one
    return one if other <= IMPOSSIBLE_LOGPROB / 2 else one + math.log1p(math.exp(other - one))
