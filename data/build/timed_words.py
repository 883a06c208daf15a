"""Reads phrases with pauses between them: recordings whose words' times are known, to measure word timestamps on.

python data/build/timed_words.py --text BOOK.txt ... --kokoro VOICES/kokoro --out data/timed_words --recordings 60

A recording is a sentence or two of a book, cut at commas or anywhere into phrases; between them is silence of 0.3 to
2 s (`--pauses`), and room noise over all. The voices tell how long each phone lasts: flite by itself, Kokoro by an
output inside its network, for which the package onnx is needed. A phrase whose phones cannot be told apart by words is
left out. manifest.jsonl has for each recording `path`, `text`, `voice`, `noise` (dB of the speech above it), and
`words`: [text, start, end] in seconds.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from english import RATE
from kokoro import MODEL, Kokoro, phones_of, session
from passages import book_sentences
from voices import resample

FLITE = ("slt", "rms", "awb", "kal16")
KOKORO = ("af_heart", "am_michael", "bf_emma", "bm_george", "af_bella", "am_fenrir")
DURATIONS = "/encoder/Clip_output_0"  # inside Kokoro: frames that each sign lasts
FRAME = 600  # samples of such a frame at 24 kHz
PHRASE = (2, 8)  # words
WORDS = (10, 34)  # of a recording
PAUSES = (0.3, 2.0)  # seconds
NOISE = (None, 40.0, 20.0)  # dB below the speech; None: 60
MOST = 29.0  # seconds of a recording
STEP = 160  # samples over which a level is measured
SILENT = 0.03  # of the loudest such level: below it nothing is heard

Timed = tuple[str, float, float]


@dataclass(frozen=True)
class Phrase:
    """16 kHz samples, without silence at either end, and the words' times in them."""

    samples: np.ndarray
    words: list[Timed]


def by_words(phones: Sequence[tuple[float, float]], counts: Sequence[int], words: Sequence[str]) -> list[Timed]:
    """Words with the first start and the last end of their phones. counts: phones of each word. Raises ValueError where
    they do not add up."""
    if sum(counts) != len(phones) or not all(counts):
        raise ValueError(f"{len(phones)} phones, {counts} by words: {' '.join(words)}")
    found, at = list[Timed](), 0
    for word, count in zip(words, counts, strict=True):
        found.append((word, phones[at][0], phones[at + count - 1][1]))
        at += count
    return found


