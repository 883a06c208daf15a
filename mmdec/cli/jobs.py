"""Shared code of the subcommands that decode files: input and output files, failed inputs, progress, and `--compare`.

Wrong paths are reported before a model is loaded. Suffixes only select files in a folder; the type of a file is
detected from its content.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, final
from unicodedata import normalize

import typer

from mmdec import InputError
from mmdec.checks.files import error_reason, failure_message, open_regular, printable, quote_path, write_atomically
from mmdec.cli.options import in_cli_syntax
from mmdec.tasks.comparison import comparison_words

SOUNDS = (
    *(".wav", ".flac", ".ogg", ".oga", ".mp3", ".opus", ".aiff", ".aif", ".au", ".caf", ".w64"),
    *(".m4a", ".m4b", ".mp4", ".mov", ".webm", ".mka", ".mkv"),
)
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


@final
@dataclass(frozen=True)
class InputFile:
    """A file that the user named, or a file in a folder that the user named.

    Args:
        refusal: Why the file cannot be read; "" if it can be read.
    """

    name: str
    refusal: str = ""

    @property
    def path(self) -> Path:
        return Path(self.name)


def input_files(
    given: Iterable[str | Path], argument: str, suffixes: Sequence[str], output: Path | None
) -> list[InputFile]:
    """List the given files, and the files in given folders and their subfolders, sorted by name.

    argument: the argument's name in error messages. suffixes: in a folder, only files with these suffixes are taken.
    output: the folder of the outputs, whose files are not inputs; None: there is none.
    """
    return [file for name in given for file in _files(str(name), argument, suffixes, output)]


def combine_files(files: Sequence[InputFile]) -> InputFile:
    """Combine files into one input, for a question about several pictures. If one file cannot be read, the input cannot
    be read."""
    refusal = next((file.refusal for file in files if file.refusal), "")
    return InputFile(", ".join(file.name for file in files), refusal)


def _files(name: str, argument: str, suffixes: Sequence[str], output: Path | None) -> Iterator[InputFile]:
    if not os.path.isdir(name):
        yield InputFile(name, _refusal(name, argument))
        return
    own, found = None if output is None else os.path.realpath(output), 0
    for folder, folders, names in os.walk(name, onerror=(errors := list[OSError]()).append):
        inside = (one for one in sorted(folders) if not one.startswith("."))
        folders[:] = [one for one in inside if os.path.realpath(os.path.join(folder, one)) != own]
        for file in sorted(names):
            if file.lower().endswith(tuple(suffixes)) and not file.startswith("."):
                found += 1
                path = os.path.join(folder, file)
                yield InputFile(path, _refusal(path, argument))
    for error in errors:
        place = str(error.filename)
        rule = f"`{argument}` must be a folder that can be read, but '{quote_path(place)}' is not"
        yield InputFile(place, f"{rule} ({error_reason(error)}). Check its permissions.")
    if not found and not errors:
        ending = ", ".join(suffixes)
        rule = f"`{argument}` must be a file or hold some, but '{quote_path(name)}' is a directory"
        yield InputFile(name, f"{rule} without any that ends in {ending}. Name the files in it.")


def _refusal(name: str, argument: str) -> str:
    try:
        with open_regular(name, argument):
            return ""
    except InputError as error:
        return str(error)


def output_paths(
    inputs: Sequence[Path], output: Path | None, suffixes: Sequence[str], suffix: str, count: int | None = None
) -> Sequence[Path | None]:
    """Choose the output file of each input.

    If `output` ends in one of `suffixes`, it is the file of the only input. Else it is a directory, and each input gets
    a file there, with its own name and `suffix`. Inputs with the same name get different files. Names that differ only
    in case or in the encoding of accents count as the same, because some file systems do not distinguish them.
    count: only the first `count` inputs get a file; None: all do.
    Returns: the paths; if `output` is None, None for each input: nothing is written.
    Raises: InputError for an impossible output, or an output that would overwrite an input.
    """
    named = inputs[:count]
    if output is None:
        return [None] * len(named)
    above = next((folder for folder in output.parents if os.path.lexists(folder)), None)
    if above is not None and not os.path.isdir(above):
        raise InputError(f"`--output` must lie in a directory, but '{above}' is none. Name another.")
    if output.suffix.lower() in suffixes and not os.path.isdir(output):
        if len(named) > 1:
            raise InputError(
                f"`--output` must be a directory for {len(named)} inputs, but is '{output}'. Name a directory."
            )
        targets = [output]
    else:
        if os.path.lexists(output) and not os.path.isdir(output):
            raise InputError(f"`--output` must be a directory or a {suffix} file, but is '{output}'. Name another.")
        taken = set[str]()
        targets = []
        for source in named:
            name, number = source.stem, 2
            while (same := normalize("NFC", name).casefold()) in taken:
                name, number = f"{source.stem}-{number}", number + 1
            targets.append(output / f"{name}{suffix}")
            taken.add(same)
    sources = {os.path.realpath(source) for source in inputs}  # Path.resolve() would raise for circular links
    for target in targets:
        if os.path.realpath(target) in sources:
            raise InputError(f"`--output` must not overwrite an input, but '{target}' is one. Name another directory.")
    return targets


def write_error(path: Path, error: OSError) -> str:
    """Return the error message for an output file that could not be written."""
    return f"the output '{printable(str(path))}' cannot be written: {error_reason(error)}"


def try_write(target: Path | None, text: str) -> str:
    """Write `text` to `target`; None: write nothing. Returns the error message, or ""."""
    if target is None:
        return ""
    try:
        write_atomically(target, text.encode())
    except OSError as error:
        return write_error(target, error)
    except InputError as error:  # from `write_atomically`, if it cannot replace the file in one step, such as a pipe
        return failure_message(error)
    return ""


Target = TypeVar("Target")


@final
class CommandJobs(Generic[Target]):
    """The readable inputs of a command with their outputs (`todo`).

    Collects failed inputs and confidences, and reports them at the end.
    """

    def __init__(self, files: Sequence[InputFile], targets: Sequence[Target], model: str) -> None:
        """Print on stderr, before anything is loaded, which inputs cannot be read.

        Exits with 1 if none can be read.

        Args:
            targets: The output of each file.
            model: The model's name; low confidences cause a warning only if they are calibrated.
        """
        self.todo = [(file, target) for file, target in zip(files, targets, strict=True) if not file.refusal]
        self.several = len(files) > 1
        self._total, self._model = len(files), model
        self._failed: list[tuple[str, str]] = []
        self._sure: list[tuple[str, float, bool | None]] = []
        for file in files:
            if file.refusal:
                _say(file.name, file.refusal)
        if not self.todo:
            self.end()

    def failed(self, name: str, message: str) -> None:
        """Remember a failed input and its error message; `end` reports it."""
        self._failed.append((name, message))

    def done(self, name: str, confidence: float | None, calibrated: bool | None = None) -> None:
        """Remember an output's confidence; `end` warns if it is low. confidence: None: there is none, for silence.

        calibrated: whether the confidence is calibrated for the model; None: it is if the model's folder has a
            calibration.
        """
        if confidence is not None:
            self._sure.append((name, confidence, calibrated))

    def end(self, code: int = 0) -> None:
        """Print which outputs are likely wrong and which inputs failed. Exits with `code`, or with 1 if any failed."""
        warn_of_unsure(self._sure, self._model)
        for name, message in self._failed:
            _say(name, message)
        if count := len(self._failed) + self._total - len(self.todo):
            print(f"{count} of {self._total} files failed", file=sys.stderr)
        if code or count:
            raise typer.Exit(code or 1)


def _say(name: str, message: str) -> None:
    print(f"failed: {printable(name)}: {in_cli_syntax(message)}", file=sys.stderr, flush=True)


def warn_of_unsure(results: Sequence[tuple[str, float, bool | None]], model: str) -> None:
    """Warn on stderr of each output whose confidence is calibrated and below `LIKELY_WRONG`.

    results: (input's name, confidence, whether it is calibrated; None: it is if the model's folder has a calibration).
    """
    from mmdec.tasks.confidence import LIKELY_WRONG

    unsure = [(name, value, known) for name, value, known in results if value < LIKELY_WRONG]
    fitted = any(known is None for _, _, known in unsure) and _has_calibration(model)
    for name, value, known in unsure:
        if not (fitted if known is None else known):
            continue
        print(
            f"warning: {printable(name)}: the output is likely wrong: its confidence is {value:.2f}, below "
            f"{LIKELY_WRONG}.",
            file=sys.stderr,
        )


def _has_calibration(model: str) -> bool:
    """Return whether the model's folder has a calibration of its confidence."""
    from mmdec.hub.find import find_model
    from mmdec.tasks.confidence import FILE, read_calibrations

    try:
        return bool(read_calibrations(find_model(model, files=["config.json", FILE])))
    except InputError:  # the folder was removed meanwhile
        return False


