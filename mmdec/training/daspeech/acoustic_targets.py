"""Computes FastSpeech 2's training targets from a recording and its phone alignment: phones, durations, pitch, energy,
mel.

An alignment is a line like "pau:0.224 w:0.262 eh:0.325": each phone and its END in seconds. Silence (`pau`) at both
ends is removed from phones and sound; inside a sentence it is kept as a phone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmdec.audio import HOP, SAMPLE_RATE, energy, log_mel, pitch
from mmdec.phonetics.lexicon import spoken
from mmdec.types import InputError

EOS = "</s>"


@dataclass(frozen=True)
class AcousticTargets:
    """One utterance of K phones, the last of them EOS with zeros, and F = sum of durations frames."""

    units: tuple[str, ...]  # (K,) phones, then "</s>"
    durations: Tensor  # (K,) int64, frames
    pitch: Tensor  # (K,) Hz, mean over the phone's frames of the interpolated contour
    energy: Tensor  # (K,) mean over the phone's frames
    mel: Tensor  # (F, 80), natural log
    first_frame: int  # index in the recording: frame f of `mel` is centred on its sample 256 (first_frame + f)


def acoustic_targets(samples: Tensor, phones_with_ends: Sequence[tuple[str, float]]) -> AcousticTargets:
    """Compute the targets of 16 kHz samples (T,) with phones [(phone, end in seconds), ...].

    A duration is round(end * sr / hop) - round(start * sr / hop) frames, so that rounding errors do not add up. A phone
    without frames gets pitch and energy of the nearest phone with frames. The pitch of unvoiced frames is interpolated.
    Raises InputError where the sound ends before its phones.
    """
    span = spoken([phone for phone, _ in phones_with_ends])
    first, last = span.start, span.stop
    if first == last:
        raise InputError("`alignment` must hold a phone other than silence, but holds none. Leave the row out.")
    start = phones_with_ends[first - 1][1] if first else 0.0
    ends = torch.tensor([start, *[end for _, end in phones_with_ends[first:last]]], dtype=torch.float64)
    edges = (
        (ends * (SAMPLE_RATE / HOP)).round().long()
    )  # (K,): the first phone's start, then each phone's end, in frames; EOS has no end
    total = 1 + samples.shape[0] // HOP
    if int(edges[-1]) > total:
        raise InputError(
            f"`samples` must last as long as their phones ({float(ends[-1]):.3f} s), but last "
            f"{samples.shape[0] / SAMPLE_RATE:.3f} s. Align this recording again."
        )
    low, high = int(edges[0]), int(edges[-1])
    durations = edges[1:] - edges[:-1]
    window = slice(low, high)
    zero = torch.zeros(1)
    return AcousticTargets(
        units=(*[phone for phone, _ in phones_with_ends[first:last]], EOS),
        durations=torch.cat([durations, zero.long()]),
        pitch=torch.cat([_phone_means(filled(pitch(samples)[window]), durations), zero]),
        energy=torch.cat([_phone_means(energy(samples)[window], durations), zero]),
        mel=log_mel(samples)[window],
        first_frame=low,
    )


def filled(contour: Tensor) -> Tensor:
    """A pitch contour (F,) in Hz with its zeros replaced: linear between voiced frames, constant at both ends."""
    voiced = torch.nonzero(contour > 0)[:, 0]
    if voiced.numel() == 0:
        return contour
    everywhere = torch.arange(contour.shape[0])
    right = torch.searchsorted(voiced, everywhere).clamp(max=voiced.numel() - 1)
    left = (right - 1).clamp(min=0)
    a, b = voiced[left], voiced[right]
    weight = ((everywhere - a).float() / (b - a).clamp(min=1)).clamp(0, 1)
    return contour[a] + weight * (contour[b] - contour[a])


def _phone_means(values: Tensor, durations: Tensor) -> Tensor:
    """Means of values (F,) over phones of durations (K,) -> (K,)."""
    ends = durations.cumsum(0)
    starts = (ends - durations).clamp(max=values.shape[0] - 1)
    total = torch.nn.functional.pad(values.double().cumsum(0), (1, 0))
    stops = torch.maximum(ends, starts + 1)
    return ((total[stops] - total[starts]) / (stops - starts)).float()
