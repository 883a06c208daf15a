"""Each benchmark's own findings as a `BenchReport`: one function for each, `report_of` by name.

`times` is always the baseline's seconds over the subject's, so that more than 1 is a gain of the subject.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mmdec.evaluation.bench.report import BenchReport, Comparison, Exactness, Kind, Quantity

Raw = Mapping[str, Any]
WALL, DECODER = "wall clock", "decoder"


def report_of(bench: str, raw: Raw) -> BenchReport:
    """The findings of `bench_<bench>` in the common form."""
    return READERS[bench](raw)


def _paired(raw: Raw, subject: str, baseline: str, group: str, kind: Kind, timed: str, **more: Any) -> Comparison:
    """Of `asdict(Paired)`, a = subject, b = baseline."""
    return Comparison(
        subject=subject,
        baseline=baseline,
        group=group,
        kind=kind,
        timed=timed,
        **{"times": raw["ratio"], "low": raw["low"], "high": raw["high"], "pairs": raw["n"], "inputs": 1}
        | {"subject_ms": raw["a_ms"], "baseline_ms": raw["b_ms"]}
        | more,
    )


def _turned(raw: Raw) -> dict[str, Any]:
    """The same pairs with a and b exchanged."""
    return {
        **raw,
        "ratio": 1 / raw["ratio"],
        "low": 1 / raw["high"],
        "high": 1 / raw["low"],
        "a_ms": raw["b_ms"],
        "b_ms": raw["a_ms"],
    }


def _compared(raw: Raw, subject: str, baseline: str, group: str, kind: Kind, **more: Any) -> Iterator[Comparison]:
    """Of `pairing.compare`: the decoder's seconds and the wall clock."""
    if not raw["n"]:
        return
    for timed, entry in ((DECODER, raw["decoder"]), (WALL, raw["wall"])):
        yield Comparison(
            subject=subject,
            baseline=baseline,
            group=group,
            kind=kind,
            timed=timed,
            times=entry["median"],
            low=entry["low"],
            high=entry["high"],
            pairs=entry["pairs"],
            inputs=raw["n"],
            subject_ms=1e3 * entry["a_s"] / raw["n"],
            baseline_ms=1e3 * entry["b_s"] / raw["n"],
            tokens_per_round=raw["a_tokens_per_round"],
            **more,
        )


def _middle(group: str) -> float | None:
    """ "11-20 words" -> 15.5, "40+ words" -> 40.0; None for what is no length."""
    span = re.match(r"(\d+)(?:-(\d+)|\+)", group)
    return None if span is None else (float(span[1]) + float(span[2] or span[1])) / 2


def _asr(raw: Raw) -> BenchReport:
    clips = raw["clips"]
    rows: list[Comparison] = []
    for row in raw["curve"]:
        group = f"{row['words']} words"
        more = {"size": _middle(group), "unit": "words"}
        rows += _compared(row, "medusa", "greedy", group, "length", **more)
    for name, row in raw["against"].items():
        rows += _compared(row, "medusa", name, raw["long"]["words"], "all")
    rows += _compared(raw["batch"], "medusa", "greedy", f"{raw['batch']['size']} together", "batch")
    for row in raw.get("sweep", ()):
        rows += [
            Comparison(
                f"medusa {row['plan']}", "greedy", f"batch {row['batch']}", "draft size", timed, row[key], None, None,
                0, 1, tokens_per_round=row["tokens_per_round"],
            )
            for timed, key in ((DECODER, "decoder"), (WALL, "wall"))
        ]  # fmt: skip
    exact = [Exactness("tokens of medusa and of transformers' greedy loop", raw["recordings"], raw["recordings"])]
    exact += [
        Exactness(f"tokens of {name} and of the greedy loop", row["identical"], row["of"])
        for name, row in raw["against"].items()
    ]
    return BenchReport(
        bench="asr",
        title=f"Medusa heads: {raw['model']}, drafts {raw['plan']}",
        hardware=raw["hardware"],
        exactness=tuple(exact),
        comparisons=tuple(rows),
        quantities=(
            Quantity("clips of few words slower than greedy decoding", clips["slower"], "clips", len(clips["each"])),
            Quantity("audio decoded in a repeat", raw["seconds_of_audio"], "s", raw["recordings"]),
            *_peer(raw.get("peer", {})),
        ),
        stages=raw.get("stages", {}),
        depths=_depths(raw),
        not_measured={} if "peer" in raw else {"another engine": "--peer ctranslate2 was not given"},
        details=dict(raw),
    )


