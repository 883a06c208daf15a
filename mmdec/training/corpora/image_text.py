"""Conversations about pictures in the layout of llava_v1_5_mix665k: a JSON list beside a folder of images."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mmdec.types import InputError

MAX_BYTES = 8_000_000_000  # of the list; that of llava_v1_5_mix665k has one
MAX_TURNS = 1000  # of a conversation
IMAGE = "<image>"
SPEAKERS = {"human": 0, "user": 0, "gpt": 1, "assistant": 1}


@dataclass(frozen=True)
class Conversation:
    """One row. turns: (question, answer) pairs, questions without the image's mark. notes: the row's other fields."""

    id: str
    images: tuple[Path, ...]
    turns: tuple[tuple[str, str], ...]
    notes: Mapping[str, Any]


def read_conversations(listed: str | Path, images: str | Path | None = None) -> list[Conversation]:
    """The rows of a list. images: the folder that their paths are relative to; by default "images" beside the list.

    Pictures are not opened. Raises InputError for a list that is missing, too large or no such list, naming the row.
    """
    listed = Path(listed)
    folder = Path(images) if images is not None else listed.parent / "images"
    try:
        if listed.stat().st_size > MAX_BYTES:
            raise InputError(f"`listed` must have at most {MAX_BYTES} bytes, but '{listed}' has more. Divide it.")
        with open(listed, encoding="utf-8") as file:
            rows = json.load(file)
    except OSError as error:
        raise InputError(f"`listed` must be a readable file, but '{listed}' is not: {error}. Check the path.") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"`listed` must be a JSON list, but '{listed}' is none: {error}.") from None
    if not isinstance(rows, list):
        raise InputError(f"`listed` must be a JSON list, but '{listed}' holds a {type(rows).__name__}.")
    return [_conversation(row, number, listed, folder) for number, row in enumerate(rows)]


def _conversation(row: object, number: int, listed: Path, folder: Path) -> Conversation:
    def refuse(rule: str, value: object) -> InputError:
        return InputError(f"Row {number} of '{listed}' must have {rule}, but has {str(value)[:80]!r}. Mend the row.")

    if not isinstance(row, dict):
        raise refuse("fields", row)
    name = row.get("id", number)
    if not isinstance(name, str | int):
        raise refuse("a string or a number as `id`", name)
    named = row.get("image")
    named = [] if named is None else [named] if isinstance(named, str) else named  # null, as tables write what lacks
    if not isinstance(named, list) or not all(isinstance(path, str) and path for path in named):
        raise refuse("a path or a list of paths as `image`", named)
    for path in named:
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\0" in path:
            raise refuse("an `image` inside the folder of images", path)
    conversation = row.get("conversations")
    if not isinstance(conversation, list) or not 2 <= len(conversation) <= 2 * MAX_TURNS or len(conversation) % 2:
        raise refuse(f"1 to {MAX_TURNS} questions, each with its answer, as `conversations`", conversation)
    values: list[str] = []
    for index, turn in enumerate(conversation):
        if (
            not isinstance(turn, dict)
            or SPEAKERS.get(str(turn.get("from"))) != index % 2
            or not isinstance(turn.get("value"), str)
        ):
            raise refuse('"human" and "gpt" in turn, each with a text as `value`, as `conversations`', turn)
        values.append(turn["value"])
    turns = tuple(
        (question.replace(IMAGE, "").strip(), answer.strip())
        for question, answer in zip(values[::2], values[1::2], strict=True)
    )
    notes = {key: value for key, value in row.items() if key not in ("id", "image", "conversations")}
    return Conversation(str(name), tuple(folder / path for path in named), turns, notes)
