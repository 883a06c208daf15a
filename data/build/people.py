"""Lists recordings of people who speak English as a manifest: path, text, split. No sound is copied.

python data/build/people.py --speechocean CLONE --orders CLONE --out data/people.tsv

`--speechocean` is a clone of github.com/jimbozhang/speechocean762 (people who learn English read sentences; free for
any use by its README); `--orders` of github.com/Picovoice/speech-to-intent-benchmark (people who order coffee;
Apache-2.0). Left out are rows of figures and three of four children. The words of the orders are not published: a
drafter learns the model's own transcripts, and the text here only makes these cheap.
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

Row = tuple[Path, str, str]


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
                yield corpus / paths[name], texts[name].capitalize(), split_of(speaker)


def orders(corpus: Path) -> Iterator[Row]:
    """The recordings of the benchmark of intents."""
    for path in sorted((corpus / "data" / "speech" / "clean").glob("*.wav")):
        yield path, ORDER, split_of(path.stem)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speechocean", type=Path, help="the clone's folder")
    parser.add_argument("--orders", type=Path, help="the clone's folder")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    found = [learners(given.speechocean)] if given.speechocean else []
    found += [orders(given.orders)] if given.orders else []
    rows = [(str(path.resolve()), *rest) for each in found for path, *rest in each]
    if not rows:
        parser.error("no recordings were found: name the clones' folders.")
    write_text(given.out, [("path", "text", "split"), *rows])
    print(f"{len(rows)} recordings in {given.out}")


if __name__ == "__main__":
    main()
