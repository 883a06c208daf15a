"""Tests the comparison of heads: training on a model's own answers brings tokens, and the text stays the model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from recipes.measure.heads import main
from tests.support.tiny_text import language_model

SMALL = ["--answers=48", "--held=3", "--tokens=20", "--batch=8", "--levels=3", "--vocabulary=40", "--lr=5e-3"]


@pytest.mark.slow
def test_trained_heads_draft_the_models_own_text(tmp_path: Path, capsys: Any) -> None:
    model: Any = language_model(num_hidden_layers=2)
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    model.save_pretrained(tmp_path)
    trees: list[float] = []
    for steps in (1, 100):
        main([f"--model={tmp_path}", *SMALL, f"--steps={steps}", "--kinds", "MLPSpeculator"])
        first, row = map(json.loads, capsys.readouterr().out.splitlines())
        assert first == {"answers": 48, "tokens": 48 * 20}
        assert row["kind"] == "MLPSpeculator"
        assert 4 >= row["tree"] >= row["chain"] >= 1
        trees.append(row["tree"])
    assert trees[1] > trees[0] + 0.2
