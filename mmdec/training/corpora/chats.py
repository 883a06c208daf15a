"""Reads what a person has to ask a model, with or without pictures, from a file of any of three kinds.

| file | layout |
|---|---|
| .json | llava_v1_5_mix665k's: a list of `conversations` (`from`, `value`), each with `image` or without |
| .jsonl | in each line `messages` (`role`, `content`), `conversations` as above, or a `question`; perhaps `image` |
| .txt | one question a line |

A single question may also be named `prompt` or `text`. The answers in the file are only read as what was said before
the next question: the model answers by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmdec.training.corpora.admission import STRICT, Admission, Names
from mmdec.training.corpora.image_text import IMAGE, MAX_TURNS, Conversation, read_conversations
from mmdec.training.corpora.text_files import check_text, json_lines, shown, text_lines
from mmdec.types import InputError

SUFFIXES = (".json", ".jsonl", ".txt")
ASKED = ("question", "prompt", "text")  # names of a single question
SPEAKERS = {"user": 0, "human": 0, "assistant": 1, "gpt": 1}
SYSTEM = "system"  # the note that holds a system message


def read_chats(
    listed: str | Path, images: str | Path | None = None, admission: Admission = STRICT
) -> list[Conversation]:
    """The conversations of a file.

    images: folder that image paths are relative to; by default "images" beside the file, or the file's own folder.
    Raises InputError for a file that is missing or of another kind, naming the row.
    """
    path = check_listed(Path(listed))
    folder = picture_folder(path, images)
    if path.suffix == ".json":
        return read_conversations(path, folder, admission)
    if path.suffix == ".txt":
        rows = ((number, {"question": line}) for number, line in text_lines(path, "data"))
    else:
        rows = json_lines(path, "data")
    names = admission.names(folder)
    return [_conversation(row, number, f"line {number} of {shown(path)}", names) for number, row in rows]


def check_listed(path: Path) -> Path:
    """Raise InputError unless this is a file of one of the three kinds, by its name."""
    if path.suffix not in SUFFIXES or not path.is_file():
        raise InputError(f"`data` must be a file that ends in {', '.join(SUFFIXES)}, but '{path}' is not. Name one.")
    return path


def picture_folder(listed: Path, images: str | Path | None) -> Path:
    """The folder that a list's image paths are relative to: the given one, "images" beside the list, or the list's."""
    beside = listed.parent / "images"
    return Path(images) if images is not None else beside if beside.is_dir() else listed.parent


def _conversation(row: object, number: int, place: str, names: Names) -> Conversation:
    if not isinstance(row, dict):
        raise _refuse(place, "fields", row)
    row = {name: value for name, value in row.items() if value is not None}  # null: missing in a table
    named = row.get("image", row.get("images", []))
    named = [named] if isinstance(named, str) else named
    if not isinstance(named, list) or not all(isinstance(path, str) and path for path in named):
        raise _refuse(place, "a path or a list of paths as `image`", named)
    said = list(_said(row, place))
    notes = {}
    if said and said[0][0] == SYSTEM:
        notes[SYSTEM] = said.pop(0)[1]
    if len(said) % 2:  # the last question has no answer yet
        said.append(("assistant", ""))
    if not 2 <= len(said) <= 2 * MAX_TURNS or any(
        SPEAKERS.get(role) != index % 2 for index, (role, _) in enumerate(said)
    ):
        raise _refuse(place, "questions and answers in turn, 1 to 1000 of each", [role for role, _ in said])
    turns = tuple(
        (question.replace(IMAGE, "").strip(), answer.strip())
        for (_, question), (_, answer) in zip(said[::2], said[1::2], strict=True)
    )
    if any(not question for question, _ in turns):
        raise _refuse(place, "a text in each question", row)
    return Conversation(str(row.get("id", number)), tuple(names(path, place) for path in named), turns, notes, place)


def _said(row: Mapping[str, Any], place: str) -> Iterator[tuple[str, str]]:
    """(role, text) of each message of a row."""
    for name, (role, value) in {"messages": ("role", "content"), "conversations": ("from", "value")}.items():
        if name not in row:
            continue
        if not isinstance(row[name], list):
            raise _refuse(place, f"a list as `{name}`", row[name])
        for message in row[name]:
            text = _text(message.get(value)) if isinstance(message, dict) else None
            if text is None or not isinstance(message.get(role), str):
                raise _refuse(place, f"a `{role}` and a text as `{value}` in each of its `{name}`", message)
            yield message[role], check_text(text, "data", place)
        return
    question = next((row[name] for name in ASKED if name in row), None)
    if not isinstance(question, str):
        raise _refuse(place, f"`messages`, `conversations` or a text as one of {', '.join(ASKED)}", row)
    yield "user", check_text(question, "data", place)


def _text(content: object) -> str | None:
    """The text of a message, which chats with pictures give in parts; None if there is none."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        texts = [part.get("text") for part in content if part.get("type") == "text"]
        return " ".join(texts) if all(isinstance(text, str) for text in texts) else None
    return None


def _refuse(place: str, rule: str, value: object) -> InputError:
    return InputError(f"L{place[1:]} must have {rule}, but has {str(value)[:80]!r}. Mend it.")
