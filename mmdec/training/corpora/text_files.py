"""Text files of corpora: lines, tables, JSON and pairs of translations. Errors name the file and the line.

Byte order marks are skipped: some editors write one at the start of a file, and concatenated files have them inside.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmdec.checks.files import open_regular, printable, quote_path
from mmdec.errors import InputError

MAX_LINE = 1 << 24  # maximum bytes of a line; a longer one is an error, because the file is probably no text
MAX_FIELD = 1 << 17  # the most characters of one field; a longer one is an error: a line end is probably missing
BYTE_ORDER_MARK = "\ufeff"  # Unicode's byte order mark, which is removed from the start of each line


def text_lines(path: Path, argument: str) -> Iterator[tuple[int, str]]:
    """Yield the number (from 1) and the text of each line that is not blank.

    Args:
        argument: The file's name in messages.

    Raises:
        InputError: For a line that is no UTF-8 text.
    """

    def refuse(rule: str, problem: str, remedy: str) -> InputError:
        return InputError(f"`{argument}` must {rule}, but line {number} of '{quote_path(path)}' {problem}. {remedy}")

    with open_regular(path, argument) as descriptor, open(descriptor, "rb", closefd=False) as file:
        number = 0
        while raw := file.readline(MAX_LINE + 1):
            number += 1
            if len(raw) > MAX_LINE:
                raise refuse(f"have lines of at most {MAX_LINE} bytes", "has more", "Fix its line ends.")
            try:
                line = raw.decode("utf-8").removeprefix(BYTE_ORDER_MARK).rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise refuse("be UTF-8", f"has the byte 0x{raw[error.start]:02x}", "Save it as UTF-8.") from None
            if "\r" in line or "\0" in line:
                problem = "a carriage return within" if "\r" in line else "a NUL"
                raise refuse("be lines of text", f"has {problem}", "Save it as UTF-8 with plain line ends.")
            if line.strip():
                yield number, line


def json_lines(path: Path, argument: str, rule: str = "JSON") -> Iterator[tuple[int, Any]]:
    """Yield the line number and the JSON value of each line that is not blank.

    Args:
        argument: The file's name in messages.
        rule: The required format, for messages.

    Raises:
        InputError: For a line that is not JSON.
    """
    for number, line in text_lines(path, argument):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"`{argument}` must be {rule}, but line {number} of '{quote_path(path)}' is not JSON "
                f"({_short(error)}). Fix the line."
            ) from None
        yield number, value


def read_json(path: Path, argument: str, rule: str = "JSON", max_bytes: int = 2_000_000_000) -> Any:
    """Read a whole JSON file, at most `max_bytes` long.

    Args:
        argument: The file's name in messages.
        rule: The required format, for messages.

    Raises:
        InputError: If it is too long or not JSON.
    """
    with open_regular(path, argument) as descriptor, open(descriptor, "rb", closefd=False) as file:
        if os.fstat(descriptor).st_size > max_bytes:
            rule = f"have at most {max_bytes} bytes"
            raise InputError(f"`{argument}` must {rule}, but '{quote_path(path)}' has more. Divide it.")
        content = file.read()
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"`{argument}` must be {rule} in UTF-8, but line {line} of '{quote_path(path)}' has the byte "
            f"0x{content[error.start]:02x}. Save it as UTF-8."
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"`{argument}` must be {rule}, but '{quote_path(path)}' is not one ({_short(error)}). Fix the file."
        ) from None


def check_text(text: str, argument: str, place: str) -> str:
    """Check a text and return it.

    Args:
        argument, place: What the text is and where, for messages.

    Raises:
        InputError: If it is too long, or cannot be encoded in UTF-8.
    """
    if len(text) > MAX_FIELD:
        raise InputError(
            f"`{argument}` must have texts of at most {MAX_FIELD} characters, but one in {place} has {len(text)}. Is a "
            "line end missing?"
        )
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(
                f"`{argument}` must be Unicode text, but {place} has half of a surrogate pair. Fix the text."
            ) from None
    return text


def problem_of(error: InputError) -> str:
    """Return the middle of an error message: what is wrong with the value.

    The rule before this and the advice after it are left out.
    """
    return str(error).partition(", but ")[2].rpartition(". ")[0]


def _short(error: Exception) -> str:
    return printable(str(error))[:120] or type(error).__name__


def read_table(path: Path, argument: str = "corpus") -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the columns of each line of a tab-separated table.

    A missing file yields nothing. Quotes have no special meaning.

    Args:
        argument: The table's name in messages.
    """
    if not path.exists():
        return
    for number, line in text_lines(path, argument):
        fields = line.split("\t")
        for field in fields:
            check_text(field, argument, f"line {number} of '{quote_path(path)}'")
        yield number, fields


