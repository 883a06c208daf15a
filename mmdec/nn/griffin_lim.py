"""Griffin-Lim with the interface of `Vocoder`: sound without trained weights, as a baseline or a fallback."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdec.audio import HOP, LOG_FLOOR, WINDOW, griffin_lim

_LEAST = WINDOW // HOP + 1  # minimum frames: fewer do not fill a window


class GriffinLimVocoder(nn.Module):
    """forward: mel (B, F, 80), natural log on mmdec's frame grid, lengths (B,) -> samples (B, F * 256) at 16 kHz.

    Rows are processed one by one, so a batch gives the same as single calls. Samples beyond a row's length are zero.
    """

    @torch.no_grad()
    def forward(self, mel: Tensor, lengths: Tensor | None = None) -> Tensor:
        batch, frames, _ = mel.shape
        sizes = [frames] * batch if lengths is None else lengths.tolist()
        samples = mel.new_zeros(batch, frames * HOP)
        for row, size in enumerate(sizes):
            heard = F.pad(mel[row, :size], (0, 0, 0, max(0, _LEAST - size)), value=math.log(LOG_FLOOR))
            samples[row, : size * HOP] = griffin_lim(heard)[: size * HOP]
        return samples
