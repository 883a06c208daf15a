"""Tests the options of the public calls: each dataclass is the list from which signatures and commands are made."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, get_overloads

import pytest
import typer

import mmdec
from mmdec.cli import app
from mmdec.daspeech.options import TranslateOptions
from mmdec.tasks.options import GenerateOptions, OptionInfo, TaskOptions, options_of
from mmdec.vision.options import DescribeOptions
from mmdec.whisper.options import TranscribeOptions

CALLS = [
    (mmdec.transcribe, TranscribeOptions),
    (mmdec.translate_speech, TranslateOptions),
    (mmdec.describe, DescribeOptions),
]
SUBCOMMANDS = {TranscribeOptions: "transcribe", TranslateOptions: "translate", DescribeOptions: "describe"}


@pytest.mark.parametrize(("call", "kind"), CALLS)
def test_an_editor_and_help_see_the_fields_and_their_defaults(
    call: Callable[..., Any], kind: type[TaskOptions]
) -> None:
    """An editor reads the first overload."""
    for signature in (inspect.signature(call), inspect.signature(get_overloads(call)[0])):
        named = [parameter for parameter in signature.parameters.values() if parameter.kind is parameter.KEYWORD_ONLY]
        assert {parameter.name: (parameter.annotation, parameter.default) for parameter in named} == {
            option.name: (option.type, option.default) for option in options_of(kind)
        }
        further = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
        assert further is issubclass(kind, GenerateOptions)


@pytest.mark.parametrize("kind", SUBCOMMANDS)
def test_the_command_line_has_their_defaults_and_help(kind: type[TaskOptions]) -> None:
    subcommands: Any = typer.main.get_command(app)
    typed = {parameter.name: parameter for parameter in subcommands.commands[SUBCOMMANDS[kind]].params}
    defaults: Any = kind()
    assert typed["model"].default == defaults.model
    for option in options_of(kind):
        info: OptionInfo = option.metadata["option"]
        if info.typed is not None:
            shown = typed[option.name]
            assert (shown.default or None, shown.help) == (option.default or None, info.help)
            assert f"--{option.name.replace('_', '-')}" in shown.opts
            assert set(shown.opts) >= {*filter(None, [info.short])}


@pytest.mark.parametrize(("call", "kind"), CALLS)
def test_the_docstring_explains_each_option(call: Callable[..., Any], kind: type[TaskOptions]) -> None:
    lines = re.findall(r"^    ([\w, ]+): ", inspect.getdoc(call) or "", re.M)
    assert {option.name for option in options_of(kind)} <= {name for line in lines for name in line.split(", ")}


@pytest.mark.parametrize(("_", "kind"), CALLS)
def test_changed_options_make_the_same_options_again(_: Any, kind: type[TaskOptions]) -> None:
    assert kind().changed() == {}
    given: dict[str, Any] = {"threads": 2, "min_confidence": 0.5}
    if issubclass(kind, GenerateOptions):
        given |= {"seed": 3, "temperature": 0.5}
        assert kind.from_keywords(given).generate_options == {"temperature": 0.5}
    assert kind.from_keywords(given).changed() == given
    assert kind.from_keywords(kind.from_keywords(given).changed()) == kind.from_keywords(given)


def test_an_unknown_option_of_a_call_without_generate_is_a_type_error() -> None:
    call: Any = mmdec.translate_speech
    with pytest.raises(TypeError, match="unexpected keyword argument 'beams'"):
        call("speech.wav", beams=2)