if TYPE_CHECKING:
    from rich.progress import Progress


def print_note(name: str, note: str) -> None:
    """Print the note of an input's result on stderr, if there is one. name: the input's."""
    if note:
        print(f"note: {printable(name)}: {in_cli_syntax(note)}", file=sys.stderr, flush=True)


LOADING_DELAY = 0.5  # seconds of loading before "loading ..." is printed
PROGRESS_INTERVAL = 30.0  # seconds between two lines of progress; shorter work prints none


@contextmanager
def loading(model: str, quiet: bool = False) -> Iterator[None]:
    """Print "loading ..." on a terminal if the block takes more than half a second (importing torch, reading weights).

    Nothing is printed if stderr is not a terminal. quiet: never print.
    """
    if quiet or not sys.stderr.isatty():
        yield
        return
    line = f"loading {printable(model)} ..."
    waiting = threading.Timer(LOADING_DELAY, lambda: print(line, file=sys.stderr, flush=True))
    waiting.daemon = True
    waiting.start()
    try:
        yield
    finally:
        waiting.cancel()


@contextmanager
def progress_bar(count: bool) -> Iterator[Progress]:
    """Make a progress bar on stderr, or lines if stderr is not a terminal. count: show "n of m"."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    class ProgressLines(Progress):
        """Prints the progress as lines instead of a bar, at most one in `EVERY` seconds."""

        printed = time.monotonic()  # when the last line was printed

        def update(self, task_id: TaskID, *arguments: Any, **options: Any) -> None:
            super().update(task_id, *arguments, **options)
            self.print_line(task_id)

        def advance(self, task_id: TaskID, advance: float = 1) -> None:
            super().advance(task_id, advance)
            self.print_line(task_id)

        def print_line(self, task_id: TaskID) -> None:
            now, task = time.monotonic(), self._tasks[task_id]
            if now - self.printed < PROGRESS_INTERVAL:
                return
            self.printed = now
            done = f"{task.completed:.0f}"
            if task.total:
                done = f"{done} of {task.total:.0f}" if count else f"{100 * task.completed / task.total:.0f} %"
            print(f"{task.description}: {done}", file=sys.stderr, flush=True)

    console = Console(stderr=True)
    counter = [MofNCompleteColumn()] if count else []
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *counter, TimeRemainingColumn())
    kind = Progress if console.is_terminal else ProgressLines
    with kind(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield progress


TURNS = 2  # number of calls with drafts, and without, in turn. The fastest of each counts: the first also fills caches
DIFFERENT_EXIT = 2  # exit code if a text with drafts differs from the text without drafts

Compare = Annotated[
    bool,
    typer.Option("--compare", help="Decode without drafts, too: how much faster is the drafter, is the text the same?"),
]


@dataclass(frozen=True)
class Comparison:
    """A comparison of decoding one input with and without drafts."""

    drafted: float  # fewest seconds with drafts
    plain: float  # fewest seconds without drafts
    same: bool  # whether all calls gave the same tokens

    def __str__(self) -> str:
        """Write the comparison in words, with the times: "2.9 times faster, same text"."""
        outcome = comparison_words(self.drafted, self.plain, self.same)
        return f"{outcome}: {self.drafted:.3f} s with drafts, {self.plain:.3f} s without"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict for JSON."""
        ratio = self.plain / self.drafted if self.drafted > 0 else None
        return {"seconds": self.drafted, "seconds_plain": self.plain, "times_faster": ratio, "same_text": self.same}


