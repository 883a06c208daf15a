"""Tests the names by which models are found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from mmdec.errors import InputError
from mmdec.hub.find import find_model

finding: Any = sys.modules["mmdec.hub.find"]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Names that are asked of the hub; its folder of shipped models holds drafters of whisper-base alone."""
    names = list[str]()

    def download(name: str, *_: Any, **__: Any) -> Path:
        names.append(name)
        return tmp_path

    (tmp_path / "whisper-base" / "ctc").mkdir(parents=True)
    monkeypatch.setattr(finding, "MODEL_FOLDERS", (tmp_path,))
    monkeypatch.setattr(finding, "download", download)
    return names


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *[(f"whisper-{size}", f"openai/whisper-{size}") for size in ("tiny", "base", "small.en", "medium", "large-v3")],
        ("whisper-large-v3-turbo", "openai/whisper-large-v3-turbo"),
        ("distil-large-v3", "distil-whisper/distil-large-v3"),
    ],
)
def test_a_short_name_means_the_hubs_model(name: str, expected: str, fetched: list[str]) -> None:
    find_model(name, "whisper")
    assert fetched == [expected]


def test_a_shipped_model_keeps_its_name(fetched: list[str], tmp_path: Path) -> None:
    (tmp_path / "whisper-base" / "config.json").write_text("{}")
    assert find_model("whisper-base", "whisper") == tmp_path / "whisper-base"
    assert not fetched


@pytest.mark.parametrize("name", ["whisper-huge", "whisper-base-mine", "whisper", "distil"])
def test_another_name_is_refused(name: str, fetched: list[str]) -> None:
    with pytest.raises(InputError, match=f"is '{name}'"):
        find_model(name, "whisper")
    assert not fetched
