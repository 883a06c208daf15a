"""Parallel text: a folder of {train,dev,test}.tsv, each row a name, a group, a sentence and all its translations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmdec.training.corpora.tables import read_table
from mmdec.types import InputError


@dataclass(frozen=True)
class TextPair:
    """A sentence with every accepted translation, the first one first. Sentences of one group share translations."""

    name: str
    group: str
    source: str
    references: tuple[str, ...]


def read_text_pairs(folder: str | Path, split: str) -> list[TextPair]:
    """The pairs of a split, in the order of its table. Raises InputError for a table that is missing or has a row
    without a translation."""
    path = Path(folder) / f"{split}.tsv"
    pairs = []
    for number, row in enumerate(read_table(path), 1):
        if len(row) < 4 or not all(row):
            raise InputError(
                f"`folder` must hold rows of a name, a group, a sentence and its translations, but line {number} of "
                f"'{path}' has {len(row)} columns, or an empty one. Mend it, or leave it out."
            )
        pairs.append(TextPair(row[0], row[1], row[2], tuple(row[3:])))
    if not pairs:
        raise InputError(f"`folder` must hold '{split}.tsv' with pairs, but '{path}' has none. Build it first.")
    return pairs
