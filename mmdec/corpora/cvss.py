"""Reads the on-disk layout of CVSS and Common Voice into rows: paths and text, no sound yet.

<common_voice>/clips/*.mp3                  source speech
<common_voice>/{split}.tsv                  columns client_id, path, sentence, ... (or validated.tsv for all splits)
<cvss>/{split}/<path>.wav                   target speech
<cvss>/{split}.tsv                          path, translation; no header
<cvss>/{split}.alignment.tsv                path, "phone:end-second ..." (a forced aligner's output; see data/README)
<cvss>/{split}.references.tsv               path, every licensed translation (optional)
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from mmdec.corpora.split import read_table
from mmdec.phonetics.lexicon import spoken
from mmdec.types import InputError

SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")


@dataclass(frozen=True)
class Row:
    """One utterance: French speech and its translation."""

    path: str  # of the clip, as both corpora name it
    clip: Path
    wav: Path
    source_text: str
    translation: str
    phones: tuple[tuple[str, float], ...]  # phone and its end in seconds, pauses at the edges included
    client: str = ""
    references: tuple[str, ...] = ()

    @property
    def units(self) -> list[str]:
        """The phones without the pauses at both edges."""
        phones = [phone for phone, _ in self.phones]
        return phones[spoken(phones)]


@dataclass
class BadRows:
    """Rows left out, counted by reason and named."""

    names: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, name: str) -> None:
        self.names.setdefault(reason, []).append(name)

    @property
    def count(self) -> int:
        return sum(len(names) for names in self.names.values())

    def report(self, shown: int = 5) -> str:
        """One line a reason: how many, and the first names."""
        return "\n".join(
            f"{reason}: {len(names)} ({', '.join(names[:shown])}{', ...' if len(names) > shown else ''})"
            for reason, names in sorted(self.names.items())
        )


def normalise(text: str) -> str:
    """Lower case, no punctuation but apostrophes, single spaces: the key by which equal source sentences meet."""
    text = unicodedata.normalize("NFC", text).lower().replace("\u2019", "'")
    return " ".join("".join(c if c.isalnum() or c in "'-" else " " for c in text).split())


def _needed(path: Path) -> Path:
    if not path.is_file():
        raise InputError(f"`{path.name}` must exist, but '{path}' does not. Build the corpus, or check the path.")
    return path


def _alignments(path: Path) -> dict[str, tuple[tuple[str, float], ...]]:
    """Phones and their ends in seconds for each clip; none where the line cannot be read."""
    aligned: dict[str, tuple[tuple[str, float], ...]] = {}
    for line in read_table(path):
        try:
            phones = tuple((phone, float(end)) for phone, end in (item.rsplit(":", 1) for item in line[1].split()))
        except (IndexError, ValueError):
            phones = ()
        ends = [0.0, *(end for _, end in phones)]
        rising = all(first <= second < math.inf for first, second in pairwise(ends))  # NaN is not
        aligned[line[0]] = phones if rising else ()
    return aligned


def read_rows(common_voice: Path, cvss: Path, split: str) -> tuple[list[Row], BadRows]:
    """All rows of a split whose files are there, in the order of the CVSS table; what is missing is counted."""
    bad = BadRows()
    listed = common_voice / f"{split}.tsv"
    lines = read_table(_needed(listed if listed.is_file() else common_voice / "validated.tsv"))
    columns = next(lines, [])
    try:
        path_at, sentence_at, client_at = (columns.index(name) for name in ("path", "sentence", "client_id"))
    except ValueError as error:
        raise InputError(
            f"`{listed.name}` must have the columns client_id, path and sentence, but has {columns}. "
            "Use Common Voice's own tables."
        ) from error
    sources = {
        line[path_at]: (line[sentence_at], line[client_at])
        for line in lines
        if len(line) > max(path_at, sentence_at, client_at)
    }
    aligned = _alignments(_needed(cvss / f"{split}.alignment.tsv"))
    references = cvss / f"{split}.references.tsv"
    licensed = {line[0]: tuple(line[1:]) for line in read_table(references)}
    rows = []
    for line in read_table(_needed(cvss / f"{split}.tsv")):
        name, translation = line[0], line[1] if len(line) > 1 else ""
        clip, wav = common_voice / "clips" / name, cvss / split / f"{name}.wav"
        if name not in sources:
            bad.add("no source sentence", name)
        elif name not in aligned:
            bad.add("no alignment", name)
        elif not aligned[name]:
            bad.add("alignment that cannot be read", name)
        elif not translation.strip():
            bad.add("no translation", name)
        elif not clip.is_file() or clip.stat().st_size == 0:
            bad.add("source recording missing or empty", name)
        elif not wav.is_file() or wav.stat().st_size <= 44:
            bad.add("target recording missing or empty", name)
        else:
            text, client = sources[name]
            phones = aligned[name]
            row = Row(name, clip, wav, text, translation, phones, client, licensed.get(name, (translation,)))
            if row.units:
                rows.append(row)
            else:
                bad.add("alignment of pauses alone", name)
    if not rows:
        raise InputError(f"`split` must hold usable rows, but '{split}' has none.\n{bad.report()}")
    return rows, bad


def canonical(rows: Iterable[Row]) -> list[Row]:
    """One rendering for each source sentence: that of its first recording (sequence-level distillation's effect)."""
    first: dict[str, Row] = {}
    result = []
    for row in sorted(rows, key=lambda row: row.path):
        chosen = first.setdefault(normalise(row.source_text), row)
        result.append(replace(row, translation=chosen.translation, phones=chosen.phones, wav=chosen.wav))
    return result


def vocabulary(rows: Iterable[Row]) -> list[str]:
    """The special units, then all phones in alphabetical order."""
    return [*SPECIALS, *sorted({unit for row in rows for unit in row.units})]
