"""Tests live transcription: final texts equal `transcribe` of the same piece of sound, and drafts from the last
hypothesis save passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

import mmdec
from mmdec.io.audio import resample
from mmdec.whisper import live
from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper
from tests.support.grid import slow_but
from tests.support.live_sound import RATE, chunks, talk
from tests.support.tiny_whisper import write

HALF = RATE // 2
TALK = talk([0.9, ("austen", None), 1.6, ("two_cities", 6.0), 2.0, ("president", None), 0.3], 1e-4)


@pytest.fixture(scope="module")
def whisper() -> LoadedWhisper:
    return load_whisper("whisper-tiny.en", "cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedWhisper:
    """Random weights: a tenth of the time."""
    return load_whisper(write(tmp_path_factory.mktemp("live") / "tiny", seconds=30), "cpu")


def listen(whisper: LoadedWhisper, sound: Tensor, sizes: Sequence[int] = (HALF,), **options: Any):
    return [*mmdec.transcribe_stream(chunks(sound, sizes), model=whisper, **options)]


def whole(whisper: LoadedWhisper, sound: Tensor, update: mmdec.StreamUpdate, **options: Any) -> mmdec.Transcript:
    """Transcribe an update's part of the stream at 16 kHz."""
    cut = sound[round(update.start * RATE) : round(update.end * RATE)]
    return mmdec.transcribe(cut, sample_rate=RATE, model=whisper, **options)


def same(transcript: mmdec.Transcript, expected: mmdec.Transcript) -> None:
    assert (transcript.text, transcript.tokens, transcript.language) == (
        expected.text,
        expected.tokens,
        expected.language,
    )
    assert transcript.segments == expected.segments
    assert transcript.seconds == pytest.approx(expected.seconds)
    assert transcript.confidence == pytest.approx(expected.confidence, abs=1e-4)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without drafts": {"drafter": None},
    "segments": {"timestamps": "segment", "drafter": "lookup"},
    "words": {"timestamps": "word"},
    "prompted": {"prompt": "The train is late.", "repetition_penalty": 1.2},
    "sampled": {"temperature": 0.7, "seed": 3, "do_sample": True},
}


@pytest.mark.parametrize(
    ("model", "name"),
    slow_but(
        [("tiny", "segments"), ("tiny", "sampled"), *(("whisper", name) for name in WAYS)],
        [("tiny", "segments"), ("tiny", "sampled")],
    ),
)
def test_final_text_equals_transcribe(request: pytest.FixtureRequest, model: str, name: str) -> None:
    whisper, options = request.getfixturevalue(model), WAYS[name]
    finals = [update for update in listen(whisper, TALK, every=2.0, **options) if update.final]
    assert len(finals) == 3
    for update in finals:
        expected = whole(whisper, TALK, update, **options)
        assert expected.text
        same(update.transcript, expected)
        moved = [time - update.start for part in update.segments for time in (part.start, part.end)]
        assert moved == pytest.approx([time for part in expected.segments for time in (part.start, part.end)])
        spoken = [word for part in update.segments for word in part.words or ()]
        assert all(update.start <= word.start <= word.end <= update.end for word in spoken)
        assert bool(spoken) == (name == "words")


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(160,), (7_777, 1, 40_000), (10**7,)], ids=str)
def test_final_text_does_not_depend_on_the_chunks(whisper: LoadedWhisper, sizes: tuple[int, ...]) -> None:
    expected = [(update.start, update.end, update.text) for update in listen(whisper, TALK, every=None)]
    result = listen(whisper, TALK, sizes, every=3.0)
    assert [(update.start, update.end, update.text) for update in result if update.final] == expected


@pytest.mark.slow
def test_provisional_text_grows_and_belongs_to_its_window(whisper: LoadedWhisper) -> None:
    updates = listen(whisper, TALK)
    finals = [update for update in updates if update.final]
    assert len(updates) > 2 * len(finals)
    for final in finals:
        own = [update for update in updates if update.start == final.start]
        assert own[-1] is final
        assert [update.final for update in own[:-1]] == [False] * (len(own) - 1)
        ends = [update.end for update in own]
        assert ends == sorted(ends)
        assert all(ends[place + 1] - ends[place] >= 0.99 for place in range(len(ends) - 3))  # `every`


@pytest.mark.slow
def test_text_that_did_not_change_costs_few_passes(whisper: LoadedWhisper) -> None:
    """Beside cold decoding of the same provisional and final texts; a pause's text is decoded once."""
    cold, drafted = (listen(whisper, TALK[: 16 * RATE], drafter=drafter) for drafter in (None, "lookup"))
    assert [(update.start, update.end, update.text) for update in cold] == [
        (update.start, update.end, update.text) for update in drafted
    ]
    passes = [sum(update.transcript.rounds for update in updates if not update.final) for updates in (cold, drafted)]
    assert passes[1] <= passes[0] / 2
    before = [updates[updates.index(update) - 1] for updates in (cold, drafted) for update in updates if update.final]
    finals = [update for updates in (cold, drafted) for update in updates if update.final]
    assert [update.transcript for update in before] == [update.transcript for update in finals]  # what the pause showed


def test_a_window_drafts_nothing_of_the_one_before(tiny: LoadedWhisper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each window is decoded once here, so that every draft is the caller's drafter's."""

    def refuse(tokens: Sequence[int]) -> None:
        raise AssertionError(f"{len(tokens)} tokens of another window are drafted")

    monkeypatch.setattr(live, "PreviousTextDrafter", refuse)
    updates = listen(tiny, TALK, every=None, drafter="recycling")
    assert len(updates) == 3


@pytest.mark.parametrize("model", slow_but(("tiny", "whisper"), ("tiny",)))
def test_speech_without_pauses_is_cut_when_a_window_is_full(request: pytest.FixtureRequest, model: str) -> None:
    whisper = request.getfixturevalue(model)
    sound = talk([("two_cities", None), ("two_cities", None)])
    finals = listen(whisper, sound, (RATE,), every=None, pause=10.0)
    assert len(finals) == 2
    assert all(15.0 <= update.end - update.start <= 30.0 for update in finals)
    for update in finals:
        same(update.transcript, whole(whisper, sound, update))


@pytest.mark.slow
@pytest.mark.parametrize("rate", [8000, 44_100, 48_000])
def test_another_rate_is_resampled_as_by_transcribe(whisper: LoadedWhisper, rate: int) -> None:
    sound = resample(TALK, RATE, rate)
    heard = resample(sound, rate)
    finals = listen(whisper, sound, (rate // 3,), every=None, sample_rate=rate)
    assert len(finals) == 3
    for update in finals:
        same(update.transcript, whole(whisper, heard, update))


def test_silence_has_no_text(tiny: LoadedWhisper) -> None:
    assert listen(tiny, talk([45.0])) == []
    assert listen(tiny, talk([20.0], 2e-3)) == []
