r"""Measures live transcription of recordings that arrive at the speed of speech.

python recipes/measure/live.py --recordings recordings.jsonl --model MODEL --language en

Each line of the file is an object with `path`, relative to the file's folder. The sound arrives in pieces
of half a second on a simulated clock. Decoding moves this clock on by the thread's CPU seconds, which do not
depend on other programs. Pieces that arrive during decoding are then decoded together.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from mmdec.core.timing import Stopwatch
from mmdec.io.audio import SAMPLE_RATE, load_audio
from mmdec.training.metrics.text import normalise_words
from mmdec.whisper.live import LiveTranscriber, StreamUpdate
from mmdec.whisper.options import DEFAULT_WHISPER
from mmdec.whisper.transcribe import load_transcriber, transcribe

PIECE = SAMPLE_RATE // 2  # number of samples that arrive together
PAUSE = 2 * SAMPLE_RATE  # number of nearly silent samples before and after each recording


@dataclass
class Heard:
    """The updates of one live transcription, each with the time on the simulated clock when it appeared."""

    seconds: float = 0.0  # length of the sound in seconds
    busy: float = 0.0  # seconds that the machine was decoding
    shown: list[tuple[float, StreamUpdate]] = field(default_factory=list[tuple[float, StreamUpdate]])


def hear(live: LiveTranscriber, sound: Tensor, clock: Callable[[], float] | None = None) -> Heard:
    """Feed a recording (T,) of 16 kHz to a live transcriber at the speed of speech.

    clock: returns the seconds of work so far; None: this thread's CPU seconds.
    """
    clock = clock or Stopwatch().cpu_time
    heard, now, at = Heard(len(sound) / SAMPLE_RATE), 0.0, 0

    def show(updates: Iterable[StreamUpdate]) -> float:
        before, done = clock(), now
        for update in updates:
            after = clock()
            done, before = done + after - before, after
            heard.shown.append((done, update))
        return done + clock() - before

    while at < len(sound):
        now = max(now, min(at + PIECE, len(sound)) / SAMPLE_RATE)
        end = min(max(at + PIECE, int(now * SAMPLE_RATE) // PIECE * PIECE), len(sound))
        then = show(live.feed(sound[at:end]))
        heard.busy, now, at = heard.busy + then - now, then, end
    heard.busy += show(live.end()) - now
    return heard


def windows(heard: Heard) -> list[tuple[StreamUpdate, list[tuple[float, StreamUpdate]]]]:
    """Return for each window of a live transcription its final update, and all its updates in order, as (time,
    update)."""
    finals = [update for _, update in heard.shown if update.final]
    return [(last, [(at, update) for at, update in heard.shown if update.start == last.start]) for last in finals]


def delays(final: StreamUpdate, shown: Sequence[tuple[float, StreamUpdate]]) -> list[float]:
    """Compute the seconds from each word's end to the first update with this word.

    final: a window's last update, with word timestamps. shown: (time, update) of the window's updates, in order.
    """
    timed = [word for segment in final.segments for word in segment.words or ()]
    wanted = ["".join(normalise_words(word.text)) for word in timed]
    first = dict[int, float]()
    for at, update in shown:
        for place in matched(normalise_words(update.text), wanted):
            first.setdefault(place, at)
    return [at - timed[place].end for place, at in sorted(first.items())]


def matched(said: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """Return the indices of the words in `wanted` that `said` has in the same order."""
    blocks = SequenceMatcher(None, said, wanted, autojunk=False).get_matching_blocks()
    return [place for block in blocks for place in range(block.b, block.b + block.size)]


def measure(streams: Sequence[Heard]) -> dict[str, Any]:
    """Summarise live transcriptions with word timestamps: delays in seconds, passes of the decoder, words that changed,
    and the real-time factor.

    Passes without drafts are not run but computed: one for each token, and one for the end token.
    """
    late, passes, cold, ends, words, kept = list[float](), 0, 0, [0, 0], 0, 0
    for final, shown in (window for heard in streams for window in windows(heard)):
        late += delays(final, shown)
        passes += sum(update.transcript.rounds for _, update in shown if not update.final)
        cold += sum(len(update.transcript.tokens) + 1 for _, update in shown if not update.final)
        ends = [ends[0] + final.transcript.rounds, ends[1] + len(final.transcript.tokens) + 1]
        for _, update in shown:
            if not update.final:
                said = normalise_words(update.text)
                words, kept = words + len(said), kept + len(matched(said, normalise_words(final.text)))
    seconds = sum(heard.seconds for heard in streams)
    return {
        "seconds": seconds,
        "windows": sum(len(windows(heard)) for heard in streams),
        "words": len(late),
        "delay": {"median": median(late), "90 %": quantiles(late, n=10)[-1]} if len(late) > 1 else {},
        "passes": {"drafted": passes, "without drafts": cold, "share": passes / max(cold, 1)},
        "passes of final texts": {"drafted": ends[0], "without drafts": ends[1]},
        "provisional words that changed": 1 - kept / max(words, 1),
        "real-time factor": sum(heard.busy for heard in streams) / max(seconds, 1e-9),
    }


def main() -> None:
    """Run the measurement from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=Path, required=True, help="JSON lines with path")
    parser.add_argument("--model", default=DEFAULT_WHISPER, help="a shipped name, a folder or a Hugging Face id")
    parser.add_argument("--language", help="default: detected")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in options.recordings.read_text(encoding="utf-8").splitlines()]
    sounds = [load_audio(options.recordings.parent / row["path"]) for row in rows]
    spoken: dict[str, Any] = {"model": load_transcriber(options.model, "cpu"), "language": options.language}
    pause = 1e-4 * torch.randn(PAUSE, generator=torch.Generator().manual_seed(0))
    # this first call is slower than later ones, so it is not timed
    transcribe(sounds[0][:SAMPLE_RATE], sample_rate=SAMPLE_RATE, **spoken)
    streams = [hear(LiveTranscriber(timestamps="word", **spoken), torch.cat([pause, sound, pause])) for sound in sounds]
    print(json.dumps(measure(streams)))


if __name__ == "__main__":
    main()
