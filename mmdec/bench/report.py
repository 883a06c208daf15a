"""The report format of all benchmarks, its JSON and its tables. A `BenchRun` holds a `BenchReport` of each benchmark.

All outputs (table, Markdown, plots, comparison with a saved run) use only this format. Further results of a benchmark
are in `details`, unprocessed. A file of another version of the format is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import fill
from typing import Any, ClassVar, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mmdec.errors import InputError

FORMAT = "mmdec-bench"
VERSION = 3
MAX_REPORT_BYTES = 64 * 2**20  # maximum bytes of a saved run, which is read whole
WALL_CLOCK = "wall clock"  # the kind of measured time that most tables show

GroupKind = Literal["all", "length", "task", "batch", "shape"]


@dataclass(frozen=True)
class Exactness:
    """Result of a comparison of outputs before any timing: how many inputs have equal outputs."""

    label: str  # names what was compared: the methods or their outputs
    equal: int  # number of inputs for which subject and baseline give the same output
    compared: int  # number of inputs whose outputs were compared


@dataclass(frozen=True)
class Comparison:
    """Two methods timed alternately, and how many times faster the first one, the subject, is."""

    subject: str  # name of the method whose speed-up this is
    baseline: str
    group: str  # name of a group of inputs: "40+ words"
    kind: GroupKind  # the property by which inputs are grouped
    timed: str  # which time was measured, such as "wall clock" or "decoder"
    times: float | None  # the baseline's seconds divided by the subject's; None: not measured
    low: float | None  # lower quartile of this ratio, or the minimum if `spread` is "range"
    high: float | None  # upper quartile of this ratio, or the maximum if `spread` is "range"
    pairs: int  # number of timed pairs of calls
    inputs: int  # number of inputs in the group
    spread: Literal["quartiles", "range"] = "quartiles"
    size: float | None = None  # the group's length in `unit`, to plot curves
    unit: str = ""
    subject_ms: float | None = None
    baseline_ms: float | None = None
    tokens_per_round: float | None = None  # mean tokens per round of the subject, bonus or correction token included
    # the same without the bonus or correction token; some papers report this number, some the one above
    accepted_per_round: float | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The key by which the same comparison is found in other results: subject, baseline, group, timed."""
        return self.subject, self.baseline, self.group, self.timed


@dataclass(frozen=True)
class Quantity:
    """A single figure, without a comparison."""

    name: str
    value: float
    unit: str
    n: int  # number of measurements
    low: float | None = None  # with `high`: quartiles or confidence interval; given alone, it is the worst value
    high: float | None = None


@dataclass(frozen=True)
class Spread:
    """A figure with its quartiles."""

    value: float
    low: float
    high: float
    n: int  # number of measurements


@dataclass(frozen=True)
class MethodRow:
    """What one decoding method does, on the inputs where its tokens are those of greedy decoding."""

    method: str
    equal: int  # number of these inputs
    compared: int  # number of all inputs
    # bonus or correction token included; None: it does not draft, or does not report it
    tokens_per_round: Spread | None
    drafter_share: float | None  # the drafter's seconds / all seconds; None: not reported
    passes: float  # of the model, in a call
    seconds: float  # of a call, wall clock
    cpu_seconds: float  # of a call, all threads


