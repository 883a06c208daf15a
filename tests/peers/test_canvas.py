"""The entropy bound against that of transformers' DiffusionGemma, which accepts among all positions of its canvas."""

from __future__ import annotations

import pytest
import torch
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
)

from mmdec.core.canvas import EntropyBound, Predictions

LENGTH, VOCABULARY = 12, 20


@pytest.mark.parametrize("bound", [0.1, 0.5, 3.0])
@pytest.mark.parametrize("seed", range(10))
def test_entropy_bound_accepts_what_the_peer_accepts(seed: int, bound: float) -> None:
    draws = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(3, LENGTH, VOCABULARY, generator=draws, dtype=torch.float64)
    hidden = torch.full((3, LENGTH), -1)
    peer = EntropyBoundSampler(EntropyBoundSamplerConfig(entropy_bound=bound), LENGTH, VOCABULARY, 48)
    accepted = peer.accept_canvas(hidden, logits.argmax(-1), logits, 1)
    revealed = EntropyBound(bound).reveal(Predictions(logits), torch.ones(3, LENGTH, dtype=torch.bool))
    assert revealed.tolist() == (accepted != -1).tolist()
    assert 3 <= int(revealed.sum()) < 3 * LENGTH
