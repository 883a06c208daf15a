"""Tests what commands on many files print: `--compare` and its exit code if texts differ, progress, loading."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import soundfile
import typer
from PIL import Image
from typer.testing import CliRunner

import mmdec
from mmdec import cli
from mmdec.cli import progress
from mmdec.cli.compare import Comparer
from mmdec.cli.inputs import InputFile
from mmdec.cli.outcomes import Outcomes, warn_of_unsure
from mmdec.cli.progress import PROGRESS_INTERVAL, progress_bar, show_loading
from mmdec.tasks.confidence import Calibration, write_calibrations
from tests.conftest import RATE, buzz
from tests.support import tiny_piece_translator as tiny_heard
from tests.support import tiny_translator, tiny_vlm_folder, tiny_whisper
from tests.support.pictures import QUESTION, pixels
from tests.support.running_servers import wav

SAID = r"(\d+\.?\d* times (faster|slower)|as fast), same text: \d+\.\d{3} s with drafts, \d+\.\d{3} s without"


def caller(seconds: dict[str, list[float]], tokens: dict[str, list[int]], calls: list[str]) -> Any:
    """Return a call whose runs of either kind take these seconds, one after the other, and give these tokens."""

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
    comparer.print_comparison("a.wav", has_many_files=True)
    word = "same" if same else "not the same"
    line = f"a.wav: 2.9 times faster, {word} text: 1.000 s with drafts, 2.900 s without\n"
    assert capsys.readouterr() == ("", line)
    assert comparer.code == (0 if same else 2)


def test_a_different_text_outweighs_a_failure() -> None:
    outcomes = Outcomes([InputFile("a.wav")], [None], "model")
    outcomes.add_failure("a.wav", "`audio` must be loud.")
    with pytest.raises(typer.Exit) as ended:
        outcomes.finish(2)
    assert ended.value.exit_code == 2


def test_without_compare_nothing_is_run_twice(capsys: pytest.CaptureFixture[str]) -> None:
    comparer, call = Comparer(False, "none", stream=True), caller({}, {}, [])
    assert comparer.both(call) is call
    comparer.print_comparison("a.wav", has_many_files=False)
    assert (comparer.fields(), capsys.readouterr()) == ({}, ("", ""))
    assert comparer.code == 0


def test_a_failed_input_is_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    comparer = Comparer(True, "medusa")
    comparer.both(caller({"drafted": [1.0] * 2, "plain": [1.0] * 2}, {"drafted": [], "plain": []}, []))(["a.wav"])

    def fail(batch: list[Any], **_: object) -> list[Any]:
        raise mmdec.InputError("`audio` must be loud. Turn it up.")

    with pytest.raises(mmdec.InputError, match="loud"):
        comparer.both(fail)(["b.wav"])
    comparer.print_comparison("b.wav", has_many_files=True)
    assert (comparer.fields(), capsys.readouterr()) == ({}, ("", ""))


@pytest.mark.parametrize(
    ("drafter", "refused", "message"),
    [("none", {}, "`--drafter` is none"), ("medusa", {"stream": True}, "must come without `--stream`")],
)
def test_options_that_cannot_be_compared_are_refused(drafter: str, refused: dict[str, bool], message: str) -> None:
    with pytest.raises(mmdec.InputError, match=message):
        Comparer(True, drafter, **refused)


@pytest.fixture(scope="module", params=["transcribe", "describe"])
def command(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the words of a command with two inputs and a small model."""
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


def test_compare_prints_a_line_for_each_input(command: list[str]) -> None:
    plain, compared = (CliRunner().invoke(cli.app, [*command, *more]) for more in ([], ["--compare"]))
    assert compared.exit_code == 0, compared.output
    assert compared.stdout == plain.stdout
    lines = [line for line in compared.stderr.splitlines() if "with drafts" in line]
    assert len(lines) == 2
    for line, source in zip(lines, command[1:3], strict=True):
        assert re.fullmatch(f"{re.escape(source)}: {SAID}", line), line


def test_compare_adds_its_figures_to_the_json(command: list[str]) -> None:
    result = CliRunner().invoke(cli.app, [*command, "--compare", "--json"])
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["compared"]["same_text"] for line in lines] == [True, True]
    assert {*lines[0]["compared"]} == {"seconds", "seconds_plain", "times_faster", "same_text"}


