"""Writes the reports of `mmdec bench` and `mmdec eval`: screen, JSON, Markdown, plots, comparison with a saved run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmdec import InputError
from mmdec.bench.report import BenchReport, BenchRun, load_run, to_json
from mmdec.checks.files import json_text, printable, write_atomically
from mmdec.cli.options import STDOUT, with_option_groups

if TYPE_CHECKING:
    from rich.console import RenderableType

TABLE_WIDTH = 80  # most characters in a line of a table, even on a wider terminal


def report_target(name: str, suffix: str) -> Callable[[Any], Any]:
    """Make a callback that checks an option's file before anything is measured.

    The file's name must end in `suffix`, or it is "-", for stdout.

    name: the option's name in errors.

    `--json` takes the next word as its file. Without this check, that word could be a recording, and the report would
    overwrite it.
    """

    def checked(target: Any) -> Any:
        if target is None or target == STDOUT:
            return target
        if Path(target).suffix.lower() != suffix or Path(target).is_dir():
            raise InputError(
                f"`{name}` must be a file that ends in {suffix}, or -, but is '{printable(str(target))}'."
                f" Write `{name} -` before an input, to print only the report."
            )
        return target

    return checked


def _plot_target(*suffixes: str) -> Callable[[Any], Any]:
    """Make a callback that checks `--plot` before anything is measured: a folder, or a file with one of the suffixes.

    The name of another file is refused, so that no folder of that name is made.
    """
    or_file = f", or a file that ends in {' or '.join(suffixes)}" if suffixes else ""

    def checked(target: Any) -> Any:
        if target is None or target.is_dir() or target.suffix.lower() in suffixes:
            return target
        if not target.suffix and not target.exists():  # the folder is made when there is something to draw
            return target
        raise InputError(f"`--plot` must be a folder{or_file}, but is '{printable(str(target))}'.")

    return checked


JsonTo = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="[FILE|-]",
        callback=report_target("--json", ".json"),
        help="Write JSON to this .json file; without a file, or with -, print only that.",
    ),
]
MarkdownTo = Annotated[
    str | None,
    typer.Option(
        "--markdown",
        metavar="FILE|-",
        callback=report_target("--markdown", ".md"),
        help="Write Markdown to this .md file; -: print only that.",
    ),
]
PlotTo = Annotated[
    Path | None,
    typer.Option("--plot", metavar="DIR", callback=_plot_target(), help="Draw plots into this folder."),
]
DrafterPlotTo = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE|DIR",
        callback=_plot_target(".png", ".svg"),
        help="Draw tokens per round and speed into a .png or .svg file, or all plots into a folder.",
    ),
]
Against = Annotated[
    Path | None, typer.Option("--against", metavar="FILE", help="Compare with this saved JSON of `mmdec bench`.")
]


@dataclass(frozen=True)
class Destinations:
    """Says where a benchmark's report goes: files, plots, screen, and a saved run to compare with.

    Create it before anything is measured: it raises InputError for impossible destinations. For a command that
    `with_report` decorates, the annotated fields are options.
    """

    json: JsonTo = None
    markdown: MarkdownTo = None
    plot: PlotTo = None
    against: Against = None
    metrics: Path | None = None  # metrics.csv of a training run, to plot; only for `bench show`

    def __post_init__(self) -> None:
        if self.json == STDOUT and self.markdown == STDOUT:
            raise InputError("`--json` and `--markdown` must not both be printed, but both are -. Name a file for one.")
        if self.metrics is not None and self.plot is None:
            raise InputError("`--metrics` must come with `--plot`, but that is missing. Name a folder.")
        if self.against is not None:
            load_run(self.against)
        if self.plot is not None:
            from mmdec.bench.plots import check_plots

            check_plots(self.metrics)

    def draw(self, run: BenchRun, target: Path) -> list[Path]:
        """Draw the results' plots into `target`, and return their files."""
        from mmdec.bench.plots import plot_run

        return plot_run(run, target, self.metrics)

    def deliver(self, run: BenchRun) -> None:
        """Write the results to the named files and plots. Print tables, unless JSON or Markdown is printed."""
        from mmdec.bench.report import compare_runs, format_markdown, format_screen

        changes = None if self.against is None else compare_runs(run, load_run(self.against), self.against.name)
        text = to_json(run, **({} if changes is None else {"against": asdict(changes)}))
        if self.plot is not None:
            for path in self.draw(run, self.plot):
                print(path, file=sys.stderr)
        for target, content in ((self.json, text), (self.markdown, format_markdown(run, changes))):
            if target == STDOUT:
                sys.stdout.write(content)
            elif target is not None:
                write_atomically(target, content.encode())
        if STDOUT not in (self.json, self.markdown):
            print_table(format_screen(run, changes))


@dataclass(frozen=True)
class DrafterDestinations(Destinations):
    """Says where a comparison of drafters goes, which can be one picture."""

    plot: DrafterPlotTo = None

    def draw(self, run: BenchRun, target: Path) -> list[Path]:
        from mmdec.bench.plots import plot_drafters

        return [plot_drafters(run, target)] if target.suffix and not target.is_dir() else super().draw(run, target)


def with_report(
    command: Callable[..., BenchReport | BenchRun], destinations: type[Destinations] = Destinations
) -> Callable[..., None]:
    """Decorate a typer command that returns a benchmark's report, so that it also writes the report.

    The options of `destinations` are added to the command, and say where. The exit code is 1 if a benchmark was left
    out.
    """

    def with_destinations(to: Destinations, **values: Any) -> None:
        report = command(**values)
        run = report if isinstance(report, BenchRun) else BenchRun((report,))
        to.deliver(run)
        if run.left_out:
            raise typer.Exit(1)

    own = signature(command, eval_str=True)
    to = Parameter("to", Parameter.KEYWORD_ONLY, annotation=destinations)
    wraps(command)(with_destinations)
    vars(with_destinations)["__signature__"] = own.replace(parameters=[*own.parameters.values(), to])
    return with_option_groups(with_destinations)


def deliver_report(
    report: Mapping[str, Any],
    json_to: str | None,
    table: Callable[[dict[str, Any]], RenderableType],
) -> None:
    """Print an evaluation's report as a table or as JSON; also write it as JSON if a file is given.

    json_to: JSON file; "-": print JSON instead of the table; None: neither. table: makes the table of the report.
    """
    text = json_text(dict(report), 2) + "\n"
    if json_to == STDOUT:
        sys.stdout.write(text)
        return
    if json_to is not None:
        write_atomically(json_to, text.encode())
    print_table(table(dict(report)))


def print_table(table: RenderableType) -> None:
    """Print a table of 80 columns, or fewer if the terminal is narrower."""
    from rich.console import Console

    console = Console(highlight=False)
    console.width = min(console.width, TABLE_WIDTH)
    console.print(table)


def print_result(result: Mapping[str, Any], as_json: bool, text: str) -> None:
    """Print the result of a command: `result` as one JSON object if `as_json`, else the sentence `text`."""
    print(json_text(dict(result)) if as_json else text)


def print_written(path: Path, as_json: bool) -> None:
    """Print the path of the file or folder that a command wrote, as text or as one JSON object."""
    print_result({"output": str(path)}, as_json, str(path))
