"""Tests `mmdec eval vlm`: scores by task, and costs."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

import mmdec
from mmdec.cli.evaluate import vlm_table
from mmdec.errors import InputError
from mmdec.evaluation.description import DescriptionHarness, evaluate_vlm, score
from mmdec.evaluation.harness import Method
from mmdec.evaluation.options import VlmEvalOptions
from mmdec.pretrained.vlm import LoadedVlm, load_vlm
from mmdec.training.corpora.image_text import ImageQuestion, read_questions
from tests.support.grid import sample
from tests.support.pictures import pixels
from tests.support.tiny_vlm_folder import drafter_weights, llava, qwen, write


@pytest.fixture(scope="module", params=sample(("llava", "qwen"), ("llava",)))
def vlm(request: pytest.FixtureRequest) -> LoadedVlm:
    return LoadedVlm(*(llava() if request.param == "llava" else qwen()))


@pytest.fixture(scope="module")
def questions_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return six questions of two tasks about four pictures."""
    folder = tmp_path_factory.mktemp("asked")
    for seed in range(4):
        Image.fromarray(pixels(seed)).save(folder / f"{seed}.png")
    rows = [
        {"image": f"{number % 4}.png", "question": f"What is {number}?", "category": "ab"[number // 3], "answer": "x"}
        for number in range(6)
    ]
    path = folder / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def evaluate(model: Any, questions: Path | None, images: Path | None = None, **more: Any) -> dict[str, Any]:
    return evaluate_vlm(model, VlmEvalOptions(questions=questions, images=images, threads=1, **more))


def shown(table: Any) -> str:
    file = io.StringIO()
    Console(width=200, file=file).print(table)
    return file.getvalue()


@pytest.mark.parametrize(
    ("fields", "answer", "right"),
    [
        ({"scoring": "exact", "answers": ("A red star",)}, "a red star.", (1, 1)),
        ({"scoring": "exact", "answers": ("no", "none")}, "None", (1, 1)),
        ({"scoring": "exact", "answers": ("no",)}, "yes", (0, 1)),
        ({"scoring": "exact", "answers": ("red",), "reference": "It is red."}, "It is red.", (1, 1)),
        ({"scoring": "exact", "answers": ("3",), "reference": "1, 2: 3.", "task": "count"}, "2, 1: 3.", (1, 1)),
        ({"scoring": "claims", "claims": (("red", "star"), ("blue", "bus"))}, "A red star.", (1, 2)),
        ({}, "anything", (0, 0)),
    ],
)
def test_answers_are_scored_by_their_benchmarks_rules(
    fields: dict[str, Any], answer: str, right: tuple[float, int]
) -> None:
    question = ImageQuestion("1", "?", (), **{"task": "t", **fields})
    assert score(question, answer) == pytest.approx(right)


def test_a_model_is_scored_by_task(vlm: LoadedVlm, questions_file: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in questions_file.read_text(encoding="utf-8").splitlines()]
    call: dict[str, Any] = {"model": vlm, "num_speculative_tokens": 3, "drafter": "lookup"}
    answers = [mmdec.describe(questions_file.parent / row["image"], row["question"], **call) for row in rows]
    for row, answer in zip(rows[:4], answers, strict=False):
        row["answer"] = answer.text.upper() + "."  # four are right, three of them of the first task
    rows.append({"image": "none.png", "question": "Missing?", "category": "b", "answer": "x"})
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    for size in (1, 4):
        report = evaluate(vlm, path, questions_file.parent, drafter="lookup", plan="3", batch_size=size)
        assert {task: (row["right"]["value"], row["right"]["n"]) for task, row in report["by_task"].items()} == {
            "a": (1.0, 3),
            "b": (0.25, 4),
        }
        assert report["right"]["n"] == 7
        assert 0 < report["right"]["low"] < 4 / 7 < report["right"]["high"] < 1
        assert list(report["refused"]) == ["6"]
        cost = report["decoding"]
        assert cost["tokens"] == sum(len(answer.tokens) for answer in answers)
        assert cost["rounds"] == sum(answer.rounds - 1 for answer in answers)
        assert cost["accepted_per_round"] == sum(answer.accepted for answer in answers) / cost["rounds"]
        assert 0 < cost["drafter_share"]["of_all"] < cost["drafter_share"]["of_decoding"] < 1
        json.dumps(report)
    text = shown(vlm_table(report))
    assert "57.1 [" in text
    assert rows_of(text) == ["a", "b", "all"]
    assert "refused 6: `image` must be an existing file" in text
    assert "any words" not in text
    swapped = evaluate(vlm, path, questions_file.parent, drafter="none", swap=True, limit=2)
    assert swapped["n"] == 4
    assert swapped["decoding"]["drafted_per_round"] == 0
    assert "pictures swapped" in shown(vlm_table(swapped))


def rows_of(table: str) -> list[str]:
    """Return the first word of each line with an interval."""
    return [line.split()[0] for line in table.splitlines() if re.search(r"\d \[\d.*\] +\d+ ", line)]


def test_answers_in_other_words_are_counted_separately(
    vlm: LoadedVlm, questions_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = [ImageQuestion(str(n), "?", (), "colour", "exact", ("red",), reference="Red.") for n in range(4)]
    texts = ["Red.", "The house is red.", "The red house.", "The house is blue."]
    monkeypatch.setattr("mmdec.evaluation.description.questions_of", lambda *_: questions)
    answer = mmdec.describe(next(questions_file.parent.glob("*.png")), model=vlm, max_new_tokens=2)
    given = [replace(answer, text=text) for text in texts]
    monkeypatch.setattr(DescriptionHarness, "describe", lambda *_: [given.pop(0)])
    report = evaluate(vlm, questions_file, drafter="none")
    row = report["by_task"]["colour"]
    assert (row["right"]["value"], row["right_in_any_words"]["value"]) == (0.25, 0.5)
    assert "colour, right in any words: 50.0 [" in shown(vlm_table(report))
    assert rows_of(shown(vlm_table(report))) == ["colour"]  # what all tasks have would be said twice


def test_compressors_are_counted_by_task(questions_file: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "tiny")
    drafter_weights("specvlm", load_vlm(folder, "cpu").model, folder / "specvlm")
    report = evaluate(folder, questions_file, questions_file.parent, drafter="specvlm", plan="4x2")
    rows = [json.loads(line) for line in questions_file.read_text(encoding="utf-8").splitlines()]
    chosen = [
        mmdec.describe(
            questions_file.parent / row["image"],
            row["question"],
            model=folder,
            drafter="specvlm",
            num_speculative_tokens=(4, 2),
        ).compressor
        for row in rows
    ]
    assert None not in chosen
    assert report["by_task"]["a"]["decoding"]["compressors"] == Counter(chosen[:3])
    assert report["decoding"]["compressors"] == Counter(chosen)
    assert f"images shortened, a: {chosen[0]}" in shown(vlm_table(report))
    without = evaluate(folder, questions_file, questions_file.parent, drafter="lookup", limit=1)
    assert without["decoding"]["compressors"] == {}
    assert "images shortened" not in shown(vlm_table(without))


def test_tokens_of_both_loops_are_compared_whole(vlm: LoadedVlm) -> None:
    """Ends included, padding not; pictures with the model's own marks."""
    harness = DescriptionHarness(vlm, 24)
    questions = [ImageQuestion(str(n), "<image>What is this?", (pixels(n),), "t") for n in range(4)]  # type: ignore[arg-type]
    ours = harness.measure(questions, Method.with_drafter("lookup", "lookup"))
    theirs = harness.measure(questions, Method.greedy())
    assert ours.tokens == theirs.tokens
    assert ours.texts == theirs.texts
    assert theirs.passes == max(map(len, theirs.tokens))
    assert ours.passes <= theirs.passes
    for report in (ours, theirs):
        assert min(report.features, report.encoder, report.decoder) > 0


def test_wrong_arguments_are_refused_by_name(vlm: LoadedVlm, questions_file: Path, tmp_path: Path) -> None:
    for wrong in ({"batch_size": 0}, {"limit": 0}, {"drafter": "eagel"}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            evaluate(vlm, questions_file, questions_file.parent, **wrong)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InputError, match="`questions` must hold questions"):
        evaluate(vlm, tmp_path / "empty.jsonl")


def test_own_pictures_are_all_asked_one_question(vlm: LoadedVlm, questions_file: Path) -> None:
    options: Any = {"prompt": "What is this?", "max_new_tokens": 4}
    report = evaluate(vlm, None, questions_file.parent, drafter="lookup", limit=2, **options)
    assert (report["n"], report["right"]["n"]) == (2, 0)  # nothing says what is right
    assert report["decoding"]["tokens"] > 0


def test_pictures_are_found_beside_the_questions_too(tmp_path: Path) -> None:
    row = json.dumps({"image": "a.png", "question": "What?"})
    for folder, pictures in ((tmp_path / "beside", ""), (tmp_path / "apart", "images")):
        (folder / pictures).mkdir(parents=True)
        (folder / pictures / "a.png").write_bytes(b"")
        (folder / "q.jsonl").write_text(row, encoding="utf-8")
        assert read_questions(folder / "q.jsonl")[0].images == (folder / pictures / "a.png",)


def test_without_sample_pictures_a_list_is_asked_for(
    vlm: LoadedVlm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="Name a list of your own"):
        evaluate_vlm(vlm)
