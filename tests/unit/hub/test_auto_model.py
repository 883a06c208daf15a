"""Tests that transformers' AutoModel loads and saves mmdec's folders, without pickles and without remote code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import AutoConfig, AutoModel

import mmdec
from mmdec.hub.auto_model import DASpeechModel, DASpeechModelConfig, DrafterModel
from mmdec.hub.ctc import HeardTokens, save_ctc
from mmdec.hub.drafters import save_network
from mmdec.hub.medusa import save_heads
from mmdec.pipelines.confidence import FORMAT
from mmdec.types import InputError
from tests.support.draft_networks import draft_network
from tests.support.tiny_text import language_model
from tests.support.tiny_whisper import EOT, TIMESTAMPS, VOCABULARY, heads, whisper
from tests.support.whisper_calls import ctc

mmdec.register()
MODEL = language_model()


def equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    mine, other = a.state_dict(), b.state_dict()
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize("system", ["eagle", "medusa", "ctc"])
def test_drafters_are_read_and_written(system: str, tmp_path: Path) -> None:
    if system == "medusa":
        folder = save_heads(tmp_path / "drafter", heads(whisper()), ranks=None)
    elif system == "ctc":
        drafter = ctc("random")
        tokens = HeardTokens(TIMESTAMPS, EOT, VOCABULARY)
        folder = save_ctc(tmp_path / "drafter", drafter.head, drafter.pieces, tokens)
    else:
        folder = save_network(draft_network(system, MODEL, base="tiny"), tmp_path / "drafter")
    assert AutoConfig.from_pretrained(folder).settings["system"] == system
    model = AutoModel.from_pretrained(folder)
    assert isinstance(model, DrafterModel)
    assert not model.training
    model.save_pretrained(tmp_path / "again")
    again = AutoModel.from_pretrained(str(tmp_path / "again"), dtype=torch.bfloat16)
    assert again.dtype == torch.bfloat16
    assert equal(model.network.bfloat16(), again.network)
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == sorted(
        path.name for path in folder.iterdir()
    )


def test_a_written_drafter_drafts(tmp_path: Path) -> None:
    folder = save_network(draft_network("eagle", MODEL, base="tiny"), tmp_path / "drafter")
    AutoModel.from_pretrained(folder).save_pretrained(tmp_path / "again")
    names = {mmdec.load_drafter(path, MODEL).name for path in (folder, tmp_path / "again")}
    assert len(names) == 1  # a name is a digest of the weights


def test_translators_are_read_and_written(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert settings["model_type"] == DASpeechModelConfig.model_type
    model = AutoModel.from_pretrained(folder)
    assert isinstance(model, DASpeechModel)
    lattice = model(torch.zeros(1, 40, 80), torch.tensor([40]))
    assert int(lattice.lengths[0]) > 1
    model.save_pretrained(tmp_path / "again")
    assert equal(AutoModel.from_pretrained(tmp_path / "again"), model)
    (folder / "confidence.json").write_text(json.dumps({"format": FORMAT, "calibrations": {}}), encoding="utf-8")
    (folder / "README.md").write_text("a card", encoding="utf-8")
    loaded = mmdec.load(folder, "cpu")
    loaded.save_pretrained(tmp_path / "third")
    for name in ("README.md", "confidence.json", "provenance.json", "config.json", "units.json", "model.safetensors"):
        assert (tmp_path / "third" / name).read_bytes() == (folder / name).read_bytes()
    loaded.save_pretrained(tmp_path / "third")  # again, over its own


def test_texts_stay_with_their_weights(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "confidence.json").write_text(json.dumps({"format": FORMAT, "calibrations": {}}), encoding="utf-8")
    (folder / "README.md").write_text("a card", encoding="utf-8")
    (folder / "provenance.json").write_text('{"training": {"step": 1}}', encoding="utf-8")
    changed = AutoModel.from_pretrained(folder)
    with torch.no_grad():
        next(changed.network.parameters()).add_(1)
    changed.save_pretrained(tmp_path / "changed")
    AutoModel.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "rounded")
    for name in ("changed", "rounded"):
        found = {path.name for path in (tmp_path / name).iterdir()}
        assert not {"README.md", "confidence.json"} & found
        assert "training" not in json.loads((tmp_path / name / "provenance.json").read_text(encoding="utf-8"))


def test_texts_outside_of_the_folder_are_not_taken_along(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (tmp_path / "secret").write_text("a key", encoding="utf-8")
    (folder / "README.md").symlink_to(tmp_path / "secret")
    mmdec.load(folder, "cpu").save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again" / "README.md").exists()


def test_a_folder_with_other_files_is_not_replaced(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine" / "sub").mkdir(parents=True)
    (tmp_path / "mine" / "thesis.tex").write_text("years", encoding="utf-8")
    with pytest.raises(InputError, match="which would be deleted"):
        mmdec.load(tiny_model, "cpu").save_pretrained(tmp_path / "mine")
    with pytest.raises(InputError, match="which would be deleted"):
        AutoModel.from_pretrained(tiny_model).save_pretrained(tmp_path / "mine")
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["sub", "thesis.tex"]


def test_options_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    folder = save_network(draft_network("eagle", MODEL, base="tiny"), tmp_path / "drafter")
    for option, value in (("device_map", "auto"), ("dtype", torch.int8), ("trust_remote_code", True)):
        with pytest.raises(InputError, match=option):
            AutoModel.from_pretrained(folder, **{option: value})
    with pytest.raises(InputError, match="from_pretrained"):
        AutoModel.from_config(AutoConfig.from_pretrained(folder))


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    folder = save_network(draft_network("eagle", MODEL, base="tiny"), tmp_path / "drafter")
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="safetensors"):
        AutoModel.from_pretrained(folder)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A hub that takes folders: `repo_id`, and the files of the last commit in `files`."""
    seen: dict[str, Any] = {}

    class Answer:
        def __init__(self, **fields: str) -> None:
            self.__dict__.update(fields)

    def create(repo_id: str, **options: Any) -> Answer:
        seen.update(repo_id=repo_id, **options)
        return Answer(repo_id=repo_id)

    def upload(*, repo_id: str, folder_path: Path, **_: Any) -> Answer:
        seen["files"] = sorted(path.name for path in Path(folder_path).iterdir())
        return Answer(commit_url=f"https://hub/{repo_id}/commit/1")

    monkeypatch.setattr(huggingface_hub, "create_repo", create)
    monkeypatch.setattr(huggingface_hub, "upload_folder", upload)
    return seen


