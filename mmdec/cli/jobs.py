"""The inputs of one call with their outputs, and what became of each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Generic, TypeVar, final

import typer

from mmdec import InputError
from mmdec.checks.files import printable
from mmdec.cli.input_files import InputFile

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
