"""Where stderr is no terminal, a line now and then; stdout stays clean."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mmdec.cli.jobs import EVERY, loading, progress_bar

ROOT = Path(__file__).parents[3]


def clock(*seconds: float) -> Iterator[float]:
    yield from seconds


def test_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    times = clock(0.0, 1.0, EVERY, EVERY + 1, 2 * EVERY, 3 * EVERY, 4 * EVERY, 4 * EVERY + 1)
    with progress_bar(count=True, now=lambda: next(times)) as progress:
        task = progress.add_task("a.wav", total=4)
        for name in ("a.wav", "b.wav", "c.wav", "d.wav"):
            progress.update(task, description=name)
            if name != "d.wav":
                progress.advance(task)
    said = capsys.readouterr()
    assert said.out == ""
    # asked at 1, 30, 31, 60, 90, 120 and 121 seconds: the first, the third and the last are too soon
    assert said.err.splitlines() == ["a.wav: 1 of 4", "b.wav: 2 of 4", "c.wav: 2 of 4", "c.wav: 3 of 4"]


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
def _no_timers() -> None:
    timers.clear()


@pytest.mark.parametrize(("terminal", "quiet"), [(False, False), (False, True), (True, True)])
def test_what_is_loaded_is_said_on_a_terminal_alone(
    terminal: bool, quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with loading("whisper-phrasebook", quiet, Waiting):
        assert timers == []


def test_what_is_loaded_is_said_after_a_while(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with loading("a\nb", timer=Waiting):
        (timer,) = timers
        assert (timer.seconds, timer.started, timer.daemon, timer.cancelled) == (0.5, True, True, False)
        assert capsys.readouterr() == ("", "")
        timer.tell()
        assert capsys.readouterr() == ("", "loading a\\nb ...\n")
    assert timer.cancelled


def test_a_model_that_cannot_be_loaded_is_not_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(RuntimeError), loading("nowhere", timer=Waiting):
        raise RuntimeError
    assert timers[0].cancelled


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
@pytest.mark.parametrize("call", ["translate x.wav -o out", "transcribe x.wav", "describe x.wav"])
def test_a_verb_says_what_it_loads_before_it_does(call: str, tmp_path: Path) -> None:
    """At once, as it is asked to here: torch's import takes longer than a thread's beginning."""
    (tmp_path / "x.wav").touch()
    code = "import sys\nfrom mmdec.cli import main, progress\nprogress.AFTER = 0\nmain()"
    command = [sys.executable, "-c", code, *call.split(), "--model", "nowhere"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open_terminal() as (terminal, screen):
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=terminal)
        try:
            said = ""
            while not said.endswith("\n"):  # a terminal hands over what is there, which may be half a line
                assert select.select([screen], [], [], 120)[0], "it says nothing"
                said += os.read(screen, 4096).decode()
            assert said.startswith("loading nowhere ...\r\n")
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


def test_what_has_no_end_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    times = clock(0.0, EVERY)
    with progress_bar(count=False, now=lambda: next(times)) as progress:
        progress.update(progress.add_task("talk.mp3", total=None), completed=12.0)
    assert capsys.readouterr().err == "talk.mp3: 12\n"


def test_what_is_not_counted_is_told_in_percent(capsys: pytest.CaptureFixture[str]) -> None:
    """Seconds of sound, "21 of 21", say little without their unit."""
    times = clock(0.0, EVERY)
    with progress_bar(count=False, now=lambda: next(times)) as progress:
        progress.update(progress.add_task("talk.mp3", total=20.0), completed=5.0)
    assert capsys.readouterr().err == "talk.mp3: 25 %\n"
