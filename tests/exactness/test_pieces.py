"""Tests recordings that are cut at pauses and decoded in batches: each text equals that of its pieces, transcribed one
by one."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import mmdec
from mmdec.core import timing
from mmdec.io.audio.voice_activity import cut_at_pauses
from mmdec.kernels.threads import own_threads
from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper
from mmdec.whisper.target import WhisperTarget
from tests.support.grid import WHOLE, slow_but
from tests.support.live_sound import RATE, noise, talk
from tests.support.tiny_whisper import write

WINDOW = 30 * RATE
LONG = talk([0.9, ("austen", None), 0.8, ("two_cities", None), 2.6, ("president", None), 0.7, ("austen", None)])
SOUNDS = [
    talk([("austen", None)]),
    talk([0.9, ("austen", None), 0.8, ("two_cities", 12.0), 13.2, ("president", None), 0.7, ("austen", None)]),
    talk([0.4, ("two_cities", 9.0)], 1e-4),
    torch.zeros(2 * RATE),
    talk([("president", None), 0.5]),
]
CUT = talk([("president", None), 0.6, ("two_cities", None), 0.6, ("two_cities", None)])  # without a long pause


@pytest.fixture(scope="module")
def whisper() -> LoadedWhisper:
    return load_whisper("whisper-tiny.en", "cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedWhisper:
    """Random weights: a tenth of the time."""
    return load_whisper(write(tmp_path_factory.mktemp("pieces") / "tiny", seconds=30), "cpu")


def pieces(sound: Tensor) -> list[Tensor]:
    return [window.samples for window in cut_at_pauses(sound, WINDOW)] if len(sound) > WINDOW else [sound]


WAYS: dict[str, dict[str, Any]] = {
    "plain": {"drafter": None},
    "heads": {"drafter": "ctc", "num_speculative_tokens": 5},
    "lookup": {"drafter": "lookup", "language": "en"},
    "segments": {"timestamps": "segment"},
    "words": {"timestamps": "word"},
    "prompted": {"prompt": "The train is late.", "repetition_penalty": 1.2},
    "sampled": {"temperature": 0.7, "seed": 3, "do_sample": True},
    "fallback": {"temperature": (0.0, 0.4), "logprob_threshold": -0.02, "seed": 5},
}


@pytest.mark.parametrize(
    ("model", "name"),
    slow_but(
        [("tiny", "words"), ("tiny", "fallback"), *(("whisper", name) for name in WAYS)],
        [("tiny", "words"), ("tiny", "fallback")],
    ),
)
def test_pieces_in_a_batch_equal_one_after_another(request: pytest.FixtureRequest, model: str, name: str) -> None:
    options = {**WAYS[name], "sample_rate": RATE, "model": request.getfixturevalue(model)}
    sounds = [*SOUNDS, CUT] if name == "heads" or WHOLE else SOUNDS
    together = mmdec.transcribe(sounds, cut_at_pauses=True, batch_size=4, **options)
    assert max(map(len, map(pieces, sounds))) > 1
    for sound, result in zip(sounds, together, strict=True):
        expected = [mmdec.transcribe(piece, **options) for piece in pieces(sound)]
        assert result.tokens == [token for transcript in expected for token in transcript.tokens]
        if model == "whisper":  # a random model's text begins with no space
            assert result.text.split() == " ".join(transcript.text for transcript in expected).split()
        assert result.windows == sum(transcript.windows for transcript in expected)
        assert result.seconds == pytest.approx(len(sound) / RATE)
        if len(expected) == 1:
            assert result.segments == expected[0].segments
            assert result.confidence == pytest.approx(expected[0].confidence, abs=1e-4)
        ends = [time for part in result.segments for time in (part.start, part.end)]
        assert ends == sorted(ends)
        assert not ends or ends[-1] <= result.seconds


def test_times_count_from_the_recordings_beginning(whisper: LoadedWhisper) -> None:
    """The words of a late piece are where its sound is, not at the beginning."""
    sound = SOUNDS[1]
    result = mmdec.transcribe(sound, sample_rate=RATE, model=whisper, cut_at_pauses=True, timestamps="word")
    windows = cut_at_pauses(sound, WINDOW)
    assert len(windows) > 1
    late = [word for part in result.segments for word in part.words or () if word.start >= windows[-1].start / RATE]
    expected = mmdec.transcribe(windows[-1].samples, sample_rate=RATE, model=whisper, timestamps="word")
    assert [word.text for word in late] == [word.text for part in expected.segments for word in part.words or ()]


def test_pieces_are_near_thirty_seconds_and_hold_all_that_is_said() -> None:
    windows = cut_at_pauses(LONG, WINDOW)
    assert all(window.start + len(window.samples) <= after.start for window, after in pairwise(windows))
    assert all(len(window.samples) <= WINDOW for window in windows)
    between = [
        LONG[window.end : after.start].abs().max() if window.end < after.start else 0.0
        for window, after in pairwise(windows)
    ]
    assert max(between) < 1e-3


def test_pieces_are_joined_to_nearly_full_windows() -> None:
    """Pauses of three seconds do not end a piece: each costs the encoder 30 s."""
    speech = talk([("austen", None), 3.0])
    sound = speech.repeat(90 * RATE // len(speech))
    windows = cut_at_pauses(sound, WINDOW)
    assert len(windows) <= len(sound) // WINDOW + 1
    assert all(len(window.samples) > WINDOW // 2 for window in windows[:-1])


def test_jobs_share_passes_and_refill(whisper: LoadedWhisper, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two, a third takes the place of the first that ends, while the other goes on."""
    seen, real = list[set[int]](), WhisperTarget.score_together

    def several(self: WhisperTarget, drafts: Any) -> Any:
        seen.append({id(session) for session, _ in drafts})
        sessions.extend(session for session, _ in drafts)
        return real(self, drafts)

    sessions = list[Any]()  # so that no two have the same id
    monkeypatch.setattr(WhisperTarget, "score_together", several)
    sounds = [talk([("austen", None)]), talk([("two_cities", 12.0)]), talk([("austen", None)])]
    mmdec.transcribe(sounds, sample_rate=RATE, model=whisper, cut_at_pauses=True, batch_size=2, drafter=None)
    assert max(map(len, seen)) == 2
    pairs = {frozenset(pair) for pair in seen if len(pair) == 2}
    assert len(pairs) == 2
    assert len(frozenset.intersection(*pairs)) == 1


