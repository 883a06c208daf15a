"""Puts load on a server: a third of the clients misbehave, the others check their answers."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

from tests.conftest import RATE

TRANSCRIBE = "/v1/audio/transcriptions"
Question = tuple[dict[str, Any], Callable[[httpx.Response], str], str]  # request, reader of its answer, right answer


@dataclass(frozen=True)
class LiveSpeech:
    """Sound for a session of live transcription."""

    samples: np.ndarray  # (T,) int16
    texts: list[str]  # the final texts


def load(
    address: str,
    questions: Sequence[Question],
    live: Sequence[LiveSpeech],
    clients: int,
    going: Callable[[int], bool],
) -> Counter[str]:
    """Run clients in threads, of which every third misbehaves. going: whether a client goes on after so many questions.

    Returns counts: "asked" is the number of good requests. Their answers were "right", "wrong", "lost" (no answer, or
        an error) or "again" (status 429). "bad" is the number of bad requests.
    """
    counts, counting = Counter[str](), threading.Lock()

    def count(what: str) -> None:
        with counting:
            counts[what] += 1

    def run(number: int) -> None:
        rng, asked = random.Random(number), 0
        with httpx.Client(base_url=address, timeout=300.0, trust_env=False) as client:
            while going(asked):
                asked += 1
                if number % 3 == 2:
                    with contextlib.suppress(OSError, httpx.HTTPError, WebSocketException):
                        rng.choice(BAD)(client, rng.choice(questions)[0], rng)
                    count("bad")
                    continue
                count("asked")
                question = rng.choice([*questions, *live])
                count(_heard(client, question) if isinstance(question, LiveSpeech) else _answered(client, question))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts


def _answered(client: httpx.Client, question: Question) -> str:
    request, read, right = question
    try:
        answer = client.send(client.build_request("POST", **request))
    except httpx.HTTPError:
        return "lost"
    if answer.status_code == 429:
        return "again"
    if answer.status_code != 200:
        print(request["url"], answer.status_code, answer.text[:300])
        return "lost"
    return "right" if read(answer) == right else "wrong"


def _heard(client: httpx.Client, speech: LiveSpeech) -> str:
    try:
        with _session(client) as session:
            for at in range(0, len(speech.samples), RATE // 5):
                _send(session, speech.samples[at : at + RATE // 5])
            session.send(json.dumps({"type": "input_audio_buffer.commit"}))
            texts = list[str]()
            while len(texts) < len(speech.texts):
                event = json.loads(session.recv(300.0))
                if event["type"] == "error":
                    print(event)
                    return "lost"
                if event["type"].endswith(".completed"):
                    texts.append(event["transcript"])
    except (OSError, WebSocketException) as error:
        print(repr(error))
        return "lost"
    return "right" if texts == speech.texts else "wrong"


def hangs_up(client: httpx.Client, request: dict[str, Any], rng: random.Random) -> None:
    """Send a whole request, and close the connection after a while without reading the answer."""
    with _sent(client, request, 1.0) as connection:
        connection.settimeout(rng.choice((0.0, 0.02, 0.2)))
        with contextlib.suppress(OSError):
            connection.recv(1)


def breaks_off(client: httpx.Client, request: dict[str, Any], rng: random.Random) -> None:
    """Close the connection before the request is complete."""
    _sent(client, request, rng.random()).close()


def leaves_a_stream(client: httpx.Client, request: dict[str, Any], rng: random.Random) -> None:
    """Close the connection after the first bytes of a streamed answer."""
    data = {**request.get("data", {}), "stream": "true"}
    streamed = {**request, "data": data} if "files" in request else {**request, "json": {**request["json"], **data}}
    with client.stream("POST", **streamed) as answer:
        next(answer.iter_bytes(), None)


def malformed(client: httpx.Client, request: dict[str, Any], rng: random.Random) -> None:
    """Send a file that is no sound, broken JSON, a broken form, or the name of an unknown model."""
    kind = rng.randrange(4)
    if kind == 0:
        client.post(TRANSCRIBE, files={"file": ("a.wav", rng.randbytes(2000))})
    elif kind == 1:
        client.post("/v1/chat/completions", content=b'{"messages": [', headers={"Content-Type": "application/json"})
    elif kind == 2:
        client.post(TRANSCRIBE, content=b"--x", headers={"Content-Type": "multipart/form-data; boundary=x"})
    else:
        client.post("/v1/chat/completions", json={"model": "nobody", "messages": [{"role": "user", "content": "x"}]})


def reads_slowly(client: httpx.Client, request: dict[str, Any], rng: random.Random) -> None:
    """Read the answer a few bytes at a time, for a second at most, and leave the rest."""
    with _sent(client, request, 1.0) as connection:
        connection.settimeout(5.0)
        for _ in range(20):
            if not connection.recv(4):
                return
            time.sleep(0.05)


def leaves_a_session(client: httpx.Client, request: dict[str, Any], rng: random.Random) -> None:
    """Leave a session of live transcription in the middle of the sound."""
    with _session(client) as session:
        _send(session, np.frombuffer(rng.randbytes(rng.randrange(1, RATE) * 2), "<i2"))
        session.socket.shutdown(socket.SHUT_RDWR)


BAD = (hangs_up, breaks_off, leaves_a_stream, malformed, reads_slowly, leaves_a_session)


@contextmanager
def _session(client: httpx.Client) -> Iterator[ClientConnection]:
    """Open a session of live transcription."""
    address = f"{client.base_url}".replace("http", "ws", 1).rstrip("/")
    with connect(f"{address}/v1/realtime", open_timeout=60.0, proxy=None) as session:
        sound = {"format": {"type": "audio/pcm", "rate": RATE}}
        session.send(json.dumps({"type": "session.update", "session": {"audio": {"input": sound}}}))
        yield session


def _send(session: ClientConnection, samples: np.ndarray) -> None:
    content = base64.b64encode(samples.astype("<i2").tobytes()).decode()
    session.send(json.dumps({"type": "input_audio_buffer.append", "audio": content}))


def _sent(client: httpx.Client, request: dict[str, Any], share: float) -> socket.socket:
    """Open a connection and send a share of the request's bytes."""
    built = client.build_request("POST", **request)
    head = "".join(f"{name}: {value}\r\n" for name, value in built.headers.items())
    whole = f"POST {request['url']} HTTP/1.1\r\n{head}\r\n".encode() + built.read()
    where = urlsplit(str(client.base_url))
    connection = socket.create_connection((where.hostname or "", where.port or 0))
    connection.sendall(whole[: int(len(whole) * share)])
    return connection
