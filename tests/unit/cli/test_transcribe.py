"""Tests `mmdec transcribe`: printed and written output in each format, and bad files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from typer.testing import CliRunner, Result

import mmdec
from mmdec import cli
from tests.conftest import RATE, buzz
from tests.support.tiny_whisper import write


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def recordings(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "in" / name for name in ("a.wav", "b.flac", "c.wav")]
    paths[0].parent.mkdir()
    for seed, path in enumerate(paths):
        soundfile.write(path, buzz((0.5, 1.2, 0.7)[seed], seed), RATE)
    return paths


@pytest.fixture
def call(model: Path):
    def run(*arguments: object) -> Result:
        given = ["transcribe", *arguments, "--model", model, "--device", "cpu", "--language", "en"]
        return CliRunner().invoke(cli.app, [str(argument) for argument in given])

    return run


def test_text_to_stdout(call, model: Path, recordings: list[Path]) -> None:
    expected = [mmdec.transcribe(path, model=model, device="cpu", language="en", drafter=None) for path in recordings]
    single = call(recordings[0])
    assert single.exit_code == 0, single.output
    assert single.stdout == expected[0].text + "\n"
    several = call(*recordings, "--batch-size", 2)
    assert several.stdout == "".join(
        f"{path}:\n  {transcript.text}\n" for path, transcript in zip(recordings, expected, strict=True)
    )
    timed = call(recordings[1], "-t", "segment").stdout.splitlines()
    assert timed[0].startswith("[00:00:0")
    assert " --> " in timed[0]


def test_cutting_at_pauses_equals_the_call(call, model: Path, recordings: list[Path]) -> None:
    """The second one is longer than this model's window of one second."""
    options: dict[str, Any] = {
        "model": model,
        "device": "cpu",
        "language": "en",
        "timestamps": "segment",
        "cut_at_pauses": True,
    }
    expected = mmdec.transcribe([*recordings], **options)
    result = call(*recordings, "--cut-at-pauses", "-t", "segment", "--json")
    assert result.exit_code == 0, result.output
    assert [json.loads(line)["tokens"] for line in result.stdout.splitlines()] == [
        transcript.tokens for transcript in expected
    ]
    assert expected[1].windows > 1


def test_pieces_at_pauses_are_compared_one_recording_at_a_time(call, recordings: list[Path]) -> None:
    result = call(*recordings, "--cut-at-pauses", "--compare", "--drafter", "lookup", "--json")
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["input"] for line in lines] == [str(path) for path in recordings]
    assert [line["compared"]["same_text"] for line in lines] == [True] * 3


def test_a_drafter_by_its_class_gives_the_same_text(call, recordings: list[Path]) -> None:
    plain = call(recordings[0], "--drafter", "none", "--json")
    drafted = call(recordings[0], "--drafter", "mmdec.drafters.lookup:LookupDrafter", "--json")
    assert drafted.exit_code == 0, drafted.output
    assert json.loads(drafted.stdout)["tokens"] == json.loads(plain.stdout)["tokens"]
    missing = call(recordings[0], "--drafter", "mmdec.drafters.lookup:Nothing")
    assert isinstance(missing.exception, mmdec.InputError)
    assert "`--drafter`" in str(missing.exception)


def test_another_text_drafts(call, model: Path, recordings: list[Path], tmp_path: Path) -> None:
    """A text of one recording, a folder with a text of each, and a model that hears them."""
    expected = [json.loads(line)["tokens"] for line in call(*recordings, "--json", "-d", "none").stdout.splitlines()]
    assert call(recordings[1], "--format", "srt", "--output", tmp_path / "b.srt").exit_code == 0
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a.txt", "b.vtt", "c.srt"):
        (folder / name).write_text("00:00:00.000 --> 00:00:01.000\nHello there\n", encoding="utf-8")
    for inputs, options, tokens in (
        (recordings[1:2], ["--draft-text", tmp_path / "b.srt"], expected[1:2]),
        (recordings[1:2], ["--draft-text", tmp_path / "b.srt", "--compare"], expected[1:2]),
        (recordings, ["--draft-text", folder, "--batch-size", 2], expected),
        (recordings, ["--draft-model", model], expected),
    ):
        result = call(*inputs, "--json", *options)
        assert result.exit_code == 0, result.output
        assert [json.loads(line)["tokens"] for line in result.stdout.splitlines()] == tokens


def test_wrong_drafts_are_refused(call, recordings: list[Path], tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("Hello there", encoding="utf-8")
    for inputs, options, message in (
        (recordings, ["--draft-text", text], "must be a folder for 3 recordings"),
        (recordings, ["--draft-text", tmp_path], "b.txt' does not exist"),
        (recordings[:1], ["--draft-text", tmp_path / "none.txt"], "none.txt' does not exist"),
        (recordings[:1], ["--draft-text", text, "--draft-model", "x"], "`--draft-text` cannot be combined"),
        (recordings[:1], ["--draft-text", text, "-d", "lookup"], "cannot be combined with `--drafter`"),
        (["-"], ["--draft-text", text], "cannot be combined with standard input"),
        (recordings[:1], ["--draft-model", tmp_path / "none"], "must be a shipped name"),
    ):
        result = call(*inputs, *options)
        assert isinstance(result.exception, mmdec.InputError)
        assert message in str(result.exception)


def test_json_has_one_object_a_line(call, recordings: list[Path]) -> None:
    result = call(*recordings, "--json", "--timestamps", "word", "--drafter", "lookup")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["input"] for line in lines] == [str(path) for path in recordings]
    for line in lines:
        assert {"text", "language", "segments", "tokens", "rounds", "timings", "lossless"} <= line.keys()
        assert {"features", "encoder", "decoder", "drafter", "total"} == line["timings"].keys()
        assert line["segments"][0]["words"]
        assert line["output"] is None


