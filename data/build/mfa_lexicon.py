"""Pronunciation dictionaries of the Montreal Forced Aligner to the lexicon that export reads: lexicon.tsv.

    mfa model download dictionary english_us_arpa        # comes to lie in MFA's folder, as english_us_arpa.dict
    python data/build/mfa_lexicon.py --dictionary english_us_arpa.dict --transcripts data/cvss_c/train.tsv \\
        --lexicon data/cvss_c/lexicon.tsv

`--transcripts` keeps the words of this table alone. Export needs all of them: words that no dictionary has are written
to lexicon.tsv.missing, one a line, and the exit code is 1. A model of spelling gives them phones; then run it again
with both dictionaries:

    mfa model download g2p english_us_arpa
    mfa g2p data/cvss_c/lexicon.tsv.missing english_us_arpa data/cvss_c/missing.dict
    python data/build/mfa_lexicon.py --dictionary english_us_arpa.dict --dictionary data/cvss_c/missing.dict ...

A line of a dictionary is word, tab, probabilities (if any), tab, phones; of the lexicon, word in lower case, tab and
phones. A word's pronunciations come most probable first, earlier dictionaries before later ones. Phones are spelled as
`mfa_alignment.py` spells them. The words of a sentence are those that mmdec finds: it must be installed.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from pathlib import Path

from tables import write_text

from mmdec.phonetics.decoder import is_mark, tokenize
from mmdec.phonetics.lexicon import pronounce

Lexicon = dict[str, list[tuple[str, ...]]]
_NUMBER = re.compile(r"\d*\.?\d+(e[+-]?\d+)?", re.IGNORECASE)
_NO_WORD = ("<", "[", "{")  # <unk>, [bracketed], {laughter}: noises


def read_dictionary(text: str) -> Lexicon:
    """word -> pronunciations, the most probable first; a line without phones is a ValueError that gives its number."""
    found: dict[str, list[tuple[float, tuple[str, ...]]]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.split():
            continue
        word, *items = line.split()
        first = next((place for place, item in enumerate(items) if not _NUMBER.fullmatch(item)), len(items))
        phones = tuple(item.replace(":", "") for item in items[first:])
        if not phones:
            raise ValueError(f"line {number} has no phones: {line!r:.60}")
        if not word.startswith(_NO_WORD):
            probability = float(items[0]) if first else 1.0
            found.setdefault(word.lower().replace("’", "'"), []).append((probability, phones))
    ordered = {word: sorted(variants, key=lambda variant: -variant[0]) for word, variants in found.items()}
    return {word: list(dict.fromkeys(phones for _, phones in variants)) for word, variants in ordered.items()}


def words_of(table: Path) -> list[str]:
    """The words of the table's translations (name, tab, translation), in lower case and alphabetical order."""
    with open(table, encoding="utf-8", newline="") as file:
        lines = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return sorted(
            {token.casefold() for line in lines if len(line) > 1 for token in tokenize(line[1]) if not is_mark(token)}
        )


def keep(lexicon: Lexicon, words: list[str]) -> tuple[Lexicon, list[str]]:
    """The lexicon of these words alone, and those it lacks; a hyphenated word may be said as its parts."""
    folded = {word.casefold(): variants for word, variants in lexicon.items()}
    said = {word: pronounce(word, folded) for word in words}
    return {word: variants for word, variants in said.items() if variants}, [word for word in words if not said[word]]


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 where words have no pronunciation, 2 for a file that is no dictionary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dictionary", type=Path, action="append", required=True, help="may be given several times")
    parser.add_argument("--lexicon", type=Path, required=True, metavar="OUT", help="the lexicon to write")
    parser.add_argument("--transcripts", type=Path, metavar="TABLE", help="keep this table's words alone, and need all")
    options = parser.parse_args(arguments)
    for path in [*options.dictionary, *([options.transcripts] if options.transcripts else [])]:
        if not path.is_file():
            parser.error(f"'{path}' must be a file, but does not exist. Check the path.")
    lexicon: Lexicon = {}
    for path in options.dictionary:
        try:
            variants_of = read_dictionary(path.read_text(encoding="utf-8-sig"))
        except ValueError as error:
            parser.error(f"`--dictionary` must hold words and phones, but '{path}' does not: {error}. Check the file.")
        for word, variants in variants_of.items():
            lexicon[word] = list(dict.fromkeys([*lexicon.get(word, []), *variants]))
    missing: list[str] = []
    if options.transcripts:
        lexicon, missing = keep(lexicon, words_of(options.transcripts))
    rows = [(word, " ".join(phones)) for word, variants in sorted(lexicon.items()) for phones in variants]
    write_text(options.lexicon, rows)
    print(f"{len(lexicon)} words in {options.lexicon}")
    lacking = options.lexicon.with_name(f"{options.lexicon.name}.missing")
    lacking.unlink(missing_ok=True)
    if missing:
        write_text(lacking, [(word,) for word in missing])
        print(f"{len(missing)} words have no pronunciation; they are in {lacking}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
