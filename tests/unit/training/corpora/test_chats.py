"""Tests files of the user's questions: each format, and errors that name the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmdec.errors import InputError
from mmdec.training.corpora.chats import read_chats

LLAVA = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A house."}]
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "I."},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Why?"}]},
]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_each_kind_of_file_is_read(tmp_path: Path) -> None:
    (llava,) = read_chats(write(tmp_path / "a.json", [{"id": 1, "image": "x.png", "conversations": LLAVA}]))
    assert (llava.turns, llava.images) == ((("What?", "A house."),), (tmp_path / "x.png",))
    chat, row, one = read_chats(
        write(tmp_path / "a.jsonl", {"messages": CHAT}, {"conversations": LLAVA}, {"prompt": "Go.", "image": "y.png"})
    )
    assert (chat.turns, chat.notes) == ((("Who?", "I."), ("Why?", "")), {"system": "Be short."})
    assert row.turns == llava.turns
    assert (one.turns, one.images) == ((("Go.", ""),), (tmp_path / "y.png",))
    first, second = read_chats(write(tmp_path / "a.txt", "One?", "", "Two?"))
    assert (first.turns, second.turns) == ((("One?", ""),), (("Two?", ""),))


def test_pictures_lie_in_the_named_folder_or_in_images(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"question": "What?", "image": "x.png"})
    (tmp_path / "images").mkdir()
    assert read_chats(file)[0].images == (tmp_path / "images" / "x.png",)
    assert read_chats(file, tmp_path / "other")[0].images == (tmp_path / "other" / "x.png",)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[]", "fields"),
        ({"answer": "x"}, "`messages`, `conversations` or a text"),
        ({"messages": "x"}, "a list as `messages`"),
        ({"messages": [{"role": "user"}]}, "a text as `content`"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a text as `content`"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}, "in turn"),
        ({"messages": []}, "in turn"),
        ({"question": "<image>"}, "a text in each question"),
        ({"question": "a", "image": [3]}, "as `image`"),
        ({"question": "a", "image": "../x.png"}, "leads out"),
    ],
)
def test_bad_rows_are_named_with_their_line(row: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_chats(write(tmp_path / "a.jsonl", "", row))
    assert "ine 2 of" in str(caught.value)


@pytest.mark.parametrize("name", ["a.csv", "none.json"])
def test_other_files_are_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "x")
    with pytest.raises(InputError, match=r"`data` must be a file that ends in \.json, \.jsonl, \.txt"):
        read_chats(tmp_path / name)
