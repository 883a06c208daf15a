"""Plots benchmarks, and a training run's metrics.csv, as PNG or SVG.

matplotlib (extra `mmdec[plots]`) needs no display here, and is imported at the first plot.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from mmdec.bench.report import WALL_CLOCK, BenchReport, BenchRun, Comparison
from mmdec.checks.files import write_atomically
from mmdec.errors import InputError
from mmdec.evaluation.harness import GREEDY

Axes = Any  # matplotlib's Axes, which is imported only to draw
LARGEST_CSV = 256 * 2**20  # maximum bytes of a metrics.csv, which is read whole
PANELS = 6  # the most panels of one figure of training curves


def plot_run(run: BenchRun, directory: str | Path, metrics: str | Path | None = None) -> list[Path]:
    """Draw all plots for which the results have data: speed-up by length, tokens per round by task, time by stage.

    Args:
        directory: Where the files are written.
        metrics: A metrics.csv of Lightning's CSVLogger, to plot training curves.

    Returns:
        The paths of the files. If there are several reports of one benchmark, each has its own files.

    Raises:
        InputError: If matplotlib is not installed, or the metrics.csv is invalid.
    """
    pyplot = import_pyplot()
    folder = Path(directory)
    curves = None if metrics is None else training_curves(metrics)
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    drawings: tuple[tuple[str, Callable[[Axes, BenchReport], bool]], ...] = (
        ("speedup-by-length", _by_length),
        ("tokens-per-round", _tokens),
        ("time-by-stage", _stages),
    )
    counts = Counter[str]()
    for report in run.reports:
        counts[report.bench] += 1
        bench = report.bench if counts[report.bench] == 1 else f"{report.bench}-{counts[report.bench]}"
        for name, draw in drawings:
            with new_figure(pyplot) as (figure, axes):
                if draw(axes, report):
                    axes.set_title(report.title, fontsize=9, loc="left", wrap=True)
                    written.append(_save(figure, folder / f"{bench}-{name}.png"))
    if curves is not None:
        written.append(_training(pyplot, curves, folder / "training-curves.png"))
    return written


def plot_drafters(run: BenchRun, path: str | Path) -> Path:
    """Draw what `mmdec bench drafters` measured: tokens per round and speed against greedy decoding, with quartiles.

    Args:
        run: Results with one such report.
        path: A .png or .svg file, written whole or not at all.

    Raises:
        InputError: If matplotlib is not installed.
    """
    pyplot, target = import_pyplot(), Path(path)
    (report,) = run.reports
    with new_figure(pyplot, 1, 2) as (figure, (left, right)):
        drafted = [(row.method, row.tokens_per_round) for row in report.methods if row.tokens_per_round is not None]
        _ranges(left, [(name, spread.value, spread.low, spread.high) for name, spread in drafted])
        left.set_xlabel("tokens per round, bonus included")
        faster = [row for row in report.comparisons if row.kind == "all" and row.baseline == GREEDY]
        timed = [row for row in faster if row.timed == WALL_CLOCK and row.times is not None]
        _ranges(right, [(row.subject, row.times or 0.0, row.low or 0.0, row.high or 0.0) for row in timed])
        right.set_xlabel("times faster than greedy decoding")
        figure.suptitle(report.title, fontsize=9)
        picture = BytesIO()
        kind = target.suffix.lower().removeprefix(".")
        # without date and version, so that equal figures give equal files
        figure.savefig(picture, format=kind, dpi=120, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return write_atomically(target, picture.getvalue())


def _ranges(axes: Axes, rows: Sequence[tuple[str, float, float, float]]) -> None:
    """Draw a bar with its quartiles for each (name, value, low, high)."""
    for at, (_, value, low, high) in enumerate(rows):
        axes.barh(at, value)
        axes.plot([low, high], [at, at], color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows], fontsize=7)
    axes.axvline(1.0, color="grey", linewidth=0.8, linestyle="--")
    axes.invert_yaxis()


def check_plots(metrics: str | Path | None = None) -> None:
    """Raise InputError if matplotlib is not installed, or `metrics` is not a valid metrics.csv."""
    import_pyplot()
    if metrics is not None:
        training_curves(metrics)


def training_curves(path: str | Path) -> dict[str, list[tuple[float, float]]]:
    """Read the columns of a metrics.csv by Lightning's CSVLogger: name -> (step, value), in order.

    Missing and non-finite values are left out.

    Raises:
        InputError: If the file cannot be read or has no such columns.
    """
    source = Path(path)
    try:
        if source.stat().st_size > LARGEST_CSV:
            raise InputError(f"`metrics` must have at most {LARGEST_CSV} bytes, but '{source}' has more.")
        with open(source, encoding="utf-8", newline="") as file:
            rows = [*csv.DictReader(file)]
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(
            f"`metrics` must be a metrics.csv of Lightning, but '{source}' cannot be read ({error!s:.100}). Name "
            "another."
        ) from None
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        step = _float(row.get("step"))
        if step is None:
            continue
        for name, text in row.items():
            value = _float(text)
            if name not in ("step", "epoch", None) and value is not None:
                curves.setdefault(name, []).append((step, value))
    if not curves:
        raise InputError(
            f"`metrics` must have a column `step` and others with numbers, but '{source}' has none. Name the "
            "metrics.csv of a run."
        )
    return curves


def _float(text: object) -> float | None:
    try:
        value = float(text)  # type: ignore[arg-type] # what is no text raises TypeError, caught below
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def import_pyplot() -> Any:
    """Import matplotlib.pyplot for drawing without a display.

    Raises:
        InputError: Where it is not installed.
    """
    try:
        import_module("matplotlib").use("Agg")
        return import_module("matplotlib.pyplot")
    except ImportError as error:
        raise InputError(
            "Plots need the package matplotlib, which is not installed. Run `pip install 'mmdec[plots]'`."
        ) from error


@contextmanager
def new_figure(
    pyplot: Any, rows: int = 1, columns: int = 1, panel: tuple[float, float] = (6.4, 4.0)
) -> Iterator[tuple[Any, Any]]:
    """Yield a new figure and its axes; close the figure at the end.

    Args:
        rows, columns: Numbers of axes.
        panel: Width and height of each axes in inches.
    """
    size = (panel[0] * columns, panel[1] * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained")
    try:
        yield figure, axes
    finally:
        pyplot.close(figure)


def _save(figure: Any, path: Path) -> Path:
    # matplotlib's version is left out of the file, so that equal figures give equal files
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return path


def _by_length(axes: Axes, report: BenchReport) -> bool:
    """Plot the speed-up over the output's length, with quartiles, and return whether the report has the data."""
    lines: dict[str, list[Comparison]] = {}
    for row in report.comparisons:
        if row.kind == "length" and row.size is not None and row.times is not None:
            lines.setdefault(f"{row.subject} / {row.baseline}, {row.timed}", []).append(row)
    for name, rows in lines.items():
        rows.sort(key=lambda row: row.size or 0.0)
        sizes, times = [row.size for row in rows], [row.times for row in rows]
        (line,) = axes.plot(sizes, times, marker="o", markersize=3, label=name)
        if all(row.low is not None and row.high is not None for row in rows):
            axes.fill_between(
                sizes, [row.low for row in rows], [row.high for row in rows], color=line.get_color(), alpha=0.15
            )
    if not lines:
        return False
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xlabel(f"length, {next(iter(lines.values()))[0].unit or 'tokens'}")
    axes.set_ylabel("times faster")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=6)
    return True


