"""Distance of two waveforms by their spectra at several resolutions (Yamamoto et al. 2020)."""

from __future__ import annotations

import torch
from torch import Tensor


def spectra(samples: Tensor, size: int) -> Tensor:
    """Magnitudes (B, bins, frames) with a window of `size` samples and a hop of a quarter; differentiable."""
    window = torch.hann_window(size, device=samples.device)
    spectrum = torch.stft(samples, size, size // 4, window=window, return_complex=True)
    return (spectrum.real.square() + spectrum.imag.square() + 1e-7).sqrt()


def spectral_loss(generated: Tensor, truth: Tensor, sizes: tuple[int, ...] = (128, 256, 512, 1024, 2048)) -> Tensor:
    """Spectral convergence plus L1 of log magnitudes (Yamamoto et al., 2020), mean over resolutions."""
    total = generated.new_zeros(())
    for size in sizes:
        a, b = spectra(generated, size), spectra(truth, size)
        total = total + (a - b).norm() / b.norm().clamp(min=1e-3) + (a.log() - b.log()).abs().mean()
    return total / len(sizes)
