"""MMMU as it is published: parquet files with pictures inside (`MMMU/MMMU` on the hub: one folder a subject)."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmdec.checks.errors import InputError
from mmdec.corpora.image_text import IMAGE
from mmdec.corpora.image_text_questions import ImageQuestion
from mmdec.corpora.tables import evenly_spaced
from mmdec.corpora.text_files import check_text, shown

PICTURES = 7  # columns image_1 to image_7
LETTERS = "ABCDEFGHIJ"
CHOOSE = "\nAnswer with the option's letter from the given choices directly."
WITHHELD = ("", "?")  # an answer of the test split
SAY = "\nAnswer the question using a single word or phrase."
_MARK = re.compile(r"<image (\d)>")


def read_mmmu(path: Path, limit: int | None = None) -> list[ImageQuestion]:
    """The questions of one parquet file, or of all validation files (else all files) of a folder; tasks are subjects.

    limit: of each subject, evenly spaced; only their rows are kept. Raises InputError for what is not MMMU's.
    """
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise InputError(
            f"`questions` must be readable here, but '{path}' is parquet and pyarrow is not installed. Run "
            "`pip install pyarrow`."
        ) from error
    files = [path]
    if path.is_dir():
        files = sorted(path.rglob("validation*.parquet")) or sorted(path.rglob("*.parquet"))
    if not files:
        raise InputError(f"`questions` must hold parquet files, but '{path}' has none. Fetch MMMU's.")
    questions = []
    for file in files:
        subject = file.parent.name if path.is_dir() else file.stem
        try:
            with parquet.ParquetFile(file) as opened:
                chosen = set(evenly_spaced(range(opened.metadata.num_rows), limit))
                start = 0
                for batch in opened.iter_batches(batch_size=16):
                    rows = [row for row in range(len(batch)) if start + row in chosen]
                    for row, fields in zip(rows, batch.take(rows).to_pylist(), strict=True):
                        questions.append(_question(fields, subject, f"row {start + row} of {shown(file)}"))
                    start += len(batch)
        except InputError:
            raise
        except (OSError, ValueError, ArrowException) as error:
            raise InputError(
                f"`questions` must be whole parquet, but '{file}' is damaged ({error!s:.200}). Fetch it again."
            ) from None
    return questions


def _question(row: Mapping[str, Any], subject: str, place: str) -> ImageQuestion:
    try:
        name, answer = str(row["id"]), row["answer"]
        text = check_text(str(row["question"]), "questions", place)
        choice = row["question_type"] == "multiple-choice"
        listed = ast.literal_eval(row["options"]) if isinstance(row["options"], str) else list(row["options"])
        listed = [str(option) for option in listed]
        pictures = {n: bytes(row[f"image_{n}"]["bytes"]) for n in range(1, PICTURES + 1) if row.get(f"image_{n}")}
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise InputError(
            f"`questions` must have MMMU's columns, but {place} has not ({error!r:.200}). Fetch it again."
        ) from None
    options = dict(zip(LETTERS, listed, strict=False)) if choice else {}
    answers = _answers(answer)
    lines = "".join(f"\n({letter}) {option}" for letter, option in options.items())
    text, order = _placed(f"{text}{lines}", tuple(pictures))
    return ImageQuestion(
        name,
        text + (CHOOSE if choice else SAY),
        tuple(pictures[n] for n in order),
        subject,
        "" if not answers else "choice" if choice else "open",
        answers,
        options,
    )


def _placed(text: str, pictures: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The text with IMAGE where a picture is first named, and the pictures in that order; one that no text names comes
    last. Named again it is "image 2"."""
    order: list[int] = []

    def mark(match: re.Match[str]) -> str:
        number = int(match[1])
        if number in order or number not in pictures:
            return f"image {number}"
        order.append(number)
        return IMAGE

    text = _MARK.sub(mark, text.replace(IMAGE, "image"))
    rest = [number for number in pictures if number not in order]
    return text + f" {IMAGE}" * len(rest), (*order, *rest)


def _answers(answer: object) -> tuple[str, ...]:
    """One, or several of which each is right, written as a Python list; none where they are withheld."""
    text = "" if answer is None else str(answer).strip()
    if text in WITHHELD:
        return ()
    if text.startswith("["):
        try:
            return tuple(str(item) for item in ast.literal_eval(text))
        except (ValueError, SyntaxError):
            return (text,)
    return (text,)
