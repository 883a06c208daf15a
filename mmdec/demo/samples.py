"""The page's sample recordings and pictures: from data/samples, or their copies in an installed wheel."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
# folders of samples: in an installed wheel, and in a checkout of the repository
FOLDERS = (PACKAGE / "_samples", PACKAGE.parent / "data" / "samples")
PICTURES = ("menu.png", "timetable.png", "street.png")
ENGLISH = ("austen.flac", "president.flac", "two_cities.flac")


@dataclass(frozen=True)
class DemoSample:
    """A shipped input: a recording, or a picture with a question and the answer.

    `text` holds the recording's words, or the picture's name.
    """

    path: Path
    text: str
    question: str = ""  # a question about a picture
    answer: str = ""


@cache
def folder() -> Path:
    """Find the folder of the samples."""
    return next((path for path in FOLDERS if path.is_dir()), FOLDERS[-1])


@cache
def french() -> tuple[DemoSample, ...]:
    """List the French recordings with their text."""
    return tuple(DemoSample(folder() / row[0], row[1]) for row in _rows(folder() / "samples.tsv") if len(row) > 1)


@cache
def english() -> tuple[DemoSample, ...]:
    """List the English recordings with their text."""
    texts = {row[0]: row[2] for row in _rows(folder() / "english" / "samples.tsv") if len(row) > 2}
    return tuple(DemoSample(folder() / "english" / name, texts[name]) for name in ENGLISH if name in texts)


@cache
def pictures() -> tuple[DemoSample, ...]:
    """List the pictures, each with a question that asks for a description."""
    rows = _rows(folder() / "images" / "samples.tsv")
    questions = {row[0]: (row[2], row[3]) for row in rows if len(row) > 3 and row[1] == "describe"}
    return tuple(
        DemoSample(folder() / "images" / name, name.partition(".")[0], *questions[name])
        for name in PICTURES
        if name in questions
    )


def _rows(table: Path) -> list[list[str]]:
    """Read the rows of a tab-separated file; none if this installation has no samples."""
    if not table.is_file():
        return []
    with table.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
