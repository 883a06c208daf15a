"""Tests `/v1/realtime`: final texts equal those of the public call, and a client's errors do not end the session."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

import mmdec
from mmdec.serving.app import build_app
from mmdec.serving.engines import EngineOptions, TranscriptionEngine, load_engine
from mmdec.serving.realtime import TRANSCRIPTION, LiveSession
from mmdec.serving.server import Server, ServerLimits
from tests.conftest import RATE, buzz
from tests.support.audio_lm_folders import write
from tests.support.measurements import measurements
from tests.support.running_servers import ROOT, AsgiSocket, finished

FORM = {"session": {"audio": {"input": {"format": {"type": "audio/pcm", "rate": RATE}}}}, "type": "session.update"}


def session(
    engines: dict[str, Any],
    talk: Callable[[AsgiSocket], Awaitable[None]],
    limits: ServerLimits | None = None,
    **how: Any,
) -> Server:
    """Run a talk with a server, and end both."""
    server = Server(engines, limits or ServerLimits(), how.pop("token", None))

    async def run() -> None:
        client = AsgiSocket(build_app(server), "/v1/realtime", **how)
        await talk(client)
        await client.close()

    finished(run())
    server.scheduler.close()
    return server


async def opened(client: AsgiSocket) -> None:
    assert (await client.message())["type"] == "websocket.accept"
    assert (await client.event())["type"] == "session.created"
    client.send(FORM)
    assert (await client.event())["session"]["audio"]["input"]["format"]["rate"] == RATE


def append(samples: np.ndarray) -> dict[str, str]:
    content = (samples * 32767).astype("<i2").tobytes()
    return {"type": "input_audio_buffer.append", "audio": base64.b64encode(content).decode()}


async def completed(client: AsgiSocket) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The next final text, and the events before it."""
    before = list[dict[str, Any]]()
    while (event := await client.event())["type"] != f"{TRANSCRIPTION}.completed":
        assert event["type"] != "error", event
        before.append(event)
    return event, before


