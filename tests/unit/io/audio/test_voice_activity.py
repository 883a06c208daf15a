"""Tests sound that arrives in pieces: windows do not depend on the pieces, are cut at pauses, and leave out silence and
noise."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmdec.io.audio import resample
from mmdec.io.audio.voice_activity import BLOCK, LEAD, TAIL, SpeechWindow, SpeechWindows, StreamResampler
from tests.conftest import buzz
from tests.support.live_sound import RATE, chunks, noise, talk

WHOLE = 30 * RATE


def windows(
    sound: Tensor, sizes: list[int], pause: float = 1.0, most: int = WHOLE, detector: str = "energy"
) -> list[SpeechWindow]:
    cutter = SpeechWindows(pause, most, detector)
    closed = [window for chunk in chunks(sound, sizes) for window in cutter.add(torch.from_numpy(chunk))]
    closed += cutter.end()
    assert cutter.sample_count == len(sound)
    assert all(torch.equal(utterance.samples, sound[utterance.start : utterance.end]) for utterance in closed)
    return closed


def places(closed: list[SpeechWindow]) -> list[tuple[int, int]]:
    return [(utterance.start, utterance.end) for utterance in closed]


TALK = talk([0.7, ("austen", None), 1.4, ("two_cities", 7.03), 2.0, ("president", None), 0.3], 1e-4)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 60_000), min_size=1, max_size=6), st.sampled_from([0.5, 1.0, 3.0]))
def test_windows_do_not_depend_on_the_chunks(sizes: list[int], pause: float) -> None:
    if sum(sizes) / len(sizes) < 200:  # a thousand chunks and more
        sizes = [*sizes, 4000]
    assert places(windows(TALK, sizes, pause)) == places(windows(TALK, [len(TALK)], pause))


@pytest.mark.parametrize("level", [0.0, 1e-4, 1e-3, 3e-3])
@pytest.mark.parametrize("quiet", [0.0, 0.4, 3.0])
def test_each_sentence_between_pauses_gets_its_own_window(level: float, quiet: float) -> None:
    """In rooms with and without noise; the room is heard first, or somebody speaks at once."""
    sound = talk([quiet, ("austen", None), 2.0, ("two_cities", 3.7), 2.0, ("austen", None), 0.2], level)
    result = windows(sound, [1600])
    assert len(result) == 3
    spans, at = [], quiet
    for length in (6.05, 3.7, 6.05):
        spans.append((at, at + length))
        at += length + 2
    for window, (start, end) in zip(result, spans, strict=True):
        assert start - 0.4 <= window.start / RATE <= start + 0.6  # the samples begin and end with some silence
        assert end - 0.6 <= window.end / RATE <= end + 0.5


def test_quiet_speech_opens_the_windows_of_loud_speech() -> None:
    """With a peak of -70 dB, as in a recording of 24 bits at a low level."""
    loud = talk([1.5, ("two_cities", 3.7), 2.0, ("two_cities", 3.7), 2.0, ("two_cities", 3.7), 0.2], 1e-3)
    quiet = loud * 10 ** (-70 / 20) / loud.abs().max()
    result = places(windows(quiet, [1600]))
    assert len(result) == 3
    for quiet_place, loud_place in zip(result, places(windows(loud, [1600])), strict=True):
        assert abs(quiet_place[0] - loud_place[0]) <= RATE // 2
        assert abs(quiet_place[1] - loud_place[1]) <= RATE // 2


@pytest.mark.parametrize(
    "sound",
    [
        noise(20, 5e-5),
        noise(20, 1e-5),
        torch.zeros(40 * RATE),
        noise(40, 1e-3),
        noise(3, 1e-2),
        noise(0.6, 1e-2),
        0.2 + noise(5, 1e-4),  # a microphone that adds a constant
        torch.cat([torch.zeros(5 * RATE), noise(5, 1e-2)]),  # one that is turned on
        torch.cat([torch.zeros(3 * RATE), torch.ones(40), torch.zeros(3 * RATE)]),  # a click
        torch.zeros(1),
        torch.zeros(0),
    ],
    ids=[
        "quiet noise",
        "dither",
        "silence",
        "noise",
        "loud noise",
        "short noise",
        "constant",
        "turned on",
        "click",
        "one sample",
        "nothing",
    ],
)
def test_silence_and_noise_give_no_window(sound: Tensor) -> None:
    assert windows(sound, [1600]) == []


def test_a_window_keeps_what_surrounds_the_voice() -> None:
    voice = torch.from_numpy(buzz(2.0))
    sound = torch.cat([torch.zeros(3 * RATE), voice, torch.zeros(3 * RATE)])
    assert places(windows(sound, [777])) == [(3 * RATE - LEAD * BLOCK, 5 * RATE + TAIL * BLOCK)]


def test_a_short_pause_ends_no_window() -> None:
    sound = talk([0.5, ("two_cities", 3.7), 0.3, ("two_cities", 3.7), 3.0])
    assert len(windows(sound, [1600])) == 1
    assert len(windows(sound, [1600], pause=0.5)) == 2


def test_full_windows_are_cut_in_a_pause_and_lose_nothing() -> None:
    """Nothing is dropped between two windows of speech without long pauses."""
    sound = talk([("two_cities", None), ("two_cities", None)])
    result = windows(sound, [1600], pause=5.0, most=10 * RATE)
    assert len(result) >= 5
    assert all(5 * RATE <= len(utterance.samples) <= 10 * RATE for utterance in result[:-1])
    for utterance, following in pairwise(result):
        assert 0 <= following.start - utterance.end <= RATE  # only a pause is left out
        around = sound[utterance.end - RATE // 10 : utterance.end + RATE // 10]
        assert around.square().mean() < sound.square().mean() / 4


def test_speech_without_any_pause_is_cut_where_it_is_quietest() -> None:
    sound = torch.from_numpy(buzz(25.0))
    result = windows(sound, [1600], most=10 * RATE)
    assert [utterance.end - utterance.start <= 10 * RATE for utterance in result] == [True] * len(result)
    assert [utterance.start for utterance in result[1:]] == [utterance.end for utterance in result[:-1]]


def test_memory_is_bounded() -> None:
    cutter = SpeechWindows(1.0, WHOLE)
    for _ in range(200):
        cutter.add(torch.zeros(RATE))
    assert len(cutter._blocks) <= LEAD
    assert sum(block.untyped_storage().nbytes() for block in cutter._blocks) <= LEAD * 4 * RATE


def test_an_open_window_says_whether_a_pause_has_begun() -> None:
    cutter = SpeechWindows(2.0, WHOLE)
    assert cutter.open() is None
    cutter.add(torch.from_numpy(buzz(3.0)))
    window, pausing = cutter.open() or pytest.fail("no window")
    assert (window.end, pausing) == (3 * RATE, False)
    cutter.add(torch.zeros(RATE))
    paused, pausing = cutter.open() or pytest.fail("no window")
    assert pausing
    (closed,) = cutter.add(torch.zeros(2 * RATE))
    assert (closed.start, closed.end) == (paused.start, paused.end)
    assert torch.equal(closed.samples, paused.samples)
    assert cutter.open() is None


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 44100, 48000])
@pytest.mark.parametrize("sizes", [[480], [1, 7, 5000], [10**6]])
def test_a_stream_is_resampled_as_a_whole_recording(rate: int, sizes: list[int]) -> None:
    sound = torch.from_numpy(buzz(3.21, rate=rate))
    stream = StreamResampler(rate)
    parts = [stream.add(chunk) for chunk in chunks(sound, sizes)]
    result = torch.cat([*parts, stream.add(np.zeros(0), last=True)])
    whole = resample(sound, rate)
    assert abs(len(result) - len(whole)) <= 1
    least = min(len(result), len(whole))
    assert (result[:least] - whole[:least]).abs().max() < 1e-5
