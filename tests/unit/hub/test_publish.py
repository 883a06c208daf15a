"""Folders of models that are written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmdec.errors import InputError
from mmdec.hub.publish import write_model_folder


def test_a_model_folder_has_settings_weights_and_card(tmp_path: Path) -> None:
    weight = torch.arange(6.0).view(2, 3).t()  # not contiguous, which safetensors refuses
    folder = write_model_folder(
        tmp_path / "new", {"system": "toy"}, {"weight": weight}, "# card\n", "heads.safetensors"
    )
    assert json.loads((folder / "config.json").read_text()) == {"system": "toy"}
    assert torch.equal(load_file(folder / "heads.safetensors")["weight"], weight)
    assert (folder / "README.md").read_text() == "# card\n"


def test_a_folder_that_holds_something_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("mine")
    with pytest.raises(InputError, match="`directory` must be new or empty"):
        write_model_folder(tmp_path, {}, {}, "")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_failed_write_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_model_folder(tmp_path / "new", {"path": tmp_path}, {}, "")  # no JSON
    assert not any(tmp_path.iterdir())
