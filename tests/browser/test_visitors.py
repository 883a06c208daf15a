"""Tests the demo with many visitors at once, and with requests for other visitors' files. Requests are sent as the
page's script would send them, without a browser."""

from __future__ import annotations

import html
import threading
import time
from pathlib import Path

import httpx
import pytest

from mmdec.demo import samples
from tests.browser.demo_visitor import SECONDS, Visitor
from tests.support.demo_server import ROOT, Server, true_english
from tests.support.grid import WHOLE

pytestmark = pytest.mark.slow

PEOPLE = 10 if WHOLE else 3  # with three, two wait for their answers and one presses Stop
MINUTES = 2.0  # of the whole run
SAMPLE = samples.french()[0]
FIRST, TRUE = SAMPLE.path, true_english()[SAMPLE.text]
ENGLISH = dict(list(true_english().items())[:3])


def visit(address: str, number: int, turn: int) -> str:
    """Let one person press one sample. Every third leaves after the first answer. Returns what went wrong, or ""."""
    label = list(ENGLISH)[(number + turn) % len(ENGLISH)]
    leaves = (number + turn) % 3 == 0
    done = False
    with Visitor(address) as visitor:
        event = visitor.press(label)
        for message in visitor.messages():
            text = html.unescape(str(message.get("output", "")))
            if message["msg"] in ("process_generating", "process_completed") and "mm-text" in text:
                if not any(english in text for english in ENGLISH[label]):
                    return f"{label}: {text[:300]}"
                if leaves:
                    if turn % 2 == 0:  # presses Stop; the others close the page
                        visitor.cancel(label, event)
                    return ""
            if message["msg"] == "process_completed":
                if not message["success"]:
                    return f"{label}: {text[:300]}"
                done = True
            if "mm-error" in text:
                return f"{label}: {text[:300]}"
    return "" if done else f"{label}: no answer"


def test_visitors_at_once_are_served(server: Server) -> None:
    wrong: list[str] = []
    until = time.monotonic() + 60 * MINUTES if WHOLE else 0.0
    memory: list[int] = []

    def person(number: int) -> None:
        turn = 0
        while True:
            try:
                problem = visit(server.address, number, turn)
            except Exception as error:
                problem = repr(error)
            if problem:
                wrong.append(problem)
            turn += 1
            if time.monotonic() >= until:
                return

    people = [threading.Thread(target=person, args=(number,)) for number in range(PEOPLE)]
    for person in people:
        person.start()
    for person in people:
        while person.is_alive():
            person.join(5.0)
            memory.append(server.ask("memory"))
    assert wrong == []
    while server.ask("running"):
        time.sleep(0.05)
    if WHOLE:  # flat: the last quarter's highest is hardly above the second quarter's
        quarter = len(memory) // 4
        assert max(memory[-quarter:]) <= 1.1 * max(memory[quarter : 2 * quarter])


def test_other_files_cannot_be_read(server: Server, tmp_path: Path) -> None:
    secret = tmp_path / "secret.wav"
    secret.write_bytes(FIRST.read_bytes())
    with Visitor(server.address) as visitor:
        for path in (secret, Path("/etc/passwd"), ROOT / "README.md", ROOT / "models/vlm-scenes/config.json"):
            assert visitor.client.get(f"gradio_api/file={path}").status_code in (403, 404), path
        way = visitor.values(visitor.event("Translate"))[1]
        visitor.press("Translate", [{"path": str(secret), "meta": {"_type": "gradio.FileData"}}, way])
        messages = [message for message in visitor.messages() if message["msg"] == "process_completed"]
    assert len(messages) == 1
    assert not messages[0]["success"]
    assert not any(text in str(messages) for text in TRUE)


def test_no_api_is_exposed(server: Server) -> None:
    with Visitor(server.address) as visitor:
        functions = [function for function in visitor.config["dependencies"] if function["backend_fn"]]
    assert len(functions) > 10
    assert {function["api_visibility"] for function in functions} == {"private"}


def test_an_upload_can_be_translated(server: Server) -> None:
    with Visitor(server.address) as visitor:
        file = visitor.upload(FIRST)
        way = visitor.values(visitor.event("Translate"))[1]
        visitor.press("Translate", [file, way])
        messages = [message for message in visitor.messages() if message["msg"] == "process_generating"]
    assert any(text in str(message) for message in messages for text in TRUE)


@pytest.mark.parametrize("megabytes", [21])
def test_uploads_have_a_limit(server: Server, tmp_path: Path, megabytes: int) -> None:
    large = tmp_path / "large.wav"
    large.write_bytes(bytes(megabytes * 1_000_000))
    with Visitor(server.address) as visitor, large.open("rb") as file:
        answer = visitor.client.post("gradio_api/upload", files={"files": (large.name, file)})
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "demo.example"}, 200),  # the server was started with this name
        ({"Host": "evil.example"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "demo.example", "Origin": "https://demo.example"}, 200),
    ],
)
def test_other_hosts_and_sites_are_refused(server: Server, headers: dict[str, str], status: int) -> None:
    with httpx.Client(base_url=server.address, timeout=SECONDS) as client:
        assert client.get("", headers=headers).status_code == status
        assert client.get("config", headers=headers).status_code == status
        small = ROOT / "data" / "samples" / "images" / "menu.png"
        answer = client.post("gradio_api/upload", files={"files": small.read_bytes()}, headers=headers)
        assert answer.status_code == status
        joined = client.post("gradio_api/queue/join", json={}, headers=headers)
        assert (joined.status_code == 403) == (status == 403)


@pytest.mark.parametrize(
    "path",
    [
        "monitoring",
        "monitoring/",
        "monitoring/summary",
        "openapi.json",
        "docs",
        "redoc",
        "gradio_api/openapi.json",
        "gradio_api/info",
    ],
)
def test_api_pages_are_closed(server: Server, path: str) -> None:
    answer = httpx.get(server.address + path, timeout=SECONDS)
    assert (answer.status_code, answer.text) == (404, "Not found.")
