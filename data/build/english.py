"""Builds the corpus of English read aloud that recognisers are measured on, in LibriSpeech's layout.

python data/build/english.py --out data/english          # resumable; the same seed gives the same files

A chapter is one reader's: held-out sentences of the phrasebook, heard in rooms and noise, as in the French corpus.
`paragraphs` are read in one go.
"""

import argparse
import itertools
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import soundfile
import voices
from parent import end_with_parent
from splits import Sentence, in_order, read_sentences
from tables import whole, write_text

RATE = 16000
FLITE = {"kal": "male", "kal16": "male", "awb": "male", "rms": "male", "slt": "female"}  # awb_time tells times alone
FLITE_SHARE = 0.4  # of the readers
ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-029", "en-us-nyc")
_QUIET = 0.01  # of the loudest sample


@dataclass(frozen=True)
class Reader:
    """A voice at a speed and a pitch. `name` says the voice alone."""

    name: str
    gender: str
    words_per_minute: int
    pitch: int


@cache
def flite_voices() -> tuple[str, ...]:
    """Those of flite's voices that this flite has."""
    listed = subprocess.run(["flite", "-lv"], capture_output=True, text=True, check=True).stdout
    return tuple(name for name in FLITE if name in listed.partition(":")[2].split())


def reader(random: np.random.Generator, *, held_out: bool) -> Reader:
    """A reader drawn from the held-out variants of espeak-ng, or from all others and flite's voices."""
    speed, pitch = int(random.integers(120, 201)), int(random.integers(20, 81))
    if not held_out and random.random() < FLITE_SHARE:
        names = flite_voices()
        name = names[int(random.integers(len(names)))]
        return Reader(f"flite-{name}", FLITE[name], speed, pitch)
    known = voices.variants()
    names = [name for name in known if (name in voices.HELD_OUT) == held_out]
    variant = names[int(random.integers(len(names)))]
    accent = ACCENTS[int(random.integers(len(ACCENTS)))]
    return Reader(f"espeak-{accent}+{variant}", known[variant], speed, pitch)


def read_aloud(text: str, who: Reader) -> np.ndarray:
    """Speech of `text`, (T,) float32 at 16 kHz, silent edges cut. Raises RuntimeError when nothing is heard."""
    engine, _, voice = who.name.partition("-")
    if engine == "flite":
        samples, rate = _flite(text, voice, who)
    else:
        samples, rate = voices.espeak(text, voice, who.words_per_minute, who.pitch), voices.RATE
    loud = np.flatnonzero(np.abs(samples) > _QUIET * np.abs(samples).max(initial=0))
    if len(loud) < rate // 10:
        raise RuntimeError(f"{engine} gave no sound for {text!r} in voice {who.name}")
    return voices.resample(samples[loud[0] : loud[-1] + 1], rate, RATE).astype(np.float32)


def _flite(text: str, voice: str, who: Reader) -> tuple[np.ndarray, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "speech.wav"
        stretch = 160 / who.words_per_minute
        tone = (140 if who.gender == "female" else 80) + who.pitch
        command = ["flite", "-voice", voice, "--setf", f"duration_stretch={stretch:.2f}"]
        command += ["--setf", f"int_f0_target_mean={tone}", "-t", text, "-o", str(path)]
        subprocess.run(command, capture_output=True, check=True, timeout=60)
        return soundfile.read(path, dtype="float32")


WORDS, SECONDS = (40, 90), 29.0  # of a paragraph
HELD_OUT = "test_voices"  # the split that voices read which no other split has


@dataclass(frozen=True)
class Chapter:
    """What one reader reads."""

    split: str
    number: int
    texts: tuple[str, ...]

    def folder(self, root: Path) -> Path:
        return root / self.split / f"{self.number:05d}" / "1"


def texts_of(sentences: Sequence[Sentence]) -> dict[str, set[str]]:
    """Each split's English texts. One that could be said for sentences of two splits belongs to the one that trains."""
    said = {
        split: {text for s in sentences if s.split == split for text in s.renderings}
        for split in ("train", "dev", "test")
    }
    said["dev"] -= said["train"]
    said["test"] -= said["train"] | said["dev"]
    return said


def chapters(sentences: Sequence[Sentence], held: int, seed: int) -> Iterator[Chapter]:
    """Chapters of `held` texts of each split, and of half as many `paragraphs`."""
    draw = random.Random(f"english {seed}")
    said = texts_of(sentences)
    number = 0
    pools = {
        split: [
            text
            for s in in_order([s for s in sentences if s.split == split], seed)
            for text in draw.sample(s.renderings, 1)
            if text in said[split]
        ]
        for split in ("dev", "test")
    }
    pools["test_voices"] = pools["test"][held:]
    for split in ("dev", "test", "test_voices"):
        chosen = list(dict.fromkeys(pools[split]))[:held]
        for begin in range(0, len(chosen), 4):  # many readers
            number += 1
            yield Chapter(split, number, tuple(chosen[begin : begin + 4]))
    for _ in range(held // 2):
        words = draw.randint(*WORDS)
        paragraph: list[str] = []
        while sum(len(text.split()) for text in paragraph) < words:
            paragraph.append(draw.choice(pools["test"]))
        number += 1
        yield Chapter("paragraphs", number, (" ".join(paragraph),))


def record(root: Path, seed: int, chapter: Chapter) -> list[str]:
    """Record a chapter that is not there yet; what failed, by name. The transcript comes last and makes it whole."""
    folder = chapter.folder(root)
    name = f"{chapter.number:05d}-1"
    transcript = folder / f"{name}.trans.txt"
    if transcript.exists():
        return []
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng([seed, chapter.number])
    who = reader(draw, held_out=chapter.split == HELD_OUT)
    lines, failed = [], []
    for index, text in enumerate(chapter.texts):
        try:
            samples = read_aloud(text, who)
        except Exception as error:  # one bad sentence must not end the build: it is named at the end
            failed.append(f"{text}: {error}")
            continue
        before, after = draw.uniform(0.05, 0.5, size=2)
        samples = np.pad(samples, (int(before * RATE), int(after * RATE)))
        samples = voices.place(samples, draw, RATE)
        if len(samples) > SECONDS * RATE:
            continue  # a paragraph read too slowly
        samples = samples / np.abs(samples).max() * draw.uniform(0.1, 0.95)
        path = folder / f"{name}-{index:04d}.flac"
        with whole(path) as partial:
            soundfile.write(partial, samples, RATE, format="FLAC", subtype="PCM_16")
        lines.append((f"{name}-{index:04d} {text}",))
    (folder / "reader.txt").write_text(f"{who.name} | {who.gender} | {who.words_per_minute} | {who.pitch}\n")
    if not failed:  # else the same command tries again
        write_text(transcript, lines)
    return failed


def main() -> int:
    """Exit code: 0, or 1 when a synthesis failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="build the corpus in this folder, or go on there")
    parser.add_argument("--held", type=int, default=600, help="texts of dev, test and test_voices (default 600)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    arguments = parser.parse_args()
    planned = chapters(read_sentences(), arguments.held, arguments.seed)
    failed: list[str] = []
    with ProcessPoolExecutor(arguments.jobs, initializer=end_with_parent, initargs=(os.getpid(),)) as pool:
        work = itertools.repeat(arguments.out), itertools.repeat(arguments.seed), planned
        for count, bad in enumerate(pool.map(record, *work, chunksize=4)):
            failed += bad
            if count % 500 == 499:
                print(f"{count + 1} chapters", flush=True)
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
