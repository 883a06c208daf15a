"""Tests the corpus of speech in other languages: splits share no language or voice, and a killed run can continue."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import yaml

sys.path.insert(0, str(Path(__file__).parents[3] / "data" / "build"))
import other_speech
from kokoro import phones_of

TABLE = yaml.safe_load(other_speech.TABLE.read_text(encoding="utf-8"))


def test_test_languages_and_voices_are_not_those_of_the_fit() -> None:
    planned = list(other_speech.plan(TABLE, natural=True))
    assert {sentence.split for sentence in planned} == {"dev", "test"}
    for part in ("language", "espeak", "style", "text"):
        dev, test = (
            {getattr(sentence, part) for sentence in planned if sentence.split == split} - {None}
            for split in ("dev", "test")
        )
        assert dev, part
        assert dev.isdisjoint(test), part
    assert len({sentence.name for sentence in planned}) == len(planned)
    assert all(sentence.style is None for sentence in other_speech.plan(TABLE, natural=False))


class Reader:
    """Stands for espeak-ng and the natural voices."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __call__(self, sentence: other_speech.Sentence, kokoro: object) -> tuple[np.ndarray, str]:
        self.read.append(sentence.name)
        if sentence.name.endswith("03"):
            raise ValueError("no such sign")
        return np.full(1600, 0.1, np.float32), "nobody"


def test_what_is_read_goes_into_a_manifest_and_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader()
    monkeypatch.setattr(other_speech, "read_aloud", reader)
    planned = [sentence for sentence in other_speech.plan(TABLE, natural=False) if sentence.language == "Italian"][:5]
    failed = other_speech.build(iter(planned[:2]), None, tmp_path)
    assert failed == []
    failed = other_speech.build(iter(planned), None, tmp_path)
    assert [line.split()[0] for line in failed] == ["italian-03"]
    assert reader.read == [sentence.name for sentence in planned]
    rows = [line.split("\t") for line in (tmp_path / "manifest.tsv").read_text(encoding="utf-8").splitlines()]
    assert rows[0] == list(other_speech.HEADER)
    assert [row[0] for row in rows[1:]] == ["italian-00", "italian-01", "italian-02", "italian-04"]
    for row in rows[1:]:
        samples, rate = soundfile.read(tmp_path / row[1])
        assert (len(samples), rate, row[2], row[4]) == (1600, 16_000, "test", "Italian")


def test_other_languages_keep_their_own_r(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the French r is uvular."""
    asked: list[str] = []

    def espeak(clauses: list[str], language: str) -> list[str]:
        asked.append(language)
        return ["aro"]

    monkeypatch.setattr("kokoro.espeak_phones", espeak)
    assert phones_of("caro.") == "aʁo."
    assert phones_of("caro.", "it") == "aro."
    assert asked == ["fr-fr", "it"]
