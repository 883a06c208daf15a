"""Small spectrogram discriminators for the vocoder's adversarial stage; they are never shipped."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZES = (256, 512, 1024)  # windows, in samples; the hop is a quarter


class SpectrogramDiscriminator(nn.Module):
    """Judges patches of a log-magnitude spectrogram (after Jang et al., 2021), with few channels."""

    def __init__(self, size: int, channels: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("window", torch.hann_window(size), persistent=False)
        shapes = [(1, channels), (channels, channels), (channels, 2 * channels), (2 * channels, 2 * channels)]
        self.convs = nn.ModuleList(
            [
                nn.utils.parametrizations.weight_norm(
                    nn.Conv2d(a, b, (7, 3), stride=(3 if i < 2 else 2, 1), padding=(3, 1))
                )
                for i, (a, b) in enumerate(shapes)
            ]
        )
        self.out = nn.utils.parametrizations.weight_norm(nn.Conv2d(2 * channels, 1, 3, padding=1))

    def forward(self, samples: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(B, T) -> patch scores (B, 1, bins', frames) and the features on the way."""
        window = self.get_buffer("window")
        spectrum = torch.stft(samples, self.size, self.size // 4, window=window, return_complex=True)
        x = (spectrum.real.square() + spectrum.imag.square() + 1e-6).log()[:, None] * 0.25  # (B, 1, bins, frames)
        features = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            features.append(x)
        return self.out(x), features


class Discriminators(nn.Module):
    """One for each resolution."""

    def __init__(self, channels: int = 12) -> None:
        super().__init__()
        self.judges = nn.ModuleList([SpectrogramDiscriminator(size, channels) for size in SIZES])

    def forward(self, samples: Tensor) -> list[tuple[Tensor, list[Tensor]]]:
        return [judge(samples) for judge in self.judges]


def discriminator_loss(judges: Discriminators, generated: Tensor, truth: Tensor) -> Tensor:
    """Least squares: recordings to 1, made sound to 0."""
    total = generated.new_zeros(())
    for (false, _), (true, _) in zip(judges(generated), judges(truth), strict=True):
        total = total + false.square().mean() + (true - 1).square().mean()
    return total / len(judges.judges)


def generator_loss(judges: Discriminators, generated: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """How far made sound is from being taken for a recording, and the L1 distance of the features."""
    with torch.no_grad():
        wanted = judges(truth)
    fooled, matched, count = generated.new_zeros(()), generated.new_zeros(()), 0
    for (score, features), (_, targets) in zip(judges(generated), wanted, strict=True):
        fooled = fooled + (score - 1).square().mean()
        for feature, target in zip(features, targets, strict=True):
            matched = matched + (feature - target).abs().mean() / target.abs().mean().clamp(min=1e-3)
            count += 1
    return fooled / len(judges.judges), matched / count
