"""Drafters that compress the prompt, so that their memory is shorter: their options, prompts, and rounds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmdec.core.loop import decode
from mmdec.core.sampling import Sequences, Stop
from mmdec.core.verify import MatchRule
from mmdec.targets.registry import make_target
from mmdec.types import Round
from tests.support.tiny_vlm import Picture

SYSTEMS: dict[str, dict[str, Any]] = {
    "specvlm": {"compressors": ("pool",), "pool_ratio": 3},
    "vispec": {"queries": 3},
    "flash": {"slots": 3, "latents": 2},
    "flash-tree": {"slots": 3, "latents": 2, "tree": True},
}
ROWS: list[list[Any]] = [
    [[5, 6], Picture.random(1), [7, 8, 9], Picture.random(2), [10]],
    [[11, 12, 13, 14, 15]],
    [Picture.random(3), [20, 21]],
]


def rounds_of(model: Any, drafter: Any, budget: Any, inputs: dict[str, Any], length: int) -> list[Round]:
    text = Sequences(inputs["input_ids"], Stop(inputs["input_ids"].shape[1] + length, frozenset({45})))
    return list(decode(make_target(model), inputs, text, MatchRule(), drafter, budget))


def random_prompt(images: tuple[tuple[int, int], ...], length: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a prompt's embeddings and features (length, 16), and mark the tokens of its images: [begin, end)."""
    drawn = torch.Generator().manual_seed(1)
    visual = torch.zeros(length, dtype=torch.bool)
    for begin, end in images:
        visual[begin:end] = True
    return torch.randn(length, 16, generator=drawn), torch.randn(length, 16, generator=drawn), visual
