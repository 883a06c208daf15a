"""Texts of random embeddings and features, to train draft networks on."""

from __future__ import annotations

import torch

from mmdec.drafters.networks.training.teacher import TargetFeatures


def reading(prompt: int, answer: int, seed: int, seen: range = range(0), channels: int = 32) -> TargetFeatures:
    """Return a text of random numbers. seen: its visual columns. channels: of its features."""
    draw = torch.Generator().manual_seed(seed)
    length = prompt + answer - 1
    visual = torch.zeros(length, dtype=torch.bool)
    visual[list(seen)] = True
    embeds, features = (torch.randn(length, size, generator=draw).double() for size in (32, channels))
    return TargetFeatures(prompt, torch.randint(6, 58, (answer,), generator=draw).tolist(), embeds, features, visual)


SHAPES: list[tuple[int, int, int, range]] = [(9, 6, 1, range(2, 6)), (5, 9, 2, range(0)), (12, 2, 3, range(1, 10))]
TEXTS = [reading(*shape) for shape in SHAPES]
WIDE = [reading(*shape, channels=96) for shape in SHAPES]  # of three layers
