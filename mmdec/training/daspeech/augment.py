"""Augmentation of filterbanks, for a padded batch on any device: masks, and warps of time and frequency.

SpecAugment (Park et al., 2019) as in the paper's recipe; the warps (a voice of another size, another pace) are for
corpora with few speakers. Random numbers come from torch's global generator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mmdec.nn.conformer import lengths_to_mask


@dataclass(frozen=True)
class Augmentation:
    """Defaults: DASpeech's SpecAugment (F=27 once, T=100 once, always), no warp."""

    frequency_width: int = 27
    frequency_masks: int = 1
    time_width: int = 100
    time_masks: int = 1
    frequency_warp: float = 0.0  # the largest relative stretch of the frequency axis
    time_warp: float = 0.0  # the largest relative change of pace

    def __call__(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """features (B, N, 80), lengths (B,) -> the same, changed; padding stays zero."""
        if self.time_warp or self.frequency_warp:
            features, lengths = self._warp(features, lengths)
        b, n, bands = features.shape
        keep = lengths_to_mask(lengths, n)[..., None]
        bins = torch.arange(bands, device=features.device)[None]
        for _ in range(self.frequency_masks):
            width = torch.rand(b, 1, device=features.device) * self.frequency_width
            start = torch.rand(b, 1, device=features.device) * (bands - width)
            keep = keep & ~((bins >= start) & (bins < start + width))[:, None]
        frames = torch.arange(n, device=features.device)[None]
        for _ in range(self.time_masks):
            # A mask never hides more than a fifth of a short utterance.
            bound = (lengths[:, None] * 0.2).clamp(max=self.time_width)
            width = torch.rand(b, 1, device=features.device) * bound
            start = torch.rand(b, 1, device=features.device) * (lengths[:, None] - width)
            keep = keep & ~((frames >= start) & (frames < start + width))[..., None]
        return features * keep, lengths  # the features have zero mean: a mask is silence of average colour

    def _warp(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Resample both axes by one bilinear look-up, a pace and a stretch for each row."""
        b, n, bands = features.shape
        device = features.device
        pace = 1 + (2 * torch.rand(b, device=device) - 1) * self.time_warp
        stretch = 1 + (2 * torch.rand(b, device=device) - 1) * self.frequency_warp
        new_lengths = (lengths / pace).floor().to(torch.long).clamp(min=8)
        size = int(new_lengths.max())
        rows = torch.arange(size, device=device)[None] * (lengths - 1)[:, None] / (new_lengths - 1)[:, None]
        y = rows * 2 / max(n - 1, 1) - 1  # (B, N'), in grid_sample's coordinates
        columns = (torch.arange(bands, device=device)[None] * stretch[:, None]).clamp(max=bands - 1)
        x = columns * 2 / (bands - 1) - 1  # (B, 80)
        grid = torch.stack([x[:, None].expand(-1, size, -1), y[..., None].expand(-1, -1, bands)], dim=-1)
        warped = F.grid_sample(features[:, None], grid, align_corners=True, padding_mode="border")[:, 0]
        return warped * lengths_to_mask(new_lengths, size)[..., None], new_lengths
