"""Times two methods alternately, A B A B: on a noisy machine only the ratio of neighbouring runs is reliable.

It also has what all benchmarks share: report rows, seconds of stages, and accepted drafts by depth.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

import numpy as np
import torch

from mmdec.checks.arguments import check_threads
from mmdec.checks.devices import check_device
from mmdec.decode.guard import ForwardingDrafter
from mmdec.decode.tree import depths, int_list, int_rows
from mmdec.decode.watch import Stopwatch
from mmdec.drafters.registry import named_drafter
from mmdec.evaluation.bench.report import DECODER, WALL, Comparison, Kind
from mmdec.evaluation.quality.harness import Measurement, Measurements, Method
from mmdec.pipelines.threads import keep_threads
from mmdec.types import Draft, Drafter, Scores, Verdict

Result = TypeVar("Result")


def prepared(device: str | None, threads: int) -> torch.device:
    """Set torch's threads and return the device. Raises InputError for an impossible device or number."""
    check_threads(threads)
    found = check_device(device)
    keep_threads(threads)
    return found


@dataclass(frozen=True)
class Paired:
    """Two methods timed alternately: medians in milliseconds, and the median of the ratios b / a with its quartiles."""

    a_ms: float
    b_ms: float
    ratio: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Paired:
        """Summarise pairs (a, b) of the two methods' seconds, each from two successive runs."""
        low, middle, high = _quartiles([y / x for x, y in pairs])
        a, b = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
        return cls(a_ms=a, b_ms=b, ratio=middle, low=low, high=high, n=len(pairs))


def paired(
    a: Callable[[], Result],
    b: Callable[[], Result],
    repeats: int,
    device: torch.device,
    seconds: Callable[[Result], float] | None = None,
) -> Paired:
    """Run a and b alternately, after one warm-up of each.

    seconds: reads the seconds from a result; None: measure the wall clock of the call.
    """
    pairs: list[tuple[float, float]] = []
    stopwatch = Stopwatch(device)
    for number in range(repeats + 1):
        pair = []
        for side in (a, b):
            stopwatch.lap()
            result = side()
            wall = stopwatch.lap()
            pair.append(wall if seconds is None else seconds(result))
        if number:
            pairs.append((pair[0], pair[1]))
    return Paired.of(pairs)


def comparison(
    pairs: Mapping[str, Any], subject: str, baseline: str, group: str, kind: Kind, timed: str, **more: Any
) -> Comparison:
    """Build a report row. group, kind: the group of inputs, and the property that groups them. timed: the kind of time.
    pairs: `Paired` as a dict, a = subject, b = baseline. more: further fields of the row."""
    fields = {
        **{"times": pairs["ratio"], "low": pairs["low"], "high": pairs["high"], "pairs": pairs["n"], "inputs": 1},
        **{"subject_ms": pairs["a_ms"], "baseline_ms": pairs["b_ms"]},
    }
    return Comparison(subject, baseline, group, kind, timed, **{**fields, **more})


def turned(pairs: Mapping[str, Any]) -> dict[str, Any]:
    """Exchange a and b in the summary of pairs, so that the other method is the baseline."""
    ratios = {"ratio": 1 / pairs["ratio"], "low": 1 / pairs["high"], "high": 1 / pairs["low"]}
    return {**pairs, **ratios, "a_ms": pairs["b_ms"], "b_ms": pairs["a_ms"]}


def comparisons(
    found: Mapping[str, Any], subject: str, baseline: str, group: str, kind: Kind, **more: Any
) -> list[Comparison]:
    """Build the report rows for a result of `compare`: one for decoder seconds, one for wall clock. found: the result.
    group, kind: the group of inputs, and the property that groups them."""
    return [
        Comparison(
            *(subject, baseline, group, kind, timed, part["median"], part["low"], part["high"], part["pairs"]),
            inputs=found["n"],
            subject_ms=1e3 * part["a_s"] / found["n"],
            baseline_ms=1e3 * part["b_s"] / found["n"],
            tokens_per_round=found["a_tokens_per_round"],
            accepted_per_round=found.get("a_accepted_per_round"),
            **more,
        )
        for timed, key in ((DECODER, "decoder"), (WALL, "wall"))
        if found["n"]
        for part in (found[key],)
    ]


def middle(group: str) -> float | None:
    """Return the middle of a length group: "11-20 words" -> 15.5, "40+ words" -> 40.0; None if the group is not a
    length."""
    span = re.match(r"(\d+)(?:-(\d+)|\+)", group)
    return None if span is None else (float(span[1]) + float(span[2] or span[1])) / 2


