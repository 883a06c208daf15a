"""What a benchmark found, in one form for all of them, and its JSON: a `BenchRun` holds a `BenchReport` for each.

Every renderer (table, Markdown, plots, comparison with a saved run) reads this form and none else. What a benchmark has
beyond it stands in `details`, as it was measured. A saved file names its version of the form; another is refused with a
sentence.
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
WALL, DECODER = "wall clock", "decoder"  # what is timed

Kind = Literal["all", "length", "task", "batch", "draft size", "shape"]


@dataclass(frozen=True)
class Exactness:
    """What was compared before anything was timed."""

    what: str
    equal: int  # inputs on which both sides agreed
    of: int


@dataclass(frozen=True)
class Comparison:
    """Two sides timed in turn. `times` is how many times faster the subject is: the median of the paired ratios."""

    subject: str  # whose speed this is
    baseline: str
    group: str  # of inputs, in words: "40+ words"
    kind: Kind  # by what the inputs are grouped
    timed: str  # "wall clock", "decoder", ...
    times: float | None  # baseline's seconds over the subject's
    low: float | None  # quartiles, or the extremes where `spread` says so
    high: float | None
    pairs: int  # of runs
    inputs: int
    spread: Literal["quartiles", "range"] = "quartiles"
    size: float | None = None  # the group's length in `unit`, for a curve
    unit: str = ""
    subject_ms: float | None = None
    baseline_ms: float | None = None
    tokens_per_round: float | None = None  # of the subject, bonus or correction included

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What a saved run's comparison is found by."""
        return self.subject, self.baseline, self.group, self.timed


@dataclass(frozen=True)
class Quantity:
    """A figure that compares nothing."""

    name: str
    value: float
    unit: str
    n: int
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class BenchReport:
    """One benchmark's findings."""

    bench: str  # asr, vlm, ...
    title: str
    hardware: dict[str, Any]
    exactness: tuple[Exactness, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    quantities: tuple[Quantity, ...] = ()
    stages: dict[str, dict[str, float]] = field(default_factory=dict)  # method -> stage -> milliseconds of an input
    depths: dict[str, tuple[float, ...]] = field(default_factory=dict)  # drafter -> share accepted at depth 1, 2, ...
    not_measured: dict[str, str] = field(default_factory=dict)  # what -> why
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BenchRun:
    """The benchmarks of one command, and those that were left out, with the reason."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # of all that it holds, too

    reports: tuple[BenchReport, ...]
    left_out: dict[str, str] = field(default_factory=dict)


def to_json(run: BenchRun, **more: Any) -> str:
    """A run as JSON that every parser reads: what is not finite becomes null. more: further entries of its top."""
    content = {"format": FORMAT, "version": VERSION, **asdict(run), **more}
    text = json.dumps(_plain(content), indent=2, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode() + "\n"


def load_run(path: str | Path) -> BenchRun:
    """What `to_json` wrote. Raises InputError for a file that is missing, too large, or holds anything else."""
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
        text = json.dumps(known, ensure_ascii=False).encode("utf-8", "replace")  # names of files may be no UTF-8
        return reader().validate_json(text, strict=True)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"The saved run must be whole, but '{source}' is damaged: {_first_wrong(error)}. Measure it again."
        ) from None


def reader() -> TypeAdapter[BenchRun]:
    """What checks a saved run. Raises InputError without the package pydantic."""
    try:
        from pydantic import TypeAdapter
    except ImportError as error:
        raise InputError(
            "Saved runs need the package pydantic, which is not installed. pip install mmdec[eval]"
        ) from error
    return TypeAdapter(BenchRun)


def _first_wrong(error: Any) -> str:
    """In one sentence, of all that pydantic found: an entry that is wrong before one that is missing."""
    if not hasattr(error, "errors"):
        return f"{error!s:.200}"
    wrong = min(error.errors(), key=lambda entry: entry["type"] == "missing")
    return f"{'.'.join(map(str, ('run', *wrong['loc'])))}: {wrong['msg']}, but it holds {wrong['input']!r:.60}"


def _plain(value: Any) -> Any:
    """For JSON: infinities and NaN as null, keys as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def merged(runs: Sequence[BenchRun]) -> BenchRun:
    """Several runs as one; of two reports of the same benchmark both stay."""
    left_out: dict[str, str] = {}
    for run in runs:
        left_out |= run.left_out
    return BenchRun(tuple(report for run in runs for report in run.reports), left_out)
