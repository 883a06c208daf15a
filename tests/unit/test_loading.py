"""Tests `mmdec.load` and `mmdec.load_drafter` by name, folder and Hugging Face id, and errors for missing models."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import filter_repo_objects

import mmdec
from mmdec.daspeech.translator import SpeechTranslator
from mmdec.drafters import registry
from mmdec.drafters.medusa.checkpoint import save_heads
from mmdec.drafters.registry import auto_names
from mmdec.errors import InputError
from mmdec.pretrained import language_model as texts
from mmdec.pretrained import vlm
from mmdec.pretrained.drafters import save_network
from mmdec.pretrained.vlm import LoadedVlm
from mmdec.whisper import checkpoint as whisper
from mmdec.whisper.checkpoint import LoadedWhisper
from tests.conftest import RATE, buzz
from tests.support import tiny_vlm_folder, tiny_whisper
from tests.support.draft_networks import draft_network
from tests.support.pictures import QUESTION, pixels
from tests.support.tiny_text import language_model

MODEL = language_model()


def test_a_folder_is_loaded_by_its_kind(tiny_model: Path, tmp_path: Path) -> None:
    assert isinstance(mmdec.load(tiny_model, "cpu"), SpeechTranslator)
    recogniser = tiny_whisper.write(tmp_path / "whisper")
    assert isinstance(mmdec.load(recogniser, "cpu"), LoadedWhisper)
    assert isinstance(mmdec.load(tiny_vlm_folder.write(tmp_path / "vlm"), "cpu"), LoadedVlm)
    with pytest.raises(InputError, match="`vocoder` must be left out"):
        mmdec.load(recogniser, vocoder="someone/hifigan")


def test_a_drafter_folder_is_refused_as_a_model(tmp_path: Path) -> None:
    heads = save_heads(tmp_path / "heads", tiny_whisper.heads(tiny_whisper.whisper()))
    with pytest.raises(InputError, match="is a drafter, medusa"):
        mmdec.load(heads)


def test_drafters_of_shipped_models_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("mmdec.hub.find"), "MODEL_FOLDERS", (tmp_path,))  # `hub.find` is its function
    save_network(draft_network("eagle", MODEL, base="tiny"), tmp_path / "tiny" / "eagle")
    save_network(draft_network("msd", MODEL, base="tiny"), tmp_path / "tiny-msd")
    assert mmdec.load_drafter("tiny/eagle", MODEL).name.startswith("eagle")
    assert mmdec.load_drafter("tiny/msd", MODEL).name.startswith("msd")
    assert mmdec.load_drafter(str(tmp_path / "tiny-msd"), MODEL).name.startswith("msd")
    for wrong in ("../tiny/eagle", "tiny/../tiny-msd"):
        with pytest.raises(InputError, match=r"must be a drafter's folder.*or a Hugging Face id"):
            mmdec.load_drafter(wrong, MODEL)


def test_drafters_come_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_network(draft_network("eagle", MODEL, base="tiny"), tmp_path / "drafter")
    asked: list[Any] = []

    def fetch(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repository, revision))
        assert not any(pattern.endswith((".bin", ".pt", ".py")) for pattern in allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert mmdec.load_drafter("someone/eagle@v2", MODEL).name.startswith("eagle")
    assert asked == [("someone/eagle", "v2")]


def test_older_drafters_come_from_the_hub_as_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Safetensors are asked for first; `revision` and `token` are handed on."""
    folder = save_network(draft_network("eagle", MODEL, base="tiny"), tmp_path / "drafter")
    (folder / "model.safetensors").rename(tmp_path / "kept.safetensors")
    asked: list[tuple[bool, str | None, str]] = []

    def fetch(repository: str, revision: str | None, allow_patterns: list[str], token: str) -> str:
        pickles = "pytorch_model.bin" in allow_patterns
        asked.append((pickles, revision, token))
        if pickles:
            (tmp_path / "kept.safetensors").rename(folder / "model.safetensors")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    drafter = mmdec.load_drafter("someone/eagle", MODEL, revision="v2", token="secret")
    assert drafter.name.startswith("eagle")
    assert asked == [(False, "v2", "secret"), (True, "v2", "secret")]


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("no"), OfflineModeIsEnabled("offline")])
def test_a_missing_model_offline_says_how_to_get_it(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    for call in (mmdec.load, lambda name: mmdec.load_drafter(name, MODEL)):
        with pytest.raises(InputError, match="run `hf download someone/model --local-dir DIR`") as caught:
            call("someone/model")
        assert "\n" not in str(caught.value)


def test_an_unknown_name_lists_what_is_there() -> None:
    with pytest.raises(InputError, match="are in models/ of a checkout and in the wheel") as caught:
        mmdec.load("whisper-phrasebok")
    assert "(daspeech-everyday, vlm-scenes, whisper-tiny.en)" in str(caught.value)


def test_every_drafter_with_weights_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    mmdec.register_drafter("mine", loader="mine.module:load")
    for name in ("medusa", "eagle", "flash", "mine"):
        (tmp_path / "config.json").write_text(json.dumps({"system": name}))
        with pytest.raises(InputError, match=f"is a drafter, {name}"):
            mmdec.load(tmp_path)


def test_one_rule_names_drafters_in_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("mmdec.hub.find"), "MODEL_FOLDERS", (tmp_path,))
    save_network(draft_network("eagle", MODEL, base="tiny"), tmp_path / "tiny" / "eagle")
    loaded = mmdec.load_drafter("tiny/eagle", MODEL)
    ids = torch.tensor([[1, 2, 3]])
    plain = MODEL.generate(ids, max_new_tokens=4)
    assert mmdec.generate(MODEL, ids, "tiny/eagle", max_new_tokens=4).sequences.tolist() == plain.tolist()
    assert mmdec.speculate("tiny/eagle").drafter_for(MODEL).name == loaded.name  # type: ignore[union-attr] # there is one
    assert MODEL.generate(ids, custom_generate=mmdec.speculate("tiny/eagle"), max_new_tokens=4).tolist() == (
        plain.tolist()
    )
    whisper = mmdec.load(tiny_whisper.write(tmp_path / "whisper"), "cpu")
    options: dict[str, Any] = {"sample_rate": RATE, "model": whisper, "max_new_tokens": 4}
    drafted = mmdec.transcribe(buzz(0.5), drafter="whisper/medusa", **options)
    assert drafted.tokens == mmdec.transcribe(buzz(0.5), drafter=None, **options).tokens
    vlm: Any = mmdec.load(tiny_vlm_folder.write(tmp_path / "vlm"), "cpu")
    save_network(draft_network("eagle", vlm.model, base="vlm"), tmp_path / "vlm" / "eagle")
    described = mmdec.describe(pixels(0), QUESTION, model=vlm, drafter="vlm/eagle", max_new_tokens=4)
    assert described.tokens == mmdec.describe(pixels(0), QUESTION, model=vlm, drafter=None, max_new_tokens=4).tokens
    for call in (
        lambda name: mmdec.speculate(name),
        lambda name: mmdec.generate(MODEL, ids, name),
        lambda name: mmdec.transcribe(buzz(0.5), drafter=name, **options),
        lambda name: mmdec.describe(pixels(0), QUESTION, model=vlm, drafter=name),
    ):
        with pytest.raises(InputError, match=r"`drafter` must be a drafter.s folder.*or a Hugging Face id, but is"):
            call("../tiny/eagle")


@pytest.mark.parametrize(
    ("patterns", "speech"), [(whisper.WHISPER_FILES, True), (vlm.VLM_FILES, False), (texts.LANGUAGE_MODEL_FILES, False)]
)
def test_drafters_in_the_folder_of_a_hub_model_come_whole(patterns: tuple[str, ...], speech: bool) -> None:
    names = auto_names(speech)
    files = [f"{name}/{file}" for name in names for file in ("config.json", "model.safetensors")]
    assert list(filter_repo_objects([*files, "original/model.safetensors"], allow_patterns=list(patterns))) == files
