"""A report of `mmdec eval vlm` as a table for a terminal of 80 columns. Nothing is computed here."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mmdec.evaluation.bench.tables import FIRST, machine


def vlm_table(report: dict[str, Any]) -> RenderableType:
    """A report of `evaluate_vlm`: a row for each task, and one for all where there are several."""
    other = ", pictures swapped" if report["swapped"] else ""
    title = f"{report['model']} on {report['questions']}{other}, n = {report['n']}, drafter {report['drafter']}"
    grid = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    grid.add_column("", max_width=FIRST, overflow="fold")
    for name in ("right, % [95 %]", "of", "tokens\na round", "accepted\na round", "drafter's\nshare, %", "s,\nmedian"):
        grid.add_column(name, justify="right", no_wrap=True)
    rows = list(report["by_task"].items())
    if len(rows) != 1:
        rows.append(("all", {"right": report["right"], "decoding": report["decoding"]}))
    for task, row in rows:
        cost = row["decoding"]
        share = cost.get("drafter_share", {}).get("of_all")
        grid.add_row(
            escape(task),
            _rate(row["right"]),
            str(row["right"]["n"]),
            _two(cost.get("tokens_per_round")),
            _two(cost.get("accepted_per_round")),
            "-" if share is None else f"{100 * share:.1f}",
            "-" if not cost else f"{cost['median_seconds']:.3f}",
        )
    compressed = {name: row["decoding"].get("compressors") for name, row in rows}
    notes = [
        f"images shortened, {name}: {', '.join(f'{how} {count}' for how, count in counts.items())}"
        for name, counts in compressed.items()
        if counts
    ]
    notes += [
        f"{name}, right in any words: {_rate(row['right_in_any_words'])}"
        for name, row in rows
        if "right_in_any_words" in row
    ]
    notes += [
        f"{row['task']} {row['id']}: {row['question']!r} answered {row['answer']!r}, expected {row['expected']!r}"
        for row in report["worst"]
    ]
    notes += [f"refused {name}: {error}" for name, error in report["refused"].items()]
    return Group(Text(title), grid, Text("\n".join([*notes, machine(report["hardware"])])))


def _rate(entry: dict[str, Any]) -> str:
    if not entry["n"]:
        return "-"
    return f"{100 * entry['value']:.1f} [{100 * entry['low']:.1f}, {100 * entry['high']:.1f}]"


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
