"""Tests the benchmark of batched transcription on a tiny Whisper; no test depends on times."""

from __future__ import annotations

import pytest
import torch

from mmdec.audio import SAMPLE_RATE
from mmdec.evaluation.bench import batched_transcription as together
from mmdec.types import MmdecError
from tests.support.live_sound import talk


def test_lengths_are_mixed_and_the_same_each_time() -> None:
    sounds = [torch.arange(50.0 * SAMPLE_RATE), torch.arange(5.0 * SAMPLE_RATE)]
    found, again = together.mixed(sounds, 30), together.mixed(sounds, 30)
    assert [len(one) for one in found] == [len(one) for one in again]
    lengths = sorted(len(one) / SAMPLE_RATE for one in found)
    assert together.SHORTEST <= lengths[0] < 4 < 15 < lengths[-1] <= together.LONGEST


def test_pieces_are_compared_before_seconds_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = talk([("sentence", None)])
    options = {"model": "whisper-tiny.en", "drafter": None}
    report = together.measure([sound, sound[: SAMPLE_RATE * 2]], options)
    assert report["recordings"] == 2
    assert report["windows"] == 2
    assert set(report["processor seconds"]) == {"one after another", "side by side", "encoder of one after another"}
    real = together.transcribe
    monkeypatch.setattr(
        together, "transcribe", lambda cut, **given: real(cut[:1] if "cut_at_pauses" in given else cut, **given)
    )
    with pytest.raises(MmdecError, match="differ"):
        together.measure([sound, sound[: SAMPLE_RATE * 2]], options)
