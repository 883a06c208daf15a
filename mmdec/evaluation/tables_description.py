"""Reports of `mmdec eval vlm` and `mmdec bench vlm` as tables for a terminal. Nothing is computed here."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table


def vlm_table(report: dict[str, Any]) -> Table:
    """A report of `evaluate_vlm`: a row for each task."""
    other = ", pictures swapped" if report["swapped"] else ""
    title = f"{report['model']} on {report['questions']}{other}, n = {report['n']}, drafter {report['drafter']}"
    grid = Table(title=escape(title), title_justify="left")
    grid.add_column("")
    for name in ("right, % [95 %]", "of", "tokens a round", "accepted a round", "drafter's share, %", "s, median"):
        grid.add_column(name, justify="right")
    rows = [*report["by_task"].items(), ("all", {"right": report["right"], "decoding": report["decoding"]})]
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
    notes = [
        f"{row['task']} {row['id']}: {row['question']!r} answered {row['answer']!r}, expected {row['expected']!r}"
        for row in report["worst"]
    ]
    notes += [f"refused {name}: {error}" for name, error in report["refused"].items()]
    grid.caption, grid.caption_justify = escape("\n".join([*notes, _machine(report)])), "left"
    return grid


def bench_table(report: dict[str, Any]) -> Table:
    """A report of `bench_vlm`: a row for each of our drafters, baseline and group of questions."""
    grid = Table(title=escape(f"{report['model']}, {report['questions']} questions"), title_justify="left")
    for name in ("drafter", "against", "questions", "n", "times faster (quartiles)", "tokens a round"):
        grid.add_column(name, justify="left" if name in ("drafter", "against", "questions") else "right")
    for drafter, entry in report["drafters"].items():
        for baseline, groups in entry["against"].items():
            for group, row in groups.items():
                if not row["n"]:
                    continue
                wall = row["wall"]
                times = f"{wall['median']:.2f} ({wall['low']:.2f} to {wall['high']:.2f})"
                cells = (drafter, baseline, group)
                grid.add_row(*map(escape, cells), str(row["n"]), times, _two(row["a_tokens_per_round"]))
    notes = [f"{name}: {reason}" for name, reason in report["left_out"].items()]
    grid.caption, grid.caption_justify = escape("\n".join([*notes, _machine(report)])), "left"
    return grid


def _machine(report: dict[str, Any]) -> str:
    machine = report["hardware"]
    return f"{machine['cpu']}, {machine['threads']} threads, torch {machine['versions']['torch']}"


def _rate(entry: dict[str, Any]) -> str:
    if not entry["n"]:
        return "-"
    return f"{100 * entry['value']:.1f} [{100 * entry['low']:.1f}, {100 * entry['high']:.1f}]"


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