def test_final_texts_are_those_of_the_call(engines: dict[str, Any], folder: Path) -> None:
    speech = np.concatenate([buzz(0.8, 1), np.zeros(2 * RATE, np.float32), buzz(0.7, 2)])
    chunks = [append(speech[at : at + RATE // 5]) for at in range(0, len(speech), RATE // 5)]
    sent = ((speech * 32767).astype("<i2") / 32768).astype(np.float32)
    wanted = [  # several: the tiny model's window is one second
        update for update in mmdec.transcribe_stream([sent], model=folder / "whisper", every=None) if update.final
    ]

    async def talk(client: AsgiSocket) -> None:
        await opened(client)
        for chunk in chunks:
            client.send(chunk)
        client.send({"type": "input_audio_buffer.commit"})
        told = [await completed(client) for _ in wanted]
        assert [event["transcript"] for event, _ in told] == [each.text for each in wanted]
        assert [event["start"] for event, _ in told] == [round(each.start, 3) for each in wanted]
        for event, before in told:
            assert {each["item_id"] for each in before} == {event["item_id"]}
            deltas = [each["delta"] for each in before if each["type"] == f"{TRANSCRIPTION}.delta"]
            assert "".join(deltas) == event["transcript"]
        client.send(append(buzz(0.6, 3)))  # what follows a commit counts on
        client.send({"type": "input_audio_buffer.commit"})
        last, _ = await completed(client)
        assert last["start"] >= len(speech) / RATE - 0.1

    session(engines, talk)


def test_an_audio_language_model_does_not_hear_live(tmp_path: Path) -> None:
    """So no session holds its cache, and `cache_tokens` leaves none out."""
    engines = dict([load_engine(str(write("Qwen2Audio", tmp_path / "heard")), EngineOptions(threads=1), "cpu", None)])

    async def talk(client: AsgiSocket) -> None:
        assert (await client.message())["type"] == "websocket.accept"
        assert (await client.event())["type"] == "session.created"
        for event in (FORM, append(buzz(0.6, 1))):
            client.send(event)
            refused = (await client.event())["error"]
            assert "`model` must be a Whisper to transcribe a stream" in refused["message"]

    assert not session(engines, talk).scheduler.load()


def test_provisional_text_comes_before_the_final_one() -> None:
    """By the shipped model: the tiny one's window is shorter than the sound after which text is renewed."""
    speech, rate = soundfile.read(ROOT / "data/samples/english/austen.flac", dtype="float32")
    engines = dict([load_engine("whisper-tiny.en", EngineOptions(threads=1), "cpu", None)])

    async def talk(client: AsgiSocket) -> None:
        await opened(client)
        client.send(append(speech))
        while (event := await client.event())["type"] != "mmdec.transcription.provisional":
            pass
        assert event["text"]

    assert rate == RATE
    assert session(engines, talk).sessions == 0


def test_errors_are_reported_and_the_session_goes_on(engines: dict[str, Any]) -> None:
    wrong: list[Any] = [
        "{",
        "[]",
        "7",
        {},
        {"type": "nothing"},
        {"type": "session.update"},
        {"type": "session.update", "session": {"audio": {"input": {"format": {"rate": 1}}}}},
        {"type": "session.update", "session": {"audio": {"input": {"transcription": {"language": "xx"}}}}},
        {"type": "session.update", "session": {"audio": {"input": {"transcription": {"model": "pictures"}}}}},
        {"type": "session.update", "session": {"audio": {"input": {"format": {"type": "audio/pcmu"}}}}},
        {"type": "input_audio_buffer.append"},
        {"type": "input_audio_buffer.append", "audio": "%%%"},
        {"type": "input_audio_buffer.append", "audio": 7},
        {"type": "input_audio_buffer.append", "audio": "é"},
        {"type": "session.update", "session": {"audio": []}},
        {"type": "session.update", "session": {"audio": {"input": {"transcription": {"language": 7}}}}},
        b"\x00\xff",
    ]

    async def talk(client: AsgiSocket) -> None:
        await opened(client)
        for event in wrong:
            client.send(event)
            told = await client.event()
            assert told["type"] == "error", (event, told)
            assert told["error"]["type"] == "invalid_request_error", (event, told)
            assert told["error"]["message"]
        client.send(append(buzz(0.7)))
        client.send({"type": "input_audio_buffer.commit"})
        assert (await completed(client))[0]["transcript"]

    session(engines, talk)


def test_an_unexpected_exception_is_logged_as_the_servers(
    engines: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("a bug")

    async def talk(client: AsgiSocket) -> None:
        await opened(client)
        monkeypatch.setattr(LiveSession, "_update", broken)
        client.send(FORM)
        assert (await client.event())["error"]["type"] == "server_error"
        monkeypatch.setattr(TranscriptionEngine, "live", broken)
        client.send(append(buzz(0.7)))
        assert (await client.event())["error"]["type"] == "server_error"

    session(engines, talk)
    assert [str(record.exc_info and record.exc_info[1]) for record in caplog.records] == ["'a bug'"] * 2


def test_an_early_disconnect_frees_its_place(engines: dict[str, Any]) -> None:
    """Unsent texts do not keep the session open."""
    server, gone = Server(engines, ServerLimits()), asyncio.Event()
    app = build_app(server)

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        async def sending(message: Any) -> None:
            if gone.is_set():
                raise OSError("the connection is closed")
            await send(message)

        await app(scope, receive, sending)

    async def run() -> None:
        client = AsgiSocket(broken, "/v1/realtime")
        await opened(client)
        gone.set()
        client.send(append(buzz(0.7)))
        client.send({"type": "input_audio_buffer.commit"})
        await client.close()

    finished(run())
    assert server.sessions == 0
    server.scheduler.close()


def test_a_session_uses_the_servers_options(folder: Path) -> None:
    statistics, before = mmdec.DecodingStatistics(), measurements(mmdec.default_statistics())
    engines: dict[str, Any] = dict(
        [load_engine(str(folder / "whisper"), EngineOptions(threads=1, statistics=statistics), "cpu", None)]
    )

    async def talk(client: AsgiSocket) -> None:
        await opened(client)
        client.send(append(buzz(0.7)))
        client.send({"type": "input_audio_buffer.commit"})
        await completed(client)

    session(engines, talk)
    assert statistics._targets
    assert measurements(mmdec.default_statistics()) == before
    assert engines["whisper"].live()._threads == 1


def test_full_and_unauthorised_sessions_are_closed(engines: dict[str, Any]) -> None:
    async def refused(client: AsgiSocket) -> None:
        assert (await client.message())["type"] == "websocket.close"

    async def full(client: AsgiSocket) -> None:
        assert (await client.message())["type"] == "websocket.accept"
        assert (await client.event())["error"]["code"] == "busy"
        assert (await client.message())["code"] == 1013

    async def unknown(client: AsgiSocket) -> None:
        assert (await client.message())["type"] == "websocket.accept"
        assert (await client.event())["error"]["code"] == "model_not_found"

    session(engines, refused, token="sesame")
    session(engines, opened, token="sesame", headers={"Authorization": "Bearer sesame"})
    session(engines, full, ServerLimits(sessions=0))
    session(engines, unknown, query="model=gpt-5")


NULLS: list[dict[str, Any]] = [
    {"audio": None},
    {"audio": {"input": None}},
    {"audio": {"input": {"format": None, "transcription": None}}},
    {"audio": {"input": {"format": {"type": None, "rate": RATE}}}},
    {"audio": {"input": {"format": {"type": "audio/pcm", "rate": None}}}},
    {"audio": {"input": {"transcription": {"model": None, "language": None, "prompt": None}}}},
]


@pytest.mark.parametrize("settings", NULLS)
def test_null_settings_count_as_absent(engines: dict[str, Any], settings: dict[str, Any]) -> None:
    async def talk(client: AsgiSocket) -> None:
        await opened(client)
        client.send({"type": "session.update", "session": settings})
        answer = await client.event()
        assert answer["type"] == "session.updated", answer
        assert answer["session"]["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": RATE}

    session(engines, talk)


PAGE = "https://example.org"


@pytest.mark.parametrize(
    ("origin", "allowed", "admitted"),
    [
        (None, [], True),  # no browser
        ("http://127.0.0.1:8000", [], True),  # a page of the server itself
        ("https://127.0.0.1:8000", [], True),  # the same behind a proxy with TLS
        (PAGE, [PAGE], True),
        (PAGE, ["*"], True),
        (PAGE, [], False),
        ("null", [], False),  # a local file or a sandboxed frame
        ("http://127.0.0.1:8001", [], False),
        ("https://127.0.0.1:8000.example.org", [], False),
        ("https://else.org", [PAGE], False),
        ("http://example.org", [PAGE], False),
    ],
)
def test_a_web_page_opens_a_socket_only_if_it_is_allowed(
    engines: dict[str, Any], origin: str | None, allowed: list[str], admitted: bool
) -> None:
    server = Server(engines, ServerLimits())
    headers = {"Host": "127.0.0.1:8000"} | ({} if origin is None else {"Origin": origin})

    async def run() -> None:
        client = AsgiSocket(build_app(server, origins=allowed), "/v1/realtime", headers=headers)
        assert (await client.message())["type"] == f"websocket.{'accept' if admitted else 'close'}"
        await client.close()

    finished(run())
    server.scheduler.close()
