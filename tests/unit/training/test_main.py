"""Tests `python -m mmdec.training` with a wrong corpus or model: it prints one sentence, as `mmdec` does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mmdec.errors import InputError
from mmdec.training import __main__ as training


def test_refusals_are_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the parser wraps it: its links call the data module."""

    def refuse(arguments: Sequence[str] | None) -> None:
        try:
            raise InputError("`base` must read windows of 30 s.")
        except InputError as error:
            raise ValueError("Call to compute_fn failed") from error

    monkeypatch.setattr(training, "main", refuse)
    with pytest.raises(SystemExit) as ended:
        training.command_line([])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: `base` must read windows of 30 s.\n"


def test_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: Sequence[str] | None) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(training, "main", fail)
    with pytest.raises(ZeroDivisionError):
        training.command_line([])
