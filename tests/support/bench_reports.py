"""Reports of benchmarks with known figures, for tests of tables, plots and files."""

from __future__ import annotations

import json
from typing import Any

from mmdec.bench.pairing import Group, MethodTimings, PairedTiming
from mmdec.bench.report import (
    BenchReport,
    BenchRun,
    Comparison,
    Exactness,
    GroupKind,
    MethodRow,
    Quantity,
    Spread,
    to_json,
)
from mmdec.evaluation.harness import Measurement

HARDWARE: dict[str, Any] = {
    "cpu": "AMD EPYC 9R14 96-Core Processor",
    "cores": 2,
    "threads": 2,
    "target": "cpu",
    "dtype": "float32",
    "batch": [1, 8],
    "argv": ["mmdec", "bench"],
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "date": "2026-11-22",
    "python": "3.11.9",
    "versions": {"mmdec": "0.1.0", "torch": "2.11.0", "transformers": "5.23.0", "lightning": None},
    "device": "cpu",
}


def measurement(decoder: float, total: float, rounds: int = 0, tokens: int = 0, **more: Any) -> Measurement:
    seconds = {"features": 0.0, "encoder": 0.0, "decoder": decoder, "drafter": 0.0, "total": total}
    more = {"cpu_seconds": decoder, **more}
    return Measurement([], [], **seconds, rounds=rounds, drafted_tokens=tokens, **more)


def compared(
    subject: str,
    baseline: str,
    group: str,
    kind: GroupKind,
    decoder: float,
    wall: float,
    tokens: float = 4.2,
    n: int = 4,
    accepted: int | None = None,
    **more: Any,
) -> list[Comparison]:
    """Make report rows of `n` inputs, measured twice each. decoder, wall: the ratios on the two clocks. tokens: tokens
    per round. accepted: drafted tokens accepted in 100 rounds."""
    ours = [measurement(0.25, 0.25, 100, round(100 * tokens), accepted=accepted)] * 2
    theirs = [measurement(0.25 * decoder * share, 0.25 * wall * share) for share in (0.9, 1.1)]
    sides = {subject: [ours] * n, baseline: [theirs] * n}
    timed = MethodTimings(sides, {baseline: [True] * n})
    return timed.rows(subject, baseline, Group(group, kind, range(n), **more))


def paired(ratio: float, n: int = 5) -> PairedTiming:
    return PairedTiming(a_ms=10.0, b_ms=10.0 * ratio, ratio=ratio, low=0.9 * ratio, high=1.25 * ratio, n=n)


def drafters(bench: str, title: str) -> BenchReport:
    """Make a report of a comparison of drafters."""
    rows = [
        *compared("lookup", "greedy", "all", "all", 1.5, 1.25, 2.16, 16),
        *compared("lookup", "prompt lookup", "all", "all", 1.2, 1.1, 2.16, 16),
        *compared("lookup", "greedy", "task list", "task", 2.0, 2.1, 1.4, 2),
        *compared("lookup", "greedy", "40+ words", "length", 2.64, 2.18, 4.19, size=40.0, unit="words"),
        *compared("whisper-tiny.en, inner lookup", "greedy", "all", "all", 1.1, 0.9, 3.1, 16),
        *compared("prompt lookup", "greedy", "all", "all", 0.8, 0.9, 1.0, 16),
    ]
    methods = (
        MethodRow("greedy", 16, 16, None, None, 64.0, 2.5, 2.25),
        MethodRow("lookup", 16, 16, Spread(2.16, 1.0, 3.25, 32), 0.012, 31.5, 2.0, 1.5),
        MethodRow("whisper-tiny.en, inner lookup", 16, 16, Spread(3.1, 2.0, 4.25, 32), 0.61, 22.0, 2.75, 2.0),
        MethodRow("recycling", 15, 16, None, 0.02, 30.0, 2.0, 1.5),
    )
    return BenchReport(
        bench=bench,
        title=title,
        hardware=HARDWARE,
        comparisons=tuple(rows),
        methods=methods,
        stages={"lookup": {"features": 9.0, "encoder": 20.0, "decoder": 60.0, "drafter": 11.0}},
        not_measured={"prompt lookup": "transformers cannot run it here (ValueError: no)"},
        details={"tokens": [64] * 16},
    )


def asr() -> BenchReport:
    return BenchReport(
        bench="asr",
        title="Medusa heads: whisper-tiny.en, drafts learned",
        hardware=HARDWARE,
        exactness=(
            Exactness("tokens of medusa and of transformers' greedy loop", 8, 8),
            Exactness("tokens of prompt lookup and of the greedy loop", 3, 4),
        ),
        comparisons=(
            *compared("medusa", "greedy", "1-5 words", "length", 1.53, 1.25, 2.16, size=3.0, unit="words"),
            *compared("medusa", "greedy", "40+ words", "length", 2.64, 2.18, 4.19, size=40.0, unit="words"),
            *compared("medusa", "prompt lookup", "40 and more", "all", 3.39, 2.79),
            *compared("medusa", "greedy", "8 together", "batch", 1.87, 1.53, n=1),
        ),
        quantities=(Quantity("audio decoded in a repeat", 61.5, "s", 8),),
        stages={
            "medusa": {"features": 2.0, "encoder": 30.0, "decoder": 40.5, "drafter": 5.0},
            "greedy": {"features": 2.0, "encoder": 30.0, "decoder": 120.0, "drafter": 0.0},
        },
        not_measured={"another engine": "it was not asked for"},
        details={"recordings": 8},
    )


