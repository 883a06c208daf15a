"""Servers with tiny models on this machine, and a WebSocket client that needs no network."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import soundfile
import uvicorn
from PIL import Image

from mmdec.serving.app import build_app
from mmdec.serving.engines import EngineOptions, load_engine
from mmdec.serving.server import Server, ServerLimits
from tests.conftest import RATE, buzz
from tests.support import tiny_piece_translator as tiny_heard
from tests.support import tiny_vlm_folder, tiny_whisper

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
PATIENCE = 60.0  # seconds after which a test fails if the server does not answer


def finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result. It has its own thread, because browser tests leave an event loop in the
    main one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def models(folder: Path, how: EngineOptions | None = None) -> dict[str, Any]:
    """Write a Whisper, a translator and a vision-language model into a folder. Returns the engines that serve them, by
    name."""
    how = EngineOptions(threads=1) if how is None else how
    written = [
        tiny_whisper.write(folder / "whisper"),
        tiny_heard.write(folder / "translator"),
        tiny_vlm_folder.write(folder / "pictures"),
    ]
    return dict(load_engine(str(each), how, "cpu", None) for each in written)


@contextmanager
def served(
    engines: dict[str, Any],
    limits: ServerLimits | None = None,
    token: str | None = None,
    ws: Any = "none",
    origins: Sequence[str] = (),
) -> Iterator[tuple[httpx.Client, Server]]:
    """Run a server in a thread. Yields a client for it, and the server."""
    server = Server(engines, limits or ServerLimits(), token)
    running = uvicorn.Server(uvicorn.Config(build_app(server, origins=origins), port=0, log_level="error", ws=ws))
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        until(lambda: running.started)
        port = running.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, trust_env=False) as client:
            client.headers.update({"Authorization": f"Bearer {token}"} if token else {})
            try:
                yield client, server
            finally:
                running.should_exit = True
                thread.join(PATIENCE)
    finally:
        running.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


def until(true: Callable[[], Any], seconds: float = PATIENCE) -> None:
    """Wait until something is true, for so many seconds at most."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def wav(seconds: float, seed: int = 0) -> bytes:
    """Make a buzz as a wav file's bytes."""
    return as_wav(buzz(seconds, seed))


def as_wav(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV")
    return file.getvalue()


def picture(pixels: np.ndarray) -> dict[str, Any]:
    """Make the part of a chat message that has a picture, as a data URL."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def events(text: str) -> list[dict[str, Any]]:
    """Parse the server-sent events of a response, and assert that it is complete."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


class AsgiSocket:
    """A WebSocket client that calls the application itself, without a network."""

    def __init__(self, app: Any, path: str, query: str = "", headers: dict[str, str] | None = None) -> None:
        scope = {
            "type": "websocket",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "scheme": "ws",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "subprotocols": [],
            "state": {},
        }
        self._to: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._from: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._to.put_nowait({"type": "websocket.connect"})
        self._task = asyncio.ensure_future(app(scope, self._to.get, self._from.put))

    async def message(self) -> dict[str, Any]:
        """Return the server's next ASGI message."""
        return await asyncio.wait_for(self._from.get(), PATIENCE)

    async def event(self) -> dict[str, Any]:
        """Return the server's next event, parsed from JSON."""
        message = await self.message()
        assert message["type"] == "websocket.send", message
        return json.loads(message["text"])

    def send(self, event: Any) -> None:
        content = event if isinstance(event, (str, bytes)) else json.dumps(event)
        kind = "bytes" if isinstance(content, bytes) else "text"
        self._to.put_nowait({"type": "websocket.receive", kind: content})

    async def close(self) -> None:
        """Disconnect, and wait until the server has ended the session."""
        self._to.put_nowait({"type": "websocket.disconnect", "code": 1000})
        await asyncio.wait_for(self._task, PATIENCE)
