"""Puts load on a server: a third of the clients misbehave, the others check their answers."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

TRANSCRIBE = "/v1/audio/transcriptions"
Question = tuple[dict[str, Any], Callable[[httpx.Response], str], str]  # request, reader of its answer, right answer


def load(address: str, questions: Sequence[Question], clients: int, going: Callable[[int], bool]) -> Counter[str]:
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
                question = rng.choice(questions)
                if number % 3 == 2:
                    with contextlib.suppress(OSError, httpx.HTTPError):
                        rng.choice(BAD)(client, question[0], rng)
                    count("bad")
                    continue
                count("asked")
                count(_answered(client, question))

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
        return "lost"
    return "right" if read(answer) == right else "wrong"


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


BAD = (hangs_up, breaks_off, leaves_a_stream, malformed)


def _sent(client: httpx.Client, request: dict[str, Any], share: float) -> socket.socket:
    """Open a connection and send a share of the request's bytes."""
    built = client.build_request("POST", **request)
    head = "".join(f"{name}: {value}\r\n" for name, value in built.headers.items())
    whole = f"POST {request['url']} HTTP/1.1\r\n{head}\r\n".encode() + built.read()
    where = urlsplit(str(client.base_url))
    connection = socket.create_connection((where.hostname or "", where.port or 0))
    connection.sendall(whole[: int(len(whole) * share)])
    return connection
