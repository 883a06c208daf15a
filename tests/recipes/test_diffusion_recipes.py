"""Runs the recipes of masked diffusion models with tiny models: what they save decodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import mmdec
from tests.recipes.small_recipes import check_same_weights, checkpoint, fit, logged
from tests.support.lightning_warnings import FITTING
from tests.support.tiny_text import language_model

pytestmark = [pytest.mark.slow, *FITTING]
LISTS = {"batch_size": 2, "steps_per_epoch": 2, "dev_batches": 1}
TEXTS = {**LISTS, "texts": 20, "length": 20}


def test_lists_are_trained_resumed_and_decoded(tmp_path: Path) -> None:
    fit("diffusion/lists", tmp_path / "whole", {}, LISTS)
    fit("diffusion/lists", tmp_path / "cut", {}, LISTS, "--trainer.max_epochs=1")
    resumed = f"--ckpt_path={checkpoint(tmp_path / 'cut', 2)}"
    fit("diffusion/lists", tmp_path / "cut", {}, LISTS, resumed)
    check_same_weights(checkpoint(tmp_path / "whole", 4), checkpoint(tmp_path / "cut", 4))
    assert len(logged(tmp_path / "whole", "dev/loss")) == 2
    folder = tmp_path / "whole" / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    out = mmdec.diffusion_generate(model, torch.tensor([[3, 7, 8, 9, 2]]), canvas="threshold", max_new_tokens=8)
    assert 1 <= out.new_tokens[0] <= 8
    assert json.loads((folder / "provenance.json").read_text())["training"]["step"] == 4


def test_an_autoregressive_model_becomes_a_diffusion_model(tmp_path: Path) -> None:
    language_model("llama").save_pretrained(tmp_path / "base")
    base = str(tmp_path / "base")
    fit("diffusion/stories", tmp_path / "out", {"start": base}, {**TEXTS, "model": base})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.vocab_size == model.config.mask_token_id + 1
    out = mmdec.diffusion_generate(
        model, torch.tensor([[1, 7, 8]]), canvas="top_k", max_new_tokens=8, eos_token_id=None
    )
    assert out.new_tokens == [8]
