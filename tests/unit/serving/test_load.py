"""Tests a server with 32 clients, of which a third misbehave: the others get their right answers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import mmdec
from mmdec.serving.engines import EngineOptions, load_engine
from mmdec.serving.server import ServerLimits
from tests.conftest import RATE, buzz
from tests.support import tiny_text_folder
from tests.support.pictures import QUESTION, pixels
from tests.support.running_servers import ROOT, picture, served, until, wav

pytest.importorskip("websockets", reason="needs `pip install 'mmdec[serve]'`")

from tests.unit.serving.server_load import TRANSCRIBE, LiveSpeech, Question, load

pytestmark = pytest.mark.slow

CLIENTS = 32
MODELS = ("whisper", "translator", "pictures", "writes")  # folders
WHOLE = bool(os.environ.get("MMDEC_ALL"))
SECONDS = 300.0 if WHOLE else 3.0
START_SECONDS = 300.0  # in which a process must answer, which loads its models first


@pytest.fixture(scope="module")
def writer(folder: Path) -> dict[str, Any]:
    """The engine of a language model, by its name."""
    written = tiny_text_folder.write(folder / "writes", tiny_text_folder.OTHER, 4)
    return dict([load_engine(str(written), EngineOptions(threads=1), "cpu", None)])


@pytest.fixture(scope="module")
def live(engines: dict[str, Any], folder: Path) -> list[LiveSpeech]:
    """Sessions of live transcription with the texts of the public call."""
    found = list[LiveSpeech]()
    for seed in range(3):
        speech = np.concatenate([buzz(0.8, seed), np.zeros(RATE, np.float32), buzz(0.5, seed + 1)])
        sent = (speech * 32767).astype("<i2")
        updates = mmdec.transcribe_stream([(sent / 32768).astype(np.float32)], model=folder / "whisper", every=None)
        found.append(LiveSpeech(sent, [update.text for update in updates if update.final]))
    return found


@pytest.fixture(scope="module")
def questions(engines: dict[str, Any], writer: dict[str, Any], folder: Path) -> list[Question]:
    """Requests of every kind with the answers of the public calls."""
    found = list[Question]()
    for prompt in (*tiny_text_folder.OTHER, " ".join(tiny_text_folder.OTHER * 6)):
        loaded = writer["writes"].loaded
        inputs = loaded.text_inputs(prompt)
        (new,) = mmdec.generate(loaded.model, inputs, drafter=None, max_new_tokens=24, do_sample=False).sequences
        text = loaded.tokenizer.decode(new[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        body: dict[str, Any] = {"model": "writes", "prompt": prompt, "max_tokens": 24, "temperature": 0}
        request = {"url": "/v1/completions", "json": body}
        found.append((request, lambda answer: answer.json()["choices"][0]["text"], text))
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
    engines: dict[str, Any], writer: dict[str, Any], questions: list[Question], live: list[LiveSpeech], rows: int
) -> None:
    with served(engines | writer, ServerLimits(rows=rows, sessions=CLIENTS), ws="auto") as (client, server):
        end = time.monotonic() + SECONDS
        counts = load(str(client.base_url), questions, live, CLIENTS, lambda _: time.monotonic() < end)
        until(lambda: server.open == server.sessions == 0 and not server.scheduler.load())
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
    models = [str(folder / name) for name in MODELS]
    words = [sys.executable, "-m", "mmdec", "serve", *models, "--port", str(port), "--threads", "1"]
    words += ["--device", "cpu", "--sessions", str(CLIENTS)]
    child = subprocess.Popen(words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    try:
        until(lambda: answers(port), START_SECONDS)
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


@pytest.mark.skipif(not WHOLE, reason="takes five minutes: MMDEC_ALL")
def test_memory_is_stable_under_load(folder: Path, questions: list[Question], live: list[LiveSpeech]) -> None:
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with process(folder, port) as child:
        load(address, questions, live, CLIENTS, lambda asked: asked < 20)
        before, end = resident(child), time.monotonic() + SECONDS
        counts = load(address, questions, live, CLIENTS, lambda _: time.monotonic() < end)
        after = resident(child)
        print(f"{dict(counts)}; {before} kB before, {after} kB after")
        assert counts["right"] == counts["asked"] > 0, counts
        assert after < 1.05 * before, (before, after)


def test_a_server_killed_under_load_restarts(folder: Path, questions: list[Question], live: list[LiveSpeech]) -> None:
    """Its clients get errors and no wrong answers, and its successor's answers are right."""
    port, asked = free_port(), count(1)
    address = f"http://127.0.0.1:{port}"
    with process(folder, port) as child:

        def going(_: int) -> bool:
            if next(asked) == 3 * CLIENTS:
                child.kill()
            return child.poll() is None

        counts = load(address, questions, live, CLIENTS, going)
        assert child.wait() == -signal.SIGKILL
        assert counts["wrong"] == 0 < counts["lost"], counts
    with process(folder, port) as child:
        counts = load(address, questions, live, CLIENTS, lambda asked: asked < 1)
        assert counts["right"] == counts["asked"] > 0, counts
        child.send_signal(signal.SIGTERM)
        child.wait(60)
