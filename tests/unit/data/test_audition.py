"""Tests the comparison of synthetic voices: which voices are tested, and the table of recognition results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "data" / "build"))
import audition
import natural_french
from tables import write_text


def test_every_style_is_tried_at_each_share_and_the_base_once() -> None:
    tried = list(audition.voices_to_try(["a", "base", "b"], "base", [1, 0.6]))
    assert tried == [{"base": 1.0}, {"a": 1.0}, {"b": 1.0}, {"base": 0.4, "a": 0.6}, {"base": 0.4, "b": 0.6}]


def test_the_judge_counts_words_by_voice_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        (f"{voice}{number}", f"{voice}{number}.flac", "dev", voice, "1", "2.0", "L'eau est là.")
        for voice in ("bad", "good")
        for number in range(2)
    ]
    write_text(tmp_path / natural_french.MANIFEST, [natural_french.HEADER, *rows])
    write_text(tmp_path / audition.TALLY, [("good0", "l'eau est là")])
    asked: list[str] = []

    def transcripts(whisper: str, recordings: list[tuple[str, Path]]):
        for name, _ in recordings:
            asked.append(name)
            yield name, "L'eau, est là !" if name.startswith("good") else "Lot est"

    monkeypatch.setattr(audition, "transcripts", transcripts)
    audition.judge(tmp_path, "whisper")
    audition.judge(tmp_path, "whisper")
    assert asked == ["bad0", "bad1", "good1"]
    told = capsys.readouterr().out.splitlines()[:2]
    assert told == [
        "good\t0.0% of 8 words wrong\t2.0 words a second",
        "bad\t75.0% of 8 words wrong\t2.0 words a second",
    ]
