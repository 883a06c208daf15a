"""Reads speech with transcripts: from folders in LibriSpeech's format, or from a manifest (a list of sound files)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from mmdec.checks.files import quote_path
from mmdec.errors import InputError
from mmdec.io.audio import load_audio
from mmdec.training.corpora.admission import STRICT, Admission
from mmdec.training.corpora.text_files import check_text, json_lines, problem_of, read_table, text_lines

UTTERANCE_SUFFIXES = (".flac", ".wav", ".mp3", ".ogg")  # in the order in which they are looked for
MANIFEST = "a manifest with `path` and `text`"
DEV_SHARE = 0.1  # share of the speakers (or recordings) that become "dev" if a manifest has no splits


@dataclass(frozen=True)
class Utterance:
    """One transcribed recording, or a part of one.

    A chapter is a sequence of utterances that one speaker read in order.
    """

    path: Path
    text: str
    speaker: str
    chapter: str
    place: str = field(default="", compare=False)  # file and line where it is listed
    part: tuple[int, int] | None = None  # start and end in samples at 16 kHz, end exclusive; None: the whole file

    def samples(self) -> Tensor:
        """Load the sound as mono samples (T,) at 16 kHz."""
        recording = load_audio(self.path)
        return recording if self.part is None else recording[slice(*self.part)]


def read_utterances(root: str | Path, split: str | None = None, admission: Admission = STRICT) -> list[Utterance]:
    """Read the utterances of a corpus, in order.

    Args:
        root: A folder in LibriSpeech's format, {split}/{speaker}/{chapter}/*.trans.txt next to the sound files. Or a
            manifest: .tsv with a header, or .jsonl, with `path` (relative to the manifest), `text`, optionally
            `speaker`, `chapter` and `split`.
        split: A folder below `root`, or a value in the manifest's column `split`; None: all. If no row of a manifest
            has a split, speakers are divided into "train" and "dev"; with fewer than three speakers, recordings are.

    Raises:
        InputError: For bad entries, naming file and line. Missing recordings are an error only if all are missing.
    """
    path = Path(root)
    if path.is_file():
        utterances = _rows_of(split, list(_manifest(path, admission)))
    elif path.suffix in (".tsv", ".jsonl"):
        raise InputError(f"`root` must be an existing manifest, but '{path}' is not a file. Check the path.")
    else:
        folder = path / split if split else path
        if not folder.is_dir():
            raise InputError(f"`root` must hold a folder '{split or ''}', but '{folder}' is none. Check both.")
        utterances = [row for file in sorted(folder.rglob("*.trans.txt")) for row in _chapter(file, admission)]
    if not utterances:
        raise InputError(
            f"`root` must hold transcripts (*.trans.txt, or a manifest's rows), but '{path}' has none for split "
            f"{split!r}. LibriSpeech's layout or a .tsv or .jsonl of `path` and `text` is read."
        )
    if not any(row.path.is_file() for row in utterances):
        first = utterances[0]
        raise InputError(
            f"`root` must name existing sound files, but none of {len(utterances)} is there: "
            f"'{quote_path(first.path)}' of {first.place} does not exist. Check the path of the corpus."
        )
    return utterances


def read_recordings(paths: Sequence[str | Path]) -> list[Utterance]:
    """Read a user's own recordings. The transcript of a.wav is a.txt next to it.

    Raises:
        InputError: If a recording or its transcript is missing.
    """
    utterances = []
    for number, path in enumerate(map(Path, paths)):
        beside = path.with_suffix(".txt")
        try:
            text = " ".join(line for _, line in text_lines(beside, "recordings"))
        except InputError as error:
            raise InputError(
                f"`recordings` must have their transcripts next to them, but '{beside}' cannot be read: "
                f"{problem_of(error)}. Write what is said there; `mmdec bench drafters --audio` needs none."
            ) from None
        if not path.is_file():
            raise InputError(f"`recordings` must be sound files, but '{path}' is not one. Check the path.")
        utterances.append(Utterance(path, " ".join(text.split()), str(number), str(number), f"'{quote_path(path)}'"))
    return utterances


def read_splits(root: str | Path, splits: str | list[str] | None, admission: Admission = STRICT) -> list[Utterance]:
    """Read the utterances of one split or of several.

    Args:
        splits: Folders below `root`, or values in a manifest's column `split`; None: the whole corpus.
    """
    named = splits if isinstance(splits, list) else [splits]
    return [row for split in named for row in read_utterances(root, split, admission)]


def _chapter(file: Path, admission: Admission) -> Iterator[Utterance]:
    speaker, chapter = file.parent.parent.name, f"{file.parent.parent.name}-{file.parent.name}"
    resolve, lines = admission.path_resolver(file.parent), dict[str, int]()
    for number, line in text_lines(file, "root"):
        name, _, text = line.strip().partition(" ")
        place = f"line {number} of '{quote_path(file)}'"
        if not text.strip():
            raise InputError(f"`root` must have a text for each recording, but {place} has none. Leave the line out.")
        if lines.setdefault(name, number) != number:
            raise InputError(
                f"`root` must name each recording once, but {place} has '{name:.80}' again, as line {lines[name]}. "
                "Remove one of them."
            )
        paths = [resolve(f"{name}{suffix}", place) for suffix in UTTERANCE_SUFFIXES]
        path = next((path for path in paths if path.is_file()), paths[0])
        yield Utterance(path, check_text(text.strip(), "root", place), speaker, chapter, place)


def _rows_of(split: str | None, rows: list[tuple[Utterance, object]]) -> list[Utterance]:
    """Select the rows of a split; None: all.

    Args:
        rows: Pairs of a row and the value in its column `split`; None if it has no such column.

    Raises:
        InputError: If only some rows have a split.
    """
    if split is None:
        return [row for row, _ in rows]
    if rows and all(row_split is None for _, row_split in rows):
        return divide_by_speaker([row for row, _ in rows]).get(split, [])
    for row, row_split in rows:
        if not isinstance(row_split, str) or not row_split.strip():
            raise InputError(
                f"`root` must name the split of each row, but {row.place} has no `split`. Write one in every row, "
                "train or dev, or in none: they are then divided by speakers."
            )
    return [row for row, row_split in rows if str(row_split).strip() == split]


def divide_by_speaker(rows: Sequence[Utterance]) -> dict[str, list[Utterance]]:
    """Divide rows into "train" and "dev".

    A tenth of the speakers becomes "dev"; with fewer than three speakers, a tenth of the recordings.

    The choice depends on the names only, so it is the same at each call.

    Raises:
        InputError: For fewer than two recordings.
    """
    speakers = {row.speaker for row in rows}
    by_speaker = len(speakers) > 2

    def name(row: Utterance) -> str:
        return row.speaker if by_speaker else row.path.name

    def shuffle_key(name: str) -> bytes:
        return hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest()

    names = sorted({name(row) for row in rows}, key=shuffle_key)
    if len(names) < 2:
        raise InputError(
            f"`root` must hold at least 2 recordings where no row has a `split`, but has {len(rows)}. Add one for "
            "development."
        )
    dev = set(names[: max(1, round(DEV_SHARE * len(names)))])
    return {
        "train": [row for row in rows if name(row) not in dev],
        "dev": [row for row in rows if name(row) in dev],
    }


def _manifest(file: Path, admission: Admission) -> Iterator[tuple[Utterance, object]]:
    """Yield the checked rows of a manifest, each with the value in its column `split`, or None without this column."""
    resolve, lines = admission.path_resolver(file.parent), dict[Path, int]()
    for number, row in _rows(file):
        place = f"line {number} of '{quote_path(file)}'"
        for column in ("path", "text"):
            value = row.get(column)
            if not isinstance(value, str) or not value.strip():
                raise InputError(f"`root` must be {MANIFEST}, but {place} has no `{column}`. Write it there.")
            check_text(value, "root", place)
        path = resolve(row["path"], place)
        if lines.setdefault(path, number) != number:
            raise InputError(
                f"`root` must name each recording once, but {place} has '{row['path']:.80}' again, as line "
                f"{lines[path]}. Remove one of them."
            )
        speaker = str(row.get("speaker") or "")  # all rows without a speaker count as one speaker
        utterance = Utterance(path, row["text"].strip(), speaker, str(row.get("chapter") or speaker), place)
        yield utterance, row.get("split")


def _rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the fields of each row of a manifest."""
    if file.suffix == ".jsonl":
        for number, row in json_lines(file, "root", MANIFEST):
            if not isinstance(row, dict):
                raise InputError(
                    f"`root` must be {MANIFEST}, but line {number} of '{quote_path(file)}' has no fields. "
                    "Correct the file."
                )
            yield number, row
        return
    header: list[str] = []
    for number, fields in read_table(file, "root"):
        if not header:
            header = [name.strip() for name in fields]
            if not {"path", "text"} <= set(header) or len(set(header)) < len(header):
                raise InputError(
                    f"`root` must be {MANIFEST}, but line {number} of '{quote_path(file)}' has the columns "
                    f"{', '.join(header):.200}. Give .tsv with a header and tabs, or .jsonl."
                )
        elif len(fields) != len(header):
            raise InputError(
                f"`root` must have {len(header)} columns in each row, but line {number} of '{quote_path(file)}' has "
                f"{len(fields)}. Is there a tab too few, or one within the text?"
            )
        else:
            yield number, dict(zip(header, fields, strict=True))
