"""The former home of Medusa heads: `mmdec.medusa.load_heads` for one more release."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmdec import medusa
from mmdec.hub.medusa import load_heads, save_heads
from mmdec.nn.medusa import MedusaConfig, MedusaHeads
from tests.support.tiny_whisper import network, processor


def test_heads_are_read_as_before_and_the_new_way_is_named(tmp_path: Path) -> None:
    model = network(processor().tokenizer)  # type: ignore[attr-defined] # set by name
    config = MedusaConfig(hidden_size=model.config.d_model, vocab_size=model.config.vocab_size, heads=2)
    save_heads(tmp_path / "heads", MedusaHeads(config))
    with pytest.warns(DeprecationWarning, match=r"Call `mmdec\.load_drafter\(folder, model\)`") as caught:
        drafter = medusa.load_heads(tmp_path / "heads", model)
    assert caught[0].filename == __file__
    expected, found = load_heads(tmp_path / "heads", model).heads.state_dict(), drafter.heads.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