KINDS = ("graph", "transcript", "answer")


def fitted(folder: Path, bias: float) -> Path:
    """Return the folder with a curve that is always as sure as its bias says."""
    write_calibrations(folder, {kind: Calibration({}, bias) for kind in KINDS}, {})
    return folder


@pytest.mark.parametrize("subcommand", ["translate", "transcribe", "describe"])
def test_one_line_for_an_output_that_is_likely_wrong(subcommand: str, tmp_path: Path) -> None:
    source = tmp_path / ("a.png" if subcommand == "describe" else "a.wav")
    if subcommand == "describe":
        Image.fromarray(pixels(0)).save(source)
    else:
        soundfile.write(source, buzz(1.0, 0), RATE)
    write = {"translate": tiny_translator, "transcribe": tiny_whisper, "describe": tiny_vlm_folder}[subcommand].write
    more = {
        "translate": ["-o", tmp_path / "out"],
        "transcribe": ["--language", "en", "--max-new-tokens", 12],
        "describe": ["--prompt", QUESTION, "--max-new-tokens", 4],
    }[subcommand]
    plain = write(tmp_path / "plain")
    outputs = {}
    for name, model in (
        ("plain", plain),
        ("unsure", fitted(shutil.copytree(plain, tmp_path / "unsure"), -2.0)),
        ("sure", fitted(shutil.copytree(plain, tmp_path / "sure"), 2.0)),
    ):
        words = [subcommand, source, "--model", model, "--device", "cpu", "--json", *more]
        outputs[name] = CliRunner().invoke(cli.app, [str(word) for word in words])
        assert outputs[name].exit_code == 0, outputs[name].output
    warned = f"warning: {source}: the output is likely wrong: its confidence is 0.12, below 0.5."
    assert [line for line in outputs["unsure"].stderr.splitlines() if "wrong" in line] == [warned]
    assert all("wrong" not in outputs[name].stderr for name in ("plain", "sure"))
    result = {name: json.loads(done.stdout) for name, done in outputs.items()}  # one line, no other
    assert result["plain"].keys() == result["unsure"].keys() == result["sure"].keys()
    assert result["plain"]["text"] == result["unsure"]["text"]


def test_half_is_sure_enough_and_a_missing_model_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    model = str(fitted(tmp_path / "model", 0.0))
    warn_of_unsure([("a", 0.5, None), ("b", 0.49, None), ("c", 0.4, False)], model)
    warn_of_unsure([("a", 0.1, None), ("d", 0.3, True)], str(tmp_path / "gone"))  # one that a shipped curve has rated
    captured = capsys.readouterr()
    assert captured.err == "".join(
        f"warning: {name}: the output is likely wrong: its confidence is {value}, below 0.5.\n"
        for name, value in (("b", "0.49"), ("d", "0.30"))
    )
    assert captured.out == ""


