"""What all verbs have: help that fits 80 columns, an example that parses, and errors in the words that were typed."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from mmdec import cli
from mmdec.cli.options import Verb, as_typed
from tests.support.verbs import VERBS

ENDING = [verb for verb in VERBS if verb not in ("", "eval", "bench", "convert")]


def command(verb: str) -> Any:
    found: Any = get_command(cli.app)
    for word in verb.split():
        found = found.commands[word]
    return found


def said(verb: str) -> str:
    return CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, [*verb.split(), "--help"]).stdout


@pytest.mark.parametrize("verb", VERBS)
def test_names_are_whole_at_80_columns(verb: str) -> None:
    shown = said(verb)
    assert "…" not in shown
    for option in command(verb).params:
        assert all(f"{name} " in shown for name in option.opts if name.startswith("--"))


@pytest.mark.parametrize("verb", VERBS)
def test_there_is_one_example(verb: str) -> None:
    assert said(verb).count("Example: mmdec ") == 1


@pytest.mark.parametrize("verb", ENDING)
def test_the_example_is_of_this_verb_and_parses(verb: str) -> None:
    found = command(verb)
    assert isinstance(found, Verb)
    words = shlex.split(found.epilog.removeprefix("Example: mmdec "))
    count = len(verb.split())
    assert words[:count] == verb.split()
    found.make_context(verb, words[count:])  # raises for what is no option


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("`batch_size` must be 1.", "`--batch-size` must be 1."),
        ("`kind` or `model`", "`--format` or `--model`"),
        ("`audio` must be a file, `nothing` else", "`audio` must be a file, `nothing` else"),
    ],
)
def test_errors_name_what_was_typed(message: str, typed: str) -> None:
    assert as_typed(message, command("transcribe").params) == typed


@pytest.mark.parametrize("verb", ["translate x.wav -o out", "transcribe x.wav", "describe x.wav"])
def test_a_dtype_that_is_none(verb: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.wav").touch()
    result = CliRunner().invoke(cli.app, [*verb.split(), "--dtype", "float8", "--device", "cpu"])
    assert str(result.exception).startswith("`--dtype` must be float32, bfloat16, float16 or float64, but is 'float8'.")
