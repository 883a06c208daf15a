"""Tests folders of draft networks: they are written in one step, and a wrong model or folder gives one clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mmdec
from mmdec.errors import InputError
from mmdec.hub.find import MODEL_FOLDERS
from mmdec.pretrained.drafters import draft_card, load_network, read_network, save_network
from tests.support.draft_networks import draft_network
from tests.support.tiny_text import VOCABULARY, language_model

MODEL = language_model()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_network(draft_network("msd", MODEL, base="tiny"), tmp_path / "drafter")


@pytest.mark.parametrize("system", ["eagle", "msd"])
def test_a_drafter_is_the_same_after_saving_and_loading(system: str, tmp_path: Path) -> None:
    network = draft_network(system, MODEL, input_norm=True, layers=(0, -1), base="tiny")
    save_network(network, tmp_path / "drafter")
    again = load_network(tmp_path / "drafter", MODEL)
    assert type(again) is type(network)
    assert again.config == network.config
    assert all(
        torch.equal(a, b) for a, b in zip(again.state_dict().values(), network.state_dict().values(), strict=True)
    )
    drafter = mmdec.load_drafter(tmp_path / "drafter", MODEL)
    assert drafter.name.startswith(system)


def test_neither_embedding_nor_head_is_stored(folder: Path) -> None:
    assert all(VOCABULARY not in tensor.shape for tensor in load_file(folder / "model.safetensors").values())


def test_a_folder_is_a_drafter_everywhere(folder: Path) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = MODEL.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)  # type: ignore[operator]
    out = mmdec.generate(MODEL, ids, folder, num_speculative_tokens=(7, 3), max_new_tokens=8, do_sample=False)
    assert torch.equal(out.sequences, expected)
    assert sum(sum(round_.drafted) for round_ in out.rounds) > 0
    rounds = list(mmdec.stream(MODEL, ids, str(folder), num_speculative_tokens=3, max_new_tokens=8, do_sample=False))
    assert [token for round_ in rounds for token in round_.tokens[0]] == expected[0, 4:].tolist()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vocab_size": 62}, "must have 61 tokens for this drafter, but has 62. It was trained for tiny"),
        ({"hidden_size": 64}, "must have 32 channels for this drafter, but has 64"),
    ],
)
def test_a_drafter_of_another_model_is_one_error(folder: Path, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        mmdec.load_drafter(folder, language_model(**sizes))


@pytest.mark.parametrize(
    ("names", "trained_for"),
    [
        ({"base": "402af2b1ab88", "target": "vlm-scenes"}, "vlm-scenes (402af2b1ab88)"),
        ({"target": "vlm-scenes"}, "vlm-scenes"),
        ({"base": "402af2b1ab88"}, "402af2b1ab88"),
        ({}, "another model"),
    ],
)
def test_the_error_names_the_targets_folder(names: dict[str, str], trained_for: str, tmp_path: Path) -> None:
    save_network(draft_network("eagle", MODEL, **names), tmp_path / "drafter")
    with pytest.raises(InputError) as caught:
        mmdec.load_drafter(tmp_path / "drafter", language_model(vocab_size=62))
    assert f"It was trained for {trained_for}; use" in str(caught.value)
    card = (tmp_path / "drafter" / "README.md").read_text(encoding="utf-8")
    assert f" for {trained_for}\n" in card or not names
    assert ('model="vlm-scenes"' in card) == ("target" in names)
    assert "```" not in draft_card(read_network(tmp_path / "drafter"), reads_images=False)


@pytest.mark.parametrize("system", ["eagle", "msd", "specvlm", "vispec", "flash", "eagle3"])
def test_shipped_cards_equal_those_written_now(system: str) -> None:
    folder = next(path / "vlm-scenes" / system for path in MODEL_FOLDERS if (path / "vlm-scenes").is_dir())
    assert (folder / "README.md").read_text(encoding="utf-8") == draft_card(read_network(folder))


def test_a_drafter_that_reads_layers_the_model_lacks_is_refused(tmp_path: Path) -> None:
    save_network(draft_network("eagle", MODEL, layers=(3, -1)), tmp_path / "drafter")
    with pytest.raises(InputError, match="must have the layers"):
        load_network(tmp_path / "drafter", MODEL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"system": "hawk"}, "`system` must be one of"),
        ({"system": None}, "`system` must be one of"),
        ({"hidden_size": 2**30}, "`hidden_size` must be an integer"),
        ({"hidden_size": 2**20, "intermediate_size": 2**20}, "weights of its config's shapes"),
        ({"hidden_size": "32"}, "`hidden_size` must be an integer"),
        ({"num_attention_heads": 3}, "must divide"),
        ({"visual_token": "both"}, "`visual_token` must be next or own, but is 'both'"),
        ({"visual_token": ["next"]}, "`visual_token` must be next or own"),
        ({"fancy": 1}, "`fancy` is not one of its settings"),
        ({"layers": [[0]]}, "`layers` must be"),
        ({"base": None}, "`base` must be text"),
        ({"target": 7}, "`target` must be text"),
        ({"layers": 5}, "damaged or of another version"),
        ({"fc_norm": True}, "lacks 'fc_norm.weight'"),
        ({"fc_bias": False}, "holds 'fc.bias'"),
    ],
)
def test_settings_are_checked(folder: Path, change: dict[str, Any], message: str) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(InputError, match=message):
        read_network(folder)


def test_damaged_weights_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    state = load_file(file)
    save_file({**state, "fc.bias": torch.full_like(state["fc.bias"], torch.nan)}, file)
    with pytest.raises(InputError, match="finite"):
        read_network(folder)
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(InputError, match="damaged"):
        read_network(folder)
    file.unlink()
    with pytest.raises(InputError, match=r"lacks 'model\.safetensors'"):
        read_network(folder)


def test_endless_configs_and_missing_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").write_text("{" + " " * 2**17 + "}")
    with pytest.raises(InputError, match="at most 65536 bytes"):
        read_network(folder)
    with pytest.raises(InputError, match=r"has no config\.json"):
        read_network(tmp_path / "nowhere")
    with pytest.raises(InputError, match="`directory` must be a path"):
        read_network(5)  # type: ignore[arg-type]


def test_an_occupied_directory_is_left_alone(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(InputError, match="new or empty"):
        save_network(draft_network("eagle", MODEL, seed=3), folder)
    assert (folder / "model.safetensors").read_bytes() == before
