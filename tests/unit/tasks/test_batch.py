"""Tests lists with bad files: the others are translated or transcribed, and only the bad ones are reported.

Also the order in which results of a list are reported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from typer.testing import CliRunner

import mmdec
from mmdec import cli
from mmdec.checks.files import printable
from mmdec.tasks.batch import InputBatch
from tests.conftest import RATE, buzz
from tests.support.bad_list import encoded, write_list
from tests.support.grid import slow_but
from tests.support.tiny_whisper import write


@pytest.fixture(scope="module")
def hundred(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], dict[Path, str]]:
    return write_list(tmp_path_factory.mktemp("lists") / "hundred")


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "whisper")


def unheard(bad: dict[Path, str]) -> tuple[Path, dict[Path, str]]:
    """Return the silent recording, of which a transcript is empty, and what is bad for a transcript, too."""
    (silent,) = (path for path in bad if path.name == "silent.wav")
    return silent, {path: reason for path, reason in bad.items() if path != silent}


def check_error(error: mmdec.BatchError, paths: list[Path], bad: dict[Path, str], count: int) -> None:
    """`count` named, each at its own place and with its own reason, and a result for every other."""
    assert len(paths) == 100
    assert [path for path, result in zip(paths, error.results, strict=True) if result is None] == [
        path for path in paths if path in bad
    ]
    assert list(error.errors) == [place for place, path in enumerate(paths) if path in bad]
    assert len(error.errors) == len(bad) == count
    for place, problem in error.errors.items():
        assert isinstance(problem, mmdec.InputError)
        assert bad[paths[place]] in str(problem), paths[place]
    assert str(error).startswith(f"{count} of 100 recordings were rejected")


def test_a_batch_of_a_hundred_reports_its_bad_files(
    hundred: tuple[list[Path], dict[Path, str]], tiny_model: Path, whisper: Path
) -> None:
    paths, bad = hundred
    with pytest.raises(mmdec.BatchError) as translated:
        mmdec.translate_speech(paths, model=tiny_model, device="cpu")
    check_error(translated.value, paths, bad, 20)
    with pytest.raises(mmdec.BatchError) as transcribed:
        mmdec.transcribe(paths, model=whisper, device="cpu", language="en", drafter=None)
    silent, refused = unheard(bad)
    check_error(transcribed.value, paths, refused, 19)
    result = transcribed.value.results[paths.index(silent)]
    assert result.text == ""
    assert "silent" in result.note


@pytest.mark.parametrize("subcommand", slow_but(["translate", "transcribe"], ["transcribe"]))
def test_a_list_of_a_hundred_on_the_command_line_reports_its_bad_files(
    subcommand: str, hundred: tuple[list[Path], dict[Path, str]], tiny_model: Path, whisper: Path, tmp_path: Path
) -> None:
    paths, bad = hundred
    silent, refused = unheard(bad)
    bad, count = (bad, 20) if subcommand == "translate" else (refused, 19)
    model = tiny_model if subcommand == "translate" else whisper
    command = [subcommand, *map(str, paths), "-o", str(tmp_path / "out"), "--json"]
    command += ["--model", str(model), "--device", "cpu", "--threads", "1"]
    done = CliRunner().invoke(cli.app, command)
    stderr = done.stderr
    assert done.exit_code == 1, stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    good = [path for path in paths if path not in bad]
    assert [line["input"] for line in lines] == [str(path) for path in good]  # names that are no UTF-8, too
    written = {str(path) for path in (tmp_path / "out").iterdir()}
    assert {line["output"] for line in lines} == written
    assert len(written) == 100 - count
    assert stderr.endswith(f"{count} of 100 files failed\n")
    named = [line for line in stderr.splitlines() if line.startswith("failed: ")]
    assert len(named) == len(bad) == count
    if subcommand == "transcribe":
        (line,) = (line for line in lines if line["input"] == str(silent))
        assert line["text"] == ""
        assert "silent" in line["note"]
    for path in bad:  # what is wrong with a path is said before the others are read
        (line,) = (line for line in named if line.startswith(f"failed: {printable(str(path))}: `"))
        assert bad[path] in line


def test_a_decoder_error_fails_its_file_alone(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        (tmp_path / f"{number}.wav").write_bytes(encoded(buzz(0.5, number), "WAV", None, RATE + number))
    read = soundfile.SoundFile.read

    def failing(self: soundfile.SoundFile, *arguments: object, **options: object) -> object:
        if self.samplerate == RATE + 1:
            raise AssertionError("a decoder's own")
        return read(self, *arguments, **options)

    monkeypatch.setattr(soundfile.SoundFile, "read", failing)
    with pytest.raises(mmdec.BatchError) as caught:
        mmdec.translate_speech(sorted(tmp_path.glob("*.wav")), model=tiny_model, device="cpu")
    assert [result is None for result in caught.value.results] == [False, True, False]
    assert "(a decoder's own)" in str(caught.value.errors[1])


@pytest.mark.parametrize("how", ["closed", "failing"])
def test_an_empty_file_object_fails_alone(how: str, whisper: Path) -> None:
    class Failing:
        def read(self, size: int = -1) -> bytes:
            raise OSError(5, "Input/output error")

    class Closed(Failing):
        def read(self, size: int = -1) -> bytes:
            raise ValueError("I/O operation on closed file")

    batch = [buzz(0.5), Failing() if how == "failing" else Closed()]
    with pytest.raises(mmdec.BatchError) as caught:
        mmdec.transcribe(batch, sample_rate=RATE, model=whisper, device="cpu", language="en")  # type: ignore[arg-type]
    assert caught.value.results[0] is not None
    assert "the file object is not (I" in str(caught.value.errors[1])


def test_a_model_that_fails_on_one_recording_does_not_blame_the_others(
    whisper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from mmdec import cli
    from mmdec.whisper import recordings

    lengths = (0.4, 0.9, 0.6, 0.5)
    paths = [tmp_path / f"{number}.wav" for number in range(4)]
    for path, seconds in zip(paths, lengths, strict=True):
        path.write_bytes(encoded(buzz(seconds), "WAV"))
    real = recordings.transcribe_windows

    def failing(recording: Any) -> object:
        if int(recording.attention_mask.sum()) == 60:  # frames of 0.01 s
            raise RuntimeError("out of memory")
        return (yield from real(recording))

    monkeypatch.setattr(recordings, "transcribe_windows", failing)
    arguments = ["transcribe", *map(str, paths), "-o", str(tmp_path / "out"), "--model", str(whisper), "-l", "en"]
    result = CliRunner().invoke(cli.app, [*arguments, "--device", "cpu"])
    assert result.exit_code == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0.txt", "1.txt", "3.txt"]
    lines = result.stderr.splitlines()
    assert lines[-2:] == [f"failed: {paths[2]}: RuntimeError: out of memory", "1 of 4 files failed"]
    assert all(line.startswith("note: ") and "cut at" in line for line in lines[:-2])


def test_a_recording_without_units_is_refused(tiny_model: Path) -> None:
    import copy

    import torch

    from mmdec.daspeech.units import NUM_SPECIAL_UNITS

    loaded = mmdec.load(tiny_model, "cpu")
    silenced = copy.deepcopy(loaded)
    weight = silenced.model.decoder.embed_tokens.weight
    with torch.no_grad():  # whatever a vertex holds, a special unit wins
        weight[NUM_SPECIAL_UNITS:] = 0
        weight[0] = torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(0))
        weight[1] = -weight[0]
    with pytest.raises(mmdec.InputError, match="`audio` must hold speech that the model recognises, but it found none"):
        mmdec.translate_speech(buzz(1.0), sample_rate=RATE, model=silenced)
    real = silenced.translate
    spoken = loaded.translate

    def some(samples: list, *rest: object) -> list:
        return [(real if len(sample) < 1.2 * RATE else spoken)([sample], *rest)[0] for sample in samples]  # type: ignore[arg-type]

    silenced.translate = some  # type: ignore[method-assign]
    with pytest.raises(mmdec.BatchError) as caught:
        mmdec.translate_speech([buzz(2.0), buzz(1.0), np.zeros(5)], sample_rate=RATE, model=silenced)
    assert [result is None for result in caught.value.results] == [False, True, True]
    assert list(caught.value.errors) == [1, 2]
    assert "found none" in str(caught.value.errors[1])


@pytest.mark.parametrize("rejected", [(), (0,), (1,), (0, 1)])
def test_results_are_reported_in_order_past_rejected_inputs(rejected: tuple[int, ...]) -> None:
    batch, reported = InputBatch([None] * 3, single=False), list[int]()
    accepted = [index for index in range(3) if index not in rejected]
    for index in (2, 0, 1):
        if index in rejected:
            batch.errors[index] = mmdec.InputError("")
        batch.add({} if index in rejected else {index: "text"}, lambda index, _: reported.append(index))
    assert reported == accepted
    assert batch.results == dict.fromkeys(accepted, "text")
