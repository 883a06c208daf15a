"""Tests which files go into the wheel. It does not need hatchling, which builds the wheel."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
INTERFACE = "hatchling.builders.hooks.plugin.interface"


@pytest.fixture
def artefacts(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], dict[str, str]]:
    parts = INTERFACE.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    stub: Any = sys.modules[INTERFACE]
    stub.BuildHookInterface = object
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.artefacts


def test_hidden_folders_and_models_without_a_card_stay_behind(
    artefacts: Callable[[Path], dict[str, str]], tmp_path: Path
) -> None:
    packed = {
        "models/tiny/README.md": "mmdec/_models/tiny/README.md",
        "models/tiny/model.safetensors": "mmdec/_models/tiny/model.safetensors",
        "models/tiny/eagle/README.md": "mmdec/_models/tiny/eagle/README.md",
        "models/tiny/eagle/model.safetensors": "mmdec/_models/tiny/eagle/model.safetensors",
        "data/samples/images/a.png": "mmdec/_samples/images/a.png",
    }
    left = (
        "models/.tiny-x1/README.md",
        "models/.tiny-x1/model.safetensors",
        "models/tiny/.eagle.123/README.md",
        "models/tiny/.DS_Store",
        "models/tiny/msd/model.safetensors",  # no card
        "models/half/config.json",  # no card
        "models/half/eagle/README.md",
        "data/samples/__pycache__/a.pyc",
        "data/samples/.cache/x",
        "demos/app.py",
    )
    for name in (*packed, *left):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert artefacts(tmp_path) == {str(tmp_path / name): inside for name, inside in packed.items()}


def test_every_shipped_model_and_drafter_goes_into_the_wheel(artefacts: Callable[[Path], dict[str, str]]) -> None:
    inside = set(artefacts(ROOT).values())
    configs = [path for path in (ROOT / "models").rglob("config.json") if "/." not in str(path.relative_to(ROOT))]
    assert configs
    for path in configs:
        assert f"mmdec/_models/{path.relative_to(ROOT / 'models').as_posix()}" in inside
