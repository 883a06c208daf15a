"""Where stderr is no terminal, a line now and then; stdout stays clean."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mmdec.cli.progress import EVERY, progress_bar


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


def test_what_has_no_end_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    times = clock(0.0, EVERY)
    with progress_bar(count=False, now=lambda: next(times)) as progress:
        progress.update(progress.add_task("talk.mp3", total=None), completed=12.0)
    assert capsys.readouterr().err == "talk.mp3: 12\n"
