"""Tests the reader for the layout of llava_v1_5_mix665k, and the scoring of answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmdec.errors import InputError
from mmdec.training.corpora import chats
from mmdec.training.corpora.chats import read_conversations
from mmdec.training.corpora.image_text import SHORT_ANSWER_PROMPT, ImageQuestion, read_questions, swap_pictures
from mmdec.training.metrics.text import count_claims, right_answer, right_in_other_words


def row(**changes: Any) -> dict[str, Any]:
    conversation = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A star."}]
    return {"id": "a1", "image": "coco/train/1.jpg", "conversations": conversation} | changes


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


def test_broken_lists_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="existing file"):
        read_conversations(tmp_path / "missing.json")
    for content in (b"", b"{", b"\xff\xfe", b"[" * 100_000):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(InputError, match="JSON list"):
            read_conversations(tmp_path / "bad.json")
    with pytest.raises(InputError, match="holds a dict"):
        read_conversations(write(tmp_path, {}))
    monkeypatch.setattr(chats, "MAX_LIST_BYTES", 10)
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
def test_paraphrases_count_as_right(answer: str, expected: str, right: bool) -> None:
    assert right_in_other_words(answer, expected) == right


def test_right_answers_are_recognised() -> None:
    assert right_answer("in the  Top left", "In the top left.", "top left", "where")
    assert not right_answer("In the left.", "In the top left.", "top left", "where")
    assert not right_answer("In the top centre.", "In the centre.", "centre", "where")
    assert right_answer("Top row 1, middle row 1, bottom row 1: 3.", "Top row 2, ...: 3.", "3", "count")
    assert not right_answer("Top row 3, middle row 0, bottom row 0: 4.", "...: 3.", "3", "count")
    assert not right_answer("", "...: 3.", "3", "count")
    claims = [["large", "red", "star", "top left"], ["SOUP", "4.50"], ["-4", "degrees"], ["4.50"]]
    text = "A large red star in the top left, and SOUP costs 4.50; it is -4 degrees."
    assert count_claims(text, claims) == 4
    assert count_claims("A large star. Red in the top left. SOUP. 4.50. 4 degrees.", claims) == 1
    assert count_claims("A large red star in the top left: SOUPS 4.50, 14.50", [*claims[:2], ["5", "degrees"]]) == 1
    assert count_claims("", claims) == 0


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return path


def write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def test_questions_of_llava_bench_in_the_wild_are_read(tmp_path: Path) -> None:
    rows = [
        {"question_id": 0, "image": "001.jpg", "text": "What is the name of this famous sight?", "category": "conv"},
        {"question_id": 1, "image": "001.jpg", "text": "Describe this photo in detail.", "category": "detail"},
        {"question_id": 2, "image": "001.jpg", "text": "What is recommended here?", "category": "complex"},
    ]
    (tmp_path / "images").mkdir()
    result = read_questions(lines(tmp_path / "questions.jsonl", rows))
    assert [row.task for row in result] == ["complex", "conv", "detail"]
    assert result[1].question == "What is the name of this famous sight?"
    assert result[1].images == (tmp_path / "images" / "001.jpg",)
    assert {row.scoring for row in result} == {""}
    elsewhere = read_questions(tmp_path / "questions.jsonl", tmp_path / "pictures")
    assert elsewhere[0].images == (tmp_path / "pictures" / "001.jpg",)
    long = lines(tmp_path / "long.jsonl", [{"image": "x" * 300 + ".png", "question": "What?"}])
    assert read_questions(long)[0].images == (tmp_path / "images" / ("x" * 300 + ".png"),)  # missing, and no traceback
    (tmp_path / "001.jpg").touch()
    beside = read_questions(tmp_path / "questions.jsonl")
    assert beside[0].images == (tmp_path / "001.jpg",)


def test_questions_of_mmspec_are_read(tmp_path: Path) -> None:
    """Several turns have one picture; the first is asked. Topics group them, for categories are their sources' own."""
    rows = [
        {"id": "mmspec_001", "image": "mmspec_001.jpg", "turns": ["Is it red?"], "category": "default", "topic": "vqa"},
        {"id": "mmspec_002", "image": "mmspec_002.png", "turns": ["Who?", "Why?"], "category": "ab", "topic": "talk"},
    ]
    (tmp_path / "images").mkdir()
    talk, vqa = read_questions(lines(tmp_path / "mmspec.jsonl", rows))
    assert (talk.id, talk.question, talk.task, talk.scoring) == ("mmspec_002", "Who?", "talk", "")
    assert vqa.images == (tmp_path / "images" / "mmspec_001.jpg",)


def test_questions_of_a_users_own_list_are_read(tmp_path: Path) -> None:
    rows = [
        {"image": ["a.png", "b/c.png"], "question": "Which is larger?", "answer": "The first"},
        {"question": "Say nothing.", "answers": ["-"] * 10, "task": "quiet"},
    ]
    own, quiet = read_questions(lines(tmp_path / "q.jsonl", rows), tmp_path)
    assert own.images == (tmp_path / "a.png", tmp_path / "b/c.png")
    assert (own.task, own.scoring, own.answers) == ("all", "exact", ("The first",))
    assert (quiet.images, quiet.scoring) == ((), "")
    blank = {"image": None, "question": "Say.", "answer": None, "category": None, "question_id": None}
    assert read_questions(lines(tmp_path / "blank.jsonl", [blank])) == [ImageQuestion("0", "Say.", (), "all")]
    (tmp_path / "marked.jsonl").write_text((tmp_path / "q.jsonl").read_text(), encoding="utf-8-sig")
    assert read_questions(tmp_path / "marked.jsonl", tmp_path) == [own, quiet]  # as some editors write it


