"""Reads one split of a corpus in the layout of CVSS and Common Voice, for scoring: paths and text, no sound.

<common_voice>/clips/<name>              source speech
<cvss>/{split}.tsv                       name, translation; no header
<cvss>/{split}/<name>.wav                target speech
<cvss>/{split}.references.tsv            optional: name, every licensed translation
<cvss>/{split}.alignment.tsv             optional: name, "phone:end-second ..."
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mmdec.phonetics.lexicon import spoken
from mmdec.types import InputError


@dataclass(frozen=True)
class Utterance:
    """One row of a split."""

    clip: Path  # French speech
    recording: Path  # English speech
    translation: str  # what the English recording says
    references: tuple[str, ...]  # every licensed rendering; the translation alone where no others are known
    phones: tuple[str, ...]  # of the English recording, no pauses at its ends; () where there is no alignment


def read_split(
    common_voice: Path, cvss: Path, split: str, limit: int | None = None
) -> tuple[list[Utterance], dict[str, list[str]]]:
    """The usable rows of a split, `limit` of them evenly spaced, and the names of those left out, by reason."""
    table = cvss / f"{split}.tsv"
    if not table.is_file():
        raise InputError(
            f"`split` must have a table, but '{table}' does not exist. Build the corpus, or check the path."
        )
    renderings = {
        line[0]: tuple(text for text in line[1:] if text) for line in read_table(cvss / f"{split}.references.tsv")
    }
    aligned = {line[0]: _phones(line[1]) for line in read_table(cvss / f"{split}.alignment.tsv") if len(line) > 1}
    rows: list[Utterance] = []
    skipped: dict[str, list[str]] = {}
    for line in read_table(table):
        name, translation = line[0], line[1] if len(line) > 1 else ""
        clip, recording = common_voice / "clips" / name, cvss / split / f"{name}.wav"
        if not translation.strip():
            skipped.setdefault("no translation", []).append(name)
        elif not clip.is_file():
            skipped.setdefault("source recording missing", []).append(name)
        elif not recording.is_file():
            skipped.setdefault("target recording missing", []).append(name)
        else:
            licensed = renderings.get(name) or (translation,)
            rows.append(Utterance(clip, recording, translation, licensed, aligned.get(name, ())))
    if not rows:
        raise InputError(f"`split` must hold usable rows, but '{split}' has none: {skipped}. Check the paths.")
    if limit is not None and limit < len(rows):
        rows = [rows[place * len(rows) // limit] for place in range(limit)]
    return rows, skipped


def read_table(path: Path) -> Iterator[list[str]]:
    """The lines of a tab-separated table, split; none where there is no file."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", newline="") as file:
        yield from (line for line in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if line)


def _phones(alignment: str) -> tuple[str, ...]:
    """ "pau:0.2 w:0.3 ..." -> the phones, without the pauses at both ends."""
    phones = [item.rpartition(":")[0] for item in alignment.split()]
    return tuple(phones[spoken(phones)])
