"""A server's models and limits, the checks of each request, and how a handler waits for a job."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, final

from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmdec import InputError
from mmdec.checks.arguments import format_value
from mmdec.core.scheduler import SchedulerLimits
from mmdec.core.summary import RAISE_LENGTH
from mmdec.serving.engines import AnyEngine
from mmdec.serving.job import Job
from mmdec.serving.metrics import Metrics
from mmdec.serving.scheduler_thread import DecodingStopped, Load, SchedulerThread
from mmdec.tasks.confidence import LIKELY_WRONG

log = logging.getLogger(__name__)
UNCACHED = {"Cache-Control": "no-store"}
EXPOSED_HEADERS = ("Retry-After", "X-Confidence", "X-Note", "X-Should-Retry", "X-Text")  # pages may read them
MAX_UPLOAD_READERS = 2  # maximum number of uploads that are decoded to samples or pixels at the same time
T = TypeVar("T")
EngineKind = TypeVar("EngineKind", bound=AnyEngine)


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits of what a server accepts."""

    requests: int = 64  # maximum number of open requests; further ones get status 429 and may be sent again later
    sessions: int = 8  # maximum number of open live transcription sessions
    megabytes: float = 25.0  # maximum size of a request in MB (10^6 bytes)
    audio_seconds: float = 900.0  # maximum seconds of audio in a request
    answer_tokens: int = 1024  # maximum number of new tokens in an answer
    answer_seconds: float = 300.0  # maximum seconds from a request to its answer
    upload_seconds: float = 60.0  # maximum seconds in which a request's body must arrive
    rows: int = 8  # maximum number of requests that are decoded at the same time
    cache_tokens: int = 32_768  # maximum number of tokens in the caches of these requests


@final
class ApiError(Exception):
    """An exception that becomes an error response in OpenAI's format.

    Args:
        status: The HTTP status.
        message: The text for the client.
        kind, code: The fields "type" and "code" of OpenAI's errors.
        param: The name of the wrong parameter.
        headers: Further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        code: str | None = None,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status, self.headers = status, headers
        self.content = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        super().__init__(message)

    @classmethod
    def from_error(cls, error: Exception) -> ApiError:
        """Convert an exception of a job or a handler to the error that the client gets."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, DecodingStopped):
            return cls(503, f"The request was not answered: {error}.", "server_error", "stopped")
        if isinstance(error, InputError):
            return cls(400, str(error), param=error.argument)
        log.error("a request failed", exc_info=error)
        return cls(500, "Internal server error; see the server log.", "server_error")

    def response(self) -> JSONResponse:
        """Make the HTTP response."""
        return JSONResponse(self.content, self.status, self.headers)


