"""Tests tables of known figures: at most 80 columns, no figure cut, and the same content in Markdown."""

from __future__ import annotations

import io
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from mmdec.bench.report import (
    VERSION,
    BenchRun,
    Quantity,
    compare_runs,
    format_markdown,
    format_screen,
    hardware_line,
    load_run,
    merge_runs,
    sections,
    to_json,
)
from mmdec.cli.evaluate import asr_table, speech_table, vlm_table
from mmdec.errors import InputError
from mmdec.hub import provenance
from tests.support import bench_reports as findings


def shown(what: Any, width: int = 80) -> str:
    file = io.StringIO()
    Console(width=width, file=file).print(what)
    return file.getvalue()


@pytest.mark.parametrize("bench", findings.ALL)
def test_a_table_fits_80_columns_and_no_figure_is_cut(bench: str) -> None:
    run = findings.run(bench)
    text = shown(format_screen(run))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for _, head, rows in sections(run):
        for row in rows:
            for cell in row[1:] if head else ():
                assert cell in text


def test_wide_terminals_show_the_same() -> None:
    run = findings.run("asr")
    assert "…" not in shown(format_screen(run), 200)


def test_a_comparison_is_read_in_one_line() -> None:
    lines = shown(format_screen(findings.run("asr"))).splitlines()
    assert "medusa against greedy" in lines
    (line,) = [line for line in lines if line.lstrip().startswith("40+ words") and "wall clock" in line]
    assert line.split() == ["40+", "words", "wall", "clock", "4", "2.18", "(1.96-2.40)", "250,", "545", "4.19"]
    assert "  AMD EPYC 9R14 96-Core Processor, 2 threads, float32, batch 1 and 8, torch" in lines
    assert "    2.11.0, transformers 5.23.0, commit 0123456789, 2026-11-22" in lines
    assert "  tokens of prompt lookup and of the greedy loop: 3 of 4 equal" in lines
    assert "tok/round: tokens per round, correction or bonus included" in lines


def test_markdown_says_what_the_screen_says() -> None:
    run = BenchRun(findings.run("asr").reports, {"vlm": "a | b"})
    text = format_markdown(run)
    assert "| 40+ words | wall clock | 4 | 2.18 (1.96-2.40) | 250, 545 | 4.19 |" in text
    assert "| --- | ---: |" in text
    assert "- vlm: a \\| b" in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")


def test_a_comparison_with_a_saved_run_is_shown() -> None:
    run = findings.run("asr")
    other = findings.run("asr", "core")
    other.reports[0].hardware.update()
    changes = compare_runs(run, other, "old.json")
    text = shown(format_screen(run, changes))
    assert "Against old.json" in text
    assert "only saved: core" in text
    assert max(map(len, text.splitlines())) <= 80


def rate(value: float) -> dict[str, Any]:
    return {"value": value, "low": value - 0.02, "high": value + 0.02, "n": 600}


def test_evaluations_of_many_strategies_do_not_wrap() -> None:
    signature = "nrefs:var|bs:1000|seed:12345|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"
    points = {"value": 100.0, "low": 100.0, "high": 100.0, "p": 0.001, "signature": signature}
    scores = {
        "exact": rate(0.942),
        "exact_one_rendering": rate(0.9),
        "exact_several_renderings": rate(0.95),
        "phone_error_rate": rate(0.03),
        "phone_error_rate_nearest": rate(0.01),
        "bleu": points,
        "chrf": points,
        "number_accuracy": {kind: rate(0.9) for kind in ("all", "numbers", "times", "prices")},
        "asr_bleu": points,
        "asr_chrf": points,
        "asr_bleu_ratio": 0.98,
        "asr_bleu_shuffled": 3.0,
        "refused": {},
        "latency": {"linguistic": {"median": 0.0123, "p90": 0.0156}, "vocoder": {"median": 0.1, "p90": 0.1234}},
        "real_time_factor": 0.08,
    }
    names = ("lookahead", "greedy", "viterbi", "joint-viterbi", "autoregressive")
    report = {
        "model": "daspeech-everyday",
        "split": "test",
        "n": 600,
        "systems": dict.fromkeys(names, scores),
        "hardware": findings.HARDWARE,
    }
    text = shown(speech_table(report))
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("94.2 [92.2, 96.2]") == text.count("linguistic 12.3 / 15.6") == len(names)
    assert all(name in text for name in names)


