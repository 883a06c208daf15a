"""A run beside a saved one: how each median changed, and in what their surroundings differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmdec.evaluation.bench.report import BenchReport, BenchRun, Comparison

SURROUNDINGS = ("cpu", "cores", "threads", "device", "target", "dtype", "batch", "python")  # and each version


@dataclass(frozen=True)
class Change:
    """One comparison in both runs."""

    bench: str
    subject: str
    baseline: str
    group: str
    timed: str
    before: float | None  # times faster
    now: float | None
    ratio: float | None  # of these, now over saved
    subject_ratio: float | None  # of the subject's own milliseconds, now over saved
    baseline_ratio: float | None


@dataclass(frozen=True)
class Changes:
    """All of them."""

    source: str  # the saved run's file
    warnings: tuple[str, ...]
    rows: tuple[Change, ...]
    only_now: tuple[tuple[str, ...], ...] = ()
    only_before: tuple[tuple[str, ...], ...] = ()


def against(now: BenchRun, before: BenchRun, source: str = "") -> Changes:
    """Compare the reports of equal names; a benchmark that one of the runs lacks is named."""
    warnings: list[str] = []
    rows: list[Change] = []
    only_now: list[tuple[str, ...]] = []
    only_before: list[tuple[str, ...]] = []
    saved = {report.bench: report for report in before.reports}
    for report in now.reports:
        other = saved.get(report.bench)
        if other is None:
            only_now.append((report.bench,))
            continue
        warnings += [f"{report.bench}: {line}" for line in differences(report.hardware, other.hardware)]
        mine, theirs = _by_key(report), _by_key(other)
        rows += [_change(report.bench, row, theirs[key]) for key, row in mine.items() if key in theirs]
        only_now += [(report.bench, *key) for key in mine if key not in theirs]
        only_before += [(report.bench, *key) for key in theirs if key not in mine]
    measured = {report.bench for report in now.reports}
    only_before += [(name,) for name in saved if name not in measured]
    return Changes(source, tuple(warnings), tuple(rows), tuple(only_now), tuple(only_before))


def differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """In what two runs' surroundings differ, but for commit, date and command, which say nothing of the speed."""
    lines = [
        f"{name} {before.get(name)!s} then, {now.get(name)!s} now"
        for name in SURROUNDINGS
        if now.get(name) != before.get(name)
    ]
    mine, theirs = now.get("versions") or {}, before.get("versions") or {}
    lines += [
        f"{name} {theirs.get(name)!s} then, {mine.get(name)!s} now"
        for name in sorted({*mine, *theirs} - {"mmdec"})
        if mine.get(name) != theirs.get(name)
    ]
    return lines


def _by_key(report: BenchReport) -> dict[tuple[str, str, str, str], Comparison]:
    return {row.key: row for row in report.comparisons}


def _change(bench: str, now: Comparison, before: Comparison) -> Change:
    return Change(
        bench,
        *(now.subject, now.baseline, now.group, now.timed),
        before=before.times,
        now=now.times,
        ratio=_ratio(now.times, before.times),
        subject_ratio=_ratio(now.subject_ms, before.subject_ms),
        baseline_ratio=_ratio(now.baseline_ms, before.baseline_ms),
    )


def _ratio(now: float | None, before: float | None) -> float | None:
    return None if now is None or not before else now / before