def _peer(raw: Raw) -> list[Quantity]:
    """Another engine's seconds over mmdec's, each at its best setting, and the seconds of each."""
    count = raw.get("recordings", 0)
    best, sides = raw.get("best", {}).values(), raw.get("sides", {}).items()
    times = [Quantity(f"{row['b']} over {row['a']}", row["ratio"], "times", count) for row in best]
    return times + [Quantity(f"all recordings, {name}", row["seconds"], "s", count) for name, row in sides]


def _vlm(raw: Raw) -> BenchReport:
    rows: list[Comparison] = []
    exact: list[Exactness] = []
    for drafter, entry in raw["drafters"].items():
        for baseline, groups in entry["against"].items():
            for group, row in groups.items():
                size = _middle(group)
                kind: Kind = "task" if group.startswith("task ") else "all" if size is None else "length"
                more = {} if size is None else {"size": size, "unit": "tokens"}
                rows += _compared(row, drafter, baseline, group, kind, **more)
            if baseline == "greedy":
                exact.append(Exactness(f"tokens of {drafter} and of transformers' greedy loop", *_equal(groups["all"])))
    return BenchReport(
        bench="vlm",
        title=f"Drafters for pictures: {raw['model']}, {raw['questions']} questions, drafts {raw['plan']}",
        hardware=raw["hardware"],
        exactness=tuple(exact),
        comparisons=tuple(rows),
        stages=raw.get("stages", {}),
        depths=_depths(raw),
        not_measured=dict(raw["left_out"]),
        details=dict(raw),
    )


def _equal(row: Raw) -> tuple[int, int]:
    return row["identical"], row["of"]


def _depths(raw: Raw) -> dict[str, tuple[float, ...]]:
    return {name: tuple(shares) for name, shares in raw.get("depths", {}).items() if shares}


def _speech(raw: Raw) -> BenchReport:
    rows = [
        _paired(row, "lookahead", "autoregressive", f"{row['seconds']:g} s, fixed lengths", "length", "after encoder",
                size=float(row["seconds"]), unit="s of source")
        for row in raw["curve"]
    ]  # fmt: skip
    for name, entry in (("lookahead", raw["graph"]), ("verified", raw["verified"])):
        rows.append(_over(entry["recordings"], name, "autoregressive", "recordings", "linguistic"))
    verified, rate = raw["verified"], raw["wav_to_wav_per_second"]
    count = len(verified["recordings"])
    return BenchReport(
        bench="speech",
        title="Speech translation: the graph against the autoregressive baseline",
        hardware=raw["hardware"],
        exactness=(Exactness("units of verified and of autoregressive decoding", count, count),),
        comparisons=tuple(rows),
        quantities=(
            Quantity("verified: phones in each pass of the baseline", verified["units_per_pass"], "phones", count),
            Quantity("file to samples, for a second of source", 1e3 * rate["median"], "ms", rate["n"],
                     high=1e3 * rate["worst"]),
        ),
        stages=raw.get("stages", {}),
        details=dict(raw),
    )  # fmt: skip


def _over(rows: Sequence[Raw], subject: str, baseline: str, group: str, timed: str) -> Comparison:
    """Several inputs as one: the median of their ratios, and the extremes."""
    ratios = [row["ratio"] for row in rows]
    return Comparison(
        subject, baseline, group, "all", timed, statistics.median(ratios), min(ratios), max(ratios),
        pairs=sum(row["n"] for row in rows), inputs=len(rows), spread="range",
        subject_ms=statistics.median(row["a_ms"] for row in rows),
        baseline_ms=statistics.median(row["b_ms"] for row in rows),
    )  # fmt: skip


def _paper(raw: Raw) -> BenchReport:
    return BenchReport(
        bench="paper",
        title="DASpeech of the paper's size against S2UT's decoder, random weights: time alone",
        hardware=raw["hardware"],
        exactness=(Exactness("cached decoding and one beam against the full pass", 1, 1),),
        comparisons=tuple(
            _paired(row[name], "DASpeech", f"S2UT {name}", f"{row['seconds']:g} s", "length", "decoders",
                    size=float(row["seconds"]), unit="s of source")
            for name in raw["curve"][0] if name != "seconds" for row in raw["curve"]
        ),
        not_measured={"quality": "the weights are random"},
        details=dict(raw),
    )  # fmt: skip