def test_questions_of_textvqa_are_read(tmp_path: Path) -> None:
    rows = {
        "dataset_type": "val",
        "dataset_name": "textvqa",
        "dataset_version": "0.5.1",
        "data": [
            {
                "question": "what is the brand of this camera?",
                "image_id": "003a8ae2ef43b901",
                "image_classes": ["Cassette deck"],
                "flickr_original_url": "https://example.org/x.jpg",
                "image_width": 1024,
                "image_height": 664,
                "answers": ["nous les gosses", "dakota", *["dakota digital"] * 8],
                "question_tokens": ["what"],
                "question_id": 34602,
                "set_name": "val",
            }
        ],
    }
    (question,) = read_questions(write_json(tmp_path / "TextVQA_0.5.1_val.json", rows))
    assert question.images == (tmp_path / "train_images" / "003a8ae2ef43b901.jpg",)
    assert question.question == "what is the brand of this camera?" + SHORT_ANSWER_PROMPT
    assert (question.id, question.scoring, len(question.answers)) == ("34602", "", 10)


def test_questions_of_vqav2_are_read(tmp_path: Path) -> None:
    questions = {
        "info": {},
        "task_type": "Open-Ended",
        "data_type": "mscoco",
        "data_subtype": "val2014",
        "questions": [
            {"image_id": 262148, "question": "Where is he looking?", "question_id": 262148000},
            {"image_id": 393225, "question": "Is it wet?", "question_id": 393225001},
        ],
    }
    answers = [{"answer": "down", "answer_confidence": "yes", "answer_id": n} for n in range(1, 11)]
    annotations = {
        "annotations": [
            {
                "question_type": "none of the above",
                "multiple_choice_answer": "down",
                "answers": answers,
                "image_id": 262148,
                "answer_type": "other",
                "question_id": 262148000,
            },
            {
                "question_type": "is it",
                "multiple_choice_answer": "yes",
                "answers": [{**answer, "answer": "yes"} for answer in answers],
                "image_id": 393225,
                "answer_type": "yes/no",
                "question_id": 393225001,
            },
        ]
    }
    path = write_json(tmp_path / "v2_OpenEnded_mscoco_val2014_questions.json", questions)
    # as for the test split, which has no annotations
    assert [question.scoring for question in read_questions(path)] == ["", ""]
    write_json(tmp_path / "v2_mscoco_val2014_annotations.json", annotations)
    other, wet = read_questions(path)
    assert other.images == (tmp_path / "val2014" / "COCO_val2014_000000262148.jpg",)
    assert (other.task, wet.task) == ("other", "yes/no")
    assert other.answers == ("down",) * 10
    assert other.scoring == ""


def test_conversations_take_their_scoring_from_their_notes(tmp_path: Path) -> None:
    pairs = [
        ("<image>\nDescribe this image.", "A red star."),
        ("What colour?", "It is red."),
        ("And its colour?", "Red."),
        ("Name its colour.", "Red."),
    ]
    notes = [
        {"task": "describe", "expected": "", "claims": [["red", "star"]]},
        *[{"task": "colour", "expected": "red", "claims": []}] * 3,
    ]
    turns = [{"from": who, "value": text} for pair in pairs for who, text in zip(("human", "gpt"), pair, strict=True)]
    row = {"id": "a", "image": "a.png", "conversations": turns}
    path = write_json(tmp_path / "test.json", [{**row, "turns": notes}])
    colour, again, described = read_questions(path)
    assert (colour.task, colour.scoring, colour.answers, colour.reference) == (
        "colour",
        "exact",
        ("red",),
        "It is red.",
    )
    assert again.question == "And its colour?"
    assert (described.scoring, described.claims) == ("claims", (("red", "star"),))
    assert described.images == (tmp_path / "images" / "a.png",)
    for odd in (None, 3, {"claims": None}, {"claims": 3}):  # somebody else's field of that name
        foreign = read_questions(write_json(tmp_path / "odd.json", [{**row, "turns": [odd]}]))
        assert (foreign[0].task, foreign[0].claims) == ("all", ())
    plain = read_questions(write_json(tmp_path / "mix.json", [row]))
    assert [question.scoring for question in plain] == ["", ""]


def test_pictures_are_swapped_within_a_task(tmp_path: Path) -> None:
    rows = [
        {"image": name, "text": "?", "category": task}
        for name, task in (("a", "x"), ("a", "x"), ("b", "x"), ("c", "y"))
    ]
    result = swap_pictures(read_questions(lines(tmp_path / "q.jsonl", rows)))
    assert [row.images[0].name for row in result] == ["b", "b", "a", "c"]  # type: ignore[union-attr] # no bytes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"image": "../../etc/passwd", "text": "?"}', "inside the folder"),
        ('{"image": "/etc/passwd", "text": "?"}', "inside the folder"),
        ('{"image": 3, "text": "?"}', "paths as `image`"),
        ('{"image": "a.png"}', "`question` or `text`"),
        ('{"image": "a.png", "text": ""}', "`question` or `text`"),
        ('{"text": "?", "answer": 7}', "as `answer`"),
        ("[1]", "fields"),
        ("{", "must be JSON"),
    ],
)
def test_broken_rows_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "q.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_questions(tmp_path / "q.jsonl")


@pytest.mark.parametrize("content", ['{"data": [{"image_id": 1}]}', '{"questions": [{}]}', '{"a": 1}', "7"])
def test_unreadable_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "q.json").write_text(content, encoding="utf-8")
    with pytest.raises(InputError):
        read_questions(tmp_path / "q.json")
    with pytest.raises(InputError, match="existing file"):
        read_questions(tmp_path / "none.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"must be a file, but .* is a folder"):
        read_questions(tmp_path / "empty")
