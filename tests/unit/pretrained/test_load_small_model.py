"""Tests a smaller model as a drafter, given as an object or as a folder, with the same tokenizer or another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import mmdec
from mmdec.drafters.small_model.drafter import SmallModelDrafter
from mmdec.drafters.small_model.other_vocabulary import OtherVocabularyDrafter
from mmdec.errors import InputError
from mmdec.generation.speculation import DecodingOptions, Speculation
from mmdec.pretrained.language_model import load_language_model
from tests.support.tiny_text import language_model
from tests.support.tiny_text_folder import OTHER, write
from tests.support.tiny_vlm_folder import TEXTS

OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model, and two smaller ones: of its tokenizer, and of another."""
    folder = tmp_path_factory.mktemp("models")
    write(folder / "large", TEXTS, 0)
    write(folder / "same", TEXTS, 1, num_hidden_layers=1)
    write(folder / "other", OTHER, 2, num_hidden_layers=1)
    return folder


def drafter_of(drafter: Any, model: Any) -> Any:
    return Speculation(DecodingOptions(drafter)).drafter_for(model)


@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
@pytest.mark.parametrize("given", ["folder", "object"])
@pytest.mark.parametrize(("name", "kind"), [("same", SmallModelDrafter), ("other", OtherVocabularyDrafter)])
def test_the_tokenizers_decide_the_drafters_class(home: Path, name: str, kind: type, given: str) -> None:
    large = load_language_model(home / "large", "cpu")
    small: Any = home / name if given == "folder" else load_language_model(home / name, "cpu").model
    assert isinstance(drafter_of(small, large.model), kind)
    inputs = large.tokenizer(
        ["Where is the red star?", "It is"], return_tensors="pt", padding=True, padding_side="left"
    )
    expected = large.model.generate(**inputs, **OPTIONS)  # type: ignore[operator]
    result = mmdec.generate(large.model, inputs, small, num_speculative_tokens=4, **OPTIONS)
    assert torch.equal(result.sequences, expected)
    assert sum(sum(round_.drafted) for round_ in result.rounds)


@pytest.mark.parametrize("given", ["folder", "object"])
@pytest.mark.parametrize("options", [{"inner": "lookup"}, {"prompt": 16}], ids=str)
def test_options_need_the_targets_tokenizer(home: Path, options: Any, given: str) -> None:
    large = load_language_model(home / "large", "cpu").model
    same, other = home / "same", home / "other"
    if given == "object":
        same, other = (load_language_model(folder, "cpu").model for folder in (same, other))
    assert isinstance(drafter_of(mmdec.small_model(same, **options), large), SmallModelDrafter)
    assert isinstance(drafter_of(mmdec.small_model(other), large), OtherVocabularyDrafter)
    with pytest.raises(InputError, match=f"`{next(iter(options))}` needs a smaller model with the target's tokenizer"):
        drafter_of(mmdec.small_model(other, **options), large)


def test_transformers_models_bring_their_folders(home: Path) -> None:
    large = AutoModelForCausalLM.from_pretrained(home / "large")
    small = AutoModelForCausalLM.from_pretrained(home / "other")
    assert isinstance(drafter_of(small, large), OtherVocabularyDrafter)


def test_the_targets_tokenizer_may_be_given(home: Path) -> None:
    nowhere = language_model("llama", 4, vocab_size=270)  # made from a configuration: it has no folder
    assert isinstance(mmdec.load_drafter(home / "other", nowhere, tokenizer=_tokenizer(home)), OtherVocabularyDrafter)


def test_without_a_tokenizer_a_larger_vocabulary_is_refused(home: Path) -> None:
    nowhere = language_model("llama", 4, vocab_size=61)
    with pytest.raises(InputError, match=r"at most the target's 61 tokens where the target has no tokenizer"):
        drafter_of(home / "other", nowhere)
    lone = language_model("llama", 5, vocab_size=400)
    with pytest.raises(InputError, match=r"where the smaller model has no tokenizer in its folder, but has 400"):
        drafter_of(lone, load_language_model(home / "large", "cpu").model)


def test_a_damaged_tokenizer_is_one_error(home: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "damaged", OTHER, 2)
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match="must have a whole tokenizer"):
        drafter_of(folder, load_language_model(home / "large", "cpu").model)


def test_a_model_without_a_tokenizer_is_refused(home: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "bare", OTHER, 2)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="`model` must have a tokenizer"):
        load_language_model(folder, "cpu")


def _tokenizer(home: Path) -> Any:
    return load_language_model(home / "large", "cpu").tokenizer
