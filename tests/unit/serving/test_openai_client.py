"""Tests the server with OpenAI's client: every field of its types with defaults, nulls and empty values."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import pytest

import mmdec
from tests.conftest import RATE, buzz
from tests.support.pictures import QUESTION, pixels
from tests.support.running_servers import picture, served, wav

openai = pytest.importorskip("openai", reason="needs `pip install openai`")
CHAT, TRANSCRIBE = "/v1/chat/completions", "/v1/audio/transcriptions"
HARMLESS: dict[str, Any] = {  # fields that change no answer, and neutral values of others
    "function_call": "none",
    "logprobs": False,
    "metadata": {"a": "b"},
    "modalities": ["text"],
    "n": 1,
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "A star."},
    "presence_penalty": 0.0,
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "response_format": {"type": "text"},
    "safety_identifier": "s",
    "service_tier": "auto",
    "store": True,
    "stream_options": {"include_usage": False, "include_obfuscation": False},
    "tool_choice": "none",
    "user": "me",
    "verbosity": "medium",
}
HARMFUL: dict[str, Any] = {
    "audio": {"format": "wav", "voice": "ash"},
    "frequency_penalty": 0.5,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "logit_bias": {"5": 1},
    "modalities": ["text", "audio"],
    "moderation": {"model": "m"},
    "n": 2,
    "presence_penalty": -0.5,
    "reasoning_effort": "high",
    "response_format": {"type": "json_object"},
    "tool_choice": "required",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "top_logprobs": 2,
    "verbosity": "low",
    "web_search_options": {"search_context_size": "low"},
}
ASKED: dict[str, Any] = {"model": "pictures", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def web(engines: dict[str, Any]) -> Iterator[httpx.Client]:
    with served(engines) as (client, _):
        yield client


def fields(types: Any) -> list[str]:
    return sorted({*get_type_hints(types)} - {"model", "messages", "file"})


def test_every_field_of_a_chat_may_be_null_or_empty(web: httpx.Client) -> None:
    from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as Params

    names = fields(Params)
    assert len(names) > 30
    nothing = dict.fromkeys(names)
    assert web.post(CHAT, json=nothing | ASKED).status_code == 200
    empty = {"tools": [], "functions": [], "logit_bias": {}, "metadata": {}, "stop": [], "stream_options": {}}
    empty |= {"web_search_options": {}, "user": "", "prompt_cache_options": {}, "modalities": []}
    for given in (empty, HARMLESS):
        assert set(given) <= set(names)
        answer = web.post(CHAT, json=ASKED | given)
        assert answer.status_code == 200, answer.text
    for name in names:
        answer = web.post(CHAT, json={**ASKED, "max_tokens": 1, name: None})
        assert answer.status_code == 200, (name, answer.text)


@pytest.mark.parametrize("name", HARMFUL)
def test_unsupported_fields_that_change_an_answer_are_refused(web: httpx.Client, name: str) -> None:
    answer = web.post(CHAT, json={**ASKED, name: HARMFUL[name]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert f"`{name}`" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [TRANSCRIBE, "/v1/audio/translations"])
@pytest.mark.parametrize("null", ["", "null"])
def test_every_field_of_a_recording_may_be_null(web: httpx.Client, path: str, null: str) -> None:
    from openai.types.audio.transcription_create_params import TranscriptionCreateParamsStreaming as Transcription
    from openai.types.audio.translation_create_params import TranslationCreateParams as Translation

    names = fields(Transcription if path == TRANSCRIBE else Translation)
    lists = ("include", "keywords", "known_speaker_names", "known_speaker_references", "languages")
    lists += ("timestamp_granularities",)
    form = {f"{name}[]" if name in lists else name: "" if name == "prompt" else null for name in names}
    answer = web.post(path, files={"file": ("a.wav", wav(0.5))}, data={**form, "model": "whisper"})
    assert answer.status_code == 200, answer.text
    assert set(answer.json()) - {"note"} == {"text", "usage"}  # the small model cuts its text


def test_an_assistant_s_message_is_taken_as_the_client_returns_it(web: httpx.Client) -> None:
    message = web.post(CHAT, json=ASKED).json()["choices"][0]["message"]
    message |= {"tool_calls": None, "function_call": None, "audio": None, "annotations": []}
    refused = {"role": "assistant", "content": None, "refusal": "No.", "tool_calls": []}
    part = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    for before in (message, refused, part):
        messages = [*ASKED["messages"], before, {"role": "user", "content": "And?", "name": "me"}]
        assert web.post(CHAT, json={**ASKED, "messages": messages}).status_code == 200
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert web.post(CHAT, json={**ASKED, "messages": [*ASKED["messages"], called]}).status_code == 400


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the client's own word on translations
def test_the_client_is_served(engines: dict[str, Any], folder: Path) -> None:
    with served(engines, token="sesame") as (server, _):
        client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="sesame", max_retries=0)
        assert {model.id for model in client.models.list()} == {"whisper", "translator", "pictures"}
        sound, call = ("a.wav", wav(0.8)), client.audio.transcriptions.create
        wanted = mmdec.transcribe(sound[1], model=folder / "whisper").text
        assert call(model="whisper", file=sound).text == wanted
        timed = {"response_format": "verbose_json", "timestamp_granularities": ["word", "segment"]}
        verbose = call(model="whisper", file=sound, **timed)
        assert verbose.duration == pytest.approx(0.8)
        assert len(verbose.words) > 0 < len(verbose.segments)
        assert call(model="whisper", file=sound, response_format="text") == wanted + "\n"
        told = [*call(model="whisper", file=sound, stream=True)]
        assert "".join(event.delta for event in told[:-1]) == told[-1].text == wanted
        messages = [{"role": "user", "content": [picture(pixels(6)), {"type": "text", "text": QUESTION}]}]
        chat: dict[str, Any] = {"model": "pictures", "messages": messages, "max_tokens": 20, "temperature": 0}
        wanted = mmdec.describe(pixels(6), QUESTION, model=folder / "pictures", max_new_tokens=20).text
        assert client.chat.completions.create(**chat).choices[0].message.content == wanted
        chunks = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(stream=True, **chat)]
        assert "".join(chunks) == wanted
        assert client.models.retrieve("whisper").id == "whisper"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-5/mini")
        translated = client.audio.translations.create(model="whisper", file=sound).text
        assert translated == mmdec.transcribe(sound[1], model=folder / "whisper", task="translate").text
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**{**chat, "model": "gpt-5"})
        with pytest.raises(openai.BadRequestError):
            call(model="whisper", file=b"no sound")
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="else").models.list()


@pytest.mark.filterwarnings("ignore:connect.. must be used:DeprecationWarning")  # the client's own call of websockets
def test_the_client_speaks_live(engines: dict[str, Any]) -> None:
    pytest.importorskip("websockets", reason="needs `pip install 'mmdec[serve]'`")
    with served(engines, ws="auto") as (server, _):
        client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none")
        with client.realtime.connect(model="whisper") as live:
            form = {"format": {"type": "audio/pcm", "rate": RATE}}
            live.session.update(session={"type": "transcription", "audio": {"input": form}})
            sound = (buzz(0.8) * 32767).astype("<i2").tobytes()
            live.input_audio_buffer.append(audio=base64.b64encode(sound).decode())
            live.input_audio_buffer.commit()
            for event in live:
                assert event.type != "error"
                if event.type.endswith(".completed"):
                    assert event.transcript
                    break
