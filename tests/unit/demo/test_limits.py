"""Tests which requests the demo's guard accepts, over ASGI and without a server."""

from __future__ import annotations

import asyncio
import os
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from mmdec import cli
from mmdec.demo import limits as guard
from mmdec.demo.limits import (
    DISK_BLOCK_BYTES,
    MAX_BYTES,
    MAX_FILE_AGE,
    MAX_FORM,
    MAX_MESSAGE,
    UPLOAD,
    RequestGuard,
    clean_uploads,
    private_uploads,
)

HERE = "127.0.0.1:7860"


def ask(
    headers: dict[str, str],
    path: str = "/",
    host: str = "127.0.0.1",
    names: Iterable[str] = (),
    total: int = guard.TOTAL_BYTES,
    kind: str = "http",
    arrived: str = "127.0.0.1",
) -> tuple[int, str]:
    """Status and words of the answer; 200 where the request went through."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    scope = {
        "type": kind,
        "path": path,
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
        "server": (arrived, 7860),
    }
    asyncio.run(RequestGuard(app, host, lambda: names, total)(scope, receive, send))
    return sent[0].get("status", sent[0].get("code")), b"".join(message.get("body", b"") for message in sent).decode()


@pytest.mark.parametrize(
    "host", [HERE, "localhost:7860", "LOCALHOST", "[::1]:7860", "127.0.0.1", "localhost.:7860", "demo.example.org"]
)
def test_known_hosts_are_accepted(host: str) -> None:
    assert ask({"host": host}, names=["Demo.example.org"])[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example:7860",
        "",
        "192.168.1.9",
        "[",
        "127.0.0.1@x",
        ":",
    ],
)
def test_other_hosts_are_refused(host: str) -> None:
    assert ask({"host": host})[0] == 403
    assert ask({})[0] == 403


def test_the_address_that_was_reached_is_known() -> None:
    assert ask({"host": "192.168.1.5:7860"}, host="0.0.0.0", arrived="192.168.1.5")[0] == 200
    assert ask({"host": "192.168.1.5:7860"}, host="::", arrived="::ffff:192.168.1.5")[0] == 200
    assert ask({"host": "192.168.1.6:7860"}, host="0.0.0.0", arrived="192.168.1.5")[0] == 403
    assert ask({"host": "me.lan"}, host="me.lan")[0] == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (f"http://{HERE}", 200),
        (f"https://{HERE}", 200),
        ("http://127.0.0.1:3000", 403),
        ("http://localhost:7860", 403),
        ("http://127.0.0.1", 403),
        ("https://evil.example", 403),
        ("https://demo.example.org.evil.example", 403),
        ("null", 403),
        ("", 403),
        ("https://[", 403),
        ("https://demo.example.org", 200),  # of a proxy that asks by this machine's address
    ],
)
def test_origins_are_compared_with_hosts(origin: str, status: int) -> None:
    assert ask({"host": HERE, "origin": origin}, names=["demo.example.org"])[0] == status


def test_sockets_are_guarded_too() -> None:
    assert ask({"host": "evil.example"}, kind="websocket")[0] == 1008
    assert ask({"host": HERE}, kind="websocket")[0] == 200


@pytest.mark.parametrize("path", ["/monitoring", "/monitoring/", "/monitoring/summary", "/openapi.json", "/docs"])
def test_api_pages_are_closed(path: str) -> None:
    assert ask({"host": HERE}, path) == (404, "Not found.")


@pytest.mark.parametrize("path", ["/", "/monitoringx", "/config", "/theme.css", "/gradio_api/queue/data"])
def test_other_pages_are_open(path: str) -> None:
    assert ask({"host": HERE}, path)[0] == 200


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (UPLOAD, {"content-length": str(MAX_BYTES + MAX_FORM)}, 200),
        (UPLOAD, {"content-length": str(MAX_BYTES + MAX_FORM + 1)}, 413),
        (UPLOAD, {"transfer-encoding": "chunked"}, 411),
        ("/gradio_api/queue/join", {"content-length": str(MAX_MESSAGE)}, 200),
        ("/gradio_api/queue/join", {"content-length": str(MAX_MESSAGE + 1)}, 413),
        ("/gradio_api/queue/join", {"content-length": "-1"}, 413),
        ("/gradio_api/queue/join", {"content-length": "9" * 5000}, 413),
    ],
)
def test_one_request_is_bounded(path: str, headers: dict[str, str], status: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    assert ask({"host": HERE, **headers}, path)[0] == status


def test_all_uploads_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    (tmp_path / "ab12").mkdir()
    (tmp_path / "ab12" / "kept.wav").write_bytes(bytes(60_000))
    fits, more = ({"host": HERE, "content-length": str(size)} for size in (40_000, 40_001))
    assert ask(fits, UPLOAD, total=100_000)[0] == 200
    status, words = ask(more, UPLOAD, total=100_000)
    assert status == 503
    assert "try again" in words


def test_uploads_on_their_way_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    statuses: list[int] = []
    headers = [(b"host", HERE.encode()), (b"content-length", b"40000")]

    async def main() -> None:
        first, done = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            first.set()
            await done.wait()
            await send({"status": 200})

        async def send(message: Any) -> None:
            statuses.append(message.get("status", 0))

        guarded = RequestGuard(app, "127.0.0.1", total=60_000)
        scope = {"type": "http", "path": UPLOAD, "headers": headers}
        slow = asyncio.create_task(guarded(scope, None, send))  # pyright: ignore[reportArgumentType] # nothing is read
        await first.wait()
        await guarded(scope, None, send)  # pyright: ignore[reportArgumentType] # nothing is read
        done.set()
        await slow
        await guarded(scope, None, send)  # pyright: ignore[reportArgumentType] # nothing is read

    asyncio.run(main())
    assert [status for status in statuses if status] == [503, 200, 200]


def test_leftovers_of_uploads_are_deleted_in_time(tmp_path: Path) -> None:
    (tmp_path / "ab12").mkdir()
    for path in (tmp_path / "ab12" / "whole.wav", tmp_path / "broken", tmp_path / "arriving"):
        path.write_bytes(b"x")
        os.utime(path, (1000.0, 1000.0 if path.name != "arriving" else 1001.0))
    assert clean_uploads(tmp_path, lambda: 1000.5 + MAX_FILE_AGE) == 2 * DISK_BLOCK_BYTES
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["ab12", "arriving", "whole.wav"]


def test_the_folder_of_uploads_is_the_servers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "here"))
    with private_uploads() as folder:
        assert folder.parent == tmp_path / "here"
        assert os.environ["GRADIO_TEMP_DIR"] == str(folder)
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "x").write_bytes(b"x")
    assert not folder.exists()
    assert os.environ["GRADIO_TEMP_DIR"] == str(tmp_path / "here")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Collect the arguments of `serve`, without Gradio."""
    given: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "mmdec.demo.page", SimpleNamespace(serve=lambda **options: given.update(options)))
    return given


def test_the_command_line_names_hosts(served: dict[str, Any]) -> None:
    done = CliRunner().invoke(cli.app, ["demo", "--allow-host", "a.example", "--allow-host", "b.example"])
    assert done.exit_code == 0, done.output
    assert served["names"] == ["a.example", "b.example"]


@pytest.mark.parametrize(
    ("space", "more", "names"),
    [
        (None, None, []),
        ("me-mmdec.hf.space", None, ["me-mmdec.hf.space"]),
        ("me-mmdec.hf.space", "a.example, b.example", ["me-mmdec.hf.space", "a.example", "b.example"]),
    ],
)
def test_a_space_names_its_hosts(
    space: str | None,
    more: str | None,
    names: list[str],
    served: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("SPACE_HOST", space), ("MMDEC_DEMO_HOSTS", more)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    runpy.run_path(str(Path(__file__).parents[3] / "demos" / "app.py"), run_name="__main__")
    assert served["names"] == names
