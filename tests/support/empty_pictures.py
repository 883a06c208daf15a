"""Pictures without content."""

from __future__ import annotations

import numpy as np

EMPTY = ("one colour", "white noise", "gradient", "blurred noise")
SIDE = 128  # width and height of these pictures in pixels


def empty_picture(kind: str, draw: np.random.Generator) -> np.ndarray:
    """Draw a picture of a kind in `EMPTY`, (128, 128, 3) uint8, with random colours, direction, contrast and blur."""
    shape = (SIDE, SIDE, 3)
    if kind == "one colour":
        return np.broadcast_to(draw.integers(0, 256, 3, dtype=np.uint8), shape).copy()
    if kind == "white noise":
        return draw.integers(0, 256, shape, dtype=np.uint8)
    if kind == "gradient":
        (down, across), (begin, end) = draw.normal(size=2), draw.integers(0, 256, (2, 3))
        ramp = down * np.arange(SIDE)[:, None] + across * np.arange(SIDE)
        share = (ramp - ramp.min()) / (ramp.max() - ramp.min())
        return (begin + (end - begin) * share[..., None]).round().astype(np.uint8)
    # standard deviation of the blur in pixels, and of the result in grey levels
    radius, contrast = draw.uniform(1, 8), draw.uniform(20, 60)
    waves = np.exp(-2 * (np.pi * radius * np.fft.fftfreq(SIDE)) ** 2)  # Fourier transform of the Gaussian
    noise = np.fft.fft2(draw.normal(size=shape), axes=(0, 1)) * (waves[:, None] * waves)[..., None]
    blurred = np.fft.ifft2(noise, axes=(0, 1)).real
    return (128 + contrast * blurred / blurred.std()).round().clip(0, 255).astype(np.uint8)
