"""Builds the French-English phrasebook corpus: text from a grammar, French audio by espeak-ng, English audio by flite.

python data/build/phrasebook.py --text-only 20 --seed 1       # test sentences and their references, as TSV
python data/build/phrasebook.py --out data/corpus             # the whole corpus, resumable
python data/build/phrasebook.py --pairs data/phrasebook       # all sentences, in the layout of tatoeba.py
python data/build/phrasebook.py --pairs data/home --patterns home    # what one says to a house, the same way
python data/build/phrasebook.py --pairs data/assistant --patterns assistant    # more of it, to one's tu and vous
python data/build/phrasebook.py --pairs data/records --patterns records    # encyclopaedias, addresses, news, debates
"""

import argparse
import hashlib
import re
import sys
from collections import Counter
from pathlib import Path

from splits import Sentence, in_order, normalise, read_sentences, words
from tables import write_text

FOLDERS = ("patterns", "home", "assistant", "records")  # of the grammar


def _counts(sentences: list[Sentence]) -> list[tuple[str, int]]:
    """What --stats prints."""
    patterns = {sentence.pattern.name: sentence.pattern for sentence in sentences}
    forms = {word for sentence in sentences for word in words(sentence.french)}
    splits = Counter(sentence.split for sentence in sentences)
    return [
        ("French word forms", len(forms)),
        ("French word forms, number words with hyphens left out", sum("-" not in form for form in forms)),
        ("sentence patterns with slots", sum(bool(pattern.slots) for pattern in patterns.values())),
        ("fixed phrases", sum(not pattern.slots for pattern in patterns.values())),
        ("topics", len({pattern.topic for pattern in patterns.values()})),
        ("distinct French sentences", len(sentences)),
        *((f"of them {split}", splits[split]) for split in ("train", "dev", "test")),
    ]


def print_text(count: int, seed: int) -> int:
    """Print `count` test sentences: French, then every accepted reference, separated by tabs."""
    tests = [sentence for sentence in read_sentences() if sentence.split == "test"]
    if not 0 < count <= len(tests):
        print(f"`--text-only` must be 1 to {len(tests)}, but is {count}. Ask for fewer sentences.", file=sys.stderr)
        return 2
    for sentence in in_order(tests, seed)[:count]:
        print(sentence.french, *sentence.renderings, sep="\t")
    return 0


def write_pairs(folder: Path, sentences: list[Sentence]) -> None:
    """{train,dev,test}.tsv: id, group (its own), French, every accepted English reference."""
    for split in ("train", "dev", "test"):
        rows = []
        for sentence in in_order([s for s in sentences if s.split == split], seed=0):
            name = hashlib.sha1(sentence.french.encode(), usedforsecurity=False).hexdigest()[:12]
            rows.append((name, name, sentence.french, *sentence.renderings))
        write_text(folder / f"{split}.tsv", rows)


def without(sentences: list[Sentence], tables: list[Path]) -> list[Sentence]:
    """The sentences of which no table (tab-separated texts) holds the French or an English reference."""
    known = {normalise(text) for table in tables for text in re.split("[\t\n]", table.read_text(encoding="utf-8"))}
    return [s for s in sentences if known.isdisjoint(map(normalise, (s.french, *s.renderings)))]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="build the corpus in this folder (or go on with one begun there)")
    parser.add_argument("--sentences", type=int, default=12000, help="training sentences (default 12000)")
    parser.add_argument("--recordings", type=int, default=2, help="recordings of each training sentence (default 2)")
    parser.add_argument("--dev", type=int, default=300, help="dev sentences (default 300)")
    parser.add_argument(
        "--test", type=int, default=600, help="test sentences, for test and for test_voices (default 600)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="choice of sentences and voices; never of the split (default 0)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--stats", action="store_true", help="print counts of the grammar (and of the corpus built)")
    parser.add_argument(
        "--text-only", type=int, metavar="N", help="print N test sentences with all renderings, nothing else"
    )
    parser.add_argument("--pairs", type=Path, help="write every sentence and its references to this folder, as tables")
    parser.add_argument("--without", type=Path, nargs="+", default=[], help="tables of texts that no pair may hold")
    parser.add_argument("--patterns", default="patterns", choices=FOLDERS, help="folder of the grammar")
    return parser.parse_args()


def main() -> int:
    """Exit code: 0, 1 when a synthesis failed, 2 for a wrong argument."""
    arguments = _arguments()
    if arguments.text_only is not None:
        return print_text(arguments.text_only, arguments.seed)
    if not (arguments.out or arguments.pairs or arguments.stats):
        print(
            "`--out`, `--pairs`, `--text-only` or `--stats` must be given, but none is. See --help.",
            file=sys.stderr,
        )
        return 2
    sentences = read_sentences(arguments.patterns)
    status = 0
    if arguments.stats:
        for name, count in _counts(sentences):
            print(f"{name}: {count}")
    if arguments.pairs:
        write_pairs(arguments.pairs, without(sentences, arguments.without))
    if arguments.out:
        from recording import Plan, build

        plan = Plan(arguments.sentences, arguments.recordings, arguments.dev, arguments.test, arguments.seed)
        status = build(arguments.out, plan, sentences, arguments.jobs, stats=arguments.stats)
    return status


if __name__ == "__main__":
    sys.exit(main())
