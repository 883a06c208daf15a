r"""Measures processor time and wall-clock time of `transcribe` on recordings of mixed length, one at a time and in
batches.

python -m mmdec.evaluation.bench.batched_transcription FOLDER --model MODEL --language en --count 100

The timed recordings, of 1.5 to 40 s, are cut at random places out of the recordings in the folder, with a fixed seed.
Recordings longer than a window (30 s) are first cut at pauses, so that both ways decode the same pieces. Both ways
decode the same 20 recordings, then the next 20. Their tokens must be equal.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mmdec.audio import SAMPLE_RATE, load_audio
from mmdec.audio.live import cut_at_pauses
from mmdec.decode.watch import Stopwatch
from mmdec.hub.whisper import load_whisper
from mmdec.pipelines.transcription.transcribe import transcribe
from mmdec.training.corpora.librispeech import SOUNDS
from mmdec.types import MmdecError

SHORTEST, LONGEST = 1.5, 40.0  # seconds: range of the recordings' lengths, whose logarithms are drawn uniformly
BLOCK = 20  # recordings that are decoded one at a time, then in batches, before the next ones
SIDE = 8  # batch size of decoding in batches


def mixed(sounds: Sequence[Tensor], count: int) -> list[Tensor]:
    """Cut `count` recordings (T,) of random length out of random recordings in `sounds`, (T,) of 16 kHz."""
    drawn, found = random.Random(0), list[Tensor]()
    while len(found) < count:
        size = int(SAMPLE_RATE * math.exp(drawn.uniform(math.log(SHORTEST), math.log(LONGEST))))
        sound = drawn.choice(sounds)
        if size <= len(sound):
            start = drawn.randrange(len(sound) - size + 1)
            found.append(sound[start : start + size])
    return found


def pieces(recordings: Sequence[Tensor]) -> list[Tensor]:
    """Cut recordings (T,) into the pieces that `transcribe` decodes with `cut_at_pauses=True`. Recordings up to 30 s
    stay whole."""
    most = 30 * SAMPLE_RATE
    cut = [cut_at_pauses(one, most) if len(one) > most else [] for one in recordings]
    return [
        piece for one, found in zip(recordings, cut, strict=True) for piece in ([w.samples for w in found] or [one])
    ]


def measure(recordings: Sequence[Tensor], options: Mapping[str, Any]) -> dict[str, Any]:
    """Decode the recordings one after another and in batches, and compare the seconds.

    recordings: (T,) of 16 kHz. options: keyword arguments of `transcribe`.
    Returns a JSON-ready report. "times faster" is the seconds one after another over the seconds in batches ("side by
        side").
    Raises MmdecError if the two ways give different tokens.
    """
    ratios, walls, windows, encoder, stopwatch = list[float](), list[float](), 0, 0.0, Stopwatch()
    seconds, wall = ({"one after another": 0.0, "side by side": 0.0} for _ in range(2))
    for at in range(0, len(recordings), BLOCK):
        cut = pieces(recordings[at : at + BLOCK])
        start, _ = stopwatch.process(), stopwatch.lap()
        single = transcribe(cut, sample_rate=SAMPLE_RATE, batch_size=1, **options)
        middle, alone = stopwatch.process(), stopwatch.lap()
        shared = transcribe(cut, sample_rate=SAMPLE_RATE, batch_size=SIDE, cut_at_pauses=True, **options)
        end, together = stopwatch.process(), stopwatch.lap()
        if [one.tokens for one in single] != [one.tokens for one in shared]:
            raise MmdecError(f"Tokens of recordings {at} to {at + BLOCK} differ side by side. Report this as a bug.")
        seconds["one after another"] += middle - start
        seconds["side by side"] += end - middle
        wall["one after another"] += alone
        wall["side by side"] += together
        ratios.append((middle - start) / (end - middle))
        walls.append(alone / together)
        total = sum(one.timings["total"] for one in single)
        encoder += (middle - start) * sum(one.timings["encoder"] for one in single) / total
        windows += sum(one.windows for one in single)
    return {
        "recordings": len(recordings),
        "windows": windows,
        "seconds of sound": sum(map(len, recordings)) / SAMPLE_RATE,
        "processor seconds": {**seconds, "encoder of one after another": encoder},
        "times faster": seconds["one after another"] / seconds["side by side"],
        "by block": {"median": median(ratios), "least": min(ratios), "most": max(ratios)},
        "wall seconds": wall,
        "times faster, wall clock": wall["one after another"] / wall["side by side"],
        "by block, wall clock": {"median": median(walls), "least": min(walls), "most": max(walls)},
    }


def main() -> None:
    """Run the measurement from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="recordings, searched in subfolders")
    parser.add_argument("--model", required=True, help="a shipped name, a folder or a hub id")
    parser.add_argument("--language", help="default: detected")
    parser.add_argument("--count", type=int, default=100, help="recordings to cut")
    parser.add_argument("--dtype", default="float32", help="float32 or int8")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both sides")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sounds = [load_audio(path) for path in sorted(options.folder.rglob("*")) if path.suffix in SOUNDS]
    whisper = load_whisper(options.model, "cpu", getattr(torch, options.dtype))
    spoken: dict[str, Any] = {"model": whisper, "language": options.language, "threads": options.threads}
    recordings = mixed(sounds, options.count)
    # this first call is slower than later ones, so it is not timed
    transcribe(recordings[0], sample_rate=SAMPLE_RATE, **spoken)
    for context in (None, "auto"):
        found = measure(recordings, {**spoken, "audio_context": context})
        print(json.dumps({"audio_context": context, "dtype": options.dtype, **found}), flush=True)


if __name__ == "__main__":
    main()
