"""Conversations about pictures in the layout of llava_v1_5_mix665k: a JSON list beside a folder of images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmdec.training.corpora.admission import STRICT, Admission, Names
from mmdec.training.corpora.text_files import check_text, read_json, shown
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
    place: str = field(default="", compare=False)  # where it is listed


def read_conversations(
    listed: str | Path, images: str | Path | None = None, admission: Admission = STRICT
) -> list[Conversation]:
    """The rows of a list. images: the folder that their paths are relative to; by default "images" beside the list.

    Pictures are not opened. Raises InputError for a list that is missing, too large or no such list, naming the row.
    """
    listed = Path(listed)
    folder = Path(images) if images is not None else listed.parent / "images"
    rows = read_json(listed, "listed", "a JSON list", MAX_BYTES)
    if not isinstance(rows, list):
        raise InputError(f"`listed` must be a JSON list, but '{listed}' holds a {type(rows).__name__}.")
    names, file = admission.names(folder), shown(listed)
    return [_conversation(row, number, f"row {number} of {file}", names) for number, row in enumerate(rows)]


def _conversation(row: object, number: int, place: str, names: Names) -> Conversation:
    def refuse(rule: str, value: object) -> InputError:
        return InputError(f"R{place[1:]} must have {rule}, but has {str(value)[:80]!r}. Mend the row.")

    if not isinstance(row, dict):
        raise refuse("fields", row)
    name = row.get("id", number)
    if not isinstance(name, str | int):
        raise refuse("a string or a number as `id`", name)
    named = row.get("image")
    named = [] if named is None else [named] if isinstance(named, str) else named  # null, as tables write what lacks
    if not isinstance(named, list) or not all(isinstance(path, str) and path for path in named):
        raise refuse("a path or a list of paths as `image`", named)
    images = tuple(names(path, place) for path in named)
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
        values.append(check_text(turn["value"], "listed", place))
    turns = tuple(
        (question.replace(IMAGE, "").strip(), answer.strip())
        for question, answer in zip(values[::2], values[1::2], strict=True)
    )
    notes = {key: value for key, value in row.items() if key not in ("id", "image", "conversations")}
    return Conversation(str(name), images, turns, notes, place)