def test_models_go_to_the_hub_whole(hub: dict[str, Any], tmp_path: Path, tiny_model: Path) -> None:
    folder = save_network(draft_network("eagle", MODEL, base="tiny"), tmp_path / "drafter")
    model = AutoModel.from_pretrained(folder)
    assert model.push_to_hub("me/eagle", private=True) == "https://hub/me/eagle/commit/1"
    assert (hub["repo_id"], hub["private"]) == ("me/eagle", True)
    assert hub["files"] == ["README.md", "config.json", "model.safetensors"]
    model.save_pretrained(tmp_path / "again", push_to_hub=True, repo_id="me/mine", private=True)
    assert (hub["repo_id"], hub["private"]) == ("me/mine", True)
    with pytest.raises(InputError, match="`use_temp_dir` must be left out"):
        model.push_to_hub("me/eagle", use_temp_dir=True)
    with pytest.raises(InputError, match="`max_shard_size` must be left out"):
        model.save_pretrained(tmp_path / "not", max_shard_size="1GB")
    assert not (tmp_path / "not").exists()
    assert mmdec.load(tiny_model, "cpu").push_to_hub("me/speech") == "https://hub/me/speech/commit/1"
    assert {"config.json", "encoder.safetensors", "model.safetensors", "vocoder.safetensors"} <= {*hub["files"]}


def test_a_hub_that_refuses_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("403")

    monkeypatch.setattr(huggingface_hub, "create_repo", refuse)
    folder = save_network(draft_network("eagle", MODEL, base="tiny"), tmp_path / "drafter")
    with pytest.raises(InputError, match="`repo_id` must be a repository that you may write to"):
        AutoModel.from_pretrained(folder).push_to_hub("me/eagle")
