"""Recordings that share the decoder's passes have the text that they have alone, whatever sits beside them."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

import mmdec
from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper
from mmdec.whisper.target import WhisperTarget
from tests.conftest import RATE, buzz
from tests.support.grid import slow_but
from tests.support.tiny_whisper import write

DRAWS = 60 if os.environ.get("MMDEC_ALL") else 6


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> LoadedWhisper:
    """Windows of one second, so that recordings have several."""
    return load_whisper(write(tmp_path_factory.mktemp("models") / "tiny"), "cpu")


def call_options(rng: random.Random, folder: Path) -> dict[str, Any]:
    """Draw the options of a call."""
    options: dict[str, Any] = {
        "drafter": rng.choice([None, "lookup", "recycling", str(folder / "medusa")]),
        "timestamps": rng.choice([None, "segment", "word"]),
        "language": rng.choice([None, "en"]),
        "seed": 7,
        "max_new_tokens": rng.choice([8, 24]),
        "condition_on_prev_tokens": rng.random() < 0.4,
    }
    if options["drafter"] is not None:
        options["num_speculative_tokens"] = rng.choice([None, 3, (6, 2)])
    if rng.random() < 0.5:
        options |= {"temperature": rng.choice([0.7, (0.0, 0.5, 0.9)]), "logprob_threshold": -1.8}
    if rng.random() < 0.3:
        options["prompt"] = "hello there"
    return options


@pytest.mark.parametrize("number", slow_but(range(DRAWS), (0, 2)))
def test_a_list_has_the_texts_of_its_recordings(
    whisper: LoadedWhisper, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, widths = random.Random(number), list[int]()
    score_together = WhisperTarget.score_together

    def observed(target: WhisperTarget, parts: Any) -> Any:
        widths.append(len(parts))
        return score_together(target, parts)

    monkeypatch.setattr(WhisperTarget, "score_together", observed)
    assert whisper.directory is not None
    options: dict[str, Any] = {"model": whisper, "sample_rate": RATE, **call_options(rng, whisper.directory)}
    recordings = [buzz(rng.choice([0.4, 0.9, 1.7, 2.6]), rng.randrange(99)) for _ in range(7)]
    expected = [mmdec.transcribe(recording, **options) for recording in recordings]
    assert not widths
    together = mmdec.transcribe(recordings, batch_size=rng.choice([2, 3, 7]), threads=rng.choice([1, 2]), **options)
    assert [transcript.tokens for transcript in together] == [transcript.tokens for transcript in expected]
    assert [transcript.segments for transcript in together] == [transcript.segments for transcript in expected]
    assert [transcript.windows for transcript in together] == [transcript.windows for transcript in expected]
    assert max(widths) > 1
