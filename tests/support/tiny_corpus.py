"""A corpus of a dozen rows in the layout of CVSS and Common Voice: buzzes for French, tones for English phones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

from tests.conftest import RATE, buzz

HEADER = ["client_id", "path", "sentence", "up_votes", "down_votes", "age", "gender", "accents", "locale", "segment"]
LEXICON = {"Hello": "hh ax l ow", "there": "dh eh r", "low": "l ow", "Please": "p l iy z", "hold": "hh ow l d"}
SENTENCES = {  # French sentence -> its English translations
    "Bonjour à tous !": ["Hello there.", "Hello."],
    "C'est bas.": ["There, low.", "Low there."],
    "Un bas, s'il vous plaît.": ["Please hold low."],
    "Allô ?": ["Hello, hold."],
}


@dataclass(frozen=True)
class TinyCorpus:
    """The paths of a corpus."""

    root: Path

    @property
    def common_voice(self) -> Path:
        return self.root / "cv" / "fr"

    @property
    def cvss(self) -> Path:
        return self.root / "cvss_c"

    @property
    def lexicon(self) -> Path:
        return self.root / "lexicon.tsv"


def phones_of(translation: str) -> list[str]:
    """Return the phones of an English text, with a pause at both ends and at each comma."""
    phones = ["pau"]
    for word in translation.split():
        phones += LEXICON[{w.lower(): w for w in LEXICON}[word.strip(".,?").lower()]].split()
        phones += ["pau"] if word.endswith(",") else []
    return [*phones, "pau"]


def speak(phones: list[str]) -> tuple[np.ndarray, str]:
    """Make samples (T,) at 16 kHz with a tone for each phone. Returns them and the line for the alignment's table."""
    names = sorted({phone for line in LEXICON.values() for phone in line.split()})
    pieces, ends, seconds = [], [], 0.0
    for place, phone in enumerate(phones):
        length = 0.08 + 0.01 * (place % 3)
        time = np.arange(round(length * RATE)) / RATE
        loud = 0.0 if phone == "pau" else 0.3
        pitch = 100.0 + 10 * names.index(phone) if phone in names else 100.0
        pieces.append(loud * (np.sin(2 * np.pi * pitch * time) + 0.3 * np.sin(2 * np.pi * 5 * pitch * time)) / 2)
        seconds += len(time) / RATE
        ends.append(f"{phone}:{seconds:.3f}")
    return np.concatenate(pieces).astype(np.float32), " ".join(ends)


def write_corpus(root: Path, recordings: int = 3, dev: int = 3) -> TinyCorpus:
    """Write the corpus: `recordings` recordings of each of four sentences in train, `dev` rows in dev."""
    corpus = TinyCorpus(root)
    (corpus.common_voice / "clips").mkdir(parents=True)
    corpus.root.joinpath("lexicon.tsv").write_text("".join(f"{w}\t{p}\n" for w, p in LEXICON.items()), "utf-8")
    pairs = list(SENTENCES.items())
    rows = {
        "train": [pairs[number % 4] for number in range(4 * recordings)],
        "dev": [pairs[number % 4] for number in range(dev)],
    }
    number = 0
    for split, sentences in rows.items():
        (corpus.cvss / split).mkdir(parents=True)
        voice, tables = [HEADER], {"": [], "alignment": [], "references": []}
        for french, renderings in sentences:
            number += 1
            name = f"common_voice_fr_{number:08d}.mp3"
            english = renderings[(number // 4) % len(renderings)]
            sound = buzz(1.1 + 0.13 * (number % 5), seed=number)
            soundfile.write(corpus.common_voice / "clips" / name, sound, RATE, format="MP3")
            samples, alignment = speak(phones_of(english))
            soundfile.write(corpus.cvss / split / f"{name}.wav", samples, RATE, subtype="PCM_16")
            voice.append([f"voice{number % 3}", name, french, "2", "0", "", "", "", "fr", ""])
            tables[""].append([name, english])
            tables["alignment"].append([name, alignment])
            tables["references"].append([name, *renderings])
        write_table(corpus.common_voice / f"{split}.tsv", voice)
        for kind, lines in tables.items():
            write_table(corpus.cvss / f"{split}{'.' if kind else ''}{kind}.tsv", lines)
    return corpus


def write_table(path: Path, lines: list[list[str]]) -> None:
    path.write_text("".join("\t".join(line) + "\n" for line in lines), encoding="utf-8")


def read_table(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
