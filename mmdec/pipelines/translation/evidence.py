"""Evidence for a translation's confidence: from the CTC head, the graph's path, and the other decoder's probabilities.

`mmdec.evaluation.calibration` fits its curve to exactly this evidence (`SpokenTranslation.evidence`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mmdec.nn.dag_decoder import BOS
from mmdec.nn.source import Source
from mmdec.pipelines.confidence import FLOOR, evidence
from mmdec.targets.units import EOS, PAD

Rows = list[dict[str, float]]


def second_opinion(
    decoder: Callable[[Tensor, Tensor, Tensor], Tensor], tokens: Sequence[Sequence[int]], source: Source
) -> Rows:
    """Evidence from one pass of the autoregressive decoder: its probabilities of each row's units, and the share of
    units for which it prefers another.

    decoder: units (B, M) so far, states and their lengths -> logits (B, M, V). tokens: each row's units.
    """
    device = source.states.device
    rows = [torch.tensor([BOS, *row, EOS], device=device) for row in tokens]
    said = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    chances = decoder(said[:, :-1], source.states, source.lengths).float().log_softmax(-1)
    chosen = chances.gather(2, said[:, 1:, None])[..., 0].tolist()
    same = (chances.argmax(-1) == said[:, 1:]).tolist()
    seen = []
    for row, logprobs, agrees in zip(tokens, chosen, same, strict=True):
        size = len(row) + 1
        differ = 1 - sum(agrees[:size]) / size
        seen.append(evidence(logprobs[:size]) | {"differs": math.log(differ + FLOOR)})
    return seen


def of_path(scores: Tensor, lengths: Tensor) -> Rows:
    """Evidence from the graph. scores: (B,) log-probability of each row's path. lengths: (B,) its vertices."""
    means: list[float] = (-scores / lengths).clamp(0, 30).tolist()
    return [{"graph": math.log(mean + FLOOR)} for mean in means]


def of_vertices(emissions: Tensor, vertices: Tensor, tokens: Tensor) -> Rows:
    """Evidence from the probabilities of each row's units at their vertices. emissions: (B, L, V). vertices, tokens:
    (B, K) of the path, padded with -1."""
    rows = zip(emissions, vertices, tokens, strict=True)
    return [evidence(row[at[said >= 0], said[said >= 0]].tolist()) for row, at, said in rows]


def of_heard(source: Source) -> Rows:
    """Evidence from a CTC head: its certainty about its pieces; its certainty about all frames, blanks included; and
    the number of pieces per frame, which is too low or too high for foreign speech and noise. Empty for a source
    without a CTC head."""
    heard = source.heard
    if heard is None:
        return [{} for _ in source.limits]
    seen: Rows = []
    pieces: Tensor = heard.weights[..., 0].clamp(min=1e-12).log()
    rows = (pieces.tolist(), heard.lengths.tolist(), heard.logprobs.tolist(), heard.counts.tolist())
    for sure, places, logprobs, frames in zip(*rows, strict=True):
        doubt = -sum(logprobs[:frames]) / max(frames, 1)
        seen.append(
            evidence(sure[:places], "heard_")
            | {"frames": math.log(doubt + FLOOR), "rate": math.log(max(places, 1) / max(frames, 1))}
        )
    return seen
