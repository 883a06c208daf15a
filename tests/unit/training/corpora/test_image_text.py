"""The reader of the layout of llava_v1_5_mix665k, and whether an answer is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmdec.training.corpora import image_text
from mmdec.training.corpora.image_text import read_conversations
from mmdec.training.metrics.answer_score import claims_held, right_answer, right_in_other_words
from mmdec.types import InputError


def row(**changes: Any) -> dict[str, Any]:
    said = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A star."}]
    return {"id": "a1", "image": "coco/train/1.jpg", "conversations": said} | changes


def write(folder: Path, rows: object) -> Path:
    path = folder / "train.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def test_rows_as_they_are_published(tmp_path: Path) -> None:
    more = [*row()["conversations"], {"from": "human", "value": "And?"}, {"from": "gpt", "value": " No. "}]
    text_only = row(id="text")
    del text_only["image"]
    listed = write(
        tmp_path,
        [row(), row(id=7, conversations=more, model="x"), text_only, row(image=["a.png", "b/c.png"])],
    )
    first, second, third, fourth = read_conversations(listed)
    assert first.images == (tmp_path / "images" / "coco/train/1.jpg",)
    assert first.turns == (("What is it?", "A star."),)
    assert (second.id, second.turns[1], second.notes) == ("7", ("And?", "No."), {"model": "x"})
    assert third.images == ()
    assert [path.name for path in fourth.images] == ["a.png", "c.png"]
    assert read_conversations(listed, tmp_path / "other")[0].images[0] == tmp_path / "other" / "coco/train/1.jpg"
    assert read_conversations(write(tmp_path, [row(image=None)]))[0].images == ()  # as tables write what is lacking
    behind = [{"from": "human", "value": "What is it?\n<image>"}, {"from": "gpt", "value": "x"}]
    assert read_conversations(write(tmp_path, [row(conversations=behind)]))[0].turns[0][0] == "What is it?"


@pytest.mark.parametrize(
    "changes",
    [
        {"id": None},
        {"id": ["a"]},
        {"image": 3},
        {"image": [""]},
        {"image": "/etc/passwd"},
        {"image": "../../secret.png"},
        {"image": "a\0b"},
        {"conversations": None},
        {"conversations": []},
        {"conversations": row()["conversations"][:1]},
        {"conversations": row()["conversations"][::-1]},
        {"conversations": ["a", "b"]},
        {"conversations": [{"from": "human", "value": 1}, {"from": "gpt", "value": "x"}]},
        {"conversations": row()["conversations"] * 2000},
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="Row 1 "):
        read_conversations(write(tmp_path, [row(), row(**changes)]))
    with pytest.raises(InputError, match="Row 0 "):
        read_conversations(write(tmp_path, ["x"]))


def test_a_list_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="readable file"):
        read_conversations(tmp_path / "missing.json")
    for content in (b"", b"{", b"\xff\xfe", b"[" * 100_000):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(InputError, match="JSON list"):
            read_conversations(tmp_path / "bad.json")
    with pytest.raises(InputError, match="holds a dict"):
        read_conversations(write(tmp_path, {}))
    monkeypatch.setattr(image_text, "MAX_LIST_BYTES", 10)
    with pytest.raises(InputError, match="at most 10 bytes"):
        read_conversations(write(tmp_path, [row()]))


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("The house is red.", "red", True),
        ("It is Red", "red", True),
        ("red", "red", True),
        ("The black thing is a ball.", "ball", True),
        ("It is in the top left.", "top left", True),
        ("It is 8 degrees.", "8", True),
        ("TOWAK costs 11.80.", "11.80", True),
        ("The house is not red.", "red", False),
        ("The house isn't red.", "red", False),
        ("The house is dark red.", "red", False),
        ("The red house is blue.", "red", False),
        ("Red and blue.", "red", False),
        ("It is in the left.", "top left", False),
        ("It is 18 degrees.", "8", False),
        ("No.", "no", True),
        ("Yes.", "no", False),
        ("", "red", False),
        ("red", "", False),
    ],
)
def test_what_is_right_in_other_words(answer: str, expected: str, right: bool) -> None:
    assert right_in_other_words(answer, expected) == right


def test_what_a_right_answer_is() -> None:
    assert right_answer("in the  Top left", "In the top left.", "top left", "where")
    assert not right_answer("In the left.", "In the top left.", "top left", "where")
    assert not right_answer("In the top centre.", "In the centre.", "centre", "where")
    assert right_answer("Top row 1, middle row 1, bottom row 1: 3.", "Top row 2, ...: 3.", "3", "count")
    assert not right_answer("Top row 3, middle row 0, bottom row 0: 4.", "...: 3.", "3", "count")
    assert not right_answer("", "...: 3.", "3", "count")
    claims = [["large", "red", "star", "top left"], ["SOUP", "4.50"], ["-4", "degrees"], ["4.50"]]
    text = "A large red star in the top left, and SOUP costs 4.50; it is -4 degrees."
    assert claims_held(text, claims) == 4
    assert claims_held("A large star. Red in the top left. SOUP. 4.50. 4 degrees.", claims) == 1
    assert claims_held("A large red star in the top left: SOUPS 4.50, 14.50", [*claims[:2], ["5", "degrees"]]) == 1
    assert claims_held("", claims) == 0