ROOT = Path(__file__).parents[3]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the times that are read, one after the other."""

    def set_times(*seconds: float) -> None:
        times = iter(seconds)
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(times)))

    return set_times


def test_progress_is_a_line_at_intervals_where_there_is_no_terminal(
    clock: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    clock(
        0.0,
        1.0,
        PROGRESS_INTERVAL,
        PROGRESS_INTERVAL + 1,
        2 * PROGRESS_INTERVAL,
        3 * PROGRESS_INTERVAL,
        4 * PROGRESS_INTERVAL,
        4 * PROGRESS_INTERVAL + 1,
    )
    with progress_bar(count=True) as progress:
        task = progress.add_task("a.wav", total=4)
        for name in ("a.wav", "b.wav", "c.wav", "d.wav"):
            progress.update(task, description=name)
            if name != "d.wav":
                progress.advance(task)
    captured = capsys.readouterr()
    assert captured.out == ""
    # asked at 1, 30, 31, 60, 90, 120 and 121 seconds: the first, the third and the last are too soon
    assert captured.err.splitlines() == ["a.wav: 1 of 4", "b.wav: 2 of 4", "c.wav: 2 of 4", "c.wav: 3 of 4"]


class Waiting:
    """A timer whose time comes when the test says so."""

    def __init__(self, seconds: float, tell: Callable[[], None]) -> None:
        self.seconds, self.tell = seconds, tell
        self.started = self.cancelled = self.daemon = False
        timers.append(self)

    def start(self) -> None:
        self.started = True

    def cancel(self) -> None:
        self.cancelled = True


timers: list[Waiting] = []


@pytest.fixture(autouse=True)
def _own_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    timers.clear()
    monkeypatch.setattr(progress, "threading", SimpleNamespace(Timer=Waiting))


@pytest.mark.parametrize(("terminal", "quiet"), [(False, False), (False, True), (True, True)])
def test_loading_is_announced_only_on_a_terminal(terminal: bool, quiet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with show_loading("whisper-tiny.en", quiet):
        assert timers == []


def test_loading_is_announced_after_a_while(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with show_loading("a\nb"):
        (timer,) = timers
        assert (timer.seconds, timer.started, timer.daemon, timer.cancelled) == (0.5, True, True, False)
        assert capsys.readouterr() == ("", "")
        timer.tell()
        assert capsys.readouterr() == ("", "loading a\\nb ...\n")
    assert timer.cancelled


def test_a_failed_load_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(RuntimeError), show_loading("nowhere"):
        raise RuntimeError
    assert timers[0].cancelled


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
@pytest.mark.parametrize("call", ["translate x.wav -o out", "transcribe x.wav", "describe x.wav"])
def test_a_command_announces_a_load_before_it_starts(call: str, tmp_path: Path) -> None:
    """At once, as it is asked to here: torch's import takes longer than a thread's beginning."""
    (tmp_path / "x.wav").touch()
    code = "import sys\nfrom mmdec.cli import main, progress\nprogress.LOADING_DELAY = 0\nmain()"
    command = [sys.executable, "-c", code, *call.split(), "--model", "nowhere"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open_terminal() as (terminal, screen):
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=terminal)
        try:
            output = ""
            while not output.endswith("\n"):  # a terminal hands over what is there, which may be half a line
                assert select.select([screen], [], [], 120)[0], "it says nothing"
                output += os.read(screen, 4096).decode()
            assert output.startswith("loading nowhere ...\r\n")
        finally:
            process.kill()  # torch need not be imported for this
            process.wait()


@contextmanager
def open_terminal() -> Iterator[tuple[int, int]]:
    """The two ends of a pseudo-terminal: where a program writes, and where a person reads."""
    screen, terminal = os.openpty()
    try:
        yield terminal, screen
    finally:
        os.close(screen)
        os.close(terminal)


def test_tasks_without_a_total_are_counted(clock: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    clock(0.0, PROGRESS_INTERVAL)
    with progress_bar(count=False) as progress:
        progress.update(progress.add_task("talk.mp3", total=None), completed=12.0)
    assert capsys.readouterr().err == "talk.mp3: 12\n"


def test_uncounted_tasks_are_shown_in_percent(clock: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    """Seconds of sound, "21 of 21", say little without their unit."""
    clock(0.0, PROGRESS_INTERVAL)
    with progress_bar(count=False) as progress:
        progress.update(progress.add_task("talk.mp3", total=20.0), completed=5.0)
    assert capsys.readouterr().err == "talk.mp3: 25 %\n"


@pytest.mark.parametrize("subcommand", ["transcribe", "translate", "describe"])
def test_a_note_names_the_file_as_it_was_typed(
    subcommand: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = {"transcribe": tiny_whisper, "translate": tiny_heard, "describe": tiny_vlm_folder}[subcommand].write(
        Path("model")
    )
    if subcommand == "describe":
        Image.fromarray(pixels(1)).save("file", "PNG")
    else:
        Path("file").write_bytes(wav(0.8)[:-6400])
    options = ["--max-new-tokens", "2"] if subcommand == "describe" else []
    result = CliRunner().invoke(cli.app, [subcommand, "./file", "--model", str(model), "--device", "cpu", *options])
    assert result.exit_code == 0, result.output
    assert result.stderr.count("note: ") == result.stderr.count("note: ./file: ") == 1
