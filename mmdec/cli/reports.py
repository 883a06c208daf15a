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


def report_target(name: str, suffix: str, printed: bool = True) -> Callable[[Any], Any]:
    """Make a callback that checks an option's file before anything is measured: its name must end in `suffix`.

    name: the option's name in errors. printed: whether "-" is allowed, too: print to stdout.

    `--json` takes the next word as its file. Without this check, that word could be a recording, and the report would
    overwrite it.
    """

    def checked(target: Any) -> Any:
        if target is None or (printed and target == STDOUT):
            return target
        if Path(target).suffix.lower() != suffix or Path(target).is_dir():
            printing = f" Write `{name} -` before an input, to print only the report." if printed else ""
            raise InputError(
                f"`{name}` must be a file that ends in {suffix}{', or -' if printed else ''}, but is "
                f"'{printable(str(target))}'. Name another.{printing}"
            )
        return target

    return checked


Report = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        callback=report_target("--output", ".json", printed=False),
        help="Write the report to this .json file, too.",
    ),
]
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
PlotsTo = Annotated[
    Path | None, typer.Option("--plots", metavar="DIR", file_okay=False, help="Draw plots into this folder.")
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

    output: Report = None
    json: JsonTo = None
    markdown: MarkdownTo = None
    plots: PlotsTo = None
    against: Against = None
    metrics: Path | None = None  # metrics.csv of a training run, to plot; only for `bench show`

    def __post_init__(self) -> None:
        if self.json == STDOUT and self.markdown == STDOUT:
            raise InputError("`--json` and `--markdown` must not both be printed, but both are -. Name a file for one.")
        if self.metrics is not None and self.plots is None:
            raise InputError("`--metrics` must come with `--plots`, but that is missing. Name a folder.")
        if self.against is not None:
            load_run(self.against)
        if self.plots is not None:
            from mmdec.bench.plots import check_plots

            check_plots(self.metrics)

    def deliver(self, run: BenchRun) -> None:
        """Write the results to the named files and plots. Print tables, unless JSON or Markdown is printed."""
        from mmdec.bench.report import compare_runs, format_markdown, format_screen

        changes = None if self.against is None else compare_runs(run, load_run(self.against), self.against.name)
        text = to_json(run, **({} if changes is None else {"against": asdict(changes)}))
        if self.output is not None:
            write_atomically(self.output, text.encode())
        if self.plots is not None:
            from mmdec.bench.plots import plot_run

            for path in plot_run(run, self.plots, self.metrics):
                print(path, file=sys.stderr)
        for target, content in ((self.json, text), (self.markdown, format_markdown(run, changes))):
            if target == STDOUT:
                sys.stdout.write(content)
            elif target is not None:
                write_atomically(target, content.encode())
        if STDOUT not in (self.json, self.markdown):
            print_table(format_screen(run, changes))


def _plot_target(target: Path | None) -> Path | None:
    if target is not None and (target.suffix.lower() not in (".png", ".svg") or target.is_dir()):
        raise InputError(
            f"`--plot` must be a file that ends in .png or .svg, but is '{printable(str(target))}'. Name another."
        )
    return target


@dataclass(frozen=True)
class DrafterDestinations(Destinations):
    """Says where a comparison of drafters goes: one more plot."""

    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            callback=_plot_target,
            help="Draw tokens per round and speed into a .png or .svg file.",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plot is not None:
            from mmdec.bench.plots import check_plots

            check_plots()

    def deliver(self, run: BenchRun) -> None:
        if self.plot is not None:
            from mmdec.bench.plots import plot_drafters

            plot_drafters(run, self.plot)
        super().deliver(run)


def with_report(
    verb: Callable[..., BenchReport | BenchRun], destinations: type[Destinations] = Destinations
) -> Callable[..., None]:
    """Decorate a typer command that returns a benchmark's report: add the options of `destinations`, and write the
    report there.

    The exit code is 1 if a benchmark was left out.
    """

    def command(to: Destinations, **values: Any) -> None:
        report = verb(**values)
        run = report if isinstance(report, BenchRun) else BenchRun((report,))
        to.deliver(run)
        if run.left_out:
            raise typer.Exit(1)

    verb_signature = signature(verb, eval_str=True)
    to = Parameter("to", Parameter.KEYWORD_ONLY, annotation=destinations)
    wraps(verb)(command)
    vars(command)["__signature__"] = verb_signature.replace(parameters=[*verb_signature.parameters.values(), to])
    return with_option_groups(command)


def deliver_report(
    report: Mapping[str, Any],
    output: Path | None,
    json_to: str | None,
    table: Callable[[dict[str, Any]], RenderableType],
) -> None:
    """Print an evaluation's report as a table or as JSON; also write it as JSON if a file is given.

    output: JSON file; None: none. json_to: another JSON file; "-": print JSON instead of the table; None: neither.
    table: makes the table of the report.
    """
    text = json_text(dict(report), 2) + "\n"
    for path in (output, None if json_to in (None, STDOUT) else Path(str(json_to))):
        if path is not None:
            write_atomically(path, text.encode())
    if json_to == STDOUT:
        sys.stdout.write(text)
    else:
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
