"""Reads passages of English books and everyday sentences aloud: 16 kHz flac and a manifest, resumable after any kill.

python data/build/passages.py --text BOOK.txt ... data/everyday/train.tsv --piper VOICES/piper-joe \\
    --kokoro VOICES/kokoro --out data/passages --hours 4

`--text` are books (plain text; Project Gutenberg's marks are known) and tables of pairs (tatoeba.py), whose English is
read. A passage is some sentences in a row, 2 to 28 s, by one voice: flite's, Piper's `joe` and mixtures of
Kokoro's English styles where their folders are given. Everything about a passage follows from its number and the
texts, so that interruptions change nothing. Needs flite, numpy, soundfile; for Piper piper-tts and onnxruntime, for
Kokoro onnxruntime and espeak-ng.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from english import RATE, Reader, flite_voices, read_aloud
from kokoro import RATE as KOKORO_RATE
from kokoro import Kokoro, phones_of, session
from natural_french import HEADER, MANIFEST, save_recording, trim
from splits import share
from tables import journal
from voices import resample

BOOKS = 0.7  # of the passages
LONG, SHORT = (18.0, 28.0), (2.0, 14.0)  # seconds of a passage, about
LONG_SHARE = 0.75
PACE = 2.6  # words per second
PAUSE = (0.15, 0.9)  # seconds between sentences
SHARES = (0.2, 0.4)  # of Piper and of Kokoro in the passages, where given; Kokoro takes ten times Piper's time
HELD = 40  # each so many-th passage is one of dev
WORDS = 45  # of a sentence
_SENTENCE = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[\"'(]*[A-Z])")
_READABLE = re.compile(r"[A-Za-z][A-Za-z' ,.?!;:\"-]*[.?!]\"?")
_BOOK = re.compile(r"\*\*\* ?START OF.*?\n(.*)\*\*\* ?END OF", re.DOTALL)


def book_sentences(path: Path) -> list[str]:
    """A book's sentences in order, those that a voice cannot read left out."""
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = raw.decode("latin-1")
    body = _BOOK.search(text.replace("\r\n", "\n"))
    paragraphs = re.split(r"\n\s*\n", body[1] if body else text)
    found: list[str] = []
    for paragraph in paragraphs:
        flat = " ".join(paragraph.replace("_", "").replace("--", ", ").split())
        found += _SENTENCE.split(flat)
    return [s for s in found if _READABLE.fullmatch(s) and 2 <= len(s.split()) <= WORDS and not s.isupper()]


def table_sentences(path: Path) -> list[str]:
    """The English of a table of pairs, in an order of its own."""
    rows = (line.split("\t") for line in path.read_text(encoding="utf-8").split("\n") if line)
    found = [row[3] for row in rows if _READABLE.fullmatch(row[3])]
    return sorted(set(found), key=lambda text: share("passages", text))


def passages(books: Sequence[list[str]], everyday: Sequence[str], seed: int) -> Iterator[tuple[int, list[str]]]:
    """Numbers and sentences without end: a stretch of a book, or everyday sentences."""
    number, turn, places = 0, 0, [0] * len(books)
    while True:
        draw = np.random.default_rng([seed, number])
        low, high = LONG if draw.random() < LONG_SHARE else SHORT
        words = draw.uniform(low, high) * PACE
        chosen: list[str] = []
        from_book = bool(books) and (not everyday or draw.random() < BOOKS)
        book = int(draw.integers(len(books))) if from_book else 0
        while sum(len(text.split()) for text in chosen) < words:
            if from_book:
                text = books[book][places[book] % len(books[book])]
                places[book] += 1
            else:
                text = everyday[turn % len(everyday)]
                turn += 1
            if chosen and sum(len(t.split()) for t in [*chosen, text]) > high * PACE:
                break
            chosen.append(text)
        yield number, chosen
        number += 1


@cache
def piper(folder: Path) -> tuple[Any, Any, int]:
    """Piper's module, its voice in a folder, and the voice's rate."""
    module: Any = import_module("piper")
    settings: Any = import_module("piper.config")
    model = next(folder.glob("*.onnx"))
    config = settings.PiperConfig.from_dict(json.loads(model.with_suffix(".onnx.json").read_text(encoding="utf-8")))
    return module, module.PiperVoice(session=session(str(model)), config=config), config.sample_rate


