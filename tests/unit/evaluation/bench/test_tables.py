"""Tables of known figures: 80 columns, every figure whole, Markdown that says the same."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from mmdec.evaluation.bench.against import against
from mmdec.evaluation.bench.report import BenchRun
from mmdec.evaluation.bench.tables import markdown, screen, sections
from mmdec.evaluation.quality.tables import asr_table, table, vlm_table
from tests.support import bench_findings as findings


def shown(what: Any, width: int = 80) -> str:
    file = io.StringIO()
    Console(width=width, file=file).print(what)
    return file.getvalue()


@pytest.mark.parametrize("bench", findings.ALL)
def test_a_table_fits_80_columns_and_no_figure_is_cut(bench: str) -> None:
    run = findings.run(bench)
    text = shown(screen(run))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for _, head, rows in sections(run):
        for row in rows:
            for cell in row[1:] if head else ():
                assert cell in text


def test_wide_terminals_show_the_same() -> None:
    run = findings.run("asr")
    assert "…" not in shown(screen(run), 200)


def test_a_comparison_is_read_in_one_line() -> None:
    lines = shown(screen(findings.run("asr"))).splitlines()
    assert "medusa against greedy" in lines
    (line,) = [line for line in lines if line.lstrip().startswith("40+ words") and "wall clock" in line]
    assert line.split() == ["40+", "words", "wall", "clock", "4", "2.18", "(1.96-2.40)", "250,", "545", "4.19"]
    assert "  AMD EPYC 9R14 96-Core Processor, 2 threads, float32, batch 1 and 8, torch" in lines
    assert "    2.11.0, transformers 5.23.0, commit 0123456789, 2026-11-22" in lines
    assert "  tokens of prompt lookup and of the greedy loop: 3 of 4 equal" in lines
    assert "tok/round: tokens a round, correction or bonus included" in lines


def test_markdown_says_what_the_screen_says() -> None:
    run = BenchRun(findings.run("asr").reports, {"vlm": "a | b"})
    text = markdown(run)
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
    changes = against(run, other, "old.json")
    text = shown(screen(run, changes))
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
        "model": "daspeech-phrasebook",
        "split": "test",
        "n": 600,
        "systems": dict.fromkeys(names, scores),
        "hardware": findings.HARDWARE,
    }
    text = shown(table(report))
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
        "model": "whisper-phrasebook",
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