def check_limit(limit: int | None) -> None:
    """Raise InputError if `limit`, a number of rows to take, is below 1. None is accepted and means all rows."""
    if limit is not None and limit < 1:
        raise InputError(f"`limit` must be at least 1, but is {limit}. Leave it out for all rows.")


HELD_OUT_SPLITS = ("dev", "test")
_MARK = re.compile(r"[^\w\s]")


@dataclass(frozen=True)
class TextPair:
    """A source sentence with all its accepted translations, the preferred one first."""

    name: str
    group: str  # name of the group of sentences that share a translation, directly or through other sentences
    source: str
    references: tuple[str, ...]


def read_text_pairs(folder: str | Path, split: str) -> list[TextPair]:
    """Read the sentence pairs of a split from `folder`/{split}.tsv, in its order.

    Raises:
        InputError: For a table that is missing or has a row without a translation.
    """
    path = Path(folder) / f"{split}.tsv"
    pairs = []
    for number, row in read_table(path, "folder"):
        if len(row) < 4 or not all(row):
            raise InputError(
                f"`folder` must hold rows of a name, a group, a sentence and its translations, but line {number} of "
                f"'{path}' has {len(row)} columns, or an empty one. Fix it, or leave it out."
            )
        pairs.append(TextPair(row[0], row[1], row[2], tuple(row[3:])))
    if not pairs:
        raise InputError(f"`folder` must hold '{split}.tsv' with pairs, but '{path}' has none. Build it first.")
    return pairs


def references_of(names: Sequence[str], folders: Sequence[Path], split: str) -> list[tuple[str, ...]]:
    """Find the reference translations of each recording.

    Args:
        names: recordings' names, each a folder's name, a hyphen and a sentence's name. Folders that no name begins with
            are not read.

    Returns:
        For each recording its accepted translations.

    Raises:
        InputError: For a name that no folder has.
    """
    references = {
        f"{prefix}{pair.name}": pair.references
        for folder in folders
        for prefix in (f"{folder.resolve().name}-",)
        if any(name.startswith(prefix) for name in names)
        for pair in read_text_pairs(folder, split)
    }
    lost = [name for name in names if name not in references]
    if lost:
        raise InputError(
            f"`text` must hold the sentences of the corpus, but lacks '{lost[0]}', {len(lost)} in all. Name every "
            "folder of pairs that was read aloud."
        )
    return [references[name] for name in names]


def sentence_key(text: str) -> str:
    """Return a sentence in lower case and without punctuation. Sentences with the same key count as equal."""
    return " ".join(_MARK.sub("", text.lower()).split())


def held_out_sources(folders: Iterable[str | Path]) -> set[str]:
    """Return all source sentences of the folders' dev and test splits, in lower case and without punctuation.

    Missing tables are ignored.
    """
    pairs = _held_out_pairs(Path(folder) for folder in folders)
    return {sentence_key(pair.source) for pair in pairs}


def read_training_pairs(folders: Sequence[str | Path]) -> list[list[TextPair]]:
    """Read the training pairs of each folder.

    Pairs whose sentence or translation is in the dev or test split of another folder are left out.

    Raises:
        InputError: For a table that is missing or has a row without a translation.
    """
    training = []
    for folder in folders:
        others = list(_held_out_pairs(Path(other) for other in folders if other != folder))
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


def _held_out_pairs(folders: Iterable[Path]) -> Iterable[TextPair]:
    for folder in folders:
        for split in HELD_OUT_SPLITS:
            if (folder / f"{split}.tsv").is_file():
                yield from read_text_pairs(folder, split)