@pytest.mark.parametrize("kind", ["text", "json", "srt", "vtt"])
def test_transcripts_are_written_into_a_folder_or_a_named_file(
    call, recordings: list[Path], tmp_path: Path, kind: str
) -> None:
    suffix = {"text": "txt"}.get(kind, kind)
    result = call(*recordings, "-o", tmp_path / "out", "--format", kind)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"{name}.{suffix}" for name in "abc"]
    content = (tmp_path / "out" / f"b.{suffix}").read_text(encoding="utf-8")
    named = tmp_path / "new" / f"b.{suffix}"
    assert call(recordings[1], "-o", named).exit_code == 0  # its name says the format
    if kind == "json":
        assert json.loads(content)["text"] == json.loads(named.read_text(encoding="utf-8"))["text"]
    else:
        assert named.read_text(encoding="utf-8") == content
        assert kind == "text" or "-->" in content
    assert f"{recordings[1]} -> " in result.stdout


def test_subtitles_to_stdout(call, recordings: list[Path]) -> None:
    assert call(recordings[0], "-f", "vtt").stdout.startswith("WEBVTT\n")


def test_one_bad_file_does_not_lose_the_others(call, recordings: list[Path], tmp_path: Path) -> None:
    silent, short, out = tmp_path / "silent.wav", tmp_path / "short.wav", tmp_path / "out"
    soundfile.write(silent, np.zeros(RATE), RATE)
    soundfile.write(short, np.ones(9), RATE)
    mixed = [recordings[0], silent, tmp_path / "missing.wav", recordings[2], short]
    for size in (1, 2, 8):
        result = call(*mixed, "-o", out, "--batch-size", size)
        assert result.exit_code == 1
        assert sorted(path.name for path in out.iterdir()) == ["a.txt", "c.txt", "silent.txt"]
        assert (out / "silent.txt").read_text() == "\n"
        assert f"note: {silent}: the recording is silent: its peak is -inf dB" in result.stderr
        assert f"failed: {short}: `audio` must last at least" in result.stderr
        assert f"failed: {tmp_path / 'missing.wav'}: `audio` must be an existing file" in result.stderr
        assert result.stderr.endswith("2 of 5 files failed\n")


def test_unwritable_outputs_are_named(call, recordings: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "a.txt").mkdir(parents=True)
    result = call(*recordings, "-o", out)
    assert result.exit_code == 1
    assert f"failed: {recordings[0]}" in result.stderr
    assert sorted(path.name for path in out.iterdir()) == ["a.txt", "b.txt", "c.txt"]  # and nothing half written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--language", "klingon"], "`--language` must be"),
        (["--format", "doc"], "`--format` must be one of text, json, srt, vtt"),
        (["--format", "srt", "-o", "x.vtt"], "`--format` must fit `--output`"),
        (["--format", "srt", "--json"], "`--format` must be left out with `--json`"),
        (["--timestamps", "sentence"], "`--timestamps` must be"),
        (["--drafter", "eagle"], "`--drafter` must be"),
        (["--task", "sing"], "`--task` must be"),
        (["--no-speech-threshold", "0.6"], "`--logprob-threshold` must be given"),
        (["--encoding", "bogus"], "`--encoding` must come with -, standard input"),
        (["--rate", "77"], "`--rate` must come with -, standard input"),
        (["--every", "0"], "`--every` must come with -, standard input"),
        (["--pause", "1.0"], "`--pause` must come with -, standard input"),
    ],
)
def test_wrong_calls_end_with_2_and_one_line(
    arguments: list[str],
    message: str,
    model: Path,
    recordings: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["transcribe", str(recordings[0]), "--model", str(model), "--device", "cpu", *arguments]
    monkeypatch.setattr(sys, "argv", ["mmdec", *given])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    out, stderr = capsys.readouterr()
    assert out == ""
    assert stderr.startswith(f"error: {message}")
    assert stderr.count("\n") == 1


def test_a_cut_file_is_noted_or_refused(call, recordings: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmdec.tasks.usage.cut_note", lambda *_: "")  # texts of the tiny model are cut, too
    recordings[0].write_bytes(recordings[0].read_bytes()[:-6400])
    note = "the file ends at 0.3 s of 0.5 s"
    result = call(*recordings, "--json")
    assert [json.loads(line)["note"] for line in result.stdout.splitlines()] == [note, "", ""]
    assert f"note: {recordings[0].name}: {note}" in result.stderr or f"note: {recordings[0]}: {note}" in result.stderr
    strict = call(*recordings, "--strict")
    assert strict.exit_code == 1
    assert note in strict.stderr
    assert "1 of 3 files failed" in strict.stderr


def test_fallback_options_are_accepted(call, recordings: list[Path]) -> None:
    ladder = ["--temperature", 0.0, "--temperature", 0.4, "--logprob-threshold", -1.0]
    more = ["--compression-ratio-threshold", 1.35, "--no-speech-threshold", 0.6, "--condition-on-prev-tokens"]
    result = call(recordings[1], "--drafter", "none", "--prompt", "Hello", *ladder, *more)
    assert result.exit_code == 0, result.output


def test_progress_stays_off_stdout_and_off_pipes(
    model: Path, recordings: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmdec.tasks.usage.cut_note", lambda *_: "")
    command = ["transcribe", *map(str, recordings[:2]), "--json", "--device", "cpu", "--model", str(model)]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert len(result.stdout.splitlines()) == 2