@final
class Server:
    """The state that all requests share: models by name, the thread that decodes, limits and counters.

    Args:
        models: The engines by model name.
        limits: What is accepted.
        token: Clients must send it in the header `Authorization: Bearer`; None: all clients are accepted.
        threads: torch's CPU threads for decoding.
    """

    def __init__(
        self,
        models: Mapping[str, AnyEngine],
        limits: ServerLimits,
        token: str | None = None,
        threads: int | None = None,
    ) -> None:
        self.models, self.limits, self.metrics = models, limits, Metrics()
        running = SchedulerLimits(max_rows=limits.rows, max_cache_tokens=limits.cache_tokens)
        self.scheduler = SchedulerThread(running, threads, self.metrics.count_rows)
        self.began = int(time.time())
        self.open = self.sessions = 0
        self._seconds = 0.0  # exponential moving average of the seconds from a job's submission to its end
        self._token = None if token is None else f"Bearer {token}".encode()
        self._reading = asyncio.Semaphore(MAX_UPLOAD_READERS)

    def is_authorised(self, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether a request is authorised: its headers have the right token, or the server needs none."""
        return self._token is None or hmac.compare_digest(headers.get(b"authorization", b""), self._token)

    def engine(self, name: str | None, *kinds: type[EngineKind]) -> EngineKind:
        """Return the engine of the model `name`.

        If `name` is None, the first model with such an engine is used.

        Args:
            kinds: Classes of engines that can handle the request.

        Raises:
            ApiError: If there is no such model.
        """
        fitting = {key: model for kind in kinds for key, model in self.models.items() if isinstance(model, kind)}
        if name is None and fitting:
            return next(iter(fitting.values()))
        if name in fitting:
            return fitting[name]
        raise unknown_model(name, fitting)

    async def read(self, function: Callable[[], T]) -> T:
        """Run a function that decodes an upload in a thread; at most `MAX_UPLOAD_READERS` run at the same time."""
        async with self._reading:
            return await asyncio.to_thread(function)

    def submit(self, job: Job, model: str) -> None:
        """Have a job decoded. Its events arrive in its queue.

        Args:
            model: The model's name, for the metrics.

        Raises:
            ApiError: If it could never fit into the limits.
        """
        limit = self.limits.cache_tokens
        if job.tokens > limit:
            raise ApiError(
                400,
                f"A request must take up at most {limit} tokens, prompt and answer together, but would take up "
                f"{job.tokens}. Shorten the prompt or lower the maximum length.",
            )

        def end(future: Future[Any]) -> None:
            error, task = future.exception(), job.engine.task
            self._seconds += 0.2 * (time.monotonic() - job.began - self._seconds)
            if job.is_cancelled:
                self.metrics.add("stopped_total", task=task)
            elif error is None and future.result() is not None:
                self.metrics.count_result(task, future.result(), job.seconds, model)
            job.put_event("result" if error is None else "error", future.result() if error is None else error)

        job.decoding = self.scheduler.submit(
            job.steps(job),
            job.models,
            tokens=job.tokens,
            priority=job.priority,
            label=model,
            on_round=lambda _: None,  # the steps themselves send what is new
        )
        job.decoding.future.add_done_callback(end)

    def load(self) -> dict[str, Load]:
        """Return what each model's requests take up now."""
        return dict.fromkeys(self.models, Load()) | self.scheduler.load()

    def name_of(self, engine: object) -> str:
        """Return the name of the model that an engine runs."""
        return next(name for name, model in self.models.items() if model is engine)

    async def events(self, request: Request, job: Job) -> AsyncIterator[tuple[str, Any]]:
        """Submit a job, and cancel it if its client disconnects or the answer takes too long.

        Yields:
            ("text", piece of text) while it is decoded, then ("result", the result).

        Raises:
            ApiError: If the job fails or is cancelled.
        """
        gone = asyncio.ensure_future(_wait_for_disconnect(request))
        end = time.monotonic() + self.limits.answer_seconds
        try:
            self.submit(job, self.name_of(job.engine))
            while True:
                event = asyncio.ensure_future(job.events.get())
                await asyncio.wait((event, gone), timeout=end - time.monotonic(), return_when="FIRST_COMPLETED")
                if not event.done():
                    event.cancel()
                    if gone.done():
                        raise ApiError(499, "The client has gone.", code="client_gone")
                    # OpenAI's clients would retry by themselves, which adds load to a slow server
                    headers = {"x-should-retry": "false"}
                    raise ApiError(504, "The answer took too long.", "timeout", "timeout", headers=headers)
                kind, value = event.result()
                if kind == "error":
                    raise ApiError.from_error(value)
                yield kind, value
                if kind == "result":
                    return
        finally:
            if job.decoding is not None:
                job.decoding.cancel()
            gone.cancel()

    async def result(self, request: Request, job: Job) -> Any:
        """Submit a job, and return its result when it is decoded.

        Raises:
            ApiError: If the job fails or is cancelled.
        """
        async for kind, value in self.events(request, job):
            if kind == "result":
                return value
        raise AssertionError("events end with a result or an error")

    def busy(self, noun: str, count: int, limit: int) -> ApiError:
        """Make the error with status 429 for a request that arrives while too many are open.

        Args:
            noun: What is open, in the plural.
            count: Their number, this one included.
            limit: Its maximum.
        """
        after = {"Retry-After": str(min(max(math.ceil(self._seconds), 1), 60))}
        message = f"At most {limit} {noun} may be open, but with this one there are {count}. Try again later."
        return ApiError(429, message, "rate_limit_error", "busy", headers=after)


def unknown_model(name: str | None, names: Collection[str]) -> ApiError:
    """Make the error with status 404 for a request whose model cannot answer it.

    Args:
        name: The model that the request names; None: it names none.
        names: Names of the models that can answer it.
    """
    if names:
        rule = f"`model` must be one of {', '.join(names)}, but is {format_value(name)}."
    else:
        rule = "This server has no model for such requests."
    return ApiError(404, rule, code="model_not_found", param="model")


def confidence_warning(confidence: float | None, calibrated: bool) -> dict[str, str]:
    """Return {"warning": what to tell the client} if an output is likely wrong, else {}.

    Args:
        confidence: Of the output; None: it has none, such as silence.
        calibrated: Whether the confidence is calibrated for the model.
    """
    if confidence is None or not calibrated or confidence >= LIKELY_WRONG:
        return {}
    return {"warning": f"The text is likely wrong: its confidence is {confidence:.2f}, below {LIKELY_WRONG}."}


def api_note(note: str, remedy: str = "") -> str:
    """Return a result's note without the library's remedy for a text that was cut.

    Args:
        remedy: The API's, in its place.
    """
    return note.replace(RAISE_LENGTH, remedy)


async def _wait_for_disconnect(request: Request) -> None:
    """Wait until the client disconnects. The body of the request must have been read before."""
    with suppress(Exception):
        while (await request.receive())["type"] != "http.disconnect":
            pass


def server_of(request: Any) -> Server:
    """Return the server of a request or a WebSocket."""
    return request.app.state.server


@final
class EventStream(StreamingResponse):
    """A response that is sent as server-sent events."""

    @classmethod
    async def from_events(cls, events: AsyncIterator[Mapping[str, Any]]) -> EventStream:
        """Make the response to a stream of events, when the first event is known.

        An exception before the first event is raised here, so that the client gets an ordinary error response.
        """
        return cls(_lines(await anext(events), events), media_type="text/event-stream", headers=UNCACHED)


async def _lines(first: Mapping[str, Any], events: AsyncIterator[Mapping[str, Any]]) -> AsyncIterator[str]:
    yield _data(first)
    try:
        async for event in events:
            yield _data(event)
    except Exception as error:  # status 200 is already sent, so the error becomes an event
        yield _data(ApiError.from_error(error).content)
        return
    yield "data: [DONE]\n\n"


def _data(event: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(event, ensure_ascii=False)}\n\n"


@final
class AccessMiddleware:
    """ASGI middleware for all requests to /v1/.

    It rejects requests without the right token, and requests that exceed `ServerLimits`: too many, too large or too
    slow. It also rejects WebSockets of web pages that may not call the server, because browsers do not apply CORS to
    WebSockets.

    Args:
        origins: Web pages that may open a WebSocket, such as "https://example.org"; "*": all.
    """

    def __init__(self, app: ASGIApp, server: Server, origins: Sequence[str] = ()) -> None:
        self._app, self._server, self._origins = app, server, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] in ("http", "websocket") and scope["path"].startswith("/v1/")
        if not guarded:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            headers = dict(scope["headers"])
            if self._server.is_authorised(headers) and self._is_allowed_origin(headers):
                await self._app(scope, receive, send)
            else:
                # the connection is not yet accepted: the client gets status 403
                await send({"type": "websocket.close", "code": 1008})
        else:
            await self._request(scope, receive, send)

    def _is_allowed_origin(self, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether a WebSocket comes from no web page, from one of this server, or from an allowed origin."""
        if b"origin" not in headers or "*" in self._origins:
            return True
        origin = headers[b"origin"].decode("latin-1")
        # behind a proxy with TLS, the page's scheme is not the server's
        return origin in self._origins or origin.partition("://")[2].encode("latin-1") == headers.get(b"host")

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on with its upload limited; count it either way."""
        server, began, status = self._server, time.monotonic(), 499

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        server.open += 1
        try:
            refused = self._refusal(dict(scope["headers"]))
            if refused is not None:
                await refused.response()(scope, receive, sending)
            else:
                upload = LimitedUpload(receive, sending, server.limits)
                await self._app(scope, upload.receive, upload.send)
        finally:
            server.open -= 1
            path = scope["path"] if status not in (404, 405) else "other"
            server.metrics.add("requests_total", endpoint=path, status=str(status))
            server.metrics.observe("request_seconds", time.monotonic() - began, endpoint=path)

    def _refusal(self, headers: Mapping[bytes, bytes]) -> ApiError | None:
        server = self._server
        if not server.is_authorised(headers):
            bearer = {"WWW-Authenticate": "Bearer"}
            return ApiError(401, "A valid token must come as `Authorization: Bearer`.", code="token", headers=bearer)
        if server.open > server.limits.requests:
            return server.busy("requests", server.open, server.limits.requests)
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > server.limits.megabytes * 1e6:
            return too_large_error(server.limits)
        return None


def too_large_error(limits: ServerLimits) -> ApiError:
    """Make the error with status 413 for a request with too many bytes."""
    return ApiError(413, f"A request must have at most {limits.megabytes:g} MB.", code="too_large")


@final
class LimitedUpload:
    """Reads the body of one request, and limits its bytes and its time. The declared length is not trusted.

    If a limit is exceeded, the handler receives "http.disconnect", and the client receives an error response. Holds the
    number of bytes that may still arrive, and the deadline.
    """

    def __init__(self, receive: Receive, send: Send, limits: ServerLimits) -> None:
        self._receive, self._send, self._limits = receive, send, limits
        self._left, self._whole = limits.megabytes * 1e6, False
        self._end = time.monotonic() + limits.upload_seconds
        self._refused: ApiError | None = None

    async def receive(self) -> Message:
        """Return the next ASGI message from the client, after counting its bytes and checking the time."""
        if self._whole:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), max(self._end - time.monotonic(), 0.0))
        except TimeoutError:
            self._refused = ApiError(
                408, f"A request must arrive within {self._limits.upload_seconds:g} seconds.", code="slow"
            )
            return {"type": "http.disconnect"}
        self._left -= len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        if self._left < 0:
            self._refused = too_large_error(self._limits)
            return {"type": "http.disconnect"}
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the handler's response. If a limit was exceeded, send the error response instead."""
        if self._refused is None:
            await self._send(message)
        elif message["type"] == "http.response.start":
            await self._refused.response()({"type": "http"}, self._receive, self._send)
