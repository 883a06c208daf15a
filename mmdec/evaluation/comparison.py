"""Two ways to decode the same recordings, timed in turn: what the one's seconds are of the other's."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from mmdec.evaluation.harness import Run, Way

Runs = dict[str, list[list[Run]]]  # way -> each group of recordings -> its repeats


def compare(runs: Runs, a: Way, b: Way, places: Sequence[int]) -> dict[str, Any]:
    """A JSON object: b over a, on the groups at `places`.

    Seconds are sums over the groups, each with the median of its repeats, and `ratio` is that of the sums; `median` and
    the quartiles `low` and `high` are of the ratios of neighbours. Tokens a round count the bonus or correction, but
    not the prompt's pass; b's are known at batch 1 alone.
    """
    if not places:
        return {"n": 0}
    ours, theirs = ([runs[way.name][place] for place in places] for way in (a, b))
    passes, windows = (sum(each[0].passes for each in theirs), sum(each[0].windows for each in theirs))
    return {
        "n": len(places),
        "decoder": _paired(ours, theirs, lambda run: run.decoder),
        "wall": _paired(ours, theirs, lambda run: run.total),
        "a_tokens_per_round": _tokens(ours) / max(sum(each[-1].rounds for each in ours), 1),
        "a_passes": sum(each[-1].passes for each in ours),
        "b_passes": passes,
        "b_tokens_per_pass": _tokens(ours) / max(passes - windows, 1) if len(ours[0][0].tokens) == 1 else None,
        "a_decoder_share": _share(ours),
        "b_decoder_share": _share(theirs),
        "seconds": {
            "features": _sum(theirs, lambda run: run.features),
            "encoder": _sum(theirs, lambda run: run.encoder),
        },
    }


def _paired(
    ours: Sequence[Sequence[Run]], theirs: Sequence[Sequence[Run]], seconds: Callable[[Run], float]
) -> dict[str, float | int]:
    pairs = [seconds(y) / seconds(x) for a, b in zip(ours, theirs, strict=True) for x, y in zip(a, b, strict=True)]
    low, middle, high = statistics.quantiles(pairs, n=4) if len(pairs) > 1 else pairs * 3
    a, b = _sum(ours, seconds), _sum(theirs, seconds)
    return {"a_s": a, "b_s": b, "ratio": b / a, "median": middle, "low": low, "high": high, "pairs": len(pairs)}


def _sum(runs: Sequence[Sequence[Run]], seconds: Callable[[Run], float]) -> float:
    return sum(statistics.median(seconds(run) for run in each) for each in runs)


def _share(runs: Sequence[Sequence[Run]]) -> float:
    return _sum(runs, lambda run: run.decoder) / _sum(runs, lambda run: run.total)


def _tokens(runs: Sequence[Sequence[Run]]) -> int:
    return sum(each[-1].drafted_tokens for each in runs)
