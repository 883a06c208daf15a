"""Tests the endpoints for sound: each format, the same text as the public call, streams, refusals."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import numpy as np
import pytest
import soundfile
import torch

import mmdec
from mmdec.core.scheduler import Scheduler
from mmdec.pretrained.audio_lm import load_audio_lm
from mmdec.serving.engines import EngineOptions, TranscriptionEngine
from mmdec.serving.server import ServerLimits, confidence_warning
from tests.conftest import RATE, buzz
from tests.support.audio_lm_folders import write
from tests.support.running_servers import as_wav, events, finished, served, until, wav

TRANSCRIBE, TRANSLATE = "/v1/audio/transcriptions", "/v1/audio/translations"


@pytest.fixture(scope="module")
def client(engines: dict[str, Any]) -> Iterator[httpx.Client]:
    with served(engines) as (client, _):
        yield client


def post(client: httpx.Client, path: str, sound: bytes, **form: Any) -> httpx.Response:
    return client.post(path, files={"file": ("a.wav", sound)}, data=form)


@pytest.mark.parametrize("seconds", [0.7, 2.6])
def test_a_transcript_is_that_of_the_call(client: httpx.Client, folder: Path, seconds: float) -> None:
    sound = wav(seconds)
    options: dict[str, Any] = {"model": folder / "whisper", "language": "en"}
    wanted = mmdec.transcribe(sound, timestamps="word", **options)
    answer = post(client, TRANSCRIBE, sound, language="en").json()
    plain = mmdec.transcribe(sound, **options).text
    answer.pop("note", None)  # the small model may cut its text
    assert answer == {"text": plain, "usage": {"type": "duration", "seconds": seconds}}
    assert post(client, TRANSCRIBE, sound, language="en", response_format="text").text == plain + "\n"
    names = ["word", "segment"]
    form = {"language": "en", "response_format": "verbose_json", "timestamp_granularities[]": names}
    verbose = post(client, TRANSCRIBE, sound, **form).json()
    assert (verbose["text"], verbose["language"], verbose["task"]) == (wanted.text, "en", "transcribe")
    assert verbose["duration"] == seconds
    assert [(each["start"], each["end"], each["text"], each["tokens"]) for each in verbose["segments"]] == [
        (each.start, each.end, each.text, each.tokens) for each in wanted.segments
    ]
    words = [word for segment in wanted.segments for word in segment.words or ()]
    assert [(each["word"], each["start"], each["end"]) for each in verbose["words"]] == [
        (word.text.strip(), word.start, word.end) for word in words
    ]
    segments = mmdec.transcribe(sound, timestamps="segment", **options)
    for kind in ("srt", "vtt"):
        assert post(client, TRANSCRIBE, sound, language="en", response_format=kind).text == segments.format(kind)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (TRANSCRIBE, "include[]"),
        (TRANSCRIBE, "timestamp_granularities"),  # OpenAI's name ends in []
        (TRANSLATE, "stream"),
        (f"{TRANSLATE}/speech", "voice"),
    ],
)
def test_a_field_that_is_not_known_is_refused(client: httpx.Client, path: str, name: str) -> None:
    answer = post(client, path, wav(0.7), **{name: "true"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


def test_a_cut_file_is_noted_or_refused(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmdec.tasks.usage.cut_note", lambda *_: "")  # texts of the tiny model are cut, too
    cut, note = wav(0.8)[:-6400], "the file ends at 0.6 s of 0.8 s"
    for path in (TRANSCRIBE, TRANSLATE):
        assert post(client, path, cut).json()["note"] == note
        assert unquote(post(client, path, cut, response_format="text").headers["X-Note"]) == note
        assert post(client, path, cut, strict="true").status_code == 400
    assert post(client, TRANSCRIBE, cut, response_format="verbose_json").json()["note"] == note
    assert unquote(post(client, TRANSCRIBE, cut, response_format="srt").headers["X-Note"]) == note
    assert events(post(client, TRANSCRIBE, cut, stream="true").text)[-1]["note"] == note
    assert unquote(post(client, f"{TRANSLATE}/speech", cut).headers["X-Note"]) == note
    assert "note" not in post(client, TRANSCRIBE, wav(0.8), strict="true").json()


@pytest.mark.parametrize(("most", "reason"), [(3, "length"), (None, "stop")])
def test_the_finish_reason_is_reported(
    client: httpx.Client, engines: dict[str, Any], most: int | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = engines["whisper"].loaded.model.generation_config
    if most is None:  # the first token ends the text
        first = mmdec.transcribe(wav(0.8), model=engines["whisper"].loaded, max_new_tokens=1).tokens[0]
        monkeypatch.setattr(settings, "eos_token_id", [settings.eos_token_id, first])
    else:
        monkeypatch.setattr(settings, "max_new_tokens", most)
        monkeypatch.setattr(settings, "max_length", None)
    answer = post(client, TRANSCRIBE, wav(0.8), response_format="verbose_json").json()
    assert answer["finish_reason"] == reason
    assert answer.get("note") == (f"cut at {most} tokens" if most else None)  # the API has no option for it


@pytest.mark.parametrize("seconds", [0.8, 2.6])
def test_a_streamed_transcript_adds_up(client: httpx.Client, folder: Path, seconds: float) -> None:
    *deltas, done = events(post(client, TRANSCRIBE, wav(seconds, 3), stream="true").text)
    assert done["type"] == "transcript.text.done"
    assert done["text"] == mmdec.transcribe(wav(seconds, 3), model=folder / "whisper").text != ""
    assert {each["type"] for each in deltas} == {"transcript.text.delta"}
    assert "".join(each["delta"] for each in deltas) == done["text"]
    assert len(deltas) > 1 or seconds > 1


def test_a_temperature_samples_where_a_language_model_hears(tmp_path: Path) -> None:
    loaded = load_audio_lm(write("Qwen2Audio", tmp_path / "heard"))
    engine, samples = TranscriptionEngine(loaded, EngineOptions(threads=1)), torch.from_numpy(buzz(0.7))
    options: dict[str, Any] = {"sample_rate": RATE, "model": loaded, "max_new_tokens": 12}
    torch.manual_seed(1)
    wanted = mmdec.transcribe(samples, temperature=1.0, do_sample=True, **options).tokens

    async def heard(**asked: Any) -> list[int]:
        torch.manual_seed(1)
        job, scheduler = engine.job(engine.read_speech(samples, max_new_tokens=12, **asked)), Scheduler()
        task = scheduler.add(job.steps(job))
        scheduler.run()
        return task.result.tokens

    assert finished(heard(temperature=1.0)) == wanted
    assert finished(heard()) == mmdec.transcribe(samples, do_sample=False, **options).tokens != wanted


def test_recordings_of_an_audio_language_model_count_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_audio_lm(write("Qwen2Audio", tmp_path / "heard"))
    monkeypatch.setattr(loaded.model.generation_config, "max_new_tokens", 12)
    engine, sound = TranscriptionEngine(loaded, EngineOptions(threads=1)), wav(0.7)
    samples = torch.from_numpy(buzz(0.7))
    tokens = loaded.inputs([samples])["input_ids"].shape[1] + 12
    assert engine.read_speech(samples).tokens == tokens
    assert engine.read_speech(torch.zeros(RATE)).tokens == 0  # silence is not decoded
    with served({"hears": engine}, ServerLimits(cache_tokens=tokens - 1)) as (client, _):
        for form in ({}, {"stream": "true"}):
            refused = post(client, TRANSCRIBE, sound, **form)
            assert refused.status_code == 400
            message = refused.json()["error"]["message"]
            assert f"at most {tokens - 1} tokens" in message
            assert f"take up {tokens}." in message
    for cache, together in ((2 * tokens - 1, False), (2 * tokens, True)):
        with (
            served({"hears": engine}, ServerLimits(cache_tokens=cache)) as (client, server),
            ThreadPoolExecutor(2) as pool,
        ):
            with mmdec.model_lock(loaded.model).write():
                texts = [pool.submit(post, client, TRANSCRIBE, sound) for _ in range(2)]
                until(lambda: server.load()["hears"].waiting == 2)
            assert len({text.result().json()["text"] for text in texts}) == 1
            values = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines())
            rows = "mmdec_batch_rows"
            single = values[f'{rows}_bucket{{model="hears",le="1"}}'] == values[f'{rows}_count{{model="hears"}}']
            assert single != together


def test_recordings_that_come_together_get_their_own_text(client: httpx.Client, folder: Path) -> None:
    sounds = [buzz(0.5 + 0.06 * index, index) for index in range(9)]
    wanted = mmdec.transcribe(sounds, sample_rate=RATE, model=folder / "whisper")
    assert len({each.text for each in wanted}) > 3
    with ThreadPoolExecutor(9) as pool:
        answers = [pool.submit(post, client, TRANSCRIBE, as_wav(sound)) for sound in sounds]
        rounded = mmdec.transcribe([as_wav(sound) for sound in sounds], model=folder / "whisper")
        assert [answer.result().json()["text"] for answer in answers] == [each.text for each in rounded]


def test_recordings_and_chats_run_side_by_side(engines: dict[str, Any], folder: Path) -> None:
    sounds = [wav(0.6 + 0.1 * index, index) for index in range(3)]
    expected = [mmdec.transcribe(sound, model=folder / "whisper").text for sound in sounds]
    with served(engines) as (client, server), ThreadPoolExecutor(3) as pool:
        with mmdec.model_lock(engines["whisper"].loaded.model).write():  # none begins before all have come
            answers = [pool.submit(post, client, TRANSCRIBE, sound) for sound in sounds]
            until(lambda: server.load()["whisper"].waiting == 3)
            chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
            assert client.post("/v1/chat/completions", json=chat).status_code == 200  # its model is free
        assert [answer.result().json()["text"] for answer in answers] == expected
        text = client.get("/metrics").text
        rows, steps = (
            float(text.partition(f'mmdec_batch_rows_{name}{{model="whisper"}} ')[2].split()[0])
            for name in ("sum", "count")
        )
        assert rows > 1.5 * steps


def test_silence_is_an_empty_transcript(client: httpx.Client) -> None:
    answer = post(client, TRANSCRIBE, as_wav(np.zeros(8000, np.float32)))
    assert (answer.status_code, answer.json()["text"]) == (200, "")


def test_translations_are_those_of_the_call(client: httpx.Client, folder: Path) -> None:
    sound = wav(0.9, 4)
    wanted = mmdec.translate_speech(sound, model=folder / "translator")
    assert post(client, TRANSLATE, sound).json() == {"text": wanted.text}
    assert post(client, TRANSLATE, sound, response_format="text").text == wanted.text
    spoken = post(client, f"{TRANSLATE}/speech", sound, response_format="flac")
    assert spoken.headers["content-type"] == "audio/flac"
    assert unquote(spoken.headers["x-text"]) == wanted.text
    samples, rate = soundfile.read(io.BytesIO(spoken.content), dtype="float32")
    assert rate == wanted.sample_rate
    assert np.abs(samples - wanted.audio).max() < 1e-4  # 16 bits
    by_whisper = post(client, TRANSLATE, sound, model="whisper").json()["text"]
    assert by_whisper == mmdec.transcribe(sound, model=folder / "whisper", task="translate").text


@pytest.mark.parametrize(
    ("path", "form", "param"),
    [
        (TRANSCRIBE, {"language": "xx"}, "language"),
        (TRANSCRIBE, {"model": "translator"}, "model"),
        (TRANSCRIBE, {"model": "gpt-5"}, "model"),
        (TRANSCRIBE, {"response_format": "xml"}, "response_format"),
        (TRANSCRIBE, {"temperature": "7"}, "temperature"),
        (TRANSCRIBE, {"temperature": "nan"}, "temperature"),
        (TRANSCRIBE, {"response_format": "srt", "stream": "true"}, "stream"),
        (TRANSCRIBE, {"response_format": "verbose_json", "timestamp_granularities[]": "letter"}, None),
        (TRANSCRIBE, {"prompt": "word " * 9999}, "prompt"),
        (TRANSLATE, {"response_format": "srt"}, "response_format"),
        (TRANSLATE, {"prompt": "Hello"}, "prompt"),
        (f"{TRANSLATE}/speech", {"response_format": "aac"}, "response_format"),
    ],
)
def test_wrong_options_are_refused_by_name(client: httpx.Client, path: str, form: dict[str, Any], param: Any) -> None:
    answer = post(client, path, wav(0.5), **form)
    assert answer.status_code == (404 if param == "model" else 400)
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert param is None or error["param"] == param


def test_english_is_not_translated_into_english(
    client: httpx.Client, engines: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = engines["whisper"].loaded.model.generation_config
    monkeypatch.setattr(settings, "lang_to_id", {"<|en|>": settings.lang_to_id["<|en|>"]})
    answer = post(client, TRANSLATE, wav(0.5), model="whisper")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    monkeypatch.setattr(settings, "is_multilingual", False)
    assert post(client, TRANSCRIBE, wav(0.5), model="whisper", language="en").status_code == 200
    assert post(client, TRANSCRIBE, wav(0.5), model="whisper", language="de").status_code == 400


def test_an_unlikely_transcript_has_a_warning(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "warning" not in post(client, TRANSCRIBE, wav(0.7)).json()  # no calibration
    assert confidence_warning(None, True) == confidence_warning(0.9, True) == confidence_warning(0.1, False) == {}
    monkeypatch.setattr("mmdec.serving.speech.confidence_warning", lambda value, known: confidence_warning(0.1, True))
    assert "likely wrong" in post(client, TRANSCRIBE, wav(0.7)).json()["warning"]


@pytest.mark.parametrize("content", [b"", b"no sound", wav(0.5)[:60], b"RIFF" + bytes(400)])
def test_files_without_sound_are_refused(client: httpx.Client, content: bytes) -> None:
    for path in (TRANSCRIBE, f"{TRANSLATE}/speech"):
        answer = post(client, path, content)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "audio")


@pytest.mark.parametrize(
    "body",
    [
        {"content": b"{}", "headers": {"Content-Type": "application/json"}},
        {"content": b"--x\r\nContent-Disp", "headers": {"Content-Type": "multipart/form-data; boundary=x"}},
        {"content": b"anything", "headers": {"Content-Type": "multipart/form-data"}},
        {"data": {"file": "a name"}},
        {},
    ],
)
def test_malformed_bodies_are_refused(client: httpx.Client, body: dict[str, Any]) -> None:
    answer = client.post(TRANSCRIBE, **body)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
