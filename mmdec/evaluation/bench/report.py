"""The report format of all benchmarks and its JSON: a `BenchRun` holds one `BenchReport` for each benchmark.

All outputs (table, Markdown, plots, comparison with a saved run) use only this format. Further results of a benchmark
are in `details`, unprocessed. A saved file has the format's version; a file of another version is refused with a clear
message.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mmdec.types import InputError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

FORMAT = "mmdec-bench"
VERSION = 1
LARGEST = 64 * 2**20  # bytes of a saved run
WALL, DECODER = "wall clock", "decoder"  # kinds of measured time

Kind = Literal["all", "length", "task", "batch", "draft size", "shape"]


@dataclass(frozen=True)
class Exactness:
    """The comparison of outputs that was made before any timing."""

    what: str
    equal: int  # number of inputs with equal outputs
    of: int


@dataclass(frozen=True)
class Comparison:
    """Two methods timed alternately. `times`: how many times faster the subject is, the median of the paired ratios."""

    subject: str  # the method whose speed-up this is
    baseline: str
    group: str  # name of a group of inputs: "40+ words"
    kind: Kind  # what the groups are made by
    timed: str  # "wall clock", "decoder", ...
    times: float | None  # seconds of the baseline over seconds of the subject
    low: float | None  # quartiles, or the extremes if `spread` says so
    high: float | None
    pairs: int  # number of pairs of runs
    inputs: int
    spread: Literal["quartiles", "range"] = "quartiles"
    size: float | None = None  # the group's length in `unit`, to plot curves
    unit: str = ""
    subject_ms: float | None = None
    baseline_ms: float | None = None
    tokens_per_round: float | None = None  # the subject's, bonus or correction token included
    accepted_per_round: float | None = None  # the subject's, without that token; papers give one or the other

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The key by which the same comparison is found in another run."""
        return self.subject, self.baseline, self.group, self.timed


@dataclass(frozen=True)
class Quantity:
    """A single figure, without a comparison."""

    name: str
    value: float
    unit: str
    n: int
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class BenchReport:
    """The results of one benchmark."""

    bench: str  # asr, vlm, ...
    title: str
    hardware: dict[str, Any]
    exactness: tuple[Exactness, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    quantities: tuple[Quantity, ...] = ()
    stages: dict[str, dict[str, float]] = field(default_factory=dict)  # method -> stage -> milliseconds for one input
    depths: dict[str, tuple[float, ...]] = field(default_factory=dict)  # drafter -> accepted share at depths 1, 2, ...
    not_measured: dict[str, str] = field(default_factory=dict)  # what -> the reason
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BenchRun:
    """The benchmarks of one command; and those that were left out, with the reason."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # applies to all nested classes, too

    reports: tuple[BenchReport, ...]
    left_out: dict[str, str] = field(default_factory=dict)


def to_json(run: BenchRun, **more: Any) -> str:
    """The run as standard JSON: values that are not finite become null. more: further top-level entries."""
    content = {"format": FORMAT, "version": VERSION, **asdict(run), **more}
    text = json.dumps(_plain(content), indent=2, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode() + "\n"


def load_run(path: str | Path) -> BenchRun:
    """Read what `to_json` wrote. Raises InputError for a file that is missing, too large or of another format."""
    source = Path(path)
    try:
        with open(source, "rb") as file:
            raw = file.read(LARGEST + 1)
    except OSError as error:
        raise InputError(
            f"The saved run must be a readable file, but '{source}' is not ({error.strerror}). Check the path."
        ) from None
    if len(raw) > LARGEST:
        raise InputError(f"The saved run must have at most {LARGEST} bytes, but '{source}' has more. Name another.")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InputError(f"The saved run must be JSON, but '{source}' is not ({error!s:.100}). Name another.") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(
            f"The saved run must be what `mmdec bench --json` wrote, but '{source}' is none. Measure it again."
        )
    if content.get("version") != VERSION:
        raise InputError(
            f"The saved run must have version {VERSION}, but '{source}' has {content.get('version')!r:.40}. Measure it "
            "again with this mmdec."
        )
    known = {name: content[name] for name in ("reports", "left_out") if name in content}
    try:
        text = json.dumps(known, ensure_ascii=False).encode("utf-8", "replace")  # file names may be invalid UTF-8
        return reader().validate_json(text, strict=True)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"The saved run must be whole, but '{source}' is damaged: {_first_wrong(error)}. Measure it again."
        ) from None


def reader() -> TypeAdapter[BenchRun]:
    """The validator of saved runs. Raises InputError without the package pydantic."""
    try:
        from pydantic import TypeAdapter
    except ImportError as error:
        raise InputError(
            "Saved runs need the package pydantic, which is not installed. pip install mmdec[eval]"
        ) from error
    return TypeAdapter(BenchRun)


def _first_wrong(error: Any) -> str:
    """One sentence on the first error that pydantic found; wrong entries come before missing ones."""
    if not hasattr(error, "errors"):
        return f"{error!s:.200}"
    wrong = min(error.errors(), key=lambda entry: entry["type"] == "missing")
    return f"{'.'.join(map(str, ('run', *wrong['loc'])))}: {wrong['msg']}, but it holds {wrong['input']!r:.60}"


def _plain(value: Any) -> Any:
    """Convert a value for JSON: infinities and NaN to null, keys to text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def merged(runs: Sequence[BenchRun]) -> BenchRun:
    """Merge several runs into one; all reports are kept, also two of the same benchmark."""
    left_out: dict[str, str] = {}
    for run in runs:
        left_out |= run.left_out
    return BenchRun(tuple(report for run in runs for report in run.reports), left_out)
