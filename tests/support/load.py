"""Load on a server: clients of which a third is bad, each good one checking its own answers."""

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
    """Run clients in threads, every third of them bad. going: whether a client asks again, by its questions so far.

    Returns: how many good requests were right, wrong, lost (no answer, or an error) and told to come again, and how
        many bad ones there were.
    """
    counts, counting = Counter[str](), threading.Lock()

    def count(what: str) -> None:
        with counting:
            counts[what] += 1

    def run(number: int) -> None:
        dice, asked = random.Random(number), 0
        with httpx.Client(base_url=address, timeout=300.0, trust_env=False) as client:
            while going(asked):
                asked += 1
                question = dice.choice(questions)
                if number % 3 == 2:
                    with contextlib.suppress(OSError, httpx.HTTPError):
                        dice.choice(BAD)(client, question[0], dice)
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


def hangs_up(client: httpx.Client, request: dict[str, Any], dice: random.Random) -> None:
    """Goes away after the whole request, after a while."""
    with _sent(client, request, 1.0) as connection:
        connection.settimeout(dice.choice((0.0, 0.02, 0.2)))
        with contextlib.suppress(OSError):
            connection.recv(1)


def breaks_off(client: httpx.Client, request: dict[str, Any], dice: random.Random) -> None:
    """Goes away within its request."""
    _sent(client, request, dice.random()).close()


def leaves_a_stream(client: httpx.Client, request: dict[str, Any], dice: random.Random) -> None:
    """Goes away within its answer."""
    data = {**request.get("data", {}), "stream": "true"}
    streamed = {**request, "data": data} if "files" in request else {**request, "json": {**request["json"], **data}}
    with client.stream("POST", **streamed) as answer:
        next(answer.iter_bytes(), None)


def malformed(client: httpx.Client, request: dict[str, Any], dice: random.Random) -> None:
    """Sends what is no sound, no JSON, no multipart, or for no model."""
    kind = dice.randrange(4)
    if kind == 0:
        client.post(TRANSCRIBE, files={"file": ("a.wav", dice.randbytes(2000))})
    elif kind == 1:
        client.post("/v1/chat/completions", content=b'{"messages": [', headers={"Content-Type": "application/json"})
    elif kind == 2:
        client.post(TRANSCRIBE, content=b"--x", headers={"Content-Type": "multipart/form-data; boundary=x"})
    else:
        client.post("/v1/chat/completions", json={"model": "nobody", "messages": [{"role": "user", "content": "x"}]})


BAD = (hangs_up, breaks_off, leaves_a_stream, malformed)


def _sent(client: httpx.Client, request: dict[str, Any], share: float) -> socket.socket:
    """A connection on which a share of a request was sent."""
    built = client.build_request("POST", **request)
    head = "".join(f"{name}: {value}\r\n" for name, value in built.headers.items())
    whole = f"POST {request['url']} HTTP/1.1\r\n{head}\r\n".encode() + built.read()
    where = urlsplit(str(client.base_url))
    connection = socket.create_connection((where.hostname or "", where.port or 0))
    connection.sendall(whole[: int(len(whole) * share)])
    return connection
