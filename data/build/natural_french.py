"""Reads French sentences in natural voices: 16 kHz flac and a manifest, resumable after any kill.

python data/build/natural_french.py --text data/everyday data/phrasebook --shares 0.85 0.15 --voices VOICES/kokoro \\
    --out data/natural --recordings 40000

`--text` are folders of {train,dev,test}.tsv (id, group, French, English references: tatoeba.py, phrasebook.py --pairs).
Test sentences have voices that no training recording has (french_voices.yaml); each tenth recording is one of dev or
test until they are done. Needs espeak-ng, onnxruntime, numpy, soundfile, PyYAML; one thread. Everything about a
recording follows from its sentence, so that the order of work and interruptions change nothing.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
import soundfile
import voices
import yaml
from kokoro import RATE, Kokoro, phones_of
from splits import share
from tables import journal, whole
from tatoeba import key

HEARD = 16_000  # Hz
SPEEDS = (0.85, 1.2)
WORDS, SIGNS = (1, 20), 120  # of a sentence that is read
PACE = (0.025, 0.3)  # seconds a phone: outside of them something went wrong
MANIFEST = "manifest.tsv"
HEADER = ("id", "path", "split", "speaker", "speed", "seconds", "text")
_READABLE = re.compile(r"[^\W\d_][^\d%€$°/\"()]*")
VOICES = Path(__file__).with_name("french_voices.yaml")


@dataclass(frozen=True)
class Sentence:
    """What is read, and for which split."""

    name: str  # folder of text and id
    split: str
    french: str


def read_text(folder: Path, split: str) -> list[Sentence]:
    """The sentences of a folder that can be read aloud: no figures, few words; the short ones tend to come first."""
    rows = (line.split("\t") for line in (folder / f"{split}.tsv").read_text(encoding="utf-8").split("\n") if line)
    sentences = [Sentence(f"{folder.name}-{row[0]}", split, row[2]) for row in rows]
    fit = [
        sentence
        for sentence in sentences
        if WORDS[0] <= len(sentence.french.split()) <= WORDS[1]
        and len(sentence.french) <= SIGNS
        and _READABLE.fullmatch(sentence.french)
    ]
    # An exponential race: a sentence of twice as many words is as likely to come half as early.
    return sorted(fit, key=lambda s: -math.log(share("order", s.name) or 2**-64) * len(s.french.split()))


def interleaved(lists: Sequence[Sequence[Sentence]], shares: Sequence[float]) -> Iterator[Sentence]:
    """All sentences, each list at its share for as long as it lasts."""
    taken = [0] * len(lists)
    while any(count < len(sentences) for count, sentences in zip(taken, lists, strict=True)):
        left = [i for i, sentences in enumerate(lists) if taken[i] < len(sentences)]
        chosen = min(left, key=lambda i: (taken[i] + 1) / shares[i])
        yield lists[chosen][taken[chosen]]
        taken[chosen] += 1


def plan(folders: Sequence[Path], shares: Sequence[float], recordings: int, held: Mapping[str, int]) -> list[Sentence]:
    """At most `recordings` training sentences, none that a folder holds back; after each ninth one of dev or test,
    until there are `held` of each."""

    def of_split(split: str, count: int) -> list[Sentence]:
        ordered = interleaved([read_text(folder, split) for folder in folders], shares)
        return [sentence for sentence, _ in zip(ordered, range(count), strict=False)]

    held_back = {key(s.french) for split in held for folder in folders for s in read_text(folder, split)}
    train = [s for s in of_split("train", recordings) if key(s.french) not in held_back]
    both = zip_longest(*(of_split(split, count) for split, count in held.items()))
    tests = [sentence for row in both for sentence in row if sentence]
    planned: list[Sentence] = []
    for number, sentence in enumerate(train):
        planned.append(sentence)
        if number % 9 == 8 and tests:
            planned.append(tests.pop(0))
    return planned + tests


def voice_of(sentence: Sentence, table: Mapping) -> tuple[dict[str, float], float]:
    """The styles' shares and the speed of a sentence."""
    draw = [share("voice", sentence.name, number) for number in range(4)]
    speed = round(SPEEDS[0] + draw[0] * (SPEEDS[1] - SPEEDS[0]), 3)
    if sentence.split == "test":
        return dict(table["held_out"][int(draw[1] * len(table["held_out"]))]), speed
    if draw[1] < table["alone"]:
        return {table["base"]: 1.0}, speed
    others = list(table["train"])
    other = others[int(draw[2] * len(others))]
    part = round(table["least"] + draw[3] * (table["train"][other] - table["least"]), 2)
    return {table["base"]: round(1 - part, 2), other: part}, speed


