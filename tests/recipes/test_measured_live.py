"""Tests the measures of live transcription: delays on a simulated clock, passes, words that changed."""

from __future__ import annotations

from itertools import count

import pytest

from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper
from mmdec.whisper.live import LiveTranscriber, StreamUpdate
from mmdec.whisper.transcript import Segment, Transcript, Word
from recipes.measure.live import Heard, delays, hear, matched, measure, windows
from tests.support.live_sound import RATE, chunks, talk

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whisper() -> LoadedWhisper:
    return load_whisper("whisper-tiny.en", "cpu")


def update(text: str, end: float, final: bool = False, rounds: int = 1) -> StreamUpdate:
    """Return an update of a window that begins at 10 s; its words end at 0.5, 1.0, 1.5 s of the window."""
    timed = [Word(f" {word}", at / 2, at / 2 + 0.5) for at, word in enumerate(text.split())]
    segments = [Segment(0.0, end - 10, text, [], timed if final else None)]
    tokens = [1] * len(text.split())
    transcript = Transcript(text, "en", segments, tokens, rounds, 1.0, {})
    return StreamUpdate(10.0, end, final, transcript)


SHOWN = [
    (11.2, update("one tu", 11.0)),
    (12.2, update("One, two", 12.0, rounds=2)),
    (14.0, update("one two three", 13.0, True, 3)),
]


def test_a_words_delay_counts_from_its_first_update() -> None:
    assert delays(SHOWN[-1][1], SHOWN) == pytest.approx([0.7, 1.2, 2.5])


def test_delays_and_revisions_are_counted() -> None:
    result = measure([Heard(20.0, 5.0, SHOWN)])
    assert (result["windows"], result["words"], result["real-time factor"]) == (1, 3, 0.25)
    assert result["delay"]["median"] == pytest.approx(1.2)
    assert result["passes"] == {"drafted": 3, "without drafts": 6, "share": 0.5}
    assert result["passes of final texts"] == {"drafted": 3, "without drafts": 4}
    assert result["provisional words that changed"] == pytest.approx(1 / 4)


def test_words_are_matched_in_order() -> None:
    assert matched(["a", "x", "c"], ["a", "b", "c"]) == [0, 2]
    assert matched([], ["a"]) == []


def test_the_simulated_clock_waits_for_sound_and_for_work(whisper: LoadedWhisper) -> None:
    """With work that takes no time the texts are those of pieces of half a second; with slow work pieces wait together,
    and final texts are the same."""
    sound = talk([1.0, ("austen", 4.0), 2.0])
    options = {"model": whisper, "language": "en", "timestamps": "word"}
    quick = hear(LiveTranscriber(**options), sound, lambda: 0.0)
    direct = LiveTranscriber(**options)
    expected = [update for chunk in chunks(sound, [RATE // 2]) for update in direct.feed(chunk)]
    assert [update.text for _, update in quick.shown] == [update.text for update in [*expected, *direct.end()]]
    assert all(update.end <= at <= update.end + 1.5 for at, update in quick.shown)
    ticks = count()
    slow = hear(LiveTranscriber(**options), sound, lambda: float(next(ticks)))
    assert len(slow.shown) < len(quick.shown)
    (one, _), (other, _) = windows(quick)[0], windows(slow)[0]
    assert (one.start, one.end, one.text) == (other.start, other.end, other.text)
    assert measure([quick])["words"] == len(one.text.split())
    assert measure([slow])["real-time factor"] > 1