def test_the_other_evaluations_fit_too() -> None:
    cost = {
        "seconds": dict.fromkeys(("features", "encoder", "decoder", "drafter", "total"), 1234.56),
        "decoder_share": 0.555,
        "decoder_passes": 12345,
        "tokens_per_round": 4.19,
        "real_time_factor": 0.123,
    }
    edits = {"substitutions": 100, "deletions": 30, "insertions": 40, "length": 9000}
    keys = ("wer", "cer", "wer_raw", "cer_raw")
    report = {
        "model": "whisper-tiny.en",
        "split": "test",
        "n": 600,
        "decoding": {"medusa": cost, "greedy": cost},
        **{key: {**rate(0.036), **edits} for key in keys},
        **{key: rate(0.848) for key in ("exact", "exact_raw")},
        "normaliser": "English",
        "batch_size": 8,
        "worst": [],
        "refused": {},
        "hardware": findings.HARDWARE,
    }
    asked = {
        "tokens_per_round": 3.21,
        "accepted_per_round": 2.21,
        "drafter_share": {"of_all": 0.083},
        "median_seconds": 0.123,
    }
    pictures = {
        "model": "vlm-scenes",
        "questions": "data/scenes/test.json",
        "swapped": False,
        "n": 1200,
        "drafter": "eagle",
        "by_task": {name: {"right": rate(0.98), "decoding": asked} for name in ("description", "count", "x" * 40)},
        "right": rate(0.98),
        "decoding": asked,
        "worst": [],
        "refused": {},
        "hardware": findings.HARDWARE,
    }
    for text, figures in (
        (shown(asr_table(report)), "100 S 30 D 40 I"),
        (shown(vlm_table(pictures)), "98.0 [96.0, 100.0]"),
    ):
        assert max(map(len, text.splitlines())) <= 80
        assert figures in text
        assert "…" not in text


def test_a_run_survives_its_json(tmp_path: Path) -> None:
    run = BenchRun(findings.run().reports, {"peer": "not installed"})
    path = tmp_path / "run.json"
    path.write_text(to_json(run, against={"source": "x"}), encoding="utf-8")
    again = load_run(path)
    assert again.left_out == run.left_out
    for report, other in zip(again.reports, run.reports, strict=True):
        assert replace(report, details={}) == replace(other, details={}, hardware=report.hardware)
        assert report.hardware == json.loads(json.dumps(other.hardware))


def test_json_has_no_nan_or_infinity() -> None:
    report = replace(
        findings.run("core").reports[0], quantities=(Quantity("x", float("nan"), "s", 1, high=float("inf")),)
    )
    content = to_json(BenchRun((report,), {"a\udcffb": "no UTF-8"}))
    assert "NaN" not in content
    assert "Infinity" not in content
    content.encode("utf-8")
    read = json.loads(content)
    assert read["version"] == VERSION
    assert read["reports"][0]["quantities"][0]["value"] is None


def test_names_that_are_no_utf_8_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(to_json(BenchRun((), {"vlm": "a\udcffb"})), encoding="utf-8")
    assert load_run(path) == BenchRun((), {"vlm": "a?b"})