def piper_speech(text: str, folder: Path, speed: float, noise: float) -> np.ndarray:
    """(T,) float32 at 16 kHz."""
    module, voice, rate = piper(folder)
    settings = module.SynthesisConfig(length_scale=1 / speed, noise_scale=noise)
    parts = [chunk.audio_float_array for chunk in voice.synthesize(text, settings)]
    return resample(np.concatenate(parts), rate, RATE).astype(np.float32)


@cache
def kokoro(folder: Path) -> tuple[Kokoro, list[str]]:
    """Kokoro's network and its English styles."""
    network = Kokoro(folder)
    return network, sorted(name for name in network.styles if name[0] in "ab")


def kokoro_speech(text: str, voice: Kokoro, shares: Mapping[str, float], speed: float) -> np.ndarray:
    """(T,) float32 at 16 kHz. The accent is that of the first style, American or British."""
    language = "en-us" if next(iter(shares)).startswith("a") else "en-gb"
    return resample(trim(voice.speak(phones_of(text, language), shares, speed)), KOKORO_RATE, RATE).astype(np.float32)


def read_passage(
    number: int,
    texts: Sequence[str],
    folder: Path | None,
    styles: Path | None,
    seed: int,
    shares: Sequence[float] = SHARES,
) -> tuple[np.ndarray, str, float]:
    """16 kHz samples, the voice's name, its speed. folder: Piper's. styles: Kokoro's folder. shares: of both."""
    draw = np.random.default_rng([seed, number, 1])
    which = draw.random()
    if folder is not None and which < shares[0]:
        speed, noise = float(draw.uniform(0.8, 1.3)), float(draw.uniform(0.4, 0.9))
        sounds, name = [piper_speech(text, folder, speed, noise) for text in texts], folder.name
    elif styles is not None and which > 1 - shares[1]:
        voice, names = kokoro(styles)
        one, other = (names[int(draw.integers(len(names)))] for _ in range(2))
        part, speed = float(draw.uniform(0.0, 0.5)), float(draw.uniform(0.85, 1.25))
        mixed = {one: 1 - part, other: part} if one != other else {one: 1.0}
        sounds, name = [kokoro_speech(text, voice, mixed, speed) for text in texts], f"kokoro:{'+'.join(mixed)}"
    else:
        names = flite_voices()
        who = names[int(draw.integers(len(names)))]
        pace, pitch = int(draw.integers(125, 200)), int(draw.integers(20, 81))
        reader = Reader(f"flite-{who}", "female" if who == "slt" else "male", pace, pitch)
        sounds, name, speed = [read_aloud(text, reader) for text in texts], reader.name, pace / 160
    pauses = [np.zeros(int(draw.uniform(*PAUSE) * RATE), np.float32) for _ in sounds]
    joined = np.concatenate([part for pair in zip(sounds, pauses, strict=True) for part in pair][:-1])
    return (joined / max(float(np.abs(joined).max()), 1e-3) * 0.7).astype(np.float32), name, speed


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--piper", type=Path)
    parser.add_argument("--kokoro", type=Path)
    parser.add_argument("--shares", type=float, nargs=2, default=SHARES, help="of Piper and of Kokoro in the passages")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hours", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    books = [book_sentences(path) for path in given.text if path.suffix == ".txt"]
    everyday = [text for path in given.text if path.suffix == ".tsv" for text in table_sentences(path)]
    with journal(given.out / MANIFEST, HEADER) as (done, add):
        seconds = sum(float(row[4]) for name, row in done.items() if name != HEADER[0])
        for number, texts in passages(books, everyday, given.seed):
            if seconds >= given.hours * 3600:
                break
            name = f"passage-{number:06d}"
            if name in done:
                continue
            try:
                samples, who, speed = read_passage(number, texts, given.piper, given.kokoro, given.seed, given.shares)
            except Exception as error:  # one sentence that a voice cannot say must not end the build
                print(f"{name}: {error}", file=sys.stderr)
                continue
            if len(samples) > 29.5 * RATE:
                continue
            path = Path(f"{number % 100:02d}") / f"{name}.flac"
            length = save_recording(given.out / path, samples)
            split = "dev" if number % HELD == HELD - 1 else "train"
            add(name, str(path), split, who, f"{speed:.3f}", f"{length:.3f}", " ".join(texts))
            seconds += length


if __name__ == "__main__":
    main()
