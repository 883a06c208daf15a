"""Findings of benchmarks with known figures, as the benchmarks give them: for whatever reads them."""

from __future__ import annotations

from typing import Any

from mmdec.evaluation.bench.report import BenchRun
from mmdec.evaluation.bench.rows import report_of

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


def asr() -> dict[str, Any]:
    return {
        "model": "whisper-phrasebook",
        "plan": "learned",
        "recordings": 8,
        "curve": [
            {"words": "1-5", **compared(1.53, 1.25, 2.16)},
            {"words": "40+", **compared(2.64, 2.18, 4.19)},
        ],
        "long": {"words": "40 and more", **compared(2.64, 2.18)},
        "clips": {"slower": 0, "each": [{"name": "a.wav", "words": 3, "wall": 1.1}]},
        "against": {"prompt lookup": {"identical": 3, "of": 4, **compared(3.39, 2.79)}},
        "batch": {"size": 8, **compared(1.87, 1.53, n=1)},
        "sweep": [{"plan": "16x6", "batch": 1, "decoder": 2.5, "wall": 2.0, "tokens_per_round": 4.0}],
        "stages": {
            "medusa": {"features": 2.0, "encoder": 30.0, "decoder": 40.5, "drafter": 5.0},
            "greedy": {"features": 2.0, "encoder": 30.0, "decoder": 120.0, "drafter": 0.0},
        },
        "depths": {"medusa": [0.9, 0.72, 0.5]},
        "seconds_of_audio": 61.5,
        "hardware": HARDWARE,
    }


def vlm(drafter: str = "eagle") -> dict[str, Any]:
    groups = {
        name: {"identical": 4, "of": 4, **compared(2.0, factor)}
        for name, factor in (
            ("all", 1.8),
            ("task menu", 2.1),
            ("task map", 1.4),
            ("1-8 tokens", 1.1),
            ("65+ tokens", 2.4),
        )
    }
    return {
        "model": "vlm-scenes",
        "plan": "learned",
        "questions": 4,
        "left_out": {"prompt lookup": "transformers cannot run it here (ValueError: no)"},
        "stages": {drafter: {"features": 9.0, "encoder": 20.0, "decoder": 60.0, "drafter": 11.0}},
        "depths": {drafter: [0.8, 0.6], "plain": []},
        "drafters": {drafter: {"against": {"greedy": groups, "plain": {"all": groups["all"] | {"n": 0}}}}},
        "hardware": HARDWARE,
    }


def paper() -> dict[str, Any]:
    rows = [{"seconds": s, "greedy": paired(6.0 + s), "beam 10": paired(14.0 + s)} for s in (3, 6, 12)]
    return {"curve": rows, "hardware": HARDWARE}


def core() -> dict[str, Any]:
    row = {**paired(2.25), "tokens_per_round": 18.1}
    return {
        "core_share": {"size": "130M", "share": 0.01, "low": 0.008, "high": 0.012, "n": 120},
        "lookup": {"sizes": {"2M": {"repeating": row, "wandering": row}}},
        "batch": {"size": "130M", "times": 3.4, "n": 5},
        "always_wrong": {"2M": paired(1.1)},
        "hardware": HARDWARE,
    }


def speech() -> dict[str, Any]:
    row = {**paired(2.2), "seconds": 1.5, "units": 23, "passes": 2}
    return {
        "curve": [{**row, "seconds": s} for s in (1.5, 3, 20)],
        "graph": {"recordings": [row, {**row, "ratio": 3.1}]},
        "verified": {"recordings": [row], "units_per_pass": 11.5},
        "wav_to_wav_per_second": {"median": 0.08, "worst": 0.12, "n": 24},
        "stages": {"lookahead": {"read": 1.0, "encoder": 12.0, "linguistic": 6.0, "acoustic": 5.0, "vocoder": 9.0,
                                 "words": 2.0}},
        "hardware": HARDWARE,
    }  # fmt: skip


def kernels() -> dict[str, Any]:
    sides = {"SDPA, dense mask, heads repeated": paired(1.3)}
    return {
        "tree_attention": [{"heads": "Llama-3-8B", "nodes": 16, "prefix": 1024, "against": sides}],
        "kv_gather": {"layers": 12, "path": 6, "against": {"a copy for each layer": paired(4.0)}},
        "dag": [{"shape": [1, 60, 480], "what": "forward and backward", "against": {"dense torch": paired(7.5)}}],
        "why_not": "the CPU was asked for",
        "hardware": HARDWARE,
    }


def passes() -> dict[str, Any]:
    text = {"subject": "tree attention", "baseline": "SDPA, dense mask", "group": "7B", "timed": "draft's pass"}
    speech = {"subject": "fast pass, CUDA graphs", "baseline": "pass by pass", "group": "small", "timed": "round"}
    return {
        "rows": [{**text, "pair": paired(1.1)}, {**speech, "pair": paired(3.2)}],
        "not_measured": {"tree attention's kernel": "no GPU"},
        "hardware": HARDWARE,
    }


def compressor() -> dict[str, Any]:
    row = {"compressor": "pool", "visual": 1024, "cache": 0.06, "prompt": paired(0.44), "round": paired(0.8)}
    return {"rows": [row], "hardware": HARDWARE}


ALL = {
    "speech": speech,
    "asr": asr,
    "vlm": vlm,
    "core": core,
    "kernels": kernels,
    "passes": passes,
    "compressor": compressor,
    "paper": paper,
}


def run(*names: str) -> BenchRun:
    """The benchmarks of these names; of all without one."""
    return BenchRun(tuple(report_of(name, ALL[name]()) for name in names or ALL), {})
