"""Tests drafter="auto": the drafter in the model's folder, else the one shipped for its weights, else "lookup"."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import mmdec
from mmdec.checks.files import write_atomically
from mmdec.drafters.ctc.checkpoint import save_ctc, token_merges
from mmdec.drafters.ctc.drafter import CtcDrafter, MultilingualCtcDrafter
from mmdec.drafters.ctc.network import CtcHead, CtcHeadConfig
from mmdec.drafters.ctc.tokens import TokenPieces
from mmdec.drafters.ctc.training.measure import ctc_token_ids
from mmdec.drafters.lookup import LookupDrafter
from mmdec.drafters.medusa.checkpoint import save_heads
from mmdec.drafters.medusa.drafter import MedusaDrafter
from mmdec.drafters.medusa.network import MedusaConfig
from mmdec.generation.auto_drafter import (
    SHIPPED_FILE,
    SHIPPED_FORMAT,
    auto_drafter,
    is_shipped_for,
    network_shape,
    values_of,
)
from mmdec.tasks.confidence import Calibration, write_calibrations
from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper, read_whisper
from tests.conftest import RATE, buzz
from tests.support.tiny_text import language_model
from tests.support.tiny_whisper import heads, medusa_heads, network, processor, write


def write_shipped(folder: Path, model: Any, drafters: list[str]) -> None:
    """Write the list of the drafters in a folder, which are shipped for these weights."""
    values = [float(f"{value:.6g}") for value in values_of(model)]
    content = {"format": SHIPPED_FORMAT, "drafters": drafters, "network": network_shape(model), "values": values}
    write_atomically(folder / SHIPPED_FILE, json.dumps(content).encode())


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    return write(tmp_path / "mine" / "whisper", with_heads=False)


@pytest.fixture
def shipped(tmp_path: Path, bare: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of models in which heads for `bare` are shipped."""
    home = tmp_path / "shipped" / "for-whisper"
    model = read_whisper(bare)
    save_heads(home / "medusa", heads(model))
    write_shipped(home, model, ["medusa"])
    monkeypatch.setattr(import_module("mmdec.hub.find"), "MODEL_FOLDERS", (home.parent,))
    return home


def words(model: Any, **options: Any) -> list[int]:
    return mmdec.transcribe(buzz(0.7), sample_rate=RATE, model=model, max_new_tokens=8, **options).tokens


def test_a_plain_model_needs_no_drafter(bare: Path) -> None:
    whisper = load_whisper(bare, "cpu")
    assert isinstance(auto_drafter(whisper.model, whisper.directory), LookupDrafter)
    assert words(whisper) == words(whisper, drafter=None)
    both = mmdec.transcribe([buzz(0.7)] * 2, sample_rate=RATE, model=whisper, max_new_tokens=8)
    assert both[1].tokens == words(whisper, drafter=None)


