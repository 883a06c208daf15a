"""Tests models with quantised activations, which give a token other scores beside other tokens than alone.

mmdec finds this out once for each model, and then decodes as `generate` does, without drafts. Models with quantised
weights alone, or in half precision, are drafted."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mmdec
from mmdec.pretrained.vlm import load_vlm
from mmdec.targets import quantization_check as siblings
from mmdec.targets.quantization_check import sibling_difference, siblings_change_logits
from mmdec.targets.registry import make_target
from mmdec.whisper.checkpoint import load_whisper
from tests.conftest import buzz
from tests.exactness.quantised import dynamic, weights_alone
from tests.support import tiny_vlm_folder, tiny_whisper
from tests.support.tiny_text import language_model, prompts
from tests.support.tiny_vlm import KINDS, Picture, batch_of, vision_model
from tests.support.whisper_calls import MODELS, MODES, call

LLAMA: Any = language_model("llama", 1)
OPTIONS: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
WARNING = "its activations are quantised"


def tokens_by(entry_point: str, model: Any, inputs: dict[str, Tensor], drafter: Any = "recycling") -> list[list[int]]:
    """Return each row's new tokens."""
    start = inputs["input_ids"].shape[1]
    if entry_point == "stock":
        return model.generate(**inputs, **OPTIONS)[:, start:].tolist()
    if entry_point == "speculate":
        return model.generate(**inputs, **OPTIONS, custom_generate=mmdec.speculate(drafter))[:, start:].tolist()
    if entry_point == "generate":
        return mmdec.generate(model, inputs, drafter, **OPTIONS).sequences[:, start:].tolist()
    texts: list[list[int]] = [[] for _ in inputs["input_ids"]]
    for round_ in mmdec.stream(model, inputs, drafter, **OPTIONS):
        for row, tokens in zip(round_.rows, round_.tokens, strict=True):
            assert len(tokens) == 1
            texts[row] += tokens
    longest = max(map(len, texts))
    return [text + [0] * (longest - len(text)) for text in texts]


@pytest.mark.parametrize("drafter", [None, "recycling"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("entry_point", ["generate", "stream", "speculate"])
def test_quantised_language_models_keep_their_texts(entry_point: str, batch: int, drafter: str | None) -> None:
    model = dynamic(LLAMA)
    for seed in range(2):
        warns = batch > 1 or drafter is not None  # else nothing stands beside a token
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            result = tokens_by(entry_point, model, prompts(batch, seed), drafter)
        assert [WARNING in str(warning.message) for warning in heard] == [True] * (warns and seed == 0)
        assert result == tokens_by("stock", model, prompts(batch, seed))


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_vlms_keep_their_texts(kind: str) -> None:
    model = dynamic(vision_model(kind))
    rows = [[[8, 9, 8, 9], Picture.random(1), [8, 9]], [[8, 10], Picture.random(2), [11]]]
    for inputs in (batch_of(kind, rows[:1]), batch_of(kind, rows)):
        with pytest.warns(RuntimeWarning) if len(inputs["input_ids"]) == 1 else warnings.catch_warnings():
            result = tokens_by("generate", model, inputs)
        assert result == tokens_by("stock", model, inputs)


@pytest.mark.parametrize("mode", ["short", "long"])
def test_quantised_whispers_keep_their_texts(mode: str) -> None:
    model = dynamic(MODELS[80])
    for batch in (1, 3):
        with pytest.warns(RuntimeWarning, match=WARNING) if batch == 1 else warnings.catch_warnings():
            result = call(model, MODES[mode], batch, custom_generate=mmdec.speculate("lookup"))
        expected = call(model, MODES[mode], batch)
        if isinstance(result, dict):
            result, expected = result["sequences"], expected["sequences"]
        assert torch.equal(result, expected)


def test_quantised_activations_turn_drafts_off_in_transcribe_and_describe(tmp_path: Path) -> None:
    whisper = load_whisper(tiny_whisper.write(tmp_path / "whisper"), "cpu")
    whisper = replace(whisper, model=dynamic(whisper.model))
    plain = mmdec.transcribe(buzz(0.9), sample_rate=16_000, model=whisper, drafter=None)
    with pytest.warns(RuntimeWarning, match=WARNING):
        result = mmdec.transcribe(buzz(0.9), sample_rate=16_000, model=whisper, drafter="lookup")
    assert (result.tokens, result.tokens_per_round) == (plain.tokens, 1.0)
    vlm = load_vlm(tiny_vlm_folder.write(tmp_path / "eye"), "cpu")
    vlm = replace(vlm, model=dynamic(vlm.model))
    picture = np.zeros((24, 40, 3), np.uint8)
    answer = mmdec.describe(picture, model=vlm, drafter=None, max_new_tokens=12)
    with pytest.warns(RuntimeWarning, match=WARNING):
        drafted = mmdec.describe(picture, model=vlm, drafter="recycling", max_new_tokens=12)
    assert (drafted.tokens, drafted.tokens_per_round) == (answer.tokens, 1.0)


def test_weights_alone_are_drafted() -> None:
    model, given = weights_alone(LLAMA), prompts(1, 1)
    apart, bound = sibling_difference(model, make_target(model))
    assert apart < 1e-5 < bound
    result = mmdec.generate(model, given, "recycling", num_speculative_tokens=(12, 4), **OPTIONS)
    assert result.tokens_per_round > 1
    assert result.sequences[:, 14:].tolist() == tokens_by("stock", model, given)


@pytest.mark.parametrize("kind", ["text", "whisper", *KINDS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_not_taken_for_quantisation(kind: str, dtype: torch.dtype) -> None:
    model: Any = LLAMA if kind == "text" else MODELS[80] if kind == "whisper" else vision_model(kind)
    model = copy.deepcopy(model).to(dtype)
    apart, bound = sibling_difference(model, make_target(model))
    assert apart < bound / 2


def test_a_model_is_measured_once_and_anew_when_it_was_quantised_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = list[tuple[float, float]]()

    def record_difference(model: Any, target: Any) -> tuple[float, float]:
        measured.append(sibling_difference(model, target))
        return measured[-1]

    monkeypatch.setattr(siblings, "sibling_difference", record_difference)
    assert not siblings_change_logits(LLAMA, make_target(LLAMA))
    assert not measured  # of torch's and transformers' own parts
    model = weights_alone(LLAMA)
    for _ in range(2):
        assert not siblings_change_logits(model, make_target(model))
    assert len(measured) == 1
    model = copy.deepcopy(LLAMA)
    assert not siblings_change_logits(model, make_target(model))
    dynamic(model, in_place=True)
    with pytest.warns(RuntimeWarning, match=WARNING):
        assert siblings_change_logits(model, make_target(model))
    assert siblings_change_logits(model, make_target(model))
    assert len(measured) == 2
    assert measured[1][0] > 1e-2
