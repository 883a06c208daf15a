"""Losses of the linguistic half: the graph's marginal likelihood, glancing, the baseline's cross-entropy, CTC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmdec.nn.dag_decoder import PAD, DagDecoder, Lattice
from mmdec.nn.fastspeech2 import AcousticBatch, AcousticLoss, FastSpeech2, FastSpeech2Output
from mmdec.nn.fastspeech2 import acoustic_loss as own_acoustic_loss
from mmdec.training.optim import token_weight


@dataclass(frozen=True)
class GraphLoss:
    """The graph loss of a batch, and values that other losses and logs use."""

    value: Tensor  # scalar
    invalid: Tensor  # number of rows left out: the target does not fit the graph, or the likelihood is not finite
    match: Tensor  # (B, M, L) log-probability of the m-th target token at vertex l


def graph_loss(lattice: Lattice, units: Tensor, unit_lengths: Tensor, forced: Tensor | None = None) -> GraphLoss:
    """Compute the graph loss: the mean over rows of -log P(Y|X) / M (DASpeech, section 3.1).

    A row whose log P(Y|X) is not finite adds 0 to the mean and is counted in `invalid`.
    units: (B, M) target tokens, padded. unit_lengths: (B,) their number in each row.
    forced: (B, L) index of the target token that GLAT showed to a vertex; -1: none was shown. A vertex emits its shown
        token with probability 1, without a gradient.
    """
    match = lattice.matches(units)
    if forced is not None:
        steps = torch.arange(units.shape[1], device=units.device)[None, :, None]
        shown = forced[:, None, :]  # (B, 1, L)
        match = torch.where(shown < 0, match, torch.where(shown == steps, 0.0, -torch.inf))
    score = lattice.marginal(match, unit_lengths)
    valid = score.isfinite()
    value = -(torch.where(valid, score, 0.0) / unit_lengths).mean() * row_weight(units)
    return GraphLoss(value, (~valid).sum(), match)


@torch.no_grad()
def glance(
    decoder: DagDecoder,
    states: Tensor,
    state_lengths: Tensor,
    frame_lengths: Tensor,
    units: Tensor,
    unit_lengths: Tensor,
    ratio: float,
) -> tuple[Tensor, Tensor]:
    """Run GLAT's first decoder pass, and choose vertices that are shown their target token ("number-random").

    The number of shown tokens is ratio x (the target's tokens - those that this pass predicts right on the best path).
    The vertices are drawn at random from this path. The second pass will use the same dropout.
    Returns: `given` (B, L), the shown token or -1, for the decoder's second pass; `forced` (B, L), the token's index in
        the target or -1, for `graph_loss`.
    """
    devices = [states.device] if states.is_cuda else []
    with torch.random.fork_rng(devices):  # restores the generator, so that the second pass draws the same dropout
        lattice = decoder(states, state_lengths, frame_lengths)
        noise = torch.rand(lattice.logits.shape[:2], device=states.device)
    path = lattice.best_alignment(lattice.matches(units), unit_lengths)  # (B, L)
    aligned = path >= 0
    gold = torch.where(aligned, units.gather(1, path.clamp(min=0)), -1)
    right = ((lattice.logits.argmax(-1) == gold) & aligned).sum(1)
    count = (ratio * (unit_lengths - right)).round().clamp(min=0)
    order = torch.where(aligned, noise, 2.0).argsort(1).argsort(1)
    chosen = aligned & (order < count[:, None])
    return torch.where(chosen, gold, -1), torch.where(chosen, path, -1)


def autoregressive_loss(logits: Tensor, units: Tensor, label_smoothing: float) -> Tensor:
    """Compute the cross-entropy of logits (B, M-1, V) with the units (B, M) that follow <s>. Padding is ignored."""
    target = units[:, 1:]
    mean = F.cross_entropy(logits.float().transpose(1, 2), target, ignore_index=PAD, label_smoothing=label_smoothing)
    return mean * token_weight((target != PAD).sum())


def ctc_loss(logits: Tensor, lengths: Tensor, text: Tensor, text_lengths: Tensor) -> Tensor:
    """Compute the CTC loss for each target symbol, as a mean over rows. A row whose text is too long for its frames
    counts as 0. logits: (B, S, C), class 0 is the blank. lengths: (B,) frames. text: (B, T) classes, padded."""
    scores = logits.float().log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, text, lengths, text_lengths, zero_infinity=True) * row_weight(text)


def acoustic_loss(output: FastSpeech2Output, batch: AcousticBatch, model: FastSpeech2) -> AcousticLoss:
    """Compute FastSpeech 2's losses, as means over the frames and phones of all processes."""
    loss = own_acoustic_loss(output, batch, model)
    spoken = (batch.durations > 0).sum()
    counts = torch.stack([output.mel_lengths.sum(), batch.lengths.sum(), spoken])
    frames, phones, voiced = token_weight(counts)
    return AcousticLoss(loss.mel * frames, loss.duration * phones, loss.pitch * voiced, loss.energy * voiced)


def row_weight(rows: Tensor) -> Tensor:
    """Return the weight on this process's mean over rows (B, ...) that makes the processes' average a mean over all
    rows."""
    return token_weight(torch.tensor(len(rows), device=rows.device))


def glat_ratio(options: Any, step: int) -> float:
    """Return the share of the target that the graph decoder sees at a step: linear from `glat_start` to `glat_end` in
    `glat_steps` steps. options: holds these three fields."""
    part = min(1.0, step / max(options.glat_steps, 1))
    return options.glat_start + part * (options.glat_end - options.glat_start)