def _tokens(axes: Axes, report: BenchReport) -> bool:
    """Plot the tokens per round of each drafter, by task or by the report's other groups.

    Returns:
        Whether the report has the data.
    """
    rows = {
        (row.subject, row.group): row.tokens_per_round
        for row in report.comparisons
        if row.tokens_per_round is not None and row.baseline in ("greedy", "prompt lookup", "plain generate")
    }
    kinds = {row.group for row in report.comparisons if row.kind == "task"}
    chosen = {key: value for key, value in rows.items() if not kinds or key[1] in kinds}
    if not chosen:
        return False
    groups = [*dict.fromkeys(group for _, group in chosen)]
    subjects = [*dict.fromkeys(subject for subject, _ in chosen)]
    _bars(axes, groups, {name: [chosen.get((name, group)) for group in groups] for name in subjects})
    axes.set_ylabel("tokens per round, bonus included")
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle="--")
    return True


def _stages(axes: Axes, report: BenchReport) -> bool:
    """Plot a stacked bar of milliseconds for each method, and return whether the report has the data."""
    if not report.stages:
        return False
    names = [*dict.fromkeys(stage for spent in report.stages.values() for stage in spent if stage != "total")]
    methods = [*report.stages]
    left = [0.0] * len(methods)
    for name in names:
        spent = [report.stages[method].get(name) or 0.0 for method in methods]
        axes.barh(methods, spent, left=left, label=name)
        left = [start + part for start, part in zip(left, spent, strict=True)]
    axes.set_xlabel("milliseconds of an input")
    axes.invert_yaxis()
    axes.legend(fontsize=7)
    return True


def _bars(axes: Axes, groups: Sequence[str], heights: Mapping[str, Sequence[float | None]]) -> None:
    width = 0.8 / len(heights)
    for number, (name, values) in enumerate(heights.items()):
        centres = [index + (number - (len(heights) - 1) / 2) * width for index in range(len(groups))]
        axes.bar(centres, [value or 0.0 for value in values], width, label=name)
    axes.set_xticks(range(len(groups)), groups, rotation=30, ha="right", fontsize=7)
    axes.legend(fontsize=7)


def _training(pyplot: Any, curves: Mapping[str, Sequence[tuple[float, float]]], path: Path) -> Path:
    """Plot training curves, train and val of a metric in one panel; at most `PANELS`, those with the most points.

    Args:
        curves: Metric -> (step, value) in order.

    Returns:
        The path of the file.
    """
    panels: dict[str, list[str]] = {}
    for name in curves:
        panels.setdefault(name.split("/")[-1].removeprefix("train_").removeprefix("val_"), []).append(name)
    longest = sorted(panels, key=lambda name: -max(len(curves[curve]) for curve in panels[name]))[:PANELS]
    columns = min(2, len(longest))
    with new_figure(pyplot, -(-len(longest) // columns), columns) as (figure, axes):
        flat = axes.flat if len(longest) > 1 else [axes]
        for axis, panel in zip(flat, longest, strict=False):
            for name in panels[panel]:
                steps, values = zip(*curves[name], strict=True)
                axis.plot(steps, values, label=name, linewidth=1)
            axis.set_xlabel("step")
            axis.set_title(panel, fontsize=9, loc="left")
            axis.legend(fontsize=7)
        return _save(figure, path)
