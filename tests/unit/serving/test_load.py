"""Tests a server with 32 clients, of which a third misbehave: the others get their right answers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import mmdec
from mmdec.serving.server import ServerLimits
from tests.support.pictures import QUESTION, pixels
from tests.support.running_servers import ROOT, picture, served, until, wav
from tests.unit.serving.server_load import TRANSCRIBE, Question, load

pytestmark = pytest.mark.slow

CLIENTS = 32
WHOLE = bool(os.environ.get("MMDEC_ALL"))
SECONDS = 300.0 if WHOLE else 3.0


@pytest.fixture(scope="module")
def questions(engines: dict[str, Any], folder: Path) -> list[Question]:
    """Requests of every kind with the answers of the public calls."""
    found = list[Question]()
    for seed in range(8):
        sound = wav(0.4 + 0.07 * seed, seed)
        for form in ({}, {"language": "en"}):
            text = mmdec.transcribe(sound, model=folder / "whisper", language=form.get("language")).text
            request = {"url": TRANSCRIBE, "files": {"file": ("a.wav", sound)}, "data": form}
            found.append((request, lambda answer: answer.json()["text"], text))
    for seed in range(4):
        answer = mmdec.describe(pixels(seed), QUESTION, model=folder / "pictures", max_new_tokens=8).text
        content = [picture(pixels(seed)), {"type": "text", "text": QUESTION}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
        request = {"url": "/v1/chat/completions", "json": body}
        found.append((request, lambda answer: answer.json()["choices"][0]["message"]["content"], answer))
    sound = wav(0.8, 4)
    text = mmdec.translate_speech(sound, model=folder / "translator").text
    request = {"url": "/v1/audio/translations", "files": {"file": ("a.wav", sound)}}
    found.append((request, lambda answer: answer.json()["text"], text))
    return found


@pytest.mark.parametrize("rows", [2, 8])
def test_every_request_under_load_gets_its_right_answer(
    engines: dict[str, Any], questions: list[Question], rows: int
) -> None:
    with served(engines, ServerLimits(rows=rows)) as (client, server):
        end = time.monotonic() + SECONDS
        counts = load(str(client.base_url), questions, CLIENTS, lambda _: time.monotonic() < end)
        until(lambda: server.open == 0 and not server.scheduler.load())
        assert counts["right"] == counts["asked"] > 0, counts
        assert counts["bad"] > 0
        lines = [line for line in client.get("/metrics").text.splitlines() if "batch_rows_bucket" in line]
        assert lines  # batches were made, and counted
        assert client.get("/health").json() == {"status": "ok", "waiting": 0, "decoding": 0}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def process(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """`mmdec serve` in a process of its own, once it answers."""
    models = [str(folder / name) for name in ("whisper", "translator", "pictures")]
    words = [sys.executable, "-m", "mmdec", "serve", *models, "--port", str(port), "--threads", "1"]
    words += ["--device", "cpu"]
    child = subprocess.Popen(words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    try:
        until(lambda: answers(port))
        yield child
    finally:
        child.kill()
        child.wait()


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def resident(child: subprocess.Popen[bytes]) -> int:
    """Resident kilobytes of a process."""
    status = Path(f"/proc/{child.pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmRSS:")[2].split()[0])


@pytest.mark.skipif(not WHOLE, reason="starts two servers and takes five minutes: MMDEC_ALL")
def test_memory_is_stable_and_a_killed_server_restarts(folder: Path, questions: list[Question]) -> None:
    """Five minutes against a process; then it is killed under load, and its successor's answers are right."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with process(folder, port) as child:
        load(address, questions, CLIENTS, lambda asked: asked < 20)
        before, end = resident(child), time.monotonic() + SECONDS
        counts = load(address, questions, CLIENTS, lambda _: time.monotonic() < end)
        after = resident(child)
        assert counts["right"] == counts["asked"] > 0, counts
        assert after < 1.05 * before, (before, after)
        threading.Timer(2.0, child.kill).start()
        counts = load(address, questions, CLIENTS, lambda asked: asked < 50)
        assert counts["wrong"] == 0 < counts["lost"], counts
    with process(folder, port) as child:
        counts = load(address, questions, CLIENTS, lambda asked: asked < 5)
        assert counts["right"] == counts["asked"] > 0, counts
        child.send_signal(signal.SIGTERM)
        child.wait(60)