def _core(raw: Raw) -> BenchReport:
    share, batch = raw["core_share"], raw["batch"]
    rows = [
        _paired(row, "lookup", "prompt lookup", f"{size}, {text} text", "all", WALL,
                tokens_per_round=row["tokens_per_round"])
        for size, texts in raw["lookup"]["sizes"].items() for text, row in texts.items()
    ]  # fmt: skip
    for size, row in raw["always_wrong"].items():
        rows.append(_paired(_turned(row), "always wrong", "plain generate", size, "all", WALL))
    return BenchReport(
        bench="core",
        title="Language models, random weights, greedy",
        hardware=raw["hardware"],
        exactness=(Exactness("kinds of run whose tokens equal plain generate's", len(rows) + 1, len(rows) + 1),),
        comparisons=tuple(rows),
        quantities=(
            Quantity(f"{share['size']}: the core's time over the target's pass", 100 * share["share"], "%", share["n"],
                     100 * share["low"], 100 * share["high"]),
            Quantity(
                f"{batch['size']}: tokens a second of 8 rows over those of one", batch["times"], "times", batch["n"]
            ),
        ),
        not_measured={"acceptance": "random weights say nothing of it: two kinds of text bound it"},
        details=dict(raw),
    )  # fmt: skip


def _kernels(raw: Raw) -> BenchReport:
    rows: list[Comparison] = []
    for row in raw["tree_attention"]:
        group = f"{row['heads']}, {row['nodes']} nodes, {row['prefix']} before"
        rows += [_paired(entry, "tree attention", other, group, "shape", "call") for other, entry in _against(row)]
    gather = raw["kv_gather"]
    group = f"{gather['layers']} layers, path of {gather['path']}"
    rows += [_paired(entry, "kv gather", other, group, "shape", "call") for other, entry in _against(gather)]
    for row in raw["dag"]:
        group = " x ".join(map(str, row["shape"]))
        rows += [_paired(entry, "DAG", other, group, "shape", row["what"]) for other, entry in _against(row)]
    reason = raw["why_not"]
    left_out = {name: why for row in raw["tree_attention"] for name, why in row.get("not_measured", {}).items()}
    return BenchReport(
        bench="kernels",
        title="Operators alone",
        hardware=raw["hardware"],
        exactness=(Exactness("rows whose two sides agree", len(rows), len(rows)),),
        comparisons=tuple(rows),
        not_measured=left_out if reason is None else {"GPU kernels": reason, **left_out},
        details=dict(raw),
    )


def _against(row: Raw) -> list[tuple[str, Raw]]:
    return list(row["against"].items())


def _passes(raw: Raw) -> BenchReport:
    rows = [
        _paired(row["pair"], row["subject"], row["baseline"], row["group"], "shape", row["timed"])
        for row in raw["rows"]
    ]
    return BenchReport(
        bench="passes",
        title="Whole passes and rounds, random weights",
        hardware=raw["hardware"],
        exactness=(Exactness("rows whose two sides agree", len(rows), len(rows)),),
        comparisons=tuple(rows),
        not_measured=raw["not_measured"],
        details=dict(raw),
    )


def _compressor(raw: Raw) -> BenchReport:
    rows = [
        _paired(_turned(row[part]), f"SpecVLM {row['compressor']}", "EAGLE-2", f"{row['visual']} visual tokens",
                "length", timed, size=float(row["visual"]), unit="visual tokens")
        for row in raw["rows"] for part, timed in (("prompt", "prompt"), ("round", "round"))
    ]  # fmt: skip
    shares = [
        Quantity(
            f"{row['compressor']}, {row['visual']} visual tokens: cache over EAGLE-2's", 100 * row["cache"], "%", 1
        )
        for row in raw["rows"]
        if math.isfinite(row["cache"])
    ]
    return BenchReport(
        bench="compressor",
        title="SpecVLM's drafter against EAGLE-2's, random weights",
        hardware=raw["hardware"],
        comparisons=tuple(rows),
        quantities=tuple(shares),
        not_measured={"acceptance": "an oracle accepts, whatever is drafted"},
        details=dict(raw),
    )


READERS: dict[str, Callable[[Raw], BenchReport]] = {
    "speech": _speech,
    "asr": _asr,
    "vlm": _vlm,
    "core": _core,
    "kernels": _kernels,
    "passes": _passes,
    "compressor": _compressor,
    "paper": _paper,
}
