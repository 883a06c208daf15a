"""Times methods in turn, A B A B: on a noisy machine only the ratio of neighbouring calls is reliable.

`time_pairs` times two functions. `MethodTimings` compares decoding methods that answered the same inputs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar, final

import numpy as np
import torch

from mmdec.bench.report import WALL_CLOCK, Comparison, GroupKind
from mmdec.checks.arguments import check_threads
from mmdec.checks.devices import check_device
from mmdec.core.timing import Stopwatch
from mmdec.evaluation.harness import Measurement, Measurements
from mmdec.tasks.threads import keep_threads

CPU_TIME = "CPU time"  # the kind of measured time that counts the CPU seconds of all threads
Result = TypeVar("Result")


def prepare_device(device: str | None, threads: int) -> torch.device:
    """Set torch's threads for the process, and return the device; None: a GPU if there is one.

    Raises:
        InputError: If the device or the number is impossible.
    """
    check_threads(threads)
    resolved = check_device(device)
    keep_threads(threads)
    return resolved


@dataclass(frozen=True)
class PairedTiming:
    """Timings of two methods, a and b, in turn.

    Holds the medians in milliseconds, the median ratio b / a with its quartiles, and the number of pairs (`n`).
    """

    a_ms: float
    b_ms: float
    ratio: float
    low: float
    high: float
    n: int

    @classmethod
    def from_pairs(cls, pairs: Sequence[tuple[float, float]]) -> PairedTiming:
        """Summarise pairs (a, b): the seconds of two successive calls, one of each method."""
        low, middle, high = quartiles([y / x for x, y in pairs])
        a, b = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
        return cls(a_ms=a, b_ms=b, ratio=middle, low=low, high=high, n=len(pairs))

    def row(self, subject: str, baseline: str, group: str, kind: GroupKind, timed: str, **more: Any) -> Comparison:
        """Build a row of a report, in which a is the subject and b the baseline.

        Args:
            subject, baseline: Names of the methods.
            group, kind, timed, more: Fields of `Comparison`.
        """
        return Comparison(
            subject,
            baseline,
            group,
            kind,
            timed,
            times=self.ratio,
            low=self.low,
            high=self.high,
            pairs=self.n,
            inputs=1,
            subject_ms=self.a_ms,
            baseline_ms=self.b_ms,
            **more,
        )


def time_pairs(
    a: Callable[[], Result],
    b: Callable[[], Result],
    repeats: int,
    device: torch.device,
    seconds: Callable[[Result], float] | None = None,
) -> PairedTiming:
    """Call a and b alternately, after one warm-up of each, and summarise their seconds.

    Args:
        repeats: Number of timed pairs.
        device: The wall clock waits until this device has finished.
        seconds: Takes what a or b returned, and returns the seconds to count; None: the wall clock of the call.
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
    return PairedTiming.from_pairs(pairs)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return low, middle, high


@dataclass(frozen=True)
class Group:
    """The inputs that one row of a report covers."""

    name: str
    kind: GroupKind
    indices: Sequence[int]  # the inputs' indices
    size: float | None = None  # the inputs' length in `unit`, to plot curves
    unit: str = ""


def task_groups(tasks: Sequence[str]) -> list[Group]:
    """Group inputs: all, and those of each task.

    Args:
        tasks: The task of each input.
    """
    indices_of_task = {name: [index for index, task in enumerate(tasks) if task == name] for name in sorted(set(tasks))}
    each = [Group(f"task {name}", "task", indices) for name, indices in indices_of_task.items()]
    return [Group("all", "all", range(len(tasks))), *each]


def length_groups(lengths: Sequence[int], bins: Sequence[tuple[int, int]], unit: str) -> list[Group]:
    """Group inputs by length.

    Args:
        lengths: The length of each input.
        bins: Least and most length of each group. The last group's name shows only the least.
        unit: The unit of the lengths, for names such as "6-10 words".
    """
    groups = []
    for low, high in bins:
        last = (low, high) == bins[-1]
        name = f"{low}+ {unit}" if last else f"{low}-{high} {unit}"
        indices = [index for index, length in enumerate(lengths) if low <= length <= high]
        groups.append(Group(name, "length", indices, float(low) if last else (low + high) / 2, unit))
    return groups


