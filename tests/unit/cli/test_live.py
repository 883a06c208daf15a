"""`mmdec transcribe -`: raw samples, wav streams and whole files from a pipe, in every form of output."""

from __future__ import annotations

import io
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from typer.testing import CliRunner, Result

import mmdec
from mmdec import cli
from mmdec.errors import InputError
from mmdec.io.audio.pipe import PipedSound, decode_samples, is_wav, stream_pieces, wav_stream
from tests.conftest import RATE, buzz
from tests.support.tiny_whisper import write
from tests.support.warm_processes import start

VOICE = np.concatenate([np.zeros(RATE), buzz(0.7), np.zeros(2 * RATE), buzz(0.6, 1), np.zeros(RATE)]).astype("float32")
S16 = np.round(VOICE * 32767).astype("<i2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("live") / "four", with_heads=False, seconds=4)


@pytest.fixture(scope="module")
def finals(model: Path) -> list[mmdec.StreamUpdate]:
    stream = mmdec.transcribe_stream([S16], model=model, device="cpu", language="en", every=None, timestamps="segment")
    return [update for update in stream if update.final]


@pytest.fixture
def call(model: Path):
    def run(content: bytes, *arguments: object) -> Result:
        given = ["transcribe", "-", *arguments, "--model", model, "--device", "cpu", "--language", "en"]
        return CliRunner().invoke(cli.app, [str(argument) for argument in given], input=content)

    return run


def wav(data: np.ndarray, rate: int = RATE, subtype: str = "PCM_16", form: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, data, rate, subtype=subtype, format=form)
    return file.getvalue()


def streamed(content: bytes) -> bytes:
    """Return a wav whose writer did not know its length, as FFmpeg writes it into a pipe."""
    at = content.index(b"data")
    return content[:4] + b"\xff\xff\xff\xff" + content[8 : at + 4] + b"\xff\xff\xff\xff" + content[at + 8 :]


def lines(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_raw_samples_are_transcribed(call, finals: list[mmdec.StreamUpdate]) -> None:
    timed = lines(call(S16.tobytes(), "-t", "segment"))
    assert timed == [
        f"[00:00:{part.start:06.3f} --> 00:00:{part.end:06.3f}] {part.text}"
        for update in finals
        for part in update.segments
    ]
    assert len(finals) == 2


@pytest.mark.parametrize(
    "content",
    [
        wav(S16),
        streamed(wav(S16)),
        wav(VOICE, subtype="FLOAT"),
        wav(S16, subtype="PCM_24"),
        wav(np.stack([S16, S16], 1)),
    ],
    ids=["wav", "of unknown length", "floats", "24 bit", "stereo"],
)
def test_a_wav_stream_is_transcribed(call, content: bytes) -> None:
    assert lines(call(content)) == lines(call(S16.tobytes()))


def test_another_file_is_read_whole(call, model: Path) -> None:
    content = wav(S16, form="FLAC")
    expected = mmdec.transcribe(content, model=model, device="cpu", language="en")
    assert expected.text
    assert "\n".join(lines(call(content))) == expected.text


def test_rate_and_encoding_of_samples(call) -> None:
    """Given explicitly, they are trusted, whatever the first bytes look like."""
    slow = np.repeat(VOICE, 3)
    assert len(lines(call(slow.astype("<f4").tobytes(), "--rate", 48_000, "--encoding", "f32"))) == 2
    assert lines(call(b"RIFF\0\0\0\0WAVE" + bytes(RATE), "--rate", 16_000)) == []


def test_json_has_a_line_an_update(call, finals: list[mmdec.StreamUpdate]) -> None:
    updates = [json.loads(line) for line in lines(call(S16.tobytes(), "--json", "--every", 0, "-t", "segment"))]
    assert [update["final"] for update in updates] == [True, True]
    assert [update["text"] for update in updates] == [update.text for update in finals]
    assert [update["start"] for update in updates] == [update.start for update in finals]
    assert [part["start"] for update in updates for part in update["segments"]] == [
        part.start for update in finals for part in update.segments
    ]
    assert "segments" in json.loads(lines(call(S16.tobytes(), "--format", "json"))[0])


def test_subtitles_are_numbered_through(call, finals: list[mmdec.StreamUpdate]) -> None:
    subtitles = "\n".join(lines(call(S16.tobytes(), "--format", "srt")))
    cues = [cue.splitlines() for cue in subtitles.strip().split("\n\n")]
    assert [cue[0] for cue in cues] == [str(number) for number in range(1, len(cues) + 1)]
    assert [" ".join(cue[2:]) for cue in cues] == [
        part.text for update in finals for part in update.segments if part.text
    ]
    shown = "\n".join(lines(call(S16.tobytes(), "--format", "vtt")))
    assert shown.startswith("WEBVTT\n\n00:00:0")
    assert shown.count("WEBVTT") == 1
    assert shown.count(" --> ") == len(cues)


@pytest.mark.slow
def test_text_comes_while_the_pipe_is_open(model: Path, tmp_path: Path) -> None:
    """In a process of its own: the first line is there before the sound ends."""
    command = ["mmdec", "transcribe", "-", "--model", str(model), "--language", "en", "--device", "cpu"]
    content, error_log = streamed(wav(S16)), tmp_path / "errors"
    (receive, send), (read, write) = os.pipe(), os.pipe()
    with error_log.open("wb") as errors, os.fdopen(receive), os.fdopen(write):
        program = start([*command, "--threads", "1", "--every", "0"], streams=(receive, write, errors))
    with os.fdopen(send, "wb") as sound, os.fdopen(read, "rb") as text:
        sound.write(content[: 2 * 3 * RATE])
        sound.flush()
        first = text.readline()
        sound.write(content[2 * 3 * RATE :])
        sound.close()
        rest = text.read()
    assert program.wait(120) == 0, error_log.read_text()
    assert first.strip()
    assert len(rest.splitlines()) == 1
    assert "Traceback" not in error_log.read_text()


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (b"", (), "standard input is empty"),
        (S16.tobytes() + b"\0", (), "whole sample of 2 bytes, but ends with 1 bytes"),
        (np.array([np.nan] * 9, "<f4").tobytes(), ("--encoding", "f32"), "9 of 9 of one are NaN"),
        (S16.tobytes(), ("--encoding", "mp3"), "`--encoding` must be one of"),
        (S16.tobytes(), ("--rate", 100), "`sample_rate` must be at least"),
        (S16.tobytes(), ("--pause", 0.01), "`--pause` must be"),
        (S16.tobytes(), ("--output", "a.txt"), "`--output` cannot be combined with"),
        (S16.tobytes(), ("--compare",), "`--compare` cannot be combined with"),
        (S16.tobytes(), ("--min-confidence", 0.5), "`--min-confidence` cannot be combined with"),
        (S16.tobytes(), ("--min-confidence", 0), "`--min-confidence` cannot be combined with"),
        (S16.tobytes(), ("--cut-at-pauses",), "`--cut-at-pauses` cannot be combined with"),
        (S16.tobytes(), ("--batch-size", 8), "`--batch-size` cannot be combined with"),
        (S16.tobytes(), ("--shard", "3/4"), "`--shard` cannot be combined with"),
        (S16.tobytes(), ("--engine", "ray"), "`--engine` cannot be combined with"),
        (S16.tobytes(), ("--workers", 7), "`--workers` cannot be combined with"),
        (S16.tobytes(), ("--table", "jsonl"), "`--table` cannot be combined with"),
        (wav(S16)[:30], (), "ends within its header"),
        (wav(S16, subtype="ULAW"), (), "samples have code 7"),
        (wav(S16, form="FLAC")[:60], (), "`audio`"),
    ],
    ids=range(19),
)
def test_errors_are_one_sentence(call, content: bytes, arguments: tuple[Any, ...], message: str) -> None:
    """The command's own frame prints an InputError as its sentence."""
    result = call(content, *arguments)
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)


