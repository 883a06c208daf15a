"""The inputs of one call with their outputs, what became of each, progress on stderr, and `--compare`."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, final

import typer

from mmdec import InputError, MmdecError
from mmdec.checks.files import printable
from mmdec.cli.files import InputFile, failure
from mmdec.pipelines.comparison import verdict

LIKELY_WRONG = 0.5  # confidences below it are warned of
Target = TypeVar("Target")


@final
class Jobs(Generic[Target]):
    """Says what failed, and at the end how many did."""

    def __init__(self, files: Sequence[InputFile], targets: Sequence[Target], model: str) -> None:
        """Says on stderr, before anything is loaded, which inputs cannot be read; exits with 1 if none can be."""
        self.todo = [(file, target) for file, target in zip(files, targets, strict=True) if not file.refusal]
        self.several = len(files) > 1
        self._total, self._model = len(files), model
        self._failed: list[tuple[str, str]] = []
        self._sure: list[tuple[str, float]] = []
        for file in files:
            if file.refusal:
                _say(file.name, file.refusal)
        if not self.todo:
            self.end()

    def failed(self, name: str, message: str) -> None:
        """Keep an input that failed for the end."""
        self._failed.append((name, message))

    def done(self, name: str, confidence: float) -> None:
        """Keep how sure an output is for the end."""
        self._sure.append((name, confidence))

    def end(self, code: int = 0) -> None:
        """Say which outputs are likely wrong and which inputs failed; exit with `code`, or with 1 if any failed."""
        warn_of_unsure(self._sure, self._model)
        for name, message in self._failed:
            _say(name, message)
        if count := len(self._failed) + self._total - len(self.todo):
            print(f"{count} of {self._total} files failed", file=sys.stderr)
        if code or count:
            raise typer.Exit(code or 1)


def _say(name: str, message: str) -> None:
    print(f"failed: {printable(name)}: {message}", file=sys.stderr, flush=True)


def warn_of_unsure(results: Sequence[tuple[str, float]], model: str) -> None:
    """Warn on stderr of each output, (its input's name, its confidence), that is likely wrong. Only a model whose
    confidence was fitted is believed."""
    unsure = [(name, value) for name, value in results if value < LIKELY_WRONG]
    if not unsure or not _fitted(model):
        return
    for name, value in unsure:
        print(
            f"warning: {printable(name)}: the output is likely wrong: its confidence is {value:.2f}, below "
            f"{LIKELY_WRONG}.",
            file=sys.stderr,
        )


def _fitted(model: str) -> bool:
    """Whether the model's folder holds a curve of confidence."""
    from mmdec.hub.find import find
    from mmdec.pipelines.confidence import FILE, read_calibrations

    try:
        return bool(read_calibrations(find(model, files=["config.json", FILE])))
    except InputError:  # gone meanwhile
        return False


if TYPE_CHECKING:
    from rich.progress import Progress

AFTER = 0.5  # seconds of loading that say nothing
EVERY = 30.0  # seconds between two lines; what is done sooner says nothing


@contextmanager
def loading(model: str, quiet: bool = False, timer: Callable[..., Any] = threading.Timer) -> Iterator[None]:
    """Print "loading ..." on a terminal if the block takes more than half a second (importing torch, reading weights).

    Nothing is printed if stderr is not a terminal.

    model: the model's name or path. quiet: never print. timer: makes a timer from (seconds, function).
    """
    if quiet or not sys.stderr.isatty():
        yield
        return
    line = f"loading {printable(model)} ..."
    waiting = timer(AFTER, lambda: print(line, file=sys.stderr, flush=True))
    waiting.daemon = True
    waiting.start()
    try:
        yield
    finally:
        waiting.cancel()


class Lines:
    """Says where the work is, at most once in `EVERY` seconds. count: as n of m, not in percent."""

    def __init__(self, count: bool, now: Callable[[], float] = time.monotonic) -> None:
        self._count, self._now, self._last = count, now, now()

    def tell(self, task: Any) -> None:
        """task: of rich, with description, completed and total."""
        now = self._now()
        if now - self._last < EVERY:
            return
        self._last = now
        done = f"{task.completed:.0f}"
        if task.total:
            done = f"{done} of {task.total:.0f}" if self._count else f"{100 * task.completed / task.total:.0f} %"
        print(f"{task.description}: {done}", file=sys.stderr, flush=True)


@contextmanager
def progress_bar(count: bool, now: Callable[[], float] = time.monotonic) -> Iterator[Progress]:
    """A bar on stderr, or lines where stderr is no terminal. count: show how many of how many are done.

    now: the clock of the lines, in seconds.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    class Told(Progress):
        """Tells `lines` of every step."""

        def update(self, task_id: TaskID, *arguments: Any, **options: Any) -> None:
            super().update(task_id, *arguments, **options)
            lines.tell(self._tasks[task_id])

        def advance(self, task_id: TaskID, advance: float = 1) -> None:
            super().advance(task_id, advance)
            lines.tell(self._tasks[task_id])

    lines, console = Lines(count, now), Console(stderr=True)
    counter = [MofNCompleteColumn()] if count else []
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *counter, TimeRemainingColumn())
    kind = Progress if console.is_terminal else Told
    with kind(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield progress


TURNS = 2  # runs of either kind, in turn; the faster one counts, for the first also makes what later ones find
DIFFERS = 2  # exit code

Compare = Annotated[
    bool,
    typer.Option("--compare", help="Decode without drafts, too: how much faster is the drafter, is the text the same?"),
]


@dataclass(frozen=True)
class Comparison:
    """One input's best times, in seconds, and whether both ways gave the same tokens."""

    drafted: float
    plain: float
    same: bool

    def __str__(self) -> str:
        """ "2.9 times faster, same text"; with the times."""
        said = verdict(self.drafted, self.plain, self.same)
        return f"{said}: {self.drafted:.3f} s with drafts, {self.plain:.3f} s without"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        ratio = self.plain / self.drafted if self.drafted > 0 else None
        return {"seconds": self.drafted, "seconds_plain": self.plain, "times_faster": ratio, "same_text": self.same}


class Comparer:
    """Makes calls that decode both ways. compare: False makes it do nothing. Raises InputError for what has no plain
    counterpart: `drafter`, and `refused`, option names with whether they were given."""

    def __init__(self, compare: bool, drafter: str, **refused: bool) -> None:
        self._on = compare
        self._last: Comparison | None = None
        self._differs = False
        if compare and drafter == "none":
            raise InputError("`--compare` must come with a drafter, but `--drafter` is none. Leave that out.")
        for name, given in refused.items():
            if compare and given:
                raise InputError(f"`--compare` must come without `--{name}`, but that is given. Drop one of them.")

    def both(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` of a list with one input, which is made with drafts and without, in turn; the drafted results."""
        if not self._on:
            return call

        def compared(batch: list[Any]) -> list[Any]:
            self._last = None
            drafted, plain = [], []
            for _ in range(TURNS):
                drafted += call(batch)
                plain += call(batch, drafter=None)
            fast, slow = (min(result.timings["total"] for result in results) for results in (drafted, plain))
            same = all(result.tokens == plain[0].tokens for result in (*drafted, *plain))
            self._last = Comparison(fast, slow, same)
            self._differs = self._differs or not same
            return drafted[:1]

        return compared

    def fields(self) -> dict[str, Any]:
        """What the last input's JSON has beside its result."""
        return {"compared": self._last.to_dict()} if self._last is not None else {}

    def tell(self, source: object, several: bool) -> None:
        """Say on stderr what came of the last input."""
        if self._last is not None:
            name = f"{printable(str(source))}: " if several else ""
            print(f"{name}{self._last}", file=sys.stderr, flush=True)

    @property
    def code(self) -> int:
        """The exit code: 2 where a text differed."""
        return DIFFERS if self._differs else 0


def results_of(batch: list[Any], call: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
    """For each member of a batch, its result or an error message."""
    from mmdec import BatchError

    try:
        return [*call(batch)]
    except BatchError as error:
        return [result or str(error.errors[index]) for index, result in enumerate(error.results)]
    except MmdecError:
        raise  # wrong arguments: no input is to blame
    except Exception as error:  # caused by one input, unknown which: each alone
        if len(batch) == 1:
            return [failure(error)]
        return [result for member in batch for result in results_of([member], call)]
