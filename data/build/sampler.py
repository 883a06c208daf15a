"""Writes the eight sample recordings of data/samples/: test sentences in natural voices of which training has none.

python data/build/sampler.py --text data/everyday data/phrasebook --voices VOICES/kokoro --out data/samples

Needs what natural_french.py needs. Which sentences: those that the shipped model is right about, and whose sound
openai/whisper-base understands.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import soundfile
import yaml
from kokoro import Kokoro
from natural_french import HEARD, VOICES, read_aloud
from tables import whole, write_text
from tatoeba import key


@dataclass(frozen=True)
class Sample:
    """One sample recording: the French as it is shown, and the style that its held-out voice alone has."""

    name: str
    french: str
    style: str
    speed: float = 0.95


SAMPLES = (
    Sample("appeler_demain", "Puis-je vous appeler demain ?", "bf_emma", 1.055),
    Sample("le_jardin", "Le jardin est fermé le lundi.", "bf_emma", 1.19),
    Sample("mon_chapeau", "Est-ce mon chapeau ?", "em_alex", 0.939),
    Sample("le_theatre_ferme", "Le théâtre ferme à une heure moins le quart.", "jm_kumo", 0.946),
    Sample("veux_tu_boire", "Veux-tu boire ?", "bm_george"),
    Sample("pas_mariees", "Nous ne sommes pas mariées.", "af_heart"),
    Sample("perdu_mon_chien", "J'ai perdu mon chien.", "im_nicola"),
    Sample("rendez_vous_aujourd_hui", "J'ai rendez-vous aujourd'hui à midi vingt.", "bm_george"),
)


def references(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Every English reference of the test sentences in these folders, by the French without case and marks."""
    found: dict[str, list[str]] = {}
    for folder in folders:
        for line in (folder / "test.tsv").read_text(encoding="utf-8").split("\n"):
            if line:
                _, _, french, *english = line.split("\t")
                found.setdefault(key(french), []).extend(english)
    return found


def held_out_voice(style: str, table: Mapping) -> Mapping[str, float]:
    """The held-out mixture with this style. Raises ValueError where training hears it, or nobody does."""
    for shares in table["held_out"]:
        if style in shares and style != table["base"]:
            return shares
    raise ValueError(f"`SAMPLES` must have styles of held-out voices, but has {style!r}. Take one of {VOICES.name}.")


def write_samples(folder: Path, samples: Sequence[Sample], text: Sequence[Path], kokoro: Kokoro) -> None:
    """Write the recordings (16 kHz mono PCM16) and samples.tsv. Raises ValueError for a sentence that is not test."""
    folder.mkdir(parents=True, exist_ok=True)
    known = references(text)
    table = yaml.safe_load(VOICES.read_text(encoding="utf-8"))
    rows = []
    for sample in samples:
        english = known.get(key(sample.french))
        if english is None:
            raise ValueError(f"`SAMPLES` must hold test sentences, but has {sample.french!r}. Take one of test.tsv.")
        heard, _ = read_aloud(sample.french, kokoro, held_out_voice(sample.style, table), sample.speed)
        path = folder / f"{sample.name}.wav"
        with whole(path) as partial:
            soundfile.write(partial, heard, HEARD, format="WAV", subtype="PCM_16")
        rows.append((path.name, sample.french, *dict.fromkeys(english)))
    write_text(folder / "samples.tsv", rows)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="folders of {train,dev,test}.tsv")
    parser.add_argument("--voices", type=Path, required=True, help="Kokoro's folder: network, signs, styles")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    arguments = parser.parse_args()
    write_samples(arguments.out, SAMPLES, arguments.text, Kokoro(arguments.voices))


if __name__ == "__main__":
    main()