def audible(samples: np.ndarray, words: Sequence[Timed]) -> list[Timed]:
    """The same words; the first begins and the last ends where sound does: Kokoro counts silence to its last phone."""
    frames = samples[: len(samples) // STEP * STEP].reshape(-1, STEP)
    level = np.sqrt((frames**2).mean(1))
    heard = np.flatnonzero(level > SILENT * level.max())
    begin, end = heard[0] * STEP / RATE, (heard[-1] + 1) * STEP / RATE
    (first, start, stop), (last, opened, closed) = words[0], words[-1]
    found = [(first, max(start, min(begin, stop)), stop), *words[1:]]
    return [*found[:-1], (last, found[-1][1] if len(words) == 1 else opened, min(closed, max(end, opened)))]


def cut(samples: np.ndarray, words: Sequence[Timed]) -> Phrase:
    """What is between the first word's start and the last one's end."""
    words = audible(samples, words)
    begin, end = words[0][1], words[-1][2]
    part = samples[round(begin * RATE) : round(end * RATE)].astype(np.float32)
    return Phrase(part, [(word, start - begin, stop - begin) for word, start, stop in words])


def flite_phones(text: str, voice: str, sound: str = "none") -> list[tuple[str, float, float]]:
    """Phones with start and end, silence included."""
    command = ["flite", "-voice", voice, "-psdur", "-t", text, "-o", sound]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    found, before = list[tuple[str, float, float]](), 0.0
    for phone, end in (entry.split(":") for entry in listed):
        found.append((phone, before, float(end)))
        before = float(end)
    return found


def flite_phrase(words: Sequence[str], voice: str) -> Phrase:
    """A phrase by flite."""
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        spoken = [phone for phone in flite_phones(" ".join(words), voice, file.name) if phone[0] != "pau"]
        samples, rate = soundfile.read(file.name, dtype="float32")
    alone = [sum(phone != "pau" for phone, _, _ in flite_phones(word, voice)) for word in words]
    timed = by_words([(start, end) for _, start, end in spoken], alone, words)
    return cut(resample(samples, rate, RATE), timed)


class TimedKokoro(Kokoro):
    """Kokoro that tells how long each of its signs lasts."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        onnx: Any = import_module("onnx")
        model = onnx.load(str(folder / MODEL))
        model.graph.output.append(onnx.helper.make_empty_tensor_value_info(DURATIONS))
        self.network = session(model.SerializeToString())

    def phrase(self, words: Sequence[str], voice: str, speed: float) -> Phrase:
        """A phrase; words are what stands between spaces in the phones, too."""
        language = "en-gb" if voice[0] == "b" else "en-us"
        phones = phones_of(" ".join(words), language)
        if len(phones.split()) != len(words):  # espeak-ng says some pairs as one word
            phones = " ".join(phones_of(word, language) for word in words)
        tokens = np.array([[0, *(self.numbers[sign] for sign in phones), 0]], np.int64)
        inputs = {"tokens": tokens, "style": self.style({voice: 1.0}, len(phones)), "speed": np.array([speed], "f4")}
        samples, frames = self.network.run(None, inputs)
        ends = np.cumsum(frames.reshape(-1)) * FRAME / 24_000
        spoken = [at for at, sign in enumerate(phones, 1) if sign not in " .,;:!?"]
        counts = [len(re.sub(r"[.,;:!?]", "", part)) for part in phones.split()]
        if len(counts) != len(words):
            raise ValueError(f"{len(counts)} groups of phones for {len(words)} words")
        timed = by_words([(float(ends[at - 1]), float(ends[at])) for at in spoken], counts, words)
        return cut(resample(samples.reshape(-1), 24_000, RATE), timed)


def phrases(words: Sequence[str], draw: np.random.Generator) -> list[list[str]]:
    """Cut words into phrases: half of the time at a comma where one is near, else anywhere."""
    found, at = list[list[str]](), 0
    while at < len(words):
        count = int(draw.integers(PHRASE[0], PHRASE[1] + 1))
        marks = [
            n for n in range(PHRASE[0], PHRASE[1] + 3) if at + n <= len(words) and words[at + n - 1][-1] in ",;.!?"
        ]
        if marks and draw.random() < 0.5:
            count = marks[0]
        if len(words) - at - count < PHRASE[0]:
            count = len(words) - at
        found.append(list(words[at : at + count]))
        at += count
    return found


def recorded(said: Sequence[Phrase], noise: float | None, draw: np.random.Generator) -> tuple[np.ndarray, list[Timed]]:
    """Phrases with pauses between them and noise over all, (T,) float32, and their words."""
    parts, words, at = list[np.ndarray](), list[Timed](), 0
    loudest = max(float(np.abs(phrase.samples).max()) for phrase in said)
    for phrase in said:
        silence = np.zeros(int(draw.uniform(*PAUSES) * RATE), np.float32)
        at += len(silence)
        words += [(word, start + at / RATE, end + at / RATE) for word, start, end in phrase.words]
        at += len(phrase.samples)
        parts += [silence, phrase.samples * np.float32(0.6 / loudest)]
    clean = np.concatenate([*parts, np.zeros(int(draw.uniform(*PAUSES) * RATE), np.float32)])
    power = float(np.mean(np.concatenate(parts[1::2]) ** 2)) / 10 ** ((noise or 60.0) / 10)
    white = np.fft.rfft(draw.standard_normal(len(clean)))
    pink = np.fft.irfft(white / np.maximum(np.fft.rfftfreq(len(clean), 1 / RATE), 50) ** 0.5, len(clean))
    mixed = clean + pink * np.sqrt(power / np.mean(pink**2))
    return (mixed / max(1.0, float(np.abs(mixed).max()))).astype(np.float32), words


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--kokoro", type=Path, help="folder of Kokoro; without it flite alone")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recordings", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    books = [book_sentences(path) for path in given.text]
    kokoro = TimedKokoro(given.kokoro) if given.kokoro else None
    given.out.mkdir(parents=True, exist_ok=True)
    manifest, count, number = given.out / "manifest.jsonl", 0, 0
    manifest.write_text("", encoding="utf-8")
    while count < given.recordings:
        draw = np.random.default_rng([given.seed, number])
        number += 1
        book = books[int(draw.integers(len(books)))]
        at, most = int(draw.integers(len(book))), int(draw.integers(WORDS[0], WORDS[1] + 1))
        text = " ".join(book[at : at + 3]).replace('"', "")
        if re.search(r"[^A-Za-z ,.?!;:']|(^| )'|'( |$)", text):  # what voices read in more than one way
            continue
        words = text.split()[:most]
        natural = kokoro is not None and draw.random() < 0.6
        names = KOKORO if natural else FLITE
        voice, speed = names[int(draw.integers(len(names)))], float(draw.uniform(0.85, 1.15))
        noise = NOISE[int(draw.integers(len(NOISE)))]
        try:
            parts = phrases(words, draw)
            said = [
                kokoro.phrase(part, voice, speed) if kokoro is not None and natural else flite_phrase(part, voice)
                for part in parts
            ]
        except (ValueError, KeyError, subprocess.SubprocessError) as error:
            print(f"{number}: {error}", file=sys.stderr)
            continue
        samples, timed = recorded(said, noise, draw)
        if len(samples) > MOST * RATE:
            continue
        path = f"timed-{count:04d}.flac"
        soundfile.write(given.out / path, samples, RATE, subtype="PCM_16")
        listed = [[word, round(start, 3), round(end, 3)] for word, start, end in timed]
        row = {"path": path, "text": " ".join(words), "voice": voice, "noise": noise or 60.0, "words": listed}
        with manifest.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        count += 1


if __name__ == "__main__":
    main()