def test_heads_in_the_model_s_folder_come_first(shipped: Path, bare: Path) -> None:
    save_heads(bare / "medusa", heads(read_whisper(bare), seed=5))
    whisper = load_whisper(bare, "cpu")
    result = auto_drafter(whisper.model, whisper.directory, whisper.read_drafter)
    assert result is whisper.own_drafter("medusa")
    assert result.name != auto_drafter(read_whisper(write(bare.with_name("b"), with_heads=False))).name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("through", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_shipped_ones_are_found_for_every_copy(
    shipped: Path, bare: Path, tmp_path: Path, dtype: torch.dtype, through: torch.dtype
) -> None:
    """In any stored and loaded dtype and any folder."""
    model: Any = read_whisper(bare)
    model.to(through)
    model.save_pretrained(tmp_path / "copy")
    copy: Any = type(model).from_pretrained(tmp_path / "copy", dtype=dtype).eval()
    assert is_shipped_for(copy, shipped / SHIPPED_FILE)
    result = auto_drafter(copy)
    assert isinstance(result, MedusaDrafter)
    assert auto_drafter(copy) is result  # read once
    assert next(result.heads.parameters()).dtype == dtype


def test_a_fine_tuned_copy_gets_lookup(shipped: Path, bare: Path) -> None:
    tuned: Any = read_whisper(bare)
    with torch.no_grad():
        for weight in tuned.parameters():
            weight.mul_(1.05)
    assert not is_shipped_for(tuned, shipped / SHIPPED_FILE)
    assert isinstance(auto_drafter(tuned), LookupDrafter)


def test_another_model_of_this_shape_gets_lookup(shipped: Path) -> None:
    other = network(processor().tokenizer, seed=8)  # type: ignore[attr-defined]
    assert not is_shipped_for(other, shipped / SHIPPED_FILE)
    assert isinstance(auto_drafter(other), LookupDrafter)
    assert isinstance(auto_drafter(network(processor().tokenizer, d_model=16)), LookupDrafter)  # type: ignore[attr-defined]
    assert isinstance(auto_drafter(language_model("llama")), LookupDrafter)


@pytest.mark.parametrize("damage", ["weights", "config", "another model's", "list"])
def test_damaged_shipped_drafters_are_passed_over_by_auto(shipped: Path, bare: Path, damage: str) -> None:
    if damage == "weights":
        (shipped / "medusa" / "heads.safetensors").write_bytes(b"no")
    elif damage == "config":
        (shipped / "medusa" / "config.json").write_text("{", encoding="utf-8")
    elif damage == "list":
        (shipped / SHIPPED_FILE).write_text('{"format": "mmdec shipped drafters 1", "network": 3}', encoding="utf-8")
    else:
        shutil.rmtree(shipped / "medusa")
        save_heads(shipped / "medusa", medusa_heads(MedusaConfig(16, 99, heads=2)))
    whisper = load_whisper(bare, "cpu")
    if damage == "list":
        assert words(whisper) == words(whisper, drafter=None)
        return
    with pytest.warns(UserWarning, match='drafter="auto" skips medusa, which cannot be used'):
        drafted = words(whisper)
    assert drafted == words(whisper, drafter=None)


def test_heads_for_several_languages_are_combined(shipped: Path, bare: Path) -> None:
    """Two CTC heads with random weights, each for one language, before Medusa heads for all."""
    whisper = load_whisper(bare, "cpu")
    merges = token_merges(whisper.tokenizer)
    pieces = TokenPieces(merges, sorted(merges.alphabet)[-20:])
    known = ctc_token_ids(whisper, "some/whisper", ["en"])
    for seed, languages in enumerate((known.languages, [5])):
        torch.manual_seed(seed)
        head = CtcHead(CtcHeadConfig(whisper.model.config.d_model, len(pieces), 1, 16, 1, 3))
        save_ctc(shipped / f"ctc-{seed}", head, pieces, replace(known, languages=languages))
    write_shipped(shipped, whisper.model, ["ctc-0", "ctc-1", "medusa"])
    result = auto_drafter(whisper.model)
    assert isinstance(result, MultilingualCtcDrafter)
    assert [set(head.languages) for head in result.heads] == [set(known.languages), {5}]
    assert result.name == auto_drafter(whisper.model).name
    assert words(whisper) == words(whisper, drafter=None)
    save_ctc(shipped / "ctc-all", head, pieces, replace(known, languages=()))
    write_shipped(shipped, whisper.model, ["ctc-0", "ctc-all", "ctc-1"])
    joined = auto_drafter(load_whisper(bare, "cpu").model)
    assert isinstance(joined, MultilingualCtcDrafter)
    assert [set(head.languages) for head in joined.heads] == [set(known.languages), set()]
    write_shipped(shipped, whisper.model, ["ctc-0", "medusa"])
    assert isinstance(auto_drafter(load_whisper(bare, "cpu").model), CtcDrafter)
    write_shipped(shipped, whisper.model, ["medusa", "ctc-0"])
    assert isinstance(auto_drafter(load_whisper(bare, "cpu").model), MedusaDrafter)
    (shipped / "ctc-1" / "model.safetensors").write_bytes(b"no")
    write_shipped(shipped, whisper.model, ["ctc-0", "ctc-1"])
    with pytest.warns(UserWarning, match='drafter="auto" skips ctc-1, which cannot be used'):
        assert isinstance(auto_drafter(whisper.model), CtcDrafter)


def test_every_public_call_takes_auto(shipped: Path, bare: Path) -> None:
    model: Any = type(read_whisper(bare)).from_pretrained(bare).eval()
    speculation = mmdec.speculate()
    assert isinstance(speculation.drafter_for(model), MedusaDrafter)
    assert speculation.drafter_for(model) is speculation.drafter_for(model)
    text: Any = language_model("llama")
    prompt = torch.tensor([[5, 6, 7, 5, 6]])
    result = mmdec.generate(text, prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(result.sequences, text.generate(prompt, max_new_tokens=6, do_sample=False))
    with pytest.raises(mmdec.InputError, match="`name` must be new"):
        mmdec.register_drafter("auto", LookupDrafter)


def test_a_calibration_shipped_for_the_weights_is_used(shipped: Path, bare: Path) -> None:
    """By every copy of them; a fine-tuned model says that it has none."""
    write_calibrations(shipped, {"transcript": Calibration({"mean": 0.0}, 0.0)}, {})
    model = load_whisper(bare, "cpu")
    out = mmdec.transcribe(buzz(0.7), sample_rate=RATE, model=model, drafter=None, max_new_tokens=8)
    assert (out.confidence, out.calibrated) == (0.5, True)
    tuned: Any = LoadedWhisper(read_whisper(bare), model.processor)
    with torch.no_grad():
        tuned.model.model.decoder.layers[0].fc1.weight *= 1.01
    out = mmdec.transcribe(buzz(0.7), sample_rate=RATE, model=tuned, drafter=None, max_new_tokens=8)
    assert not out.calibrated
