"""Tests the measures of shared passes: which times are compared, and that texts must be equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mmdec.bench.pairing import CPU_TIME
from mmdec.bench.report import WALL_CLOCK
from recipes.measure.scheduler import CLIENTS, DECODER, Row, Run, client_runs, main, measure
from tests.support import tiny_whisper
from tests.support.running_servers import wav


def row(before: Sequence[float], after: Sequence[float], **more: Any) -> Row:
    """A row whose two ways take these seconds, the first of each in the run that does not count."""
    former, latter = iter(before), iter(after)
    return Row(
        "clips",
        lambda: Run(["a"], {WALL_CLOCK: next(former)}),
        lambda: Run(["a"], {WALL_CLOCK: next(latter)}),
        **more,
    )


def test_the_time_of_the_first_way_is_divided_by_that_of_the_second() -> None:
    assert measure(row([9.0, 3.0], [9.0, 2.0]), 0.0) == [
        "| clips | wall clock | 3.000 | 2.000 | 1.500 (1.500 to 1.500) | 1 |"
    ]


def test_a_delay_is_how_many_times_longer_the_second_way_takes() -> None:
    assert "| 2.000 (2.000 to 2.000) |" in measure(row([9.0, 1.0], [9.0, 2.0], delay=True), 0.0)[0]


def test_different_texts_have_no_figures() -> None:
    texts = iter("abcd")
    differing = Row("clips", lambda: Run([next(texts)]), lambda: Run([next(texts)]))
    with pytest.raises(RuntimeError, match="clips: the texts of both ways differ"):
        measure(differing, 0.0)


def test_clients_ask_one_after_another_and_at_the_same_time() -> None:
    alone, together = client_runs(str)
    for run in (alone(), together()):
        assert run.texts == [str(number) for number in range(CLIENTS)]
        assert {*run.seconds} == {WALL_CLOCK, CPU_TIME}


@pytest.mark.slow
def test_the_command_prints_a_row_for_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmdec.tasks.threads._is_fixed", False)  # the command sets it for its whole process
    sound = tmp_path / "a.wav"
    sound.write_bytes(wav(11.0))
    whisper = tiny_whisper.write(tmp_path / "whisper")
    words = ["--whisper", str(whisper), "--recordings", str(sound), "--minutes", "0", "--count", "3", "--threads", "1"]
    main([*words, "--rows", "clips", "long", "folder", "lone"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    both = [WALL_CLOCK, CPU_TIME]
    assert [line.split(" | ")[1] for line in lines[2:]] == [*both, *both, DECODER, *both, *both]
