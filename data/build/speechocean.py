"""Lists speechocean762's recordings of 250 people reading English, in turns of a few sentences a speaker.

python data/build/speechocean.py --corpus speechocean762     # seconds; writes speechocean762/manifest.tsv

The corpus (github.com/jimbozhang/speechocean762, free for commercial and other use) is of speakers of Mandarin, half of
them children, six hours in all. Whoever takes the first hours of the list (`hours` of a recipe) hears all speakers.
One speaker in twenty is kept to develop on. Texts are written as sentences: the corpus has capitals alone. Figures are
left out, since a Whisper writes them as numbers.
"""

import argparse
from collections import defaultdict
from pathlib import Path

from splits import share
from tables import write_text

TURN = 5  # sentences of a speaker, one after another
DEV = 0.05  # of the speakers
FIGURES = {"ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE"}


def sentence(capitals: str) -> str:
    """A text in capitals as a sentence."""
    words = [word.capitalize() if word.split("'")[0] == "I" else word.lower() for word in capitals.split()]
    text = " ".join(words)
    return f"{text[:1].upper()}{text[1:]}."


def rows(corpus: Path) -> list[tuple[str, str, str, str]]:
    """(path, text, split, speaker) of every recording that is there."""
    spoken: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for part in ("train", "test"):
        lines = {name: dict(_pairs(corpus / part / name)) for name in ("text", "wav.scp", "utt2spk")}
        for utterance, text in sorted(lines["text"].items()):
            path = lines["wav.scp"][utterance]
            if (corpus / path).is_file() and not FIGURES.issuperset(text.split()):
                spoken[lines["utt2spk"][utterance]].append((path, sentence(text)))
    speakers = sorted(spoken, key=lambda speaker: share("speechocean", speaker))
    found: list[tuple[str, str, str, str]] = []
    for begin in range(0, max(map(len, spoken.values()), default=0), TURN):
        for speaker in speakers:
            split = "dev" if share("speechocean", speaker) < DEV else "train"
            found += [(path, text, split, speaker) for path, text in spoken[speaker][begin : begin + TURN]]
    return found


def _pairs(path: Path) -> list[tuple[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.replace("\t", " ").partition(" ") for line in lines)]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    given = parser.parse_args()
    found = rows(given.corpus)
    write_text(given.corpus / "manifest.tsv", [("path", "text", "split", "speaker"), *found])
    print(f"{len(found)} recordings")


if __name__ == "__main__":
    main()