def vlm(drafter: str = "eagle") -> BenchReport:
    rows: list[Comparison] = []
    for group, factor, size in (("1-8 tokens", 1.1, 4.5), ("65+ tokens", 2.4, 65.0)):
        rows += compared(drafter, "greedy", group, "length", 2.0, factor, size=size, unit="tokens")
    return BenchReport(
        bench="vlm",
        title="Drafters for pictures: vlm-scenes, 4 questions, drafts learned",
        hardware=HARDWARE,
        exactness=(Exactness(f"tokens of {drafter} and of transformers' greedy loop", 4, 4),),
        comparisons=(
            *compared(drafter, "greedy", "all", "all", 2.0, 1.8, 7.81, 24, accepted=681),
            *compared(drafter, "greedy", "task menu", "task", 2.0, 2.1),
            *compared(drafter, "greedy", "task map", "task", 2.0, 1.4),
            *rows,
        ),
        stages={drafter: {"features": 9.0, "encoder": 20.0, "decoder": 60.0, "drafter": 11.0}},
        not_measured={"prompt lookup": "transformers cannot run it here (ValueError: no)"},
    )


def core() -> BenchReport:
    return BenchReport(
        bench="core",
        title="Language models, greedy",
        hardware=HARDWARE,
        comparisons=(
            paired(2.25).row(
                *("lookup", "prompt lookup", "2M, repeating text", "all", "wall clock"), tokens_per_round=18.1
            ),
            PairedTiming(11.0, 10.0, 1 / 1.1, 1 / (1.25 * 1.1), 1 / (0.9 * 1.1), 5).row(
                "always wrong", "plain generate", "2M", "all", "wall clock"
            ),
        ),
        quantities=(Quantity("130M: the core's time over the target's pass", 1.0, "%", 120, 0.8, 1.2),),
    )


def speech() -> BenchReport:
    stages = {"read": 1.0, "encoder": 12.0, "linguistic": 6.0, "acoustic": 5.0, "vocoder": 9.0, "words": 2.0}
    return BenchReport(
        bench="speech",
        title="Speech translation: the graph against the autoregressive baseline",
        hardware=HARDWARE,
        comparisons=(
            paired(2.2).row(
                *("lookahead", "autoregressive", "1.5 s, fixed lengths", "length", "after encoder"),
                **{"size": 1.5, "unit": "s of source"},
            ),
            paired(3.1).row("verified", "autoregressive", "recordings", "all", "linguistic", spread="range"),
        ),
        quantities=(Quantity("file to samples, for a second of source", 80.0, "ms", 24, high=120.0),),
        stages={"lookahead": stages},
    )


def of_shapes(bench: str, title: str, *names: tuple[str, str, str, str]) -> BenchReport:
    """Make a report. names: of each row the subject, the baseline, the group and what is timed."""
    rows = tuple(paired(1.3).row(*name[:3], "shape", name[3]) for name in names)
    return BenchReport(bench, title, HARDWARE, comparisons=rows, not_measured={"GPU kernels": "the CPU was asked for"})


ALL = {
    "speech": speech(),
    "asr": asr(),
    "vlm": vlm(),
    "core": core(),
    "drafters-text": drafters("drafters-text", "Drafters for a model: 16 prompts, 2 times, drafts learned"),
    "drafters-audio": drafters("drafters-audio", "Drafters for a Whisper: 16 recordings, 2 times, drafts learned"),
    "kernels": of_shapes(
        "kernels",
        "Operators alone",
        ("tree attention", "SDPA, dense mask, heads repeated", "Llama-3-8B, 16 nodes, 1024 before", "call"),
        ("kv gather", "a copy for each layer", "12 layers, path of 6", "call"),
        ("DAG", "dense torch", "1 x 60 x 480", "forward and backward"),
    ),
}


def run(*names: str) -> BenchRun:
    """Make a run of the benchmarks with these names; without names, of all."""
    return BenchRun(tuple(ALL[name] for name in names or ALL), {})


def check_form(report: BenchReport) -> None:
    """Assert that a report is well formed: its rows have different keys, and it can be written as JSON."""
    assert report.comparisons
    assert report.hardware["commit"] or report.hardware["date"]
    assert len({row.key for row in report.comparisons}) == len(report.comparisons)
    for row in report.comparisons:
        assert row.times is None or row.low is None or row.high is None or row.low <= row.times <= row.high
    json.loads(to_json(BenchRun((report,))))