class Comparer:
    """Decodes inputs with and without drafts, for `--compare`.

    Holds the comparison for the last input.

    Args:
        compare: Whether the option was given; if not, do nothing.
        drafter: Value of `--drafter`.
        refused: Option name -> whether it was given; these options do not go with `--compare`.

    Raises:
        InputError: If `--compare` was given, and `drafter` is "none" or an option in `refused` was given, too.
    """

    def __init__(self, compare: bool, drafter: str, **refused: bool) -> None:
        self.on = compare
        self._last: Comparison | None = None
        self._differs = False
        if compare and drafter == "none":
            raise InputError("`--compare` must come with a drafter, but `--drafter` is none. Leave that out.")
        for name, given in refused.items():
            if compare and given:
                raise InputError(f"`--compare` must come without `--{name}`, but that is given. Drop one of them.")

    def both(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `call`, which decodes a list of one input and has a keyword `drafter`. The wrapped call decodes with and
        without drafts, in turn, stores the comparison, and returns the first drafted result. Without `--compare`,
        return `call` itself."""
        if not self.on:
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
        """Return {"compared": ...}, the comparison for the last input, to add to its JSON; {} without `--compare`."""
        return {"compared": self._last.to_dict()} if self._last is not None else {}

    def tell(self, source: object, several: bool) -> None:
        """Print on stderr the comparison for the last input. source: the input's name, printed if there are several
        inputs."""
        if self._last is not None:
            name = f"{printable(str(source))}: " if several else ""
            print(f"{name}{self._last}", file=sys.stderr, flush=True)

    @property
    def code(self) -> int:
        """Return the exit code: 2 if a text differed with and without drafts, else 0."""
        return DIFFERENT_EXIT if self._differs else 0
