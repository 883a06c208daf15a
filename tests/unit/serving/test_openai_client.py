"""Tests the server with OpenAI's client. Without this package, which the tests do not install, they are skipped."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

import mmdec
from tests.conftest import RATE, buzz
from tests.support.pictures import QUESTION, pixels
from tests.support.served import picture, served, wav

openai = pytest.importorskip("openai", reason="needs `pip install openai`")


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
