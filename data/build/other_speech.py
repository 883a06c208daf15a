"""Reads sentences that are no French aloud, for the fit and the proof of a translator's confidence.

python data/build/other_speech.py --voices VOICES/kokoro --out data/other_speech    # 96 recordings, two minutes

16 kHz flac and manifest.tsv (path, split, speaker, chapter, text; the chapter is the language), resumable. Languages,
voices and sentences are those of other_speech.yaml. Needs espeak-ng, onnxruntime, numpy, soundfile, PyYAML; without
`--voices` espeak-ng speaks what natural voices would.
"""

import argparse
import io
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import voices
import yaml
from kokoro import RATE, Kokoro, phones_of
from natural_french import HEARD, MANIFEST, SPEEDS, save_recording, trim
from splits import share
from tables import journal

HEADER = ("id", "path", "split", "speaker", "chapter", "text")
WORDS_A_MINUTE = (130, 190)  # of espeak-ng
TABLE = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class Sentence:
    """What is read, how, and for which split."""

    name: str
    language: str
    split: str
    espeak: str
    style: str | None  # of Kokoro
    text: str


def plan(table: Mapping[str, Mapping], natural: bool) -> Iterator[Sentence]:
    """All sentences of the table, the styles of a language in turn. natural: there are natural voices."""
    for language, entry in table.items():
        styles = entry.get("kokoro", []) if natural else []
        for number, text in enumerate(entry["sentences"]):
            style = styles[number % len(styles)] if styles else None
            name = f"{language.lower().replace(' ', '_')}-{number:02}"
            yield Sentence(name, language, entry["split"], entry["espeak"], style, text)


def read_aloud(sentence: Sentence, kokoro: Kokoro | None) -> tuple[np.ndarray, str]:
    """16 kHz samples (T,) and the voice's name."""
    draw = share("pace", sentence.name)
    if sentence.style is None or kokoro is None:
        pace = round(WORDS_A_MINUTE[0] + draw * (WORDS_A_MINUTE[1] - WORDS_A_MINUTE[0]))
        command = ["espeak-ng", "--stdout", "-v", sentence.espeak, "-s", str(pace), "--", sentence.text]
        sound = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
        samples, rate = soundfile.read(io.BytesIO(sound), dtype="float32")
        name = f"espeak-{sentence.espeak}"
    else:
        speed = SPEEDS[0] + draw * (SPEEDS[1] - SPEEDS[0])
        samples = trim(kokoro.speak(phones_of(sentence.text, sentence.espeak), {sentence.style: 1.0}, speed))
        rate, name = RATE, f"kokoro:{sentence.style}"
    heard = voices.resample(samples, rate, HEARD)
    return (heard / np.abs(heard).max() * 0.7).astype(np.float32), name


def build(planned: Iterator[Sentence], kokoro: Kokoro | None, out: Path) -> list[str]:
    """Read what the manifest lacks; gives what failed, by name."""
    failed = []
    with journal(out / MANIFEST, HEADER) as (done, add):
        for sentence in planned:
            if sentence.name in done:
                continue
            try:
                samples, speaker = read_aloud(sentence, kokoro)
            except Exception as error:  # named at the end: the others are read
                failed.append(f"{sentence.name} {sentence.text}: {error}")
                continue
            path = Path(sentence.split) / f"{sentence.name}.flac"
            save_recording(out / path, samples)
            add(sentence.name, str(path), sentence.split, speaker, sentence.language, sentence.text)
    return failed


def main() -> int:
    """Exit code: 0, 1 when a sentence failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--voices", type=Path, help="Kokoro's folder: network, signs, styles")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write, or to go on with")
    given = parser.parse_args()
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    kokoro = None if given.voices is None else Kokoro(given.voices)
    failed = build(plan(table, kokoro is not None), kokoro, given.out)
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
