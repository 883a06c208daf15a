"""The largest values by chunks against torch's own `topk`."""

from __future__ import annotations

import pytest
import torch

from mmdec.ops import topk


@pytest.mark.parametrize("few", [0, topk.FEW])
@pytest.mark.parametrize("vocab", [3, 8, 100, 64 * 17, 64 * 17 + 5, 64 * 40 + 63])
def test_equals_topk(vocab: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "FEW", few)
    logits = torch.randn(2, 3, vocab, generator=torch.Generator().manual_seed(vocab))
    assert torch.equal(topk.top_indices(logits, 8), logits.topk(min(8, vocab)).indices)