def trim(samples: np.ndarray, keep: float = 0.08) -> np.ndarray:
    """24 kHz samples without the silence at both ends, but for `keep` seconds; what is 40 dB below speech is silent."""
    step = RATE // 100
    level = np.sqrt(np.mean(np.square(samples[: len(samples) // step * step].reshape(-1, step)), axis=1))
    loud = np.flatnonzero(level > np.quantile(level, 0.95) * 0.01)
    margin = int(keep * RATE)
    return samples[max(int(loud[0]) * step - margin, 0) : (int(loud[-1]) + 1) * step + margin]


def read_aloud(french: str, kokoro: Kokoro, shares: Mapping[str, float], speed: float) -> tuple[np.ndarray, str]:
    """16 kHz samples and the voice's name. Raises ValueError when what is heard cannot be that sentence."""
    phones = phones_of(french)
    samples = kokoro.speak(phones, shares, speed)
    peak = float(np.abs(samples).max(initial=0))
    if not np.isfinite(samples).all() or not 0.02 < peak < 8:
        raise ValueError(f"peak {peak}")
    samples = trim(samples)
    pace = len(samples) / RATE / max(sum(sign.isalpha() for sign in phones), 1)
    if not PACE[0] < pace < PACE[1]:
        raise ValueError(f"{pace:.3f} seconds a phone")
    heard = voices.resample(samples, RATE, HEARD)
    name = "+".join(f"{style}*{part:g}" for style, part in shares.items())
    return (heard / np.abs(heard).max() * 0.7).astype(np.float32), f"kokoro:{name}"


def save_recording(path: Path, samples: np.ndarray) -> float:
    """Write 16 kHz samples as flac, whole or not at all; gives their seconds."""
    with whole(path) as partial:
        soundfile.write(partial, samples, HEARD, format="FLAC", subtype="PCM_16")
    return len(samples) / HEARD


def build(planned: Sequence[Sentence], kokoro: Kokoro, table: Mapping, out: Path) -> list[str]:
    """Read what the manifest lacks; gives what failed, by name. The manifest grows by a line after each file."""
    failed = []
    with journal(out / MANIFEST, HEADER) as (done, add):
        for sentence in planned:
            if sentence.name in done:
                continue
            shares, speed = voice_of(sentence, table)
            try:
                samples, speaker = read_aloud(sentence.french, kokoro, shares, speed)
            except Exception as error:  # one bad sentence must not end a build of hours: it is named at the end
                failed.append(f"{sentence.name} {sentence.french}: {error}")
                continue
            path = Path(sentence.split) / sentence.name[-2:] / f"{sentence.name}.flac"
            seconds = save_recording(out / path, samples)
            add(sentence.name, str(path), sentence.split, speaker, f"{speed:g}", f"{seconds:.3f}", sentence.french)
    return failed


def main() -> int:
    """Exit code: 0, 1 when a sentence failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="folders of {train,dev,test}.tsv")
    parser.add_argument("--shares", type=float, nargs="+", help="of each folder (default: equal)")
    parser.add_argument("--voices", type=Path, required=True, help="Kokoro's folder: network, signs, styles")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write, or to go on with")
    parser.add_argument("--recordings", type=int, default=40_000, help="training sentences (default 40000)")
    parser.add_argument("--held", type=int, default=600, help="sentences of dev, and of test (default 600)")
    arguments = parser.parse_args()
    shares = arguments.shares or [1.0] * len(arguments.text)
    if len(shares) != len(arguments.text) or min(shares) <= 0:
        parser.error(f"`--shares` must be a positive number for each folder of `--text`, but is {shares}. See --help.")
    planned = plan(arguments.text, shares, arguments.recordings, {"dev": arguments.held, "test": arguments.held})
    table = yaml.safe_load(VOICES.read_text(encoding="utf-8"))
    failed = build(planned, Kokoro(arguments.voices), table, arguments.out)
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
