"""Tests `mmdec bench drafters` on tiny models of each kind; no test depends on times."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from mmdec.bench import drafters, workloads
from mmdec.bench.drafters import bench_drafters
from mmdec.bench.options import DrafterBenchOptions
from mmdec.bench.prompts import BEGINNINGS, INSTRUCTIONS, ChatPrompt
from mmdec.bench.report import BenchReport, BenchRun, format_markdown
from mmdec.errors import InputError
from mmdec.evaluation.harness import Log, no_log
from mmdec.evaluation.language_model import LanguageHarness
from mmdec.generation.corpus_source import write_index
from mmdec.pretrained.drafters import save_network
from mmdec.pretrained.language_model import load_language_model
from tests.support import audio_lm_folders, tiny_text_folder, tiny_vlm_folder, tiny_whisper
from tests.support.bench_reports import check_form
from tests.support.draft_networks import draft_network
from tests.support.grid import sample
from tests.support.pictures import pixels
from tests.support.tiny_vlm_folder import TEXTS

OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "repeats": 1, "max_new_tokens": 8, "per_kind": 1}
RATE = 16_000


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_text_folder.write(folder / "large", TEXTS, 0)
    tiny_text_folder.write(folder / "chat", TEXTS, 0, chat=True, max_position_embeddings=2048)
    tiny_text_folder.write(folder / "same", TEXTS, 1, num_hidden_layers=1)
    tiny_text_folder.write(folder / "other", tiny_text_folder.OTHER, 2, num_hidden_layers=1)
    tiny_whisper.write(folder / "whisper")
    tiny_vlm_folder.write(folder / "vlm")
    save_network(
        draft_network("eagle3", load_language_model(folder / "large", "cpu").model), folder / "eagle3" / "drafter"
    )
    return folder


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("recordings")
    for number, seconds in enumerate((0.5, 0.9)):
        samples = 0.1 * np.random.default_rng(number).standard_normal(round(seconds * RATE)).astype(np.float32)
        soundfile.write(folder / f"{number}.wav", samples, RATE, subtype="FLOAT")
    return sorted(folder.glob("*.wav"))


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asked")
    rows = []
    for number in range(2):
        Image.fromarray(pixels(number)).save(folder / f"{number}.png")
        rows.append({"image": f"{number}.png", "question": "What is it?", "category": "ab"[number]})
    path = folder / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("It is. It is.\nWhat is it?\n", encoding="utf-8")
    return path


def only(run: BenchRun) -> BenchReport:
    (report,) = run.reports
    check_form(report)
    assert run.left_out == {}
    return report


def compare(model: Path, log: Log = no_log, **options: Any) -> BenchRun:
    return bench_drafters(model, DrafterBenchOptions(**{**OPTIONS, **options}), log)


def names(report: BenchReport) -> list[str]:
    return [row.method for row in report.methods]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["large", "chat"])
def test_built_in_prompts_are_grouped_by_kind(home: Path, model: str) -> None:
    report = only(compare(home / model))
    assert names(report) == ["greedy", "plain", "lookup", "recycling", "jacobi", "prompt lookup"]
    kinds = {prompt.task for prompt in (INSTRUCTIONS if model == "chat" else BEGINNINGS)}
    assert {row.group for row in report.comparisons} == {"all", *(f"task {kind}" for kind in kinds)}
    assert {row.timed for row in report.comparisons} == {"wall clock", "CPU time"}


def test_an_index_of_texts_is_a_drafter(home: Path, prompts: Path, tmp_path: Path) -> None:
    index = str(write_index([prompts], home / "large", tmp_path / "texts.safetensors")[0])
    report = only(compare(home / "large", drafter=[index], data=prompts))
    assert names(report) == ["greedy", "plain", index, "prompt lookup"]


@pytest.mark.parametrize("small", sample(("same", "other"), ("same",)))
def test_a_smaller_model_is_compared_with_assisted_generation(home: Path, prompts: Path, small: str) -> None:
    inner = "lookup" if small == "same" else None
    drafts = [str(home / small), "lookup", str(home / "eagle3" / "drafter")]
    report = only(compare(home / "large", drafter=drafts, data=prompts, inner=inner, per_kind=None))
    staged = ["same, inner lookup"] if inner else []
    # transformers takes vocabularies of equal size for the same one
    stock = ["prompt lookup", "assisted by same"] if small == "same" else ["prompt lookup"]
    assert names(report) == ["greedy", "plain", small, *staged, "lookup", "eagle3", *stock]
    assert report.not_measured.keys() == (set() if small == "same" else {"assisted by other"})
    assert {row.baseline for row in report.comparisons} == {"greedy", "plain", *stock}
    for row in report.methods:
        assert (row.equal, row.compared) == (2, 2)
        drafts_tokens = row.method not in ("greedy", "plain", *stock)
        assert (row.tokens_per_round is not None) == drafts_tokens
        assert row.passes >= 1
    assert f"| {small} | 2 of 2 |" in format_markdown(BenchRun((report,)))


def test_recordings_are_drafted_by_heads_and_by_texts(home: Path, recordings: list[Path], tmp_path: Path) -> None:
    for path in recordings:
        (tmp_path / f"{path.stem}.txt").write_text("where is the station", encoding="utf-8")
    report = only(compare(home / "whisper", audio=recordings, draft_text=[tmp_path]))
    assert names(report) == [
        *("greedy", "plain", "lookup", "recycling", "jacobi", "medusa", f"text {tmp_path.name}"),
        *({"prompt lookup"} - report.not_measured.keys()),
    ]
    assert report.bench == "drafters-audio"
    assert "2 recordings" in report.title


@pytest.mark.parametrize("family", sample(("Qwen2Audio", "GraniteSpeech"), ("Qwen2Audio",)))
def test_audio_language_models_are_measured(family: str, recordings: list[Path], tmp_path: Path) -> None:
    audio_lm_folders.write(family, tmp_path / "hearing")
    report = only(compare(tmp_path / "hearing", audio=recordings))
    assert names(report)[:4] == ["greedy", "plain", "lookup", "recycling"]
    assert {row.equal for row in report.methods[:4]} == {2}
    assert report.bench == "drafters-audio"


def test_questions_about_pictures_are_answered(home: Path, questions: Path) -> None:
    report = only(compare(home / "vlm", drafter=["lookup"], data=questions))
    assert report.bench == "drafters-images"
    assert {"all", "task a", "task b", "1-8 tokens"} <= {row.group for row in report.comparisons}
    only(compare(home / "vlm", drafter=["lookup"], images=questions.parent / "1.png"))


def test_a_drafter_with_different_text_has_no_figures(
    home: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = LanguageHarness.measure

    def wrong(self: LanguageHarness, inputs: Any, method: Any) -> Any:
        result = own(self, inputs, method)
        if method.name in ("recycling", "prompt lookup") and inputs[0].ids.shape[1] == shortest:
            result.tokens[0][-1] += 1
        return result

    language = load_language_model(home / "large", "cpu")
    shortest = min(len(language.tokenizer(line)["input_ids"]) for line in prompts.read_text().splitlines())
    monkeypatch.setattr(LanguageHarness, "measure", wrong)
    lines: list[str] = []
    run = compare(home / "large", lines.append, data=prompts, per_kind=None)
    assert sum("OTHER TOKENS: recycling, prompt lookup;" in line for line in lines) == 1
    assert run.left_out.keys() == {"recycling"}
    assert "differ from greedy decoding on 1 of 2 prompts: no figures" in run.left_out["recycling"]
    (report,) = run.reports
    assert names(report) == ["greedy", "plain", "lookup", "jacobi", "prompt lookup"]
    assert [(row.equal, row.compared) for row in report.methods] == [(2, 2), (2, 2), (2, 2), (2, 2), (1, 2)]
    rows = [row for row in report.comparisons if row.baseline == "prompt lookup" and row.group == "all"]
    assert {row.inputs for row in rows} == {1}
    assert all("recycling" not in (row.subject, row.baseline) for row in report.comparisons)


def test_a_time_limit_keeps_what_was_measured(home: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 10.0)  # each look at the clock takes ten seconds
    monkeypatch.setattr(drafters.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(drafters.time, "process_time", time.perf_counter)
    lines: list[str] = []
    options: dict[str, Any] = {"data": prompts, "per_kind": 2, "repeats": 5}
    report = only(compare(home / "large", lines.append, minutes=1.0, **options))
    assert report.not_measured["the rest"] == "the time was over after 3 of 10 calls of each method, 2 of 2 prompts"
    assert [row.n for row in (report.methods[2].tokens_per_round,) if row is not None] == [3]
    methods = ["greedy", "plain", "lookup", "recycling", "jacobi", "prompt lookup"]
    assert [line.split(":")[0] for line in lines[1:7]] == methods
    assert lines[7].startswith("1 of 2, all (repeat 1 of 5): greedy ")
    assert len(lines) == 10
    report = only(compare(home / "large", minutes=0.01, **options))
    assert "1 of 10 calls of each method, 1 of 2 prompts" in report.not_measured["the rest"]
    assert {row.compared for row in report.methods} == {1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": ["lokup"]}, "`drafter` must be one of lookup.*Did you mean 'lookup'"),
        ({"drafter": [""]}, "`drafter` must be one of"),
        ({"drafter": ["lookup", "lookup"]}, "`drafter` must name each drafter once"),
        ({"drafter": ["eagle"]}, "`drafter` must be a folder for eagle"),
        ({"drafter": ["EMPTY"]}, r"`drafter` must be a folder with a drafter's config\.json"),
        ({"model": "chat", "drafter": ["WIDE"]}, "`model` must have .* channels for this drafter"),
        ({"model": "eagle3/drafter"}, "`model` must be a language model"),
        ({"data": "EMPTY/none.txt"}, "`data`"),
        ({"images": "EMPTY"}, "`images` must be for a model that reads it"),
        ({"draft_model": ["whisper-tiny.en"]}, "need recordings, but the model reads none"),
        ({"model": "whisper", "draft_model": ["nowhere"]}, "must be"),
        ({"model": "whisper", "data": "EMPTY/none.txt"}, "Give `audio` instead"),
        ({"model": "whisper", "audio": [Path("none.wav")]}, "`audio` must be files"),
        ({"model": "whisper", "drafter": ["large"]}, "`drafter` must have the target's"),
        ({"inner": "lookup"}, "`inner` must be for a smaller model"),
        ({"minutes": 0.0}, "`minutes` must be positive"),
        ({"minutes": float("nan")}, "`minutes`"),
        ({"repeats": 0}, "`repeats`"),
        ({"per_kind": 0}, "`per_kind`"),
        ({"plan": "many"}, "`plan`"),
        ({"threads": 0}, "`threads`"),
    ],
)
def test_bad_arguments_are_refused_before_the_model_is_loaded(
    home: Path, tmp_path: Path, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "inner" not in options:
        for load in ("load_language_model", "load_whisper", "load_vlm"):
            monkeypatch.setattr(workloads, load, lambda *_: pytest.fail("the model was loaded"))
    if options.get("drafter") == ["WIDE"]:
        wide = tiny_text_folder.write(tmp_path / "large", TEXTS, 0, hidden_size=64)
        save_network(draft_network("eagle3", load_language_model(wide, "cpu").model), tmp_path / "WIDE")
        monkeypatch.setattr(workloads, "load_language_model", lambda *_: pytest.fail("the model was loaded"))
    (tmp_path / "EMPTY").mkdir()
    monkeypatch.chdir(tmp_path)
    options = dict(options)
    if options.get("drafter") == ["large"]:
        options["drafter"] = [str(home / "large")]
    with pytest.raises(InputError, match=message):
        compare(home / options.pop("model", "large"), **options)


def test_kinds_take_turns() -> None:
    chosen = workloads.in_turn(
        [ChatPrompt(task, ({"number": number},)) for task, number in ("a1", "a2", "b3", "b4", "c5")]
    )
    assert [prompt.messages[0]["number"] for prompt in chosen] == ["1", "3", "5", "2", "4"]


def test_prompts_that_leave_no_room_are_left_out(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(f"Short.\n{'It is. ' * 300}\n", encoding="utf-8")
    assert "1 prompts" in only(compare(home / "large", data=path, per_kind=9)).title
    path.write_text("It is. " * 300, encoding="utf-8")
    with pytest.raises(InputError, match="must hold prompts that leave 8 of the model's 256 positions"):
        compare(home / "large", data=path)
