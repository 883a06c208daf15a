"""`--compare`: both ways are run in turn, what is said of them, and the exit code where a text differs."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import soundfile
import typer
from PIL import Image
from typer.testing import CliRunner

import mmdec
from mmdec import cli
from mmdec.cli.files import InputFile
from mmdec.cli.jobs import Comparer, Jobs
from tests.conftest import RATE, buzz
from tests.support import tiny_vlm_folder, tiny_whisper
from tests.support.pictures import pixels

SAID = r"(\d+\.?\d* times (faster|slower)|as fast), same text: \d+\.\d{3} s with drafts, \d+\.\d{3} s without"


def caller(seconds: dict[str, list[float]], tokens: dict[str, list[int]], calls: list[str]) -> Any:
    """A call whose runs of either kind take these seconds, one after the other, and give these tokens."""

    def call(batch: list[Any], drafter: str | None = "medusa") -> list[Any]:
        way = "plain" if drafter is None else "drafted"
        calls.append(way)
        return [SimpleNamespace(tokens=tokens[way], timings={"total": seconds[way].pop(0)}) for _ in batch]

    return call


@pytest.mark.parametrize("same", [True, False])
def test_both_ways_are_run_in_turn_and_the_faster_run_counts(same: bool, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[str] = []
    seconds = {"drafted": [5.0, 1.0], "plain": [2.9, 4.0]}
    call = caller(seconds, {"drafted": [1, 2], "plain": [1, 2] if same else [1, 3]}, calls)
    comparer = Comparer(True, "medusa")
    assert comparer.fields() == {}
    (result,) = comparer.both(call)(["a.wav"])
    assert result.tokens == [1, 2]
    assert calls == ["drafted", "plain", "drafted", "plain"]
    found = {"seconds": 1.0, "seconds_plain": 2.9, "times_faster": 2.9, "same_text": same}
    assert comparer.fields() == {"compared": found}
    comparer.tell("a.wav", several=True)
    word = "same" if same else "not the same"
    said = f"a.wav: 2.9 times faster, {word} text: 1.000 s with drafts, 2.900 s without\n"
    assert capsys.readouterr() == ("", said)
    assert comparer.code == (0 if same else 2)


def test_a_text_that_differs_counts_more_than_a_failure() -> None:
    jobs = Jobs([InputFile("a.wav")], [None], "model")
    jobs.failed("a.wav", "`audio` must be loud.")
    with pytest.raises(typer.Exit) as ended:
        jobs.end(2)
    assert ended.value.exit_code == 2


def test_without_the_option_nothing_is_run_twice(capsys: pytest.CaptureFixture[str]) -> None:
    comparer, call = Comparer(False, "none", stream=True), caller({}, {}, [])
    assert comparer.both(call) is call
    comparer.tell("a.wav", several=False)
    assert (comparer.fields(), capsys.readouterr()) == ({}, ("", ""))
    assert comparer.code == 0


def test_an_input_that_fails_is_compared_with_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    comparer = Comparer(True, "medusa")
    comparer.both(caller({"drafted": [1.0] * 2, "plain": [1.0] * 2}, {"drafted": [], "plain": []}, []))(["a.wav"])

    def fail(batch: list[Any], **_: object) -> list[Any]:
        raise mmdec.InputError("`audio` must be loud. Turn it up.")

    with pytest.raises(mmdec.InputError, match="loud"):
        comparer.both(fail)(["b.wav"])
    comparer.tell("b.wav", several=True)
    assert (comparer.fields(), capsys.readouterr()) == ({}, ("", ""))


@pytest.mark.parametrize(
    ("drafter", "refused", "said"),
    [("none", {}, "`--drafter` is none"), ("medusa", {"stream": True}, "must come without `--stream`")],
)
def test_what_cannot_be_compared(drafter: str, refused: dict[str, bool], said: str) -> None:
    with pytest.raises(mmdec.InputError, match=said):
        Comparer(True, drafter, **refused)


@pytest.fixture(scope="module", params=["transcribe", "describe"])
def command(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A verb with two inputs and a small model."""
    folder = tmp_path_factory.mktemp("compared")
    if request.param == "transcribe":
        model, inputs, more = tiny_whisper.write(folder / "tiny"), [folder / "a.wav", folder / "b.wav"], ["-l", "en"]
        for seed, path in enumerate(inputs):
            soundfile.write(path, buzz(0.5, seed), RATE)
    else:
        model, inputs, more = tiny_vlm_folder.write(folder / "tiny"), [folder / "a.png", folder / "b.png"], []
        for seed, path in enumerate(inputs):
            Image.fromarray(pixels(seed)).save(path)
    return [request.param, *map(str, inputs), *more, "--model", str(model), "--device", "cpu", "--drafter", "lookup"]


def test_a_verb_says_it_of_each_input(command: list[str]) -> None:
    plain, compared = (CliRunner().invoke(cli.app, [*command, *more]) for more in ([], ["--compare"]))
    assert compared.exit_code == 0, compared.output
    assert compared.stdout == plain.stdout
    lines = [line for line in compared.stderr.splitlines() if "with drafts" in line]
    assert len(lines) == 2
    for line, source in zip(lines, command[1:3], strict=True):
        assert re.fullmatch(f"{re.escape(source)}: {SAID}", line), line


def test_json_has_it_beside_the_result(command: list[str]) -> None:
    found = CliRunner().invoke(cli.app, [*command, "--compare", "--json"])
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert [line["compared"]["same_text"] for line in lines] == [True, True]
    assert {*lines[0]["compared"]} == {"seconds", "seconds_plain", "times_faster", "same_text"}
