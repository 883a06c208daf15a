"""Everyday French and English from Tatoeba's pairs: cleaned, grouped and split by what the sentences say.

python data/build/tatoeba.py --pairs fra-eng.zip --out data/everyday    # seconds; the same file gives the same tables
python data/build/tatoeba.py --pairs data/build/sentences.tsv --words 100000 --out data/written    # this project's own

The pairs are those of manythings.org/anki (fra-eng.zip: English, tab, French), CC BY 2.0. The folder gets
{train,dev,test}.tsv (id, group, French, every English reference), words.tsv (English words of the training pairs with
their counts, commonest first) and NOTICE.
"""

import argparse
import hashlib
import io
import re
import sys
import unicodedata
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tables import write_text

WORDS = 8000  # English words that training may say
TEST, DEV = (0, 1), (2,)  # SHA-1 of a group's smallest English sentence, mod 100
NOTICE = """\
The sentences are from the Tatoeba project (https://tatoeba.org), by way of https://www.manythings.org/anki.
Licence: Creative Commons Attribution 2.0 (https://creativecommons.org/licenses/by/2.0).
Attribution: www.manythings.org/anki and tatoeba.org.
Changed: quotes, apostrophes and spaces are written in one way, pairs are grouped by French sentence, and training pairs
with rare English words are left out.
"""

_SAME = str.maketrans({"’": "'", "‘": "'", "`": "'", "´": "'", "“": '"', "”": '"', "«": '"', "»": '"'})
_SAME |= str.maketrans({"–": "-", "—": "-", "‐": "-", "‑": "-", "…": "..."})
_SOFT = str.maketrans("", "", "\u00ad\u200b\u200c\u200d\ufeff")
_MARK = re.compile(r"[^\w\s]")
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_FRENCH = re.compile(r"[A-Za-zÀ-ÖØ-öø-ÿŒœ0-9 .,;:!?'\"()%€$°/-]+")
_ENGLISH = re.compile(r"[A-Za-zÀ-ÖØ-öø-ÿ0-9 .,;:!?'\"()%€$£°/-]+")


@dataclass(frozen=True)
class Row:
    """One French sentence with its English references, the first pair's first."""

    group: str
    french: str
    english: tuple[str, ...]
    split: str

    @property
    def name(self) -> str:
        return hashlib.sha1(self.french.encode(), usedforsecurity=False).hexdigest()[:12]


def clean(text: str) -> str:
    """One way to write quotes, apostrophes, dashes and spaces; no space before a mark."""
    text = unicodedata.normalize("NFC", text).translate(_SOFT).translate(_SAME)
    text = re.sub(r'"\s*([^"]*?)\s*"', r'"\1"', " ".join(text.split()))
    return re.sub(r"\s+([.,;:!?])", r"\1", text)


def key(text: str) -> str:
    """What makes two sentences the same: lower case, no punctuation."""
    return " ".join(_MARK.sub("", text.lower()).split())


def english_words(text: str) -> list[str]:
    """The words of an English sentence, in lower case; "don't" is one."""
    return _WORD.findall(text.lower())


