"""Tests the prompts of `mmdec bench drafters`: built in, and read from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmdec.bench.prompts import BEGINNINGS, INSTRUCTIONS, read_chat_prompts
from mmdec.errors import InputError


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("row", "task", "texts"),
    [
        ({"prompt": "Say."}, "all", ["Say."]),
        ({"question": "Why?", "task": "why"}, "why", ["Why?"]),
        ({"turns": ["First.", "Second."], "category": "qa", "question_id": 3}, "qa", ["First."]),
        (
            {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]},
            "all",
            ["Be brief.", "Hi."],
        ),
        ({"conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Yes?"}]}, "all", ["Hi."]),
    ],
)
def test_rows_of_a_list(tmp_path: Path, row: Any, task: str, texts: list[str]) -> None:
    (prompt,) = read_chat_prompts(lines(tmp_path / "p.jsonl", [row]))
    assert (prompt.task, [message["content"] for message in prompt.messages]) == (task, texts)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "must hold questions"),
        ([3], "Line 1 of .* must have fields"),
        ([{"prompt": ""}], "a text in each question"),
        ([{"turns": []}], "a text as one of question, prompt, text"),
        ([{"messages": [{"role": "owner", "content": "x"}]}], "questions and answers in turn"),
        ([{"messages": [{"role": "assistant", "content": "x"}]}], "questions and answers in turn"),
        ([{"messages": "x"}], "a list as `messages`"),
        ([{"prompt": "What?", "image": "x.png"}], "no pictures"),
    ],
)
def test_lists_that_are_refused(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_chat_prompts(lines(tmp_path / "p.jsonl", rows))


@pytest.mark.parametrize("prompts", [INSTRUCTIONS, BEGINNINGS])
def test_the_built_in_kinds_are_of_one_size(prompts: Any) -> None:
    tasks = [prompt.task for prompt in prompts]
    assert {tasks.count(task) for task in tasks} == {3}
    assert all(prompt.messages[-1]["role"] == "user" for prompt in prompts)
