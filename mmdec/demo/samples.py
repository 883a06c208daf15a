"""The recordings and pictures that the page offers with one click: those of data/samples, also from a wheel."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
FOLDERS = (PACKAGE / "_samples", PACKAGE.parent / "data" / "samples")  # an installed wheel, then a checkout
PICTURES = ("menu.png", "timetable.png", "street.png")
ENGLISH = ("sentence.flac", "unseen_voice.flac", "paragraph.flac")


@dataclass(frozen=True)
class Sample:
    """A file, and what is said or seen in it."""

    path: Path
    text: str
    question: str = ""  # about a picture, with its answer
    answer: str = ""


@cache
def folder() -> Path:
    """The folder of the samples."""
    return next((path for path in FOLDERS if path.is_dir()), FOLDERS[-1])


@cache
def french() -> tuple[Sample, ...]:
    """Recordings with their French text."""
    return tuple(Sample(folder() / row[0], row[1]) for row in _rows(folder() / "samples.tsv") if len(row) > 1)


@cache
def english() -> tuple[Sample, ...]:
    """Recordings with their English text."""
    texts = {row[0]: row[2] for row in _rows(folder() / "english" / "samples.tsv") if len(row) > 2}
    return tuple(Sample(folder() / "english" / name, texts[name]) for name in ENGLISH if name in texts)


@cache
def pictures() -> tuple[Sample, ...]:
    """Pictures, each with its question for a description."""
    rows = _rows(folder() / "images" / "samples.tsv")
    asked = {row[0]: (row[2], row[3]) for row in rows if len(row) > 3 and row[1] == "describe"}
    return tuple(
        Sample(folder() / "images" / name, name.partition(".")[0], *asked[name]) for name in PICTURES if name in asked
    )


def _rows(table: Path) -> list[list[str]]:
    """A tab-separated file; none where this installation came without samples."""
    if not table.is_file():
        return []
    with table.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