@pytest.mark.parametrize("field", [{"times": "2.5"}, {"kind": "x"}, {"pairs": 2.5}, {"new": 1}, {"subject": None}])
def test_a_wrong_field_is_named(field: dict[str, object], tmp_path: Path) -> None:
    path, content = tmp_path / "run.json", json.loads(to_json(findings.run("core")))
    content["reports"][0]["comparisons"][1] |= field
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InputError, match=rf"damaged: run\.reports\.0\.comparisons\.1\.{next(iter(field))}: "):
        load_run(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
        ("[]", "must be what `mmdec bench --json` wrote"),
        ('{"curve": []}', "must be what `mmdec bench --json` wrote"),
        ('{"format": "mmdec-bench", "version": 99}', "must have version 3"),
        ('{"format": "mmdec-bench", "version": 3}', "damaged"),
        ('{"format": "mmdec-bench", "version": 3, "reports": 3}', "damaged"),
        (
            '{"format": "mmdec-bench", "version": 3, "reports": [{"bench": 3}]}',
            r"run\.reports\.0\.bench: .* it holds 3",
        ),
        ('{"format": "mmdec-bench", "version": 3, "reports": [{"new": 3}]}', r"run\.reports\.0\."),
        ("[" * 100_000, "must be JSON"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        load_run(path)
    with pytest.raises(InputError, match="must be a readable file"):
        load_run(tmp_path / "missing.json")


def test_a_saved_run_is_compared_median_by_median() -> None:
    now, before = findings.run("asr", "core"), findings.run("asr", "vlm")
    asr = before.reports[0]
    halved = [replace(row, times=row.times / 2, subject_ms=2 * row.subject_ms) for row in asr.comparisons]
    gone = halved.pop(0)
    machine = {
        **asr.hardware,
        "threads": 8,
        "commit": "other",
        "versions": {**asr.hardware["versions"], "torch": "2.12"},
    }
    before = BenchRun((replace(asr, comparisons=tuple(halved), hardware=machine), before.reports[1]))
    changes = compare_runs(now, before, "old.json")
    assert changes.warnings == ("asr: threads 8 then, 2 now", "asr: torch 2.12 then, 2.11.0 now")
    assert {row.ratio for row in changes.rows} == {2.0}
    assert {row.subject_ratio for row in changes.rows} == {0.5}
    assert {row.baseline_ratio for row in changes.rows} == {1.0}
    assert changes.only_now == (("asr", *gone.key), ("core",))
    assert changes.only_before == (("vlm",),)


def test_the_same_surroundings_warn_of_nothing() -> None:
    changes = compare_runs(findings.run(), findings.run())
    assert changes.warnings == changes.only_now == changes.only_before == ()
    assert {row.ratio for row in changes.rows} == {1.0}


def test_runs_are_put_together() -> None:
    run = merge_runs([findings.run("asr"), BenchRun((), {"vlm": "not done in 1 minutes"}), findings.run("core")])
    assert [report.bench for report in run.reports] == ["asr", "core"]
    assert run.left_out == {"vlm": "not done in 1 minutes"}


def test_a_gpu_is_named_where_it_did_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU {device}")
    names = [
        provenance.command_record(device)["device"] for device in (torch.device("cpu"), torch.device("cuda:1"), None)
    ]
    assert names == ["cpu", "GPU cuda:1", None]


def test_uncommitted_changes_are_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    (tmp_path / "mmdec").mkdir()
    (tmp_path / "mmdec" / "a.py").write_text("1")
    monkeypatch.setattr(provenance, "CHECKOUT", tmp_path)
    assert (provenance.command_record(None)["commit"], provenance.command_record(None)["uncommitted"]) == (None, None)
    git("init")
    git("add", ".")
    git("commit", "-m", "a")
    clean = provenance.command_record(None)
    assert (len(clean["commit"]), clean["uncommitted"]) == (40, False)
    (tmp_path / "notes").write_text("not of the package")
    assert provenance.command_record(None)["uncommitted"] is False
    (tmp_path / "mmdec" / "a.py").write_text("2")
    assert provenance.command_record(None) == {**clean, "uncommitted": True}
    assert "commit 0123456789 and changes" in hardware_line({**findings.HARDWARE, "uncommitted": True})