def compare(measured: Measurements, a: Method, b: Method, groups: Sequence[int]) -> dict[str, Any]:
    """Compare b with a on some groups of inputs. Returns a JSON-ready dict.

    groups: indices of groups. Seconds are sums over the groups of the median over repeats, and `ratio` is the ratio of
        these sums. `median` and the quartiles `low` and `high` are those of the ratios of neighbouring runs. Tokens per
        round include the bonus or correction token; accepted tokens per round do not. Neither counts the pass over the
        prompt. Tokens per pass of b are None for batches.
    """
    if not groups:
        return {"n": 0}
    a_runs, b_runs = ([measured[method.name][group] for group in groups] for method in (a, b))
    passes = sum(repeats[0].passes - repeats[0].windows for repeats in b_runs)
    return {
        "n": len(groups),
        "decoder": _ratios(a_runs, b_runs, lambda measurement: measurement.decoder),
        "wall": _ratios(a_runs, b_runs, lambda measurement: measurement.total),
        "a_tokens_per_round": _tokens(a_runs) / max(sum(repeats[-1].rounds for repeats in a_runs), 1),
        "a_accepted_per_round": _accepted(a_runs),
        "a_passes": sum(repeats[-1].passes for repeats in a_runs),
        "b_passes": sum(repeats[0].passes for repeats in b_runs),
        "b_tokens_per_pass": _tokens(a_runs) / max(passes, 1) if len(a_runs[0][0].tokens) == 1 else None,
        "a_decoder_share": _share(a_runs),
        "b_decoder_share": _share(b_runs),
        "seconds": {
            "features": _sum(b_runs, lambda measurement: measurement.features),
            "encoder": _sum(b_runs, lambda measurement: measurement.encoder),
            "drafter": _sum(a_runs, lambda measurement: measurement.drafter),
        },
    }


def stages(measured: Measurements, groups: Sequence[int]) -> dict[str, dict[str, float]]:
    """Compute the milliseconds of each stage, for each method: the median over repeats, then the mean over groups.

    Here the decoder's time does not include the drafter's. transformers' loops report no drafter's time.
    """
    spent: dict[str, dict[str, float]] = {}
    for name, runs in measured.items():
        chosen = [runs[group] for group in groups]
        parts = {
            "features": _sum(chosen, lambda measurement: measurement.features),
            "encoder": _sum(chosen, lambda measurement: measurement.encoder),
            "decoder": _sum(chosen, lambda measurement: measurement.decoder - measurement.drafter),
            "drafter": _sum(chosen, lambda measurement: measurement.drafter),
        }
        spent[name] = {stage: 1e3 * seconds / max(len(chosen), 1) for stage, seconds in parts.items()}
    return spent


def _ratios(
    a_runs: Sequence[Sequence[Measurement]],
    b_runs: Sequence[Sequence[Measurement]],
    seconds: Callable[[Measurement], float],
) -> dict[str, float | int]:
    ratios = [seconds(y) / seconds(x) for a, b in zip(a_runs, b_runs, strict=True) for x, y in zip(a, b, strict=True)]
    low, middle, high = _quartiles(ratios)
    a, b = _sum(a_runs, seconds), _sum(b_runs, seconds)
    return {"a_s": a, "b_s": b, "ratio": b / a, "median": middle, "low": low, "high": high, "pairs": len(ratios)}


def _quartiles(ratios: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    return low, middle, high


def _sum(measured: Sequence[Sequence[Measurement]], seconds: Callable[[Measurement], float]) -> float:
    return sum(statistics.median(seconds(measurement) for measurement in repeats) for repeats in measured)


def _share(measured: Sequence[Sequence[Measurement]]) -> float:
    return _sum(measured, lambda measurement: measurement.decoder) / _sum(
        measured, lambda measurement: measurement.total
    )


def _tokens(measured: Sequence[Sequence[Measurement]]) -> int:
    return sum(repeats[-1].drafted_tokens for repeats in measured)


def _accepted(measured: Sequence[Sequence[Measurement]]) -> float | None:
    """Compute accepted tokens per round, without bonus or correction; None where they were not counted."""
    counts = [repeats[-1].accepted for repeats in measured]
    if None in counts:
        return None
    return sum(count or 0 for count in counts) / max(sum(repeats[-1].rounds for repeats in measured), 1)


@final
class DepthRecorder(ForwardingDrafter):
    """Wraps a drafter, and counts at which depths its drafts are accepted."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self._reached: Counter[int] = Counter()  # depth in the drafted tree -> number of drafts with a node there
        self._accepted: Counter[int] = Counter()

    def update(self, memory: Any, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        rows = zip(int_rows(draft.parents), int_list(draft.size), int_rows(verdict.path), strict=True)
        for parents, size, path in rows:
            for depth in range(1, max(depths(parents[:size])) + 1):
                self._reached[depth] += 1
            for depth in range(1, sum(node > 0 for node in path) + 1):
                self._accepted[depth] += 1
        super().update(memory, draft, scores, verdict)

    def shares(self) -> list[float]:
        """Return one share for each depth 1, 2, ...: drafts accepted to this depth / drafts that have a node there."""
        return [self._accepted[depth] / self._reached[depth] for depth in sorted(self._reached)]


def recorded(methods: Sequence[Method]) -> tuple[list[Method], dict[str, DepthRecorder]]:
    """Wrap the drafters of mmdec's methods in recorders. Returns the methods, and the recorders by method name."""
    recorders: dict[str, DepthRecorder] = {}
    watched = []
    for method in methods:
        drafter: Any = method.options.get("drafter")
        if method.loop == "mmdec" and drafter is not None:
            chosen = named_drafter(drafter) if isinstance(drafter, str) else drafter
            recorders[method.name] = DepthRecorder(chosen)
            method = replace(method, options={**method.options, "drafter": recorders[method.name]})
        watched.append(method)
    return watched, recorders
