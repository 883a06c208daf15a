"""Reports of benchmarks with known figures, for whatever reads them."""

from __future__ import annotations

import json
from typing import Any

from mmdec.evaluation.bench.pairing import comparison, comparisons, turned
from mmdec.evaluation.bench.report import BenchReport, BenchRun, Comparison, Exactness, Quantity, to_json

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


def ratios(median: float, pairs: int = 8) -> dict[str, Any]:
    return {
        "a_s": 1.0,
        "b_s": median,
        "ratio": median,
        "median": median,
        "low": 0.9 * median,
        "high": 1.1 * median,
        "pairs": pairs,
    }


def compared(decoder: float, wall: float, tokens: float = 4.2, n: int = 4) -> dict[str, Any]:
    return {"n": n, "decoder": ratios(decoder), "wall": ratios(wall), "a_tokens_per_round": tokens}


def paired(ratio: float, n: int = 5) -> dict[str, Any]:
    return {"a_ms": 10.0, "b_ms": 10.0 * ratio, "ratio": ratio, "low": 0.9 * ratio, "high": 1.25 * ratio, "n": n}


def asr() -> BenchReport:
    return BenchReport(
        bench="asr",
        title="Medusa heads: whisper-phrasebook, drafts learned",
        hardware=HARDWARE,
        exactness=(
            Exactness("tokens of medusa and of transformers' greedy loop", 8, 8),
            Exactness("tokens of prompt lookup and of the greedy loop", 3, 4),
        ),
        comparisons=(
            *comparisons(compared(1.53, 1.25, 2.16), "medusa", "greedy", "1-5 words", "length", size=3.0, unit="words"),
            *comparisons(
                compared(2.64, 2.18, 4.19), "medusa", "greedy", "40+ words", "length", size=40.0, unit="words"
            ),
            *comparisons(compared(3.39, 2.79), "medusa", "prompt lookup", "40 and more", "all"),
            *comparisons(compared(1.87, 1.53, n=1), "medusa", "greedy", "8 together", "batch"),
            Comparison("medusa 16x6", "greedy", "batch 1", "draft size", "decoder", 2.5, None, None, 0, 1),
        ),
        quantities=(Quantity("audio decoded in a repeat", 61.5, "s", 8),),
        stages={
            "medusa": {"features": 2.0, "encoder": 30.0, "decoder": 40.5, "drafter": 5.0},
            "greedy": {"features": 2.0, "encoder": 30.0, "decoder": 120.0, "drafter": 0.0},
        },
        depths={"medusa": (0.9, 0.72, 0.5)},
        not_measured={"another engine": "--peer ctranslate2 was not given"},
        details={"recordings": 8},
    )


def vlm(drafter: str = "eagle") -> BenchReport:
    rows: list[Comparison] = []
    for group, factor, size in (("1-8 tokens", 1.1, 4.5), ("65+ tokens", 2.4, 65.0)):
        rows += comparisons(compared(2.0, factor), drafter, "greedy", group, "length", size=size, unit="tokens")
    return BenchReport(
        bench="vlm",
        title="Drafters for pictures: vlm-scenes, 4 questions, drafts learned",
        hardware=HARDWARE,
        exactness=(Exactness(f"tokens of {drafter} and of transformers' greedy loop", 4, 4),),
        comparisons=(
            *comparisons(
                {**compared(2.0, 1.8, 7.81, 24), "a_accepted_per_round": 6.81}, drafter, "greedy", "all", "all"
            ),
            *comparisons(compared(2.0, 2.1), drafter, "greedy", "task menu", "task"),
            *comparisons(compared(2.0, 1.4), drafter, "greedy", "task map", "task"),
            *rows,
        ),
        stages={drafter: {"features": 9.0, "encoder": 20.0, "decoder": 60.0, "drafter": 11.0}},
        depths={drafter: (0.8, 0.6)},
        not_measured={"prompt lookup": "transformers cannot run it here (ValueError: no)"},
    )


def core() -> BenchReport:
    return BenchReport(
        bench="core",
        title="Language models, random weights, greedy",
        hardware=HARDWARE,
        comparisons=(
            comparison(
                paired(2.25),
                "lookup",
                "prompt lookup",
                "2M, repeating text",
                "all",
                "wall clock",
                tokens_per_round=18.1,
            ),
            comparison(turned(paired(1.1)), "always wrong", "plain generate", "2M", "all", "wall clock"),
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
            comparison(
                *(paired(2.2), "lookahead", "autoregressive", "1.5 s, fixed lengths", "length", "after encoder"),
                **{"size": 1.5, "unit": "s of source"},
            ),
            comparison(paired(3.1), "verified", "autoregressive", "recordings", "all", "linguistic", spread="range"),
        ),
        quantities=(Quantity("file to samples, for a second of source", 80.0, "ms", 24, high=120.0),),
        stages={"lookahead": stages},
    )


def of_shapes(bench: str, title: str, *names: tuple[str, str, str, str]) -> BenchReport:
    """names: of each row the subject, the baseline, the group and what is timed."""
    rows = tuple(comparison(paired(1.3), *name[:3], "shape", name[3]) for name in names)
    return BenchReport(bench, title, HARDWARE, comparisons=rows, not_measured={"GPU kernels": "the CPU was asked for"})


ALL = {
    "speech": speech(),
    "asr": asr(),
    "vlm": vlm(),
    "core": core(),
    "kernels": of_shapes(
        "kernels",
        "Operators alone",
        ("tree attention", "SDPA, dense mask, heads repeated", "Llama-3-8B, 16 nodes, 1024 before", "call"),
        ("kv gather", "a copy for each layer", "12 layers, path of 6", "call"),
        ("DAG", "dense torch", "1 x 60 x 480", "forward and backward"),
    ),
    "passes": of_shapes(
        "passes",
        "Whole passes and rounds, random weights",
        ("tree attention", "SDPA, dense mask", "7B", "draft's pass"),
        ("fast pass, CUDA graphs", "pass by pass", "small", "round"),
    ),
    "compressor": of_shapes(
        "compressor", "SpecVLM's drafter against EAGLE-2's", ("SpecVLM pool", "EAGLE-2", "1024 visual tokens", "prompt")
    ),
    "paper": of_shapes(
        "paper",
        "DASpeech of the paper's size",
        *(("DASpeech", f"S2UT {s}", "3 s", "decoders") for s in ("greedy", "beam")),
    ),
}


def run(*names: str) -> BenchRun:
    """The benchmarks of these names; of all without one."""
    return BenchRun(tuple(ALL[name] for name in names or ALL), {})


def check_form(report: BenchReport) -> None:
    """What readers of a report count on: a saved run finds its rows again, and JSON holds it."""
    assert report.comparisons
    assert report.hardware["commit"] or report.hardware["date"]
    assert len({row.key for row in report.comparisons}) == len(report.comparisons)
    for row in report.comparisons:
        assert row.times is None or row.low is None or row.high is None or row.low <= row.times <= row.high
    json.loads(to_json(BenchRun((report,))))
