"""Lists recordings of people who speak English: a manifest of path, text and split in the corpus's own folder.

python data/build/people.py CLONE ...

A CLONE is one of github.com/jimbozhang/speechocean762 (people who learn English read sentences; free for any use by its
README) or of github.com/Picovoice/speech-to-intent-benchmark (people who order coffee; Apache-2.0). Left out are rows
of figures and most children. The words of the orders are not published: a drafter learns the model's own
transcripts, and the text here only makes these cheap. Writes CLONE/manifest.tsv.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from splits import share
from tables import write_text

FIGURES = frozenset(["ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE", "OH"])
CHILD, CHILDREN = 13, 0.25  # years below which a speaker is a child; the share of the children that is taken
DEV = 0.03  # share of the speakers, or of the orders, that is kept to develop on
ORDER = "Can you make me a cup of coffee, please?"

Row = tuple[str, str, str]


def table(path: Path) -> dict[str, str]:
    """A file of Kaldi's: first word of each line -> the rest."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {name: rest.strip() for name, rest in (line.split(maxsplit=1) for line in lines if line.strip())}


def split_of(name: str) -> str:
    """The split of a speaker or of an order."""
    return "dev" if share("people", name) < DEV else "train"


def learners(corpus: Path) -> Iterator[Row]:
    """The recordings of speechocean762, speaker by speaker."""
    for part in ("train", "test"):
        texts, paths, speakers, ages = (table(corpus / part / n) for n in ("text", "wav.scp", "utt2spk", "spk2age"))
        for name in sorted(texts, key=lambda name: (speakers[name], name)):
            words, speaker = texts[name].split(), speakers[name]
            child = int(ages[speaker]) < CHILD
            if child and share("children", speaker) >= CHILDREN:
                continue
            if sum(word in FIGURES for word in words) <= len(words) / 2:
                yield paths[name], texts[name].capitalize(), split_of(speaker)


def orders(corpus: Path) -> Iterator[Row]:
    """The recordings of the benchmark of intents."""
    for path in sorted((corpus / "data" / "speech" / "clean").glob("*.wav")):
        yield str(path.relative_to(corpus)), ORDER, split_of(path.stem)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", type=Path, nargs="+", metavar="CLONE")
    for clone in parser.parse_args().clones:
        rows = [*(learners if (clone / "train" / "wav.scp").is_file() else orders)(clone)]
        if not rows:
            parser.error(f"CLONE must be the folder of one of the two corpora, but {clone} has no recordings.")
        write_text(clone / "manifest.tsv", [("path", "text", "split"), *rows])
        print(f"{len(rows)} recordings in {clone / 'manifest.tsv'}")


if __name__ == "__main__":
    main()