def test_transcripts_are_reported_in_order_as_they_finish(whisper: LoadedWhisper) -> None:
    reported, done = list[tuple[int, str]](), list[float]()
    sounds = [talk([("two_cities", 20.0)]), talk([("austen", None)]), noise(0.0), talk([("austen", None)])]
    sounds[2] = torch.zeros(RATE)
    result = mmdec.transcribe(
        sounds,
        sample_rate=RATE,
        model=whisper,
        cut_at_pauses=True,
        batch_size=2,
        progress=lambda now, _: done.append(now),
        on_transcript=lambda index, transcript: reported.append((index, transcript.text)),
    )
    assert reported == [(index, transcript.text) for index, transcript in enumerate(result)]
    assert done == sorted(done)
    assert done[-1] == pytest.approx(sum(map(len, sounds)) / RATE)


class Stop(Exception):
    """A listener raises this."""


@pytest.mark.parametrize("listener", ["on_round", "on_transcript", "progress"])
def test_an_exception_of_a_listener_ends_all_jobs(tiny: LoadedWhisper, listener: str) -> None:
    def stop(*_: object) -> None:
        raise Stop

    before = threading.active_count()
    options: dict[str, Any] = {listener: stop}
    with pytest.raises(Stop):
        mmdec.transcribe(SOUNDS[2:], sample_rate=RATE, model=tiny, cut_at_pauses=True, batch_size=2, **options)
    assert threading.active_count() <= before


def test_a_refused_option_ends_all_jobs(tiny: LoadedWhisper) -> None:
    before = threading.active_count()
    with pytest.raises(mmdec.InputError, match="nonsense"):
        mmdec.transcribe(SOUNDS[2:], sample_rate=RATE, model=tiny, cut_at_pauses=True, nonsense=1)
    assert threading.active_count() <= before


class TickingClock:
    """Stands for the module `time`: each reading of any of its clocks is a second later than the one before."""

    def __init__(self) -> None:
        self.readings = 0

    def perf_counter(self) -> float:
        self.readings += 1
        return float(self.readings)

    process_time = thread_time = perf_counter


def test_seconds_of_a_job_leave_out_other_jobs(tiny: LoadedWhisper, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = TickingClock()
    monkeypatch.setattr(timing, "time", clock)
    with own_threads(1):  # with several, a second thread encodes at the same time
        result = mmdec.transcribe(SOUNDS[2:], sample_rate=RATE, model=tiny, cut_at_pauses=True, batch_size=2)
    assert 0 < sum(transcript.timings["total"] for transcript in result) <= clock.readings
    assert all(min(transcript.timings.values()) >= 0 for transcript in result)
