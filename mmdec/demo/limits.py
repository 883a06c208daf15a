"""Refuses requests before Gradio handles them: requests of other sites, for closed pages, or that are too large."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final
from urllib.parse import urlsplit

MAX_BYTES = 20_000_000  # maximum bytes of an upload
MAX_FORM = 100_000  # maximum bytes besides the file in an upload's request
MAX_MESSAGE = 1_000_000  # maximum bytes of any other request
TOTAL_BYTES = 1_000_000_000  # maximum bytes that the server stores for all visitors at one time
DISK_BLOCK_BYTES = 4096  # bytes that a smaller file is counted as, because it takes a whole block on the disk
MAX_FILE_AGE = 3600  # seconds after which uploads and sounds are deleted
LOCAL = ("localhost", "127.0.0.1", "::1")
UPLOAD = "/gradio_api/upload"
CLOSED = (  # addresses that the page closes: Gradio's pages for programs and administrators
    "/monitoring",
    "/docs",
    "/redoc",
    "/openapi.json",
    "/gradio_api/openapi.json",
    "/gradio_api/info",
    "/gradio_api/process_recording",
    "/gradio_api/runs",
    "/gradio_api/run-history",
)

Scope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@final
class RequestGuard:
    """An ASGI application that checks requests and passes them to another ASGI application.

    Another site can reach a server on its visitor's machine in two ways: by a host name of that site that points to
    this machine (another `Host`), or by a form that it sends here (another `Origin`).

    Args:
        host: The address that the server listens on.
        names: Function that returns further host names of the page, such as a proxy's; it is called for each request.
            This machine's own names, and the address at which a request arrived, are always accepted.
        total: Maximum bytes that may be stored.
    """

    def __init__(
        self, app: App, host: str, names: Callable[[], Iterable[str]] = tuple, total: int = TOTAL_BYTES
    ) -> None:
        self._app, self._host, self._names, self._total = app, host.strip("[]"), names, total
        self._arriving = 0  # bytes of the uploads that are arriving now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI request."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        path = scope["path"].rstrip("/")
        if not self._is_own_page(headers, scope):
            await refuse(scope, send, 403, "This page is not served at this address, or for pages of other sites.")
        elif any(path == closed or path.startswith(f"{closed}/") for closed in CLOSED):
            await refuse(scope, send, 404, "Not found.")
        elif "transfer-encoding" in headers:
            await refuse(scope, send, 411, "A request must say how long it is.")
        else:
            await self._limit_request(scope, receive, send, path, _length(headers))

    def _is_own_page(self, headers: MutableMapping[str, str], scope: Scope) -> bool:
        """Return whether a request's `Host` is this page's address, and its `Origin` is this page or missing."""
        host, origin = headers.get("host", ""), headers.get("origin")
        names = {name.lower() for name in self._names()}
        arrived = str((scope.get("server") or ("",))[0]).removeprefix("::ffff:")
        if name_of(f"//{host}") not in {*names, *LOCAL, self._host.lower(), arrived} - {""}:
            return False
        return origin is None or origin.lower().partition("://")[2] == host.lower() or name_of(origin) in names

    async def _limit_request(self, scope: Scope, receive: Receive, send: Send, path: str, length: int | None) -> None:
        """Pass on a request unless it is too large, or an upload for which the server has stored too much.

        Args:
            path: The request's path.
            length: Bytes that the request declares for its body; None: not a number.
        """
        upload = path == UPLOAD
        max_bytes = MAX_BYTES + MAX_FORM if upload else MAX_MESSAGE
        if length is None or length > max_bytes:
            await refuse(scope, send, 413, f"A request must have at most {max_bytes} bytes.")
            return
        if not upload:
            await self._app(scope, receive, send)
            return
        self._arriving += length
        try:
            stored_bytes = await asyncio.to_thread(clean_uploads, uploads_folder())
            if stored_bytes + self._arriving > self._total:
                await refuse(scope, send, 503, "Too many files are kept here now. Please try again in an hour.")
            else:
                await self._app(scope, receive, send)
        finally:
            self._arriving -= length


def _length(headers: MutableMapping[str, str]) -> int | None:
    """Return the bytes that a request declares for its body; None if they are not a number.

    The server enforces this length.
    """
    declared = headers.get("content-length", "0").strip()
    return int(declared) if declared.isascii() and declared.isdigit() and len(declared) < 20 else None


def name_of(address: str) -> str:
    """Return the host name in an address, in lower case; "" if there is none."""
    try:
        return (urlsplit(address).hostname or "").rstrip(".")
    except ValueError:
        return ""


async def refuse(scope: Scope, send: Send, status: int, words: str) -> None:
    """Refuse a request: answer with this HTTP status and sentence."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    body = words.encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def private_uploads() -> Iterator[Path]:
    """Make a folder in which Gradio stores visitors' uploads and results. The folder is deleted at the end."""
    before = os.environ.get("GRADIO_TEMP_DIR")
    if before:
        Path(before).mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="mmdec-demo-", dir=before, ignore_cleanup_errors=True) as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        try:
            yield Path(folder)
        finally:
            os.environ.pop("GRADIO_TEMP_DIR")
            if before:
                os.environ["GRADIO_TEMP_DIR"] = before


def uploads_folder() -> Path:
    """Return Gradio's folder for files, created by `private_uploads`."""
    return Path(os.environ["GRADIO_TEMP_DIR"])


def clean_uploads(folder: Path, now: Callable[[], float] = time.time) -> int:
    """Count the bytes of all files in the folder, at least a disk block for each.

    Also delete the remains of broken uploads older than `MAX_FILE_AGE` seconds, because Gradio does not.

    Args:
        now: Function that returns the time in seconds, counted like the files' modification times.
    """
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            try:
                state = path.lstat()
                if path.parent == folder and now() - state.st_mtime > MAX_FILE_AGE:
                    path.unlink()
                else:
                    total += max(state.st_size, DISK_BLOCK_BYTES)
            except FileNotFoundError:  # Gradio or another request deleted it meanwhile
                continue
    return total
