r"""Measures the learned draft size on recordings in random orders, beside plain decoding and drafts of a fixed size.

python recipes/measure/budget.py --model whisper-tiny.en --recordings recordings/*.wav [--busy 2]

In each order the measurements of earlier recordings are kept for the later ones, as in a process that transcribes one
file after another. Each recording is transcribed in all three ways in turn, so that other programs slow all of them.
Recordings longer than 30 s are cut into pieces. `--busy` runs this many loops beside, each of which takes a CPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mmdec
from mmdec.core.statistics import DecodingStatistics
from mmdec.errors import exit_on_error
from mmdec.io.audio import SAMPLE_RATE, load_audio
from mmdec.whisper.transcribe import load_transcriber

FIXED = 8  # drafted tokens of the fixed size
PIECE = 30 * SAMPLE_RATE  # maximum samples of a recording


@dataclass
class Sums:
    """One way's sums over the recordings of an order."""

    wall: float = 0.0  # seconds
    cpu_seconds: float = 0.0  # seconds
    decoder: float = 0.0  # seconds of decoder and drafter
    tokens: int = 0
    rounds: float = 0.0

    def add(self, transcript: mmdec.Transcript, wall: float, cpu_seconds: float) -> None:
        self.wall, self.cpu_seconds = self.wall + wall, self.cpu_seconds + cpu_seconds
        self.decoder += transcript.timings["decoder"] + transcript.timings["drafter"]
        self.tokens += len(transcript.tokens)
        self.rounds += len(transcript.tokens) / max(transcript.tokens_per_round, 1.0)


def run_order(model: Any, recordings: Sequence[Tensor], order: Sequence[int]) -> dict[str, Sums]:
    """Transcribe the recordings in this order, each in all ways in turn.

    Raises:
        RuntimeError: If a text is not that of plain decoding.
    """
    ways: list[tuple[str, dict[str, Any]]] = [
        ("plain", {"drafter": None}),
        ("fixed", {"num_speculative_tokens": FIXED}),
        ("learned", {"statistics": DecodingStatistics()}),
    ]
    sums = {name: Sums() for name, _ in ways}
    for index in order:
        texts = set[str]()
        ways.append(ways.pop(0))  # so that no way always comes first
        for name, choice in ways:
            wall, cpu_seconds = time.perf_counter(), time.process_time()
            transcript = mmdec.transcribe(recordings[index], sample_rate=SAMPLE_RATE, model=model, **choice)
            sums[name].add(transcript, time.perf_counter() - wall, time.process_time() - cpu_seconds)
            texts.add(transcript.text)
        if len(texts) > 1:
            raise RuntimeError(f"recording {index} has several texts: {sorted(texts)}")
    return sums


def _spin() -> None:
    while True:
        pass


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Run loops that take a CPU each."""
    processes = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(loops)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="whisper-tiny.en", help="name, folder or Hugging Face id of a Whisper")
    parser.add_argument("--recordings", nargs="+", type=Path, required=True)
    parser.add_argument("--orders", type=int, default=5)
    parser.add_argument("--busy", type=int, default=0, help="loops that run beside")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_transcriber(options.model)
    recordings = [piece for path in options.recordings for piece in load_audio(path).split(PIECE)]
    recordings = [piece for piece in recordings if len(piece) >= SAMPLE_RATE]
    mmdec.transcribe(recordings[0], sample_rate=SAMPLE_RATE, model=model)
    print(f"{len(recordings)} recordings, {sum(map(len, recordings)) / SAMPLE_RATE:.0f} s, {options.busy} loops beside")
    print("| order | way | s | CPU s | against plain | CPU | decoder against plain | tokens per round |")
    with busy(options.busy):
        for seed in range(options.orders):
            order = random.Random(seed).sample(range(len(recordings)), len(recordings))
            sums = run_order(model, recordings, order)
            plain = sums["plain"]
            for name, way in sums.items():
                cells = (seed, name, f"{way.wall:.1f}", f"{way.cpu_seconds:.1f}", f"{way.wall / plain.wall:.3f}")
                more = (f"{way.cpu_seconds / plain.cpu_seconds:.3f}", f"{way.decoder / plain.decoder:.3f}")
                print("|", " | ".join(map(str, (*cells, *more, f"{way.tokens / way.rounds:.3f}"))), "|", flush=True)


if __name__ == "__main__":
    with exit_on_error():
        main()