def test_text_before_an_error_is_printed(call, finals: list[mmdec.StreamUpdate]) -> None:
    result = call(S16.tobytes() + b"\0", "-t", "segment")
    assert isinstance(result.exception, InputError)
    assert result.stdout.count(" --> ") == sum(len(update.segments) for update in finals)


def test_standard_input_must_be_the_only_input(call) -> None:
    result = call(S16.tobytes(), "talk.wav")
    assert isinstance(result.exception, InputError)
    assert "alone" in str(result.exception)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"code": 6}, "code 6 and 16 bits"),
        ({"channels": 0}, "0 channels"),
        ({"channels": 9}, "9 channels"),
        ({"rate": 1}, "`sample_rate` must be at least 8000 Hz, but is 1 in the wav stream"),
        ({"bits": 12}, "code 1 and 12 bits"),
        ({"junk": 2**31}, "declares 2147483648 bytes"),
    ],
    ids=str,
)
def test_broken_headers_are_refused(change: dict[str, int], message: str) -> None:
    form = {"code": 1, "channels": 1, "rate": RATE, "bits": 16, "junk": 4, **change}
    chunk = struct.pack("<HHIIHH", form["code"], form["channels"], form["rate"], 0, 0, form["bits"])
    content = struct.pack("<4sI", b"JUNK", form["junk"]) + b"abcd" + struct.pack("<4sI", b"fmt ", 16) + chunk
    with pytest.raises(InputError, match=message):
        wav_stream(b"RIFF\0\0\0\0WAVE", io.BytesIO(content + struct.pack("<4sI", b"data", 0)))


def test_the_header_says_where_samples_end() -> None:
    """Bytes that follow them in the file are not sound."""
    file = io.BytesIO(wav(S16) + b"LIST\4\0\0\0abcd")
    head = file.read(12)
    assert is_wav(head)
    sound = wav_stream(head, file)
    result = np.concatenate([*stream_pieces(sound, file)])
    assert np.array_equal(result, decode_samples(S16.tobytes(), "s16"))


def test_pieces_do_not_wait_for_each_other() -> None:
    """Available bytes are returned at once; the rest when it arrives."""
    receive, send = os.pipe()
    with os.fdopen(receive, "rb") as reader, os.fdopen(send, "wb") as writer:
        result = stream_pieces(PipedSound(RATE, 1, "s16", None, b""), reader)
        writer.write(S16[:1000].tobytes())
        writer.flush()
        assert len(next(result)) == 1000
        writer.write(S16[1000:3000].tobytes())
        writer.close()
        assert sum(map(len, result)) == 2000


@pytest.mark.parametrize("data", [S16, np.zeros(2 * RATE, "<i2")])
def test_a_loss_is_in_the_json_with_and_without_speech(call, data: np.ndarray) -> None:
    content = wav(data)
    updates = [json.loads(line) for line in lines(call(content[: int(0.95 * len(content))], "--json"))]
    assert updates[-1]["final"]
    assert "the file ends at" in updates[-1]["note"]


def test_opposite_channels_of_a_piped_wav_are_noted(call) -> None:
    updates = [json.loads(line) for line in lines(call(wav(np.stack([S16, -S16], axis=1)), "--json"))]
    assert "opposite and cancel each other" in updates[-1]["note"]
