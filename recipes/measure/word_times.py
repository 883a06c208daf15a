r"""Measures the errors of `transcribe`'s word timestamps, on recordings whose word times are known.

python recipes/measure/word_times.py --recordings data/timed_words/manifest.jsonl --model MODEL \
    --language en

The recordings are made by data/build/timed_words.py. Only words that the transcript has right are compared. Starts
after a pause and ends before a pause are also summarised by themselves.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from statistics import median
from typing import Any

from mmdec.training.metrics.text import normalise_words
from mmdec.whisper.options import DEFAULT_WHISPER
from mmdec.whisper.transcribe import load_transcriber, transcribe

PAUSE = 0.25  # seconds of silence beside a word that count as a pause
FAR = 0.3  # seconds; the share of larger timing errors is reported

Timed = tuple[str, float, float]  # a word, its start and its end in seconds


@dataclass(frozen=True)
class TimeError:
    """The timing errors of one word."""

    start: float  # seconds by which the word's start is too late; negative: too early
    end: float  # seconds by which the word's end is too late; negative: too early
    after_pause: bool  # whether a pause is before the word
    before_pause: bool  # whether a pause is after the word


def time_errors(found: Sequence[Timed], known: Sequence[Timed]) -> list[TimeError]:
    """Compute the timing errors of the words that transcript and truth share, in the same order.

    found: (word, start, end) of the transcript, in seconds. known: the same of the words that were really said.
    """
    said, true = (["".join(normalise_words(word)) for word, _, _ in words] for words in (found, known))
    errors = list[TimeError]()
    for block in SequenceMatcher(None, said, true, autojunk=False).get_matching_blocks():
        for at in range(block.size):
            (_, start, end), place = found[block.a + at], block.b + at
            _, starts, ends = known[place]
            errors.append(
                TimeError(
                    start - starts,
                    end - ends,
                    place == 0 or starts - known[place - 1][2] > PAUSE,
                    place == len(known) - 1 or known[place + 1][1] - ends > PAUSE,
                )
            )
    return errors


def summary(errors: Sequence[float]) -> dict[str, float]:
    """Summarise errors in seconds: number of words, median of absolute errors, median error (positive: late), share of
    more than 0.3 s.

    errors: positive: late; negative: early.
    """
    if not errors:
        return {"words": 0}
    return {
        "words": len(errors),
        "median": median(map(abs, errors)),
        "late": median(errors),
        "far": sum(abs(error) > FAR for error in errors) / len(errors),
    }


def measure(errors: Sequence[TimeError]) -> dict[str, dict[str, float]]:
    """Summarise the errors of all starts and ends, and of those beside a pause."""
    return {
        "starts": summary([error.start for error in errors]),
        "ends": summary([error.end for error in errors]),
        "starts after a pause": summary([error.start for error in errors if error.after_pause]),
        "ends before a pause": summary([error.end for error in errors if error.before_pause]),
    }


def main() -> None:
    """Run the measurement from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=Path, required=True, help="manifest.jsonl of data/build/timed_words.py")
    parser.add_argument("--model", default=DEFAULT_WHISPER, help="a shipped name, a folder or a Hugging Face id")
    parser.add_argument("--language", help="default: detected")
    options = parser.parse_args()
    loaded, errors = load_transcriber(options.model), dict[str, list[TimeError]]()
    for line in options.recordings.read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        path = options.recordings.parent / row["path"]
        out = transcribe(path, model=loaded, timestamps="word", language=options.language)
        found = [(word.text, word.start, word.end) for segment in out.segments for word in segment.words or ()]
        errors.setdefault(row["voice"], []).extend(time_errors(found, [tuple(word) for word in row["words"]]))
    groups = {"all": [error for group in errors.values() for error in group], **errors}
    print(json.dumps({name: measure(group) for name, group in groups.items()}, indent=1))


if __name__ == "__main__":
    main()
