"""Tests the benchmark of whole passes with tiny models on a CPU: its rows, its list of what is not measured, and that
it stops before timing if results differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from mmdec.targets.fast_pass import FastPass, FastRun, fast_pass
from typer.testing import CliRunner

from mmdec.cli.bench import app
from mmdec.evaluation.bench import passes as bench_passes
from mmdec.evaluation.bench import passes_transcription as bench_speech
from mmdec.targets import attention
from mmdec.targets import fast_pass as targets_fast_pass
from mmdec.types import InputError, MmdecError
from tests.support.bench_findings import check_form
from tests.support.recorded_graphs import recorded_graphs

CPU = torch.device("cpu")
TEXT = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SPEECH = {"d_model": 64, "layers": 2, "heads": 2, "max_source_positions": 50}
SIZES = bench_passes.PassSizes("mini", 40, 9, "mini")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setitem(bench_passes.TEXTS, "mini", TEXT)
    monkeypatch.setitem(bench_speech.SPEECHES, "mini", SPEECH)
    monkeypatch.setitem(bench_passes.SIZES, "cpu", SIZES)
    yield
    torch.set_num_threads(threads)


def test_a_cpu_gets_its_rows_and_says_what_a_gpu_would_have() -> None:
    found = bench_passes.bench_passes(repeats=2)
    check_form(found)
    report = found.details
    kinds = [(row["subject"], row["timed"]) for row in report["rows"]]
    fast = "fast pass, fixed shapes without graphs"
    assert kinds == [("tree attention", "draft's pass"), (fast, "round"), (fast, "draft's pass")]
    for row in report["rows"]:
        assert row["pair"].n == 2
        assert row["pair"].ratio > 0
        assert (row["dtype"], row["batch"]) == ("float32", 1)
    round_, pass_ = (row["pair"] for row in report["rows"][1:])
    assert round_.a_ms > pass_.a_ms  # the pass is part of the round
    assert report["rows"][1]["equal_texts"]
    reason = "the CPU was asked for" if torch.cuda.is_available() else "no GPU"
    assert set(found.not_measured.values()) == {reason}
    assert [name.split()[0] for name in found.not_measured] == ["7B", "small"]
    assert [row.subject for row in found.comparisons] == [subject for subject, _ in kinds]


def test_only_one_side_attends_by_tree_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.tree_attention
    monkeypatch.setattr(attention, "tree_attention", lambda *given: 1.01 * right(*given))
    with pytest.raises(MmdecError, match=r"behind 16 tokens, SDPA, dense mask: logits .* No time was taken"):
        bench_passes.text_pass(SIZES, CPU, torch.float32, 1)


@pytest.mark.parametrize("dtype", bench_speech.LIMITS)
@pytest.mark.parametrize("kind", ["text", "speech"])
def test_one_wrong_parent_is_more_than_a_rounding(kind: str, dtype: torch.dtype) -> None:
    """Behind the short prefix: the limits must tell them apart."""
    if kind == "text":
        model = bench_passes.random_text_model("mini", 64, CPU, dtype)
        inputs: dict[str, Any] = {"input_ids": torch.arange(1, 1 + bench_passes.SHORT)[None]}
    else:
        model = bench_speech.random_speech_model("mini", CPU, dtype)
        inputs = bench_speech.prompt_of(model)
    a, b = (
        bench_speech.Run(model, inputs),
        bench_speech.Run(bench_speech.twin(model), inputs),
    )
    draft = bench_speech.binary_tree(9, model.config.vocab_size, CPU)
    parents = draft.parents.clone()
    parents[0, 7] = 1
    assert bench_speech.difference(a(draft), b(draft)) == 0
    assert bench_speech.difference(a(draft), b(replace(draft, parents=parents))) > bench_speech.LIMITS[dtype]


def test_twins_share_weights_and_nothing_else() -> None:
    model = bench_passes.random_text_model("mini", 64, CPU, torch.float32)
    other: Any = bench_speech.twin(model)
    for one, same in zip(model.parameters(), other.parameters(), strict=True):
        assert one is same
    other.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == attention.TREE_ATTENTION
    assert fast_pass(model) is not fast_pass(other)


def test_where_the_fast_pass_is_used_sdpa_is_timed_without_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the stand-in that does on a CPU what CUDA graphs do."""
    monkeypatch.setattr(targets_fast_pass, "graphs_why_not", lambda device: None)
    with recorded_graphs(step=64):
        rows, missing = bench_passes.text_pass(SIZES, CPU, torch.float32, 1)
    assert not missing
    assert [row["baseline"] for row in rows] == ["SDPA, dense mask", "SDPA, dense mask, fast pass off"]
    assert all(row["graphs"][0] > 0 for row in rows)
    assert [row["graphs"][1] > 0 for row in rows] == [True, False]


def test_graphs_are_counted() -> None:
    """With the same stand-in."""
    with recorded_graphs() as graphs:
        rows, missing = bench_speech.speech_rounds("mini", CPU, torch.float32, 1, new_tokens=24)
    assert graphs.replayed > graphs.made > 0
    assert not missing
    assert all(row["graphs"] > 0 and row["fast_pass_mib"] > 0 for row in rows)


def test_a_wrong_fast_pass_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    score = FastRun.score

    def wrong(*given: Any) -> Any:
        scores = score(*given)
        return replace(scores, logits=1.01 * scores.logits)

    monkeypatch.setattr(FastRun, "score", wrong)
    with pytest.raises(MmdecError, match=r"fast pass, mini speech model.* logits"):
        bench_speech.speech_rounds("mini", CPU, torch.float32, 1)


def test_texts_must_be_equal_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that pass, and yet another text."""
    monkeypatch.setattr(bench_speech, "compare", lambda *given: 0.0)
    score = FastRun.score

    def wrong(*given: Any) -> Any:
        scores = score(*given)
        return replace(scores, logits=scores.logits.roll(1, -1))

    monkeypatch.setattr(FastRun, "score", wrong)
    with pytest.raises(MmdecError, match="the texts of the two sides differ"):
        bench_speech.speech_rounds("mini", CPU, torch.float32, 1)


def test_too_little_memory_costs_its_own_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 14 GiB.\nmore")

    monkeypatch.setattr(bench_passes, "text_pass", full)
    report = bench_passes.bench_passes(repeats=1)
    assert [row.timed for row in report.comparisons] == ["round", "draft's pass"]
    reason = report.not_measured["pass of the mini language model"]
    assert reason == "not enough GPU memory: CUDA out of memory. Tried to allocate 14 GiB."


def test_a_fast_pass_that_is_off_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FastPass, "why_not", lambda passes: "MMDEC_GRAPHS=0 keeps them off")
    rows, missing = bench_speech.speech_rounds("mini", CPU, torch.float32, 1)
    assert rows == []
    assert list(missing.values()) == ["MMDEC_GRAPHS=0 keeps them off"]


def test_sizes_are_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("text_pass", "speech_rounds"):
        monkeypatch.setattr(bench_passes, part, lambda *given: ([], {}))
    found = bench_passes.bench_passes("7B", 512)
    assert found.details["sizes"] == asdict(replace(SIZES, text="7B", prefix=512))
    for wrong in (["--text", "70B"], ["--speech", "huge"]):
        assert isinstance(CliRunner().invoke(app, ["passes", *wrong]).exception, InputError)
