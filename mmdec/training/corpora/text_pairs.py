"""Reads parallel text: a folder of {train,dev,test}.tsv. Each row has a name, a group, a sentence and all its
translations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmdec.training.corpora.text_files import read_table
from mmdec.types import InputError

HELD = ("dev", "test")
_MARK = re.compile(r"[^\w\s]")


@dataclass(frozen=True)
class TextPair:
    """A sentence with every accepted translation, the preferred one first. Sentences of one group share
    translations."""

    name: str
    group: str
    source: str
    references: tuple[str, ...]


def read_text_pairs(folder: str | Path, split: str) -> list[TextPair]:
    """The pairs of a split, in the order of its table. Raises InputError for a table that is missing or has a row
    without a translation."""
    path = Path(folder) / f"{split}.tsv"
    pairs = []
    for number, row in read_table(path, "folder"):
        if len(row) < 4 or not all(row):
            raise InputError(
                f"`folder` must hold rows of a name, a group, a sentence and its translations, but line {number} of "
                f"'{path}' has {len(row)} columns, or an empty one. Mend it, or leave it out."
            )
        pairs.append(TextPair(row[0], row[1], row[2], tuple(row[3:])))
    if not pairs:
        raise InputError(f"`folder` must hold '{split}.tsv' with pairs, but '{path}' has none. Build it first.")
    return pairs


def references_of(names: Sequence[str], folders: Sequence[Path], split: str) -> list[tuple[str, ...]]:
    """The references of each recording. Its name is a folder's name, a hyphen and a sentence's name. Only folders that
    the names use are read. Raises InputError for a name that no folder has."""
    known = {
        f"{prefix}{pair.name}": pair.references
        for folder in folders
        for prefix in (f"{folder.resolve().name}-",)
        if any(name.startswith(prefix) for name in names)
        for pair in read_text_pairs(folder, split)
    }
    lost = [name for name in names if name not in known]
    if lost:
        raise InputError(
            f"`text` must hold the sentences of the corpus, but lacks '{lost[0]}', {len(lost)} in all. Name every "
            "folder of pairs that was read aloud."
        )
    return [known[name] for name in names]


def sentence_key(text: str) -> str:
    """The normalised sentence (lower case, no punctuation): sentences with the same key count as equal."""
    return " ".join(_MARK.sub("", text.lower()).split())


def held_sources(folders: Iterable[str | Path]) -> set[str]:
    """The keys of all sentences that are in dev or test of some folder. Missing tables are ignored."""
    pairs = _held(Path(folder) for folder in folders)
    return {sentence_key(pair.source) for pair in pairs}


def read_training_pairs(folders: Sequence[str | Path]) -> list[list[TextPair]]:
    """The training pairs of each folder, without those that share a sentence or a translation with another folder's dev
    or test pair. Raises InputError as `read_text_pairs` does."""
    training = []
    for folder in folders:
        others = list(_held(Path(other) for other in folders if other != folder))
        sources = {sentence_key(pair.source) for pair in others}
        references = {sentence_key(text) for pair in others for text in pair.references}
        training.append(
            [
                pair
                for pair in read_text_pairs(folder, "train")
                if sentence_key(pair.source) not in sources
                and references.isdisjoint(map(sentence_key, pair.references))
            ]
        )
    return training


def _held(folders: Iterable[Path]) -> Iterable[TextPair]:
    for folder in folders:
        for split in HELD:
            if (folder / f"{split}.tsv").is_file():
                yield from read_text_pairs(folder, split)