@final
@dataclass(frozen=True)
class MethodTimings:
    """The measurements of several methods on the same inputs."""

    measured: Measurements  # method name -> each batch of inputs -> its repeats
    equal: Mapping[str, Sequence[bool]]  # method name -> whether its tokens of each input are those of greedy decoding

    def rows(self, subject: str, baseline: str, group: Group) -> list[Comparison]:
        """Compare two methods on the inputs for which the baseline's tokens equal greedy decoding's.

        The other inputs are skipped.

        Args:
            subject, baseline: Names of methods.
            group: The inputs to choose from.

        Returns:
            Two rows of the report, for CPU time and for the wall clock; none if all inputs were skipped.
            Tokens per round do not count the prompt's pass.
        """
        same = [index for index in group.indices if self.equal[baseline][index]]
        if not same:
            return []
        ours, theirs = ([self.measured[name][index] for index in same] for name in (subject, baseline))
        last = [repeats[-1] for repeats in ours]
        rounds = max(sum(run.rounds for run in last), 1)
        accepted = [run.accepted for run in last if run.accepted is not None]
        rows = []
        for timed, seconds in ((CPU_TIME, attrgetter("cpu_seconds")), (WALL_CLOCK, attrgetter("total"))):
            ratios = [
                seconds(b) / seconds(a)
                for a_runs, b_runs in zip(ours, theirs, strict=True)
                for a, b in zip(a_runs, b_runs, strict=True)
            ]
            low, middle, high = quartiles(ratios)
            rows.append(
                Comparison(
                    subject,
                    baseline,
                    group.name,
                    group.kind,
                    timed,
                    times=middle,
                    low=low,
                    high=high,
                    pairs=len(ratios),
                    inputs=len(same),
                    size=group.size,
                    unit=group.unit,
                    subject_ms=_milliseconds(ours, seconds),
                    baseline_ms=_milliseconds(theirs, seconds),
                    tokens_per_round=sum(run.drafted_tokens for run in last) / rounds,
                    accepted_per_round=sum(accepted) / rounds if accepted else None,
                )
            )
        return rows

    def comparisons(
        self, subjects: Sequence[str], baselines: Sequence[str], groups: Sequence[Group]
    ) -> list[Comparison]:
        """Compare each subject with each baseline that is another method, group by group. All are names."""
        return [
            row
            for subject in subjects
            for baseline in baselines
            if baseline != subject
            for group in groups
            for row in self.rows(subject, baseline, group)
        ]

    def stages(self) -> dict[str, dict[str, float]]:
        """Compute how long each stage of decoding takes for one input, in milliseconds.

        The stage "decoder" does not include the drafter's time. transformers' own loops do not report the drafter's
        time, so for them "decoder" includes it.

        Returns:
            Method -> stage -> milliseconds.
        """
        parts: dict[str, Callable[[Measurement], float]] = {
            "features": attrgetter("features"),
            "encoder": attrgetter("encoder"),
            "decoder": lambda run: run.decoder - run.drafter,
            "drafter": attrgetter("drafter"),
        }
        return {
            name: {stage: _milliseconds(runs, seconds) for stage, seconds in parts.items()}
            for name, runs in self.measured.items()
        }


def _milliseconds(runs: Sequence[Sequence[Measurement]], seconds: Callable[[Measurement], float]) -> float:
    """Compute the median over repeats, then the mean over inputs, in milliseconds.

    Args:
        runs: For each input, the measurements of its repeats.
        seconds: Takes the seconds from a measurement.
    """
    return 1e3 * statistics.fmean(statistics.median(map(seconds, repeats)) for repeats in runs)
