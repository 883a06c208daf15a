"""Counts of a server's requests and work, in the text format of Prometheus.

References:
    https://prometheus.io/docs/instrumenting/exposition_formats
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, final

PREFIX = "mmdec_"
COUNTERS = {
    "requests_total": "Requests by endpoint and status.",
    "stage_seconds_total": "Seconds of decoding by model and stage; a batch's seconds are shared by its rows.",
    "sound_seconds_total": "Seconds of sound that were decoded.",
    "tokens_total": "Tokens that were written; divided by rounds, the tokens per round.",
    "rounds_total": "Rounds that the rows took part in: a draft and one pass of the model.",
    "stopped_total": "Jobs whose client went away or waited too long.",
}
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "request_seconds": (
        "Seconds from a request's first byte to its answer's last.",
        (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
    ),
    "batch_rows": ("Rows that ran at the same time, at each step.", (1, 2, 4, 8, 16, 32, 64)),
}
Labels = tuple[tuple[str, str], ...]


@final
class Metrics:
    """Counts a server's requests and work: counters and histograms by name and labels. Any thread may add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, Labels], float] = defaultdict(float)
        self._buckets: dict[tuple[str, Labels], list[float]] = {}

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add a value to a counter.

        Args:
            name: A key of `COUNTERS`.
            labels: The counter's labels, such as endpoint="/v1/models".
        """
        with self._lock:
            self._counts[name, tuple(sorted(labels.items()))] += value

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add a value to a histogram.

        Args:
            name: A key of `HISTOGRAMS`.
            labels: The histogram's labels.
        """
        key, bounds = (name, tuple(sorted(labels.items()))), HISTOGRAMS[name][1]
        with self._lock:
            # for each upper bound, the number of values up to it; then the number and the sum of all values
            row = self._buckets.setdefault(key, [0.0] * (len(bounds) + 2))
            for index, bound in enumerate(bounds):
                row[index] += value <= bound
            row[-2] += 1
            row[-1] += value

    def count_rows(self, rows: Mapping[str, int]) -> None:
        """Count the rows that run at one step of the scheduler.

        Args:
            rows: Model -> number of its rows.
        """
        for model, count in rows.items():
            if count:
                self.observe("batch_rows", count, model=model)

    def count_result(self, task: str, result: Any, seconds: float, model: str) -> None:
        """Count the result of one request.

        Args:
            task: Label of the counters.
            seconds: Duration of the audio.
            model: The model's name, another label.
        """
        labels = {"task": task, "model": model}
        for stage, spent in result.timings.items():
            if stage != "total":
                self.add("stage_seconds_total", spent, stage=stage, **labels)
        self.add("sound_seconds_total", seconds, **labels)
        written = getattr(result, "tokens", None)
        self.add("tokens_total", len(result.units if written is None else written), **labels)
        self.add("rounds_total", result.passes if written is None else result.rounds, **labels)

    def text(self, gauges: Mapping[str, tuple[str, Mapping[str, float]]]) -> str:
        """Write all counters in Prometheus' text format.

        Args:
            gauges: Further values, name -> (description, model -> current value); the model "" stands for the server.
        """
        lines: list[str] = []
        with self._lock:
            for name, help_text in COUNTERS.items():
                rows = [
                    f"{PREFIX}{name}{_labels(labels)} {value:g}"
                    for (metric, labels), value in sorted(self._counts.items())
                    if metric == name
                ]
                lines += [f"# HELP {PREFIX}{name} {help_text}", f"# TYPE {PREFIX}{name} counter", *rows]
            for name, (help_text, bounds) in HISTOGRAMS.items():
                lines += [f"# HELP {PREFIX}{name} {help_text}", f"# TYPE {PREFIX}{name} histogram"]
                for (metric, labels), row in sorted(self._buckets.items()):
                    if metric == name:
                        for bound, count in zip((*bounds, "+Inf"), row, strict=False):
                            lines.append(f"{PREFIX}{name}_bucket{_labels((*labels, ('le', str(bound))))} {count:g}")
                        lines.append(f"{PREFIX}{name}_sum{_labels(labels)} {row[-1]:g}")
                        lines.append(f"{PREFIX}{name}_count{_labels(labels)} {row[-2]:g}")
        for name, (help_text, values) in gauges.items():
            lines += [f"# HELP {PREFIX}{name} {help_text}", f"# TYPE {PREFIX}{name} gauge"]
            for model, value in values.items():
                lines.append(f"{PREFIX}{name}{_labels((('model', model),) if model else ())} {value:g}")
        return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    inside = ",".join(f'{name}="{value}"' for name, value in labels)
    return f"{{{inside}}}" if inside else ""