@dataclass(frozen=True)
class BenchReport:
    """The results of one benchmark."""

    bench: str  # name of the benchmark, such as "asr" or "vlm"
    title: str
    hardware: dict[str, Any]
    exactness: tuple[Exactness, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    quantities: tuple[Quantity, ...] = ()
    methods: tuple[MethodRow, ...] = ()  # of a comparison of drafters
    stages: dict[str, dict[str, float]] = field(default_factory=dict)  # method -> stage -> milliseconds for one input
    not_measured: dict[str, str] = field(default_factory=dict)  # what was not measured -> the reason
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BenchRun:
    """The results of one `mmdec bench` command.

    Holds a report of each benchmark, and the benchmarks that were left out, with the reason.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # an unknown field is an error, also in the nested classes

    reports: tuple[BenchReport, ...]
    left_out: dict[str, str] = field(default_factory=dict)


def to_json(run: BenchRun, **more: Any) -> str:
    """Write benchmark results as standard JSON: values that are not finite become null.

    Args:
        more: Further top-level entries.
    """
    content = {"format": FORMAT, "version": VERSION, **asdict(run), **more}
    text = json.dumps(_plain(content), indent=2, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode() + "\n"


def load_run(path: str | Path) -> BenchRun:
    """Read what `to_json` wrote.

    Raises:
        InputError: For a file that is missing, too large or of another format.
    """
    from pydantic import TypeAdapter, ValidationError

    source = Path(path)
    try:
        with open(source, "rb") as file:
            raw = file.read(MAX_REPORT_BYTES + 1)
    except OSError as error:
        raise InputError(
            f"The saved run must be a readable file, but '{source}' is not ({error.strerror}). Check the path."
        ) from None
    if len(raw) > MAX_REPORT_BYTES:
        raise InputError(f"The saved run must have at most {MAX_REPORT_BYTES} bytes, but '{source}' has more.")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InputError(f"The saved run must be JSON, but '{source}' is not ({error!s:.100}).") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(
            f"The saved run must be what `mmdec bench --json` wrote, but '{source}' is not one. Measure it again."
        )
    if content.get("version") != VERSION:
        raise InputError(
            f"The saved run must have version {VERSION}, but '{source}' has {content.get('version')!r:.40}. Measure it "
            "again with this mmdec."
        )
    content_fields = {name: content[name] for name in ("reports", "left_out") if name in content}
    try:
        # file names may hold bytes that are not valid UTF-8; these are replaced
        text = json.dumps(content_fields, ensure_ascii=False).encode("utf-8", "replace")
        return TypeAdapter(BenchRun).validate_json(text, strict=True)
    except ValidationError as error:
        wrong = error.errors()[0]
        name = ".".join(map(str, ("run", *wrong["loc"])))
        raise InputError(
            f"The saved run must be whole, but '{source}' is damaged: {name}: {wrong['msg']}, but it holds "
            f"{wrong['input']!r:.60}. Measure it again."
        ) from None


def _plain(value: Any) -> Any:
    """Convert a value for JSON: infinities and NaN to null, keys to text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def merge_runs(runs: Sequence[BenchRun]) -> BenchRun:
    """Merge the results of several commands into one; all reports are kept, also two of the same benchmark."""
    left_out: dict[str, str] = {}
    for run in runs:
        left_out |= run.left_out
    return BenchRun(tuple(report for run in runs for report in run.reports), left_out)


Rows = list[tuple[str, ...]]
TABLE_WIDTH = 80
MIN_FIRST_COLUMN = 12  # characters: smallest width of a table's first column, the only one that may be wrapped


def format_screen(run: BenchRun, changes: Changes | None = None) -> RenderableType:
    """Format benchmark results as tables of at most `TABLE_WIDTH` characters a line.

    There is one table for each pair of subject and baseline.

    Args:
        changes: Differences from other results.
    """
    parts: list[RenderableType] = []
    for title, head, rows in sections(run, changes):
        parts.append(Text(fill(title, TABLE_WIDTH)))
        if head:
            parts.append(_grid(head, rows))
        else:
            parts += [Text(fill(row[0], TABLE_WIDTH, initial_indent="  ", subsequent_indent="    ")) for row in rows]
            parts.append(Text(""))
    return Group(*parts)


def format_markdown(run: BenchRun, changes: Changes | None = None) -> str:
    """Format benchmark results as Markdown, with the same cells as `format_screen`; a table may be wider than a screen.

    Args:
        changes: Differences from other results.
    """
    lines: list[str] = []
    for title, head, rows in sections(run, changes, width=None):
        if head:
            lines += [f"**{_cell(title)}**", "", _line(head), _line(["---", *["---:"] * (len(head) - 1)])]
            lines += [*map(_line, rows), ""]
        else:
            lines += [f"**{_cell(title)}**", "", *(f"- {_cell(row[0])}" for row in rows), ""]
    return "\n".join(lines)


def sections(
    run: BenchRun, changes: Changes | None = None, width: int | None = TABLE_WIDTH
) -> Iterator[tuple[str, tuple[str, ...], Rows]]:
    """Yield the parts of the output: a title, the headings of the table (() for a list of lines), the rows.

    Args:
        changes: Differences from other results; None: none are shown.
        width: Characters in a line, by which wide tables are cut; None: any number.
    """
    for report in run.reports:
        yield from _report(report, width)
    if changes is not None:
        yield from _changes(changes)
    if run.left_out:
        yield "Left out", (), [(f"{name}: {reason}",) for name, reason in run.left_out.items()]


def _report(report: BenchReport, width: int | None) -> Iterator[tuple[str, tuple[str, ...], Rows]]:
    exact = [(f"{gate.label}: {gate.equal} of {gate.compared} equal",) for gate in report.exactness]
    yield report.title, (), [(hardware_line(report.hardware),), *exact]
    pairs: dict[tuple[str, str], list[Comparison]] = {}
    for row in report.comparisons:
        pairs.setdefault((row.subject, row.baseline), []).append(row)
    if report.methods:
        yield from _methods(report, width)
    else:
        for (subject, baseline), rows in pairs.items():
            timed = {row.timed for row in rows}
            yield (
                f"{subject} against {baseline}{'' if len(timed) > 1 else f', {timed.pop()}'}",
                *_comparison_table(rows),
            )
    if not report.methods and any(row.tokens_per_round is not None for row in report.comparisons):
        without = any(row.accepted_per_round is not None for row in report.comparisons)
        note = "tok/round: tokens per round, correction or bonus included"
        yield f"{note}; accepted: without it" if without else note, (), []
    if report.quantities:
        rows = [(entry.name, _quantity(entry), entry.unit, str(entry.n)) for entry in report.quantities]
        yield "Figures", ("", "value", "unit", "n"), rows
    if report.stages and not report.methods:
        names = [*dict.fromkeys(stage for spent in report.stages.values() for stage in spent)]
        for some in (names[start : start + 5] for start in range(0, len(names), 5)):
            cells = [
                (method, *(_number(spent.get(stage)) for stage in some)) for method, spent in report.stages.items()
            ]
            yield "Milliseconds of an input, by stage", ("", *some), cells
    if report.not_measured:
        yield "Not measured", (), [(f"{name}: {reason}",) for name, reason in report.not_measured.items()]


def _methods(report: BenchReport, width: int | None) -> Iterator[tuple[str, tuple[str, ...], Rows]]:
    """Yield the tables (title, headings, rows) of a comparison of drafters.

    They say what each drafter does and how much faster it is, and its tokens per round by kind of input.

    Args:
        width: Characters in a line; None: the first two tables are one.
    """
    rows: Rows = [
        (
            row.method,
            f"{row.equal} of {row.compared}",
            _spread(row.tokens_per_round),
            "-" if row.drafter_share is None else f"{100 * row.drafter_share:.0f} %",
            _number(row.passes),
            _number(row.seconds),
            _number(row.cpu_seconds),
        )
        for row in report.methods
    ]
    head = ("", "equal", "tokens per round", "drafter", "passes", "s", "CPU s")
    title = "Tokens per round include the bonus token; quartiles over calls; passes and seconds of a call"
    faster = "Times faster than each column's method: median (quartiles) of pairs of calls"
    cells = {(row.subject, row.baseline, row.timed): _times(row) for row in report.comparisons if row.kind == "all"}
    baselines = [*dict.fromkeys(baseline for _, baseline, _ in cells)]
    clocks = sorted({timed for _, _, timed in cells}, reverse=True)  # the wall clock comes first
    columns = [(timed, baseline) for baseline in baselines for timed in clocks]
    named = [f"{baseline}, CPU" if timed != WALL_CLOCK else baseline for timed, baseline in columns]
    speeds = {
        row.method: [cells.get((row.method, baseline, timed), "-") for timed, baseline in columns]
        for row in report.methods
    }
    if width is None:
        wide = [(*row, *speeds[row[0]]) for row in rows]
        yield f"{title}. {faster}", (*head, *(f"against {name}" for name in named)), wide
    else:
        yield title, head, rows
        subjects = [method for method, found in speeds.items() if any(cell != "-" for cell in found)]
        for shown in _chunks(subjects, named, [17] * len(named), width):
            yield (
                faster,
                ("", *(named[column] for column in shown)),
                [(name, *(speeds[name][column] for column in shown)) for name in subjects],
            )
    by_group = {
        (row.subject, row.group): _number(row.tokens_per_round)
        for row in report.comparisons
        if row.kind != "all" and row.timed == WALL_CLOCK and row.tokens_per_round
    }
    groups = [*dict.fromkeys(group for _, group in by_group)]
    drafting = [row.method for row in report.methods if row.tokens_per_round is not None]
    for shown in _chunks(groups, drafting, [4] * len(drafting), width):
        table = [(group, *(by_group.get((drafting[column], group), "-") for column in shown)) for group in groups]
        yield "Tokens per round by kind", ("", *(drafting[column] for column in shown)), table


def _chunks(
    first: Sequence[str], names: Sequence[str], widths: Sequence[int], max_width: int | None
) -> Iterator[list[int]]:
    """Yield the indices of the columns of each table, so that none is wider than the screen.

    Args:
        first: Cells of the first column.
        names: Headings of the other columns.
        widths: Least width of each of these.
        max_width: Characters in a line; None: one table has all columns.
    """
    start = min(max(map(len, first), default=0), MIN_FIRST_COLUMN) + 2
    some, used = list[int](), start
    for at, (name, width) in enumerate(zip(names, widths, strict=True)):
        wide = max(len(name), width) + 2
        if some and max_width is not None and used + wide > max_width:
            yield some
            some, used = [], start
        some.append(at)
        used += wide
    if some:
        yield some


def _spread(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.value:.2f} ({spread.low:.2f}-{spread.high:.2f})"


def _comparison_table(rows: Sequence[Comparison]) -> tuple[tuple[str, ...], Rows]:
    """Return the headings and cells of a table of comparisons; columns without information are left out."""
    several = len({row.timed for row in rows}) > 1
    tokens = any(row.tokens_per_round is not None for row in rows)
    head = ["", *(["timed"] if several else []), "n", "faster (quartiles)", "ms, other ms"]
    head += ["tok/round"] if tokens else []
    accepted = any(row.accepted_per_round is not None for row in rows)
    head += ["accepted"] if accepted else []
    cells: Rows = []
    for row in rows:
        group = row.group if row.spread == "quartiles" else f"{row.group}, range"
        start = [group, *([row.timed] if several else []), str(row.inputs)]
        middle = [_times(row), f"{_number(row.subject_ms)}, {_number(row.baseline_ms)}"]
        ends: list[Any] = []
        if tokens:
            ends.append(row.tokens_per_round)
        if accepted:
            ends.append(row.accepted_per_round)
        cells.append((*start, *middle, *map(_number, ends)))
    return tuple(head), cells


def _changes(changes: Changes) -> Iterator[tuple[str, tuple[str, ...], Rows]]:
    if changes.warnings:
        yield "The saved run is of other surroundings: ratios may be theirs", (), [(line,) for line in changes.warnings]
    rows = [
        (
            f"{row.subject}, {row.group}, {row.timed}, against {row.baseline}",
            _number(row.before),
            _number(row.now),
            _number(row.ratio),
            _number(row.subject_ratio),
        )
        for row in changes.rows
    ]
    if rows:
        head = ("times faster", "saved", "now", "now / saved", "ms, now / saved")
        yield f"Against {changes.source}", head, rows
    lines = [f"only now: {', '.join(key)}" for key in changes.only_now]
    lines += [f"only saved: {', '.join(key)}" for key in changes.only_before]
    if lines:
        yield "Without a partner in the other run", (), [(line,) for line in lines]


def hardware_line(hardware: dict[str, Any]) -> str:
    """Write one line on the machine: CPU or GPU, threads, dtype, batch, versions, commit, date."""
    versions = hardware.get("versions") or {}
    batch = hardware.get("batch")
    device = hardware.get("device")
    parts = [
        str(hardware.get("cpu")) if device in (None, "cpu") else str(device),
        f"{hardware.get('threads')} threads",
        str(hardware.get("dtype")),
        f"batch {' and '.join(map(str, batch)) if isinstance(batch, list) else batch}",
        *(f"{name} {versions[name]}" for name in ("torch", "transformers") if versions.get(name)),
        f"commit {str(hardware.get('commit'))[:10]}" + (" and changes" if hardware.get("uncommitted") else ""),
        str(hardware.get("date")),
    ]
    return ", ".join(parts)


def _grid(head: Sequence[str], rows: Rows) -> Table:
    columns = [*zip(head, *rows, strict=True)]
    rest = sum(max(map(len, column)) for column in columns[1:])
    gap = 2 if MIN_FIRST_COLUMN + rest + 2 * len(head) < TABLE_WIDTH else 1
    first = min(max(map(len, columns[0])), max(MIN_FIRST_COLUMN, TABLE_WIDTH - gap * len(head) - rest - 1))
    grid = Table(box=SIMPLE_HEAD, padding=(0, gap - 1, 0, 0))
    grid.add_column(escape(head[0]), min_width=first, max_width=first, overflow="fold")
    for name in head[1:]:
        grid.add_column(escape(name), justify="right", no_wrap=True)
    for row in rows:
        grid.add_row(*map(escape, row))
    return grid


def _times(row: Comparison) -> str:
    if row.times is None:
        return "-"
    if row.low is None or row.high is None:
        return f"{row.times:.2f}"
    return f"{row.times:.2f} ({row.low:.2f}-{row.high:.2f})"


def _quantity(entry: Quantity) -> str:
    bounds = [_number(bound) for bound in (entry.low, entry.high) if bound is not None]
    return (
        _number(entry.value)
        + (f" ({'-'.join(bounds)})" if len(bounds) == 2 else "")
        + (f" (worst {bounds[0]})" if len(bounds) == 1 else "")
    )


def _number(value: float | None) -> str:
    """Format a number with three or four significant digits."""
    if value is None:
        return "-"
    if float(value).is_integer() and abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


# fields that should be equal in two runs that are compared; the packages' versions should be, too
MACHINE_FIELDS = ("cpu", "cores", "threads", "device", "target", "dtype", "batch", "python")


@dataclass(frozen=True)
class Change:
    """One comparison that is in both the new and the saved results, with its change."""

    bench: str
    subject: str
    baseline: str
    group: str
    timed: str
    before: float | None  # speed-up (times faster) in the saved run
    now: float | None  # speed-up (times faster) in the present run
    ratio: float | None  # `now` divided by `before`
    subject_ratio: float | None  # the subject's milliseconds now, divided by those in the saved run
    baseline_ratio: float | None


@dataclass(frozen=True)
class Changes:
    """All changes from saved results to new ones."""

    source: str  # name of the saved run's file
    warnings: tuple[str, ...]  # how the machines or versions differ
    rows: tuple[Change, ...]
    only_now: tuple[tuple[str, ...], ...] = ()  # (benchmark, *key) of comparisons that the saved run lacks
    only_before: tuple[tuple[str, ...], ...] = ()  # the comparisons that only the saved run has


def compare_runs(now: BenchRun, before: BenchRun, source: str = "") -> Changes:
    """Compare two sets of results, benchmark by benchmark. Comparisons that only one of them has are listed.

    Args:
        before: The saved results.
        source: Name of their file.
    """
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
        mine, theirs = ({row.key: row for row in each.comparisons} for each in (report, other))
        rows += [
            Change(
                report.bench,
                row.subject,
                row.baseline,
                row.group,
                row.timed,
                before=theirs[key].times,
                now=row.times,
                ratio=_ratio(row.times, theirs[key].times),
                subject_ratio=_ratio(row.subject_ms, theirs[key].subject_ms),
                baseline_ratio=_ratio(row.baseline_ms, theirs[key].baseline_ms),
            )
            for key, row in mine.items()
            if key in theirs
        ]
        only_now += [(report.bench, *key) for key in mine if key not in theirs]
        only_before += [(report.bench, *key) for key in theirs if key not in mine]
    measured = {report.bench for report in now.reports}
    only_before += [(name,) for name in saved if name not in measured]
    return Changes(source, tuple(warnings), tuple(rows), tuple(only_now), tuple(only_before))


def differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """List how the machines and versions of two results differ.

    Commit, date and command are ignored, because they do not affect speed.

    Args:
        now, before: `hardware` of the reports.
    """
    lines = [
        f"{name} {before.get(name)!s} then, {now.get(name)!s} now"
        for name in MACHINE_FIELDS
        if now.get(name) != before.get(name)
    ]
    mine, theirs = now.get("versions") or {}, before.get("versions") or {}
    lines += [
        f"{name} {theirs.get(name)!s} then, {mine.get(name)!s} now"
        for name in sorted({*mine, *theirs} - {"mmdec"})
        if mine.get(name) != theirs.get(name)
    ]
    return lines


def _ratio(now: float | None, before: float | None) -> float | None:
    return None if now is None or not before else now / before
