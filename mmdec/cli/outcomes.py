"""The inputs of a command that decodes files: which can be read, which failed, and which outputs are likely wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, final

import typer

from mmdec import BatchError, InputError, MmdecError
from mmdec.checks.files import failure_message, printable
from mmdec.cli.inputs import InputFile
from mmdec.cli.options import in_cli_syntax
from mmdec.jobs.many import decode_each

Target = TypeVar("Target")


@final
class Outcomes(Generic[Target]):
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
        self.has_many_files = len(files) > 1
        self._total, self._model = len(files), model
        self._failed: list[tuple[str, str]] = []
        self._sure: list[tuple[str, float, bool | None]] = []
        for file in files:
            if file.refusal:
                _say(file.name, file.refusal)
        if not self.todo:
            self.finish()

    def add_failure(self, name: str, message: str) -> None:
        """Remember a failed input and its error message; `finish` reports it."""
        self._failed.append((name, message))

    def add_output(self, name: str, confidence: float | None, calibrated: bool | None = None) -> None:
        """Remember an output's confidence; `finish` warns if it is low.

        Args:
            confidence: None: there is none, for silence.
            calibrated: Whether the confidence is calibrated for the model; None: it is if the model's folder has a
                calibration.
        """
        if confidence is not None:
            self._sure.append((name, confidence, calibrated))

    def finish(self, code: int = 0) -> None:
        """Print which outputs are likely wrong and which inputs failed. Exits with `code`, or with 1 if any failed."""
        warn_of_unsure(self._sure, self._model)
        order = {file.name: number for number, (file, _) in enumerate(self.todo)}
        for name, message in sorted(self._failed, key=lambda failure: order[failure[0]]):
            _say(name, message)
        if count := len(self._failed) + self._total - len(self.todo):
            print(f"{count} of {self._total} files failed", file=sys.stderr)
        if code or count:
            raise typer.Exit(code or 1)


def decode_all(
    inputs: Sequence[Any],
    call: Callable[[list[Any], Callable[[int, Any], None]], object],
    report: Callable[[int, Any], None],
    min_confidence: float | None = None,
) -> None:
    """Decode all inputs in one call, and report each result as it comes.

    If the call fails because of some input, those that have no result yet are decoded one by one.

    Args:
        call: Takes the inputs, and a function that it calls with the index of an input and its result.
        report: Called once for each input, with its index and its result or an error message.
        min_confidence: The call's `min_confidence`; it refuses results of a lower confidence when all are done.
    """
    reported, faults, is_retried = set[int](), list[Exception](), False

    def on_result(index: int, result: Any) -> None:
        if min_confidence is not None and result.confidence is not None and result.confidence < min_confidence:
            return
        reported.add(index)
        try:
            report(index, result)
        except Exception as error:  # the output's fault, no input's
            faults.append(error)
            raise

    try:
        call(list(inputs), on_result)
    except BatchError as error:
        for index, reason in error.errors.items():
            report(index, str(reason))
    except MmdecError:
        raise  # the call's arguments are wrong, not an input
    except Exception as error:
        if faults:
            raise
        if len(inputs) == 1:
            return report(0, failure_message(error))
        is_retried = True
    # not in the handler, because the error's traceback holds the call's memory
    for index, item in enumerate(inputs if is_retried else ()):
        if index not in reported:
            result = decode_each([item], lambda batch: call(batch, lambda *_: None))  # type: ignore[arg-type] # of a list: a list
            report(index, *result)


def _say(name: str, message: str) -> None:
    print(f"failed: {printable(name)}: {in_cli_syntax(message)}", file=sys.stderr, flush=True)


def print_note(name: str, note: str) -> None:
    """Print the note of an input's result on stderr, if there is one.

    Args:
        name: The input's name.
    """
    if note:
        print(f"note: {printable(name)}: {in_cli_syntax(note)}", file=sys.stderr, flush=True)


def warn_of_unsure(results: Sequence[tuple[str, float, bool | None]], model: str) -> None:
    """Warn on stderr of each output whose confidence is calibrated and below `LIKELY_WRONG`.

    Args:
        results: (input's name, confidence, whether it is calibrated; None: it is if the model's folder has a
            calibration).
    """
    from mmdec.tasks.confidence import LIKELY_WRONG

    unsure = [(name, value, is_calibrated) for name, value, is_calibrated in results if value < LIKELY_WRONG]
    fitted = any(is_calibrated is None for _, _, is_calibrated in unsure) and _has_calibration(model)
    for name, value, is_calibrated in unsure:
        if not (fitted if is_calibrated is None else is_calibrated):
            continue
        print(
            f"warning: {printable(name)}: the output is likely wrong: its confidence is {value:.2f}, below "
            f"{LIKELY_WRONG}.",
            file=sys.stderr,
        )


def _has_calibration(model: str) -> bool:
    """Return whether the model's folder has a calibration of its confidence."""
    from mmdec.hub.find import find_model
    from mmdec.tasks.confidence import CONFIDENCE_FILE, read_calibrations

    try:
        return bool(read_calibrations(find_model(model, None, ["config.json", CONFIDENCE_FILE])))
    except InputError:  # the folder was removed meanwhile
        return False
