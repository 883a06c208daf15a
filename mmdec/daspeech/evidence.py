"""Computes the evidence from which a translation's confidence is estimated.

It comes from the autoregressive decoder's scores of the text, from the graph's path, and from the CTC head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmdec.daspeech.model import EncodedSpeech
from mmdec.daspeech.units import BOS, EOS, PAD
from mmdec.tasks.confidence import UNCERTAINTY_OFFSET, token_evidence

EvidenceRows = list[dict[str, float]]
Decoder = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class TextScores:
    """The autoregressive decoder's scores of one text: of each unit and of </s>."""

    logprobs: list[float]
    is_first_choice: list[bool]  # whether it is the unit that the decoder itself would choose


def score_texts(decoder: Decoder, tokens: Sequence[Sequence[int]], source: EncodedSpeech) -> list[TextScores]:
    """Score the units of each row in one pass of the autoregressive decoder.

    Args:
        decoder: Function: (units (B, M), encoder states, their lengths) -> logits (B, M, V).
        tokens: Unit ids of each row.
        source: The encoded recordings.

    Returns:
        For each row the ln P of its units and of </s>, and whether each is the decoder's first choice.
    """
    rows = [torch.tensor([BOS, *row, EOS], device=source.states.device) for row in tokens]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    logprobs = decoder(padded[:, :-1], source.states, source.lengths).float().log_softmax(-1)
    scores = logprobs.gather(2, padded[:, 1:, None])[..., 0].tolist()
    is_first_choice = (logprobs.argmax(-1) == padded[:, 1:]).tolist()
    sizes = [len(row) + 1 for row in tokens]
    return [
        TextScores(row[:size], firsts[:size]) for row, firsts, size in zip(scores, is_first_choice, sizes, strict=True)
    ]


def autoregressive_evidence(scores: TextScores) -> dict[str, float]:
    """Compute evidence from the autoregressive decoder's scores of one text.

    It consists of the log-probabilities of the units, and the share of units for which this decoder prefers another
    unit.

    Args:
        scores: The scores of one text, from `score_texts`.
    """
    share = sum(scores.is_first_choice) / len(scores.is_first_choice)
    return token_evidence(scores.logprobs) | {"differs": math.log(1 - share + UNCERTAINTY_OFFSET)}


def path_evidence(scores: Tensor, lengths: Tensor) -> EvidenceRows:
    """Compute evidence from the graph's path.

    Args:
        scores: (B,), ln P of each row's path.
        lengths: (B,), the path's number of vertices.
    """
    means: list[float] = (-scores / lengths).clamp(0, 30).tolist()
    return [{"graph": math.log(mean + UNCERTAINTY_OFFSET)} for mean in means]


def vertex_evidence(emissions: Tensor, vertices: Tensor, tokens: Tensor) -> EvidenceRows:
    """Compute evidence from the graph's probabilities of the units on each row's path.

    Args:
        emissions: (B, L, V) log-probabilities of V units at L vertices.
        vertices: (B, K), vertex of each of the path's K steps, padded with -1.
        tokens: (B, K), unit of each of these steps, padded with -1.
    """
    rows = zip(emissions, vertices, tokens, strict=True)
    return [token_evidence(row[path[units >= 0], units[units >= 0]].tolist()) for row, path, units in rows]


def head_evidence(source: EncodedSpeech) -> EvidenceRows:
    """Compute evidence from the CTC head; {} for each row without a head.

    It has three parts: the head's probabilities of the transcript's pieces; its probabilities of the best piece or
    blank at each frame; and the number of pieces per frame, which is unusual for other languages and noise.
    """
    transcripts = source.transcripts
    if transcripts is None:
        return [{} for _ in source.limits]
    evidence: EvidenceRows = []
    pieces: Tensor = transcripts.weights[..., 0].clamp(min=1e-12).log()
    for piece_logprobs, count, logprobs, frames in zip(
        pieces.tolist(),
        transcripts.lengths.tolist(),
        transcripts.logprobs.tolist(),
        transcripts.counts.tolist(),
        strict=True,
    ):
        uncertainty = -sum(logprobs[:frames]) / max(frames, 1)
        evidence.append(
            token_evidence(piece_logprobs[:count], "heard_")
            | {"frames": math.log(uncertainty + UNCERTAINTY_OFFSET), "rate": math.log(max(count, 1) / max(frames, 1))}
        )
    return evidence
