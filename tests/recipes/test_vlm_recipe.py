"""Tests the small vision-language model's recipe on a tiny corpus: a resumed run gives the same weights, and
transformers' classes load the export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import LlavaForConditionalGeneration, LlavaProcessor

from mmdec.evaluation.quality.description import evaluate_vlm
from mmdec.training.checkpoints import read_checkpoint
from mmdec.training.vlm.data import SceneData, picture
from mmdec.training.vlm.export import export
from mmdec.training.vlm.tokens import NOWHERE
from mmdec.types import InputError
from tests.support import small_recipes
from tests.support.small_recipes import MARKS, check_same_weights, checkpoint, logged
from tests.support.tiny_scenes import SHAPE, write_scenes

pytestmark = MARKS


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("scenes"))


def fit(corpus: Path, out: Path, *more: str) -> None:
    """Three epochs of two steps."""
    model = {"shape": json.dumps(SHAPE), "vision_steps": 2, "warmup": 1, "compiled": "false", "guided": "[0,1]"}
    data = {
        "corpus": corpus,
        "tokenizer": corpus / "tokenizer",
        "pieces": 300,
        "rows": 4,
        "length": 40,
        "image": 32,
        "patches": 4,
        "steps_per_epoch": 2,
    }
    options = ("devices=1", "strategy=auto", "check_val_every_n_epoch=3", "max_epochs=3", "log_every_n_steps=1")
    small_recipes.fit("vlm/scenes", out, model, data, *(f"--trainer.{option}" for option in options), *more)


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    fit(corpus, out)
    return out / "checkpoints"


def test_the_phases_train_what_they_should(whole: Path) -> None:
    states = [read_checkpoint(whole / f"step={step}.ckpt")["state_dict"] for step in (2, 4, 6)]
    # The encoder's last norm is not read, keys' biases change no attention, states are measured once.
    idle = ("post_layernorm", "k_proj.bias", "whitening.middle", "whitening.turn")
    for name in states[0]:
        if not any(part in name for part in idle):
            assert not torch.equal(states[0][name], states[1][name]), name  # from step 2 on all of it
            assert not torch.equal(states[1][name], states[2][name]), name
    fresh = [name for name in states[0] if "language_model" in name and "norm" in name]
    assert all(bool((states[0][name] == 1).all()) for name in fresh)  # until step 2 none of the language model


def test_what_is_read_is_guided(whole: Path, corpus: Path) -> None:
    rows = logged(whole.parent, "train/guide")
    assert rows
    assert all(0 < float(row["train/guide"]) < 20 for row in rows)
    assert all(0 <= float(row["train/read_right"]) <= 1 for row in rows)
    data = SceneData(str(corpus), str(corpus / "tokenizer"), image=32, patches=4)
    for number in range(10):
        read = {patch for *_, patches in data.encoded.turns(number) for patch in patches.tolist()}
        assert read == {NOWHERE, number % 4}  # the digit of the description


def test_a_resumed_run_gives_the_same_weights(whole: Path, corpus: Path, tmp_path: Path) -> None:
    fit(corpus, tmp_path, f"--ckpt_path={whole / 'step=4.ckpt'}")
    check_same_weights(checkpoint(whole.parent, 6), checkpoint(tmp_path, 6))


def test_the_export_answers_through_transformers(whole: Path, corpus: Path, tmp_path: Path) -> None:
    folder = export([whole / "step=6.ckpt"], corpus / "tokenizer", tmp_path / "model")
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor: Any = LlavaProcessor.from_pretrained(folder)
    kept = read_checkpoint(whole / "step=6.ckpt")["state_dict"]
    weight = model.model.language_model.norm.weight  # type: ignore[union-attr]
    torch.testing.assert_close(weight, kept["model.model.language_model.norm.weight"], atol=1e-3, rtol=1e-3)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    said = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What colour is it?"}]}]
    chat = processor.apply_chat_template(said, add_generation_prompt=True)
    image = Image.open(corpus / "images" / "dev" / "0.png")
    inputs = processor(images=image, text=chat, return_tensors="pt", add_special_tokens=False)
    assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == 4
    assert float(inputs["pixel_values"].min()) == -1.0
    assert model.generate(**inputs, max_new_tokens=3).shape[1] <= inputs["input_ids"].shape[1] + 3  # type: ignore[operator, union-attr]
    report = evaluate_vlm(corpus / "dev.json", model=folder, drafter=None, limit=8, batch_size=8, max_new_tokens=8)
    assert {task: row["questions"] for task, row in report["by_task"].items()} == {"colour": 8, "describe": 8}


def test_what_does_not_fit_is_named(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be an existing file"):
        SceneData(str(tmp_path / "none"), str(tmp_path / "tokenizer"))
    with pytest.raises(InputError, match="must hold train"):
        SceneData(str(tmp_path / "none"), str(corpus / "tokenizer"))
    with pytest.raises(InputError, match="must be 64 x 64"):
        picture(corpus / "images" / "dev" / "0.png", 64)
    cells = corpus / "train.cells.npy"
    whole = np.load(cells)
    np.save(cells, whole[:5])
    data = SceneData(str(corpus), str(corpus / "tokenizer"), image=32, patches=4)
    try:
        with pytest.raises(InputError, match="5 of 10"):
            data.setup("fit")
    finally:
        np.save(cells, whole)
