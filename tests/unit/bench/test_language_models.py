"""Tests `mmdec bench core --model`, which compares drafters for a given language model with transformers' loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmdec.bench.language_models import (
    BEGINNINGS,
    INSTRUCTIONS,
    LanguageHarness,
    bench_language,
    read_prompts,
)
from mmdec.bench.report import BenchRun, markdown
from mmdec.errors import InputError, MmdecError
from mmdec.pretrained.drafters import save_network
from mmdec.pretrained.language_model import load_language_model
from tests.support.bench_reports import check_form
from tests.support.draft_networks import draft_network
from tests.support.grid import sample
from tests.support.tiny_text_folder import OTHER, write
from tests.support.tiny_vlm_folder import TEXTS

OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "repeats": 1, "max_new_tokens": 8, "per_kind": 1}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write(folder / "large", TEXTS, 0)
    write(folder / "chat", TEXTS, 0, chat=True, max_position_embeddings=2048)
    write(folder / "same", TEXTS, 1, num_hidden_layers=1)
    write(folder / "other", OTHER, 2, num_hidden_layers=1)
    return folder


PAIRS = [("large", None), ("large", "same"), ("large", "other"), ("chat", "same")]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "draft"), sample(PAIRS, [("large", None), ("large", "other"), ("chat", "same")]))
def test_all_methods_are_compared_and_timed(home: Path, model: str, draft: str | None) -> None:
    report = bench_language(home / model, None if draft is None else home / draft, **OPTIONS)
    check_form(report)
    assert report.bench == "core"
    ours = {"lookup", "recycling"} | ({"small model"} if draft else set())
    assert {row.subject for row in report.comparisons} == ours
    stock = {"greedy", "plain", "prompt lookup"} | ({"assisted generation"} if draft == "same" else set())
    # transformers takes vocabularies of equal size for the same one
    assert report.not_measured.keys() == ({"assisted generation"} if draft == "other" else set())
    assert {row.baseline for row in report.comparisons} == stock
    assert all(gate.equal == gate.of for gate in report.exactness if gate.what.split()[2] in ("lookup", "plain"))
    kinds = {prompt.task for prompt in (INSTRUCTIONS if model == "chat" else BEGINNINGS)}
    assert {row.group for row in report.comparisons} == {"all", "first 20 tokens", *(f"task {kind}" for kind in kinds)}
    assert {row.timed for row in report.comparisons} == {"wall clock", "processor"}
    assert all(row.accepted_per_round is not None for row in report.comparisons)
    assert "accepted: without it" in markdown(BenchRun((report,)))


def test_a_draft_network_is_timed_without_a_loop_of_transformers(home: Path, tmp_path: Path) -> None:
    model = load_language_model(home / "large", "cpu").model
    save_network(draft_network("eagle3", model), tmp_path / "eagle3")
    report = bench_language(home / "large", tmp_path / "eagle3", **OPTIONS)
    assert {row.subject.split("-")[0] for row in report.comparisons} == {"eagle3", "lookup", "recycling"}
    assert {row.baseline for row in report.comparisons} == {"greedy", "plain", "prompt lookup"}


def test_a_method_with_different_text_is_not_timed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = LanguageHarness.measure

    def wrong(self: LanguageHarness, inputs: Any, method: Any) -> Any:
        result = own(self, inputs, method)
        if method.name == "recycling":
            result.tokens[0][-1] += 1
        return result

    monkeypatch.setattr(LanguageHarness, "measure", wrong)
    with pytest.raises(MmdecError, match="`recycling` differs from greedy decoding on prompt 0"):
        bench_language(home / "large", **OPTIONS)


def test_prompts_that_leave_no_room_are_counted_or_refused(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(f"Short.\n{'It is. ' * 300}\n", encoding="utf-8")
    assert "1 prompts, 1 left out" in bench_language(home / "large", data=path, **{**OPTIONS, "per_kind": 9}).title
    path.write_text("It is. " * 300, encoding="utf-8")
    with pytest.raises(InputError, match="must hold prompts that leave 8 of the model's 256 positions"):
        bench_language(home / "large", data=path, **OPTIONS)


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
    (prompt,) = read_prompts(lines(tmp_path / "p.jsonl", [row]))
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
        read_prompts(lines(tmp_path / "p.jsonl", rows))


@pytest.mark.parametrize("prompts", [INSTRUCTIONS, BEGINNINGS])
def test_the_built_in_kinds_are_of_one_size(prompts: Any) -> None:
    tasks = [prompt.task for prompt in prompts]
    assert {tasks.count(task) for task in tasks} == {3}
    assert all(prompt.messages[-1]["role"] == "user" for prompt in prompts)
