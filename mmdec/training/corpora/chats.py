"""Reads conversations with a model, with or without pictures, from a file of one of three formats.

| file | format |
|---|---|
| .json | as llava_v1_5_mix665k: a list of rows with `conversations` (each `from`, `value`); optionally `image` |
| .jsonl | on each line `messages` (each `role`, `content`), `conversations`, or a `question`; optionally `image` |
| .txt | one question a line |

A .json list may also hold rows in a format of .jsonl. The field `question` may also be named `prompt` or `text`. If
`turns` is a list of questions, as in Spec-Bench, only the first is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmdec.checks.files import quote_path
from mmdec.errors import InputError
from mmdec.training.corpora.admission import STRICT, Admission, PathResolver
from mmdec.training.corpora.text_files import check_text, json_lines, read_json, text_lines

SUFFIXES = (".json", ".jsonl", ".txt")
QUESTION_FIELDS = ("question", "prompt", "text")  # possible names of the field with a single question
LAYOUTS = {"messages": ("role", "content"), "conversations": ("from", "value")}
SPEAKERS = {"user": 0, "human": 0, "assistant": 1, "gpt": 1}
SYSTEM_KEY = "system"  # the key of the system message in `Conversation.notes`
MAX_LIST_BYTES = 8_000_000_000  # size limit of a .json file, to save memory; llava_v1_5_mix665k.json has 1 GB
MAX_TURNS = 1000  # the most (question, answer) pairs in a conversation; more are an error
IMAGE = "<image>"
PART_TYPES = ("text", "image")  # types of the parts that a message's content may consist of


@dataclass(frozen=True)
class Conversation:
    """One conversation, read from one row of a file.

    Args:
        images: Paths of its pictures.
        turns: (question, answer) pairs. Questions are without the image token. The last answer may be "".
        notes: The row's other fields, by name, and the system message under the key "system".
    """

    id: str
    images: tuple[Path, ...]
    turns: tuple[tuple[str, str], ...]
    notes: Mapping[str, Any]
    place: str = field(default="", compare=False)  # file and row where it is listed


def read_chats(
    listed: str | Path, images: str | Path | None = None, admission: Admission = STRICT
) -> list[Conversation]:
    """Read the conversations of a file. Picture files are not opened.

    Args:
        images: Folder that image paths are relative to. Default: the folder "images" next to the file, else the file's
            own folder.

    Raises:
        InputError: For a file that is missing, empty or in another format. The message names the row.
    """
    path = check_listed(Path(listed))
    if path.suffix == ".json":
        rows = _list(path, "data")
    elif path.suffix == ".txt":
        rows = ((f"line {number}", {"question": line}) for number, line in text_lines(path, "data"))
    else:
        rows = ((f"line {number}", row) for number, row in json_lines(path, "data"))
    resolve, file = admission.path_resolver(picture_folder(path, images)), f"'{quote_path(path)}'"
    chats = [_conversation(row, f"{place} of {file}", resolve, False) for place, row in rows]
    if not chats:
        raise InputError(f"`data` must hold questions, but {file} holds none. Write one on each line.")
    return chats


def read_conversations(
    listed: str | Path, images: str | Path | None = None, admission: Admission = STRICT
) -> list[Conversation]:
    """Read the conversations of a .json list. Every question must have an answer. Picture files are not opened.

    Args:
        images: Folder that image paths are relative to. Default: the folder "images" next to the list.

    Raises:
        InputError: For a list that is missing, too large or in another format. The message names the row.
    """
    path = Path(listed)
    rows = _list(path, "listed")
    resolve = admission.path_resolver(path.parent / "images" if images is None else Path(images))
    return [_conversation(row, f"{place} of '{quote_path(path)}'", resolve, True) for place, row in rows]


def _list(path: Path, argument: str) -> Iterable[tuple[str, Any]]:
    rows = read_json(path, argument, "a JSON list", MAX_LIST_BYTES)
    if not isinstance(rows, list):
        raise InputError(
            f"`{argument}` must be a JSON list, but '{path}' holds a {type(rows).__name__}. Put the chats into a list."
        )
    return ((f"row {number}", row) for number, row in enumerate(rows))


def check_listed(path: Path) -> Path:
    """Check that this is an existing .json, .jsonl or .txt file, and return the path.

    Raises:
        InputError: For any other path.
    """
    if path.suffix not in SUFFIXES or not path.is_file():
        raise InputError(f"`data` must be a file that ends in {', '.join(SUFFIXES)}, but '{path}' is not.")
    return path


def picture_folder(list_file: Path, images: str | Path | None) -> Path:
    """Return the folder that a list's image paths are relative to.

    It is `images` if given, else the folder "images" beside the list if there is one, else the list's own folder.
    """
    if images is not None:
        return Path(images)
    adjacent = list_file.parent / "images"
    return adjacent if adjacent.is_dir() else list_file.parent


def _conversation(row: object, place: str, resolve: PathResolver, answered: bool) -> Conversation:
    """Turn one row of a file into a conversation.

    Args:
        place: Where the row is, for messages.
        resolve: Turns picture names into paths.
        answered: Whether the last question must have an answer.

    Raises:
        InputError: For a malformed row.
    """
    if not isinstance(row, dict):
        raise malformed_row_error(place, "fields", row)
    name = row.get("id", place.split()[1])
    if not isinstance(name, str | int):
        raise malformed_row_error(place, "a string or a number as `id`", name)
    row = {name: value for name, value in row.items() if value is not None}  # a field that is null counts as missing
    named = row.get("image", row.get("images", []))
    named = [named] if isinstance(named, str) else named
    if not isinstance(named, list) or not all(isinstance(path, str) and path for path in named):
        raise malformed_row_error(place, "a path or a list of paths as `image`", named)
    messages = list(_read_messages(row, place))
    notes = {
        key: value for key, value in row.items() if key not in ("id", "image", "images", *LAYOUTS, *QUESTION_FIELDS)
    }
    if messages and messages[0][0] == SYSTEM_KEY:
        notes[SYSTEM_KEY] = messages.pop(0)[1]
    if len(messages) % 2 and not answered:
        messages.append(("assistant", ""))
    wrong = (SPEAKERS.get(role) != index % 2 for index, (role, _) in enumerate(messages))
    if len(messages) % 2 or not 2 <= len(messages) <= 2 * MAX_TURNS or any(wrong):
        raise malformed_row_error(
            place, "questions and answers in turn, 1 to 1000 of each", [role for role, _ in messages]
        )
    turns = tuple(
        (question.replace(IMAGE, "").strip(), answer.strip())
        for (_, question), (_, answer) in zip(messages[::2], messages[1::2], strict=True)
    )
    if any(not question for question, _ in turns):
        raise malformed_row_error(place, "a text in each question", row)
    return Conversation(str(name), tuple(resolve(path, place) for path in named), turns, notes, place)


def _read_messages(row: Mapping[str, Any], place: str) -> Iterator[tuple[str, str]]:
    """Yield the (role, text) of each message of a row.

    Args:
        place: Where the row is, for messages.
    """
    for name, (role, value) in LAYOUTS.items():
        if name not in row:
            continue
        if not isinstance(row[name], list):
            raise malformed_row_error(place, f"a list as `{name}`", row[name])
        for message in row[name]:
            text = _text(message.get(value)) if isinstance(message, dict) else None
            if text is None or not isinstance(message.get(role), str):
                raise malformed_row_error(place, f"a `{role}` and a text as `{value}` in each of its `{name}`", message)
            yield message[role], check_text(text, "data", place)
        return
    turns = row.get("turns")
    first = turns[0] if isinstance(turns, list) and turns else None
    question = next((row[name] for name in QUESTION_FIELDS if name in row), first)
    if not isinstance(question, str):
        raise malformed_row_error(
            place, f"`messages`, `conversations` or a text as one of {', '.join(QUESTION_FIELDS)}", row
        )
    yield "user", check_text(question, "data", place)


def _text(content: object) -> str | None:
    """Return the text of a message's content; None if the content is malformed.

    Args:
        content: A string, or a list of parts of the types "text" and "image".
    """
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") in PART_TYPES for part in content):
        texts = [part.get("text") for part in content if part.get("type") == "text"]
        return " ".join(texts) if all(isinstance(text, str) for text in texts) else None
    return None


def malformed_row_error(place: str, rule: str, value: object) -> InputError:
    """Build the error of a malformed row.

    Args:
        place: Where the row is.
        rule: What the row must have.
        value: What the row has instead.
    """
    return InputError(f"{place[0].upper()}{place[1:]} must have {rule}, but has {str(value)[:80]!r}. Correct it.")