def read_pairs(path: Path) -> Iterator[tuple[str, str]]:
    """(French, English), cleaned, of a zip that holds fra.txt, or of such a text itself. Lines that are not of both
    languages' letters are left out."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            name = next(
                (name for name in archive.namelist() if name.endswith("fra.txt") and "MACOSX" not in name), None
            )
            if name is None:
                sys.exit(f"`--pairs` must hold fra.txt, but {path} does not. Take fra-eng.zip of manythings.org/anki.")
            text = io.TextIOWrapper(archive.open(name), encoding="utf-8").read()
    else:
        text = path.read_text(encoding="utf-8")
    for line in text.split("\n"):  # some sentences hold other signs that Python takes for ends of lines
        english, _, rest = line.partition("\t")
        french, english = clean(rest.partition("\t")[0]), clean(english)
        if _FRENCH.fullmatch(french) and _ENGLISH.fullmatch(english) and key(french) and key(english):
            yield french, english


def groups_of(pairs: Sequence[tuple[str, str]]) -> list[int]:
    """The group of each pair: pairs that share a French or an English sentence, directly or by way of others."""
    parent: list[int] = []

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    nodes: dict[tuple[str, str], int] = {}
    places = []
    for french, english in pairs:
        ends = []
        for sentence in (("fr", key(french)), ("en", key(english))):
            if sentence not in nodes:
                nodes[sentence] = len(parent)
                parent.append(len(parent))
            ends.append(nodes[sentence])
        parent[root(ends[0])] = root(ends[1])
        places.append(ends[1])
    return [root(place) for place in places]


def split_of(smallest: str) -> str:
    """The split of a group by its smallest English sentence (its key)."""
    number = int.from_bytes(hashlib.sha1(smallest.encode(), usedforsecurity=False).digest()) % 100
    return "test" if number in TEST else "dev" if number in DEV else "train"


def rows_of(pairs: Iterable[tuple[str, str]]) -> list[Row]:
    """One row a French sentence, in the order of the pairs."""
    distinct = list(dict.fromkeys(pairs))
    groups = groups_of(distinct)
    smallest: dict[int, str] = {}
    for (_, english), group in zip(distinct, groups, strict=True):
        said = key(english)
        smallest[group] = min(smallest.get(group, said), said)
    names = {
        group: hashlib.sha1(said.encode(), usedforsecurity=False).hexdigest()[:12] for group, said in smallest.items()
    }
    splits = {group: split_of(said) for group, said in smallest.items()}
    references: dict[str, list[str]] = defaultdict(list)
    place: dict[str, int] = {}
    for (french, english), group in zip(distinct, groups, strict=True):
        references[french].append(english)
        place[french] = group
    return [Row(names[place[fr]], fr, tuple(english), splits[place[fr]]) for fr, english in references.items()]


def commonest(rows: Iterable[Row], count: int) -> list[tuple[str, int]]:
    """The `count` commonest English words of the training rows; of equally common ones the first in the alphabet."""
    counts = Counter(
        word for row in rows if row.split == "train" for text in row.english for word in english_words(text)
    )
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:count]


def within(row: Row, words: set[str]) -> Row | None:
    """The row with those references that `words` can say; None if there are none."""
    english = tuple(text for text in row.english if words.issuperset(english_words(text)))
    return Row(row.group, row.french, english, row.split) if english else None


def build(pairs: Path, out: Path, count: int) -> None:
    """Write the folder and print what it holds. Dev and test keep every word: they measure what people say."""
    rows = rows_of(read_pairs(pairs))
    words = commonest(rows, count)
    known = {word for word, _ in words}
    for split in ("train", "dev", "test"):
        of_split = [row for row in rows if row.split == split]
        kept = [row for row in (within(row, known) for row in of_split) if row] if split == "train" else of_split
        write_text(out / f"{split}.tsv", [(row.name, row.group, row.french, *row.english) for row in kept])
        said = sum(len(row.english) for row in kept)
        whole = sum(len(found.english) for row in of_split if (found := within(row, known)))
        total = sum(len(row.english) for row in of_split)
        print(
            f"{split}: {len(kept)} French sentences, {said} pairs, {len({row.group for row in kept})} groups; "
            f"{whole / max(total, 1):.1%} of the pairs have common words alone"
        )
    write_text(out / "words.tsv", [(word, str(number)) for word, number in words])
    if zipfile.is_zipfile(pairs) or pairs.name == "fra.txt":
        (out / "NOTICE").write_text(NOTICE, encoding="utf-8")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, required=True, help="fra-eng.zip, or the fra.txt that it holds")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--words", type=int, default=WORDS, help=f"English words of training (default {WORDS})")
    arguments = parser.parse_args()
    if not arguments.pairs.is_file():
        parser.error(
            f"`--pairs` must be a file, but {arguments.pairs} is not. See data/README.md for where it is from."
        )
    build(arguments.pairs, arguments.out, arguments.words)


if __name__ == "__main__":
    main()
