"""The ASGI application: its routes, its error responses in OpenAI's format, its start and its end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

import mmdec
from mmdec import InputError, MmdecError

try:
    import python_multipart as _  # noqa: F401 # FastAPI needs it for uploads
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.middleware.cors import CORSMiddleware
    from fastapi.responses import JSONResponse, PlainTextResponse
    from starlette.exceptions import HTTPException
except ImportError as error:
    raise MmdecError(
        f"The server needs {error.name}, which is not installed. Run `pip install 'mmdec[serve]'`."
    ) from error

from mmdec.daspeech.options import DEFAULT_TRANSLATOR
from mmdec.pretrained import DEFAULT_VLM
from mmdec.serving import chat, completions, realtime, speech
from mmdec.serving.engines import AnyEngine, EngineOptions, load_engine
from mmdec.serving.server import (
    EXPOSED_HEADERS,
    AccessMiddleware,
    ApiError,
    Server,
    ServerLimits,
    server_of,
    unknown_model,
)
from mmdec.whisper.options import DEFAULT_WHISPER

# models that are served if the user names none: the shipped transcriber, translator and vision-language model
MODELS = (DEFAULT_WHISPER, DEFAULT_TRANSLATOR, DEFAULT_VLM)
BACKLOG = 2048  # maximum number of new connections that wait until the server accepts them; uvicorn's default
SHUTDOWN_SECONDS = 120  # seconds that open requests get to finish after the server received a signal to stop


def build_app(server: Server, origins: Sequence[str] = ()) -> FastAPI:
    """Build the ASGI application of a server.

    Args:
        origins: Web pages that may call it from a browser, such as "https://example.org"; "*": all.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        server.scheduler.close()

    app = FastAPI(title="mmdec", version=mmdec.__version__, lifespan=lifespan)
    app.state.server = server
    app.add_middleware(AccessMiddleware, server=server, origins=origins)  # type: ignore[arg-type] # an ASGI class
    if origins:  # outside AccessMiddleware, because a browser asks without the token whether it may send it
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    for module in (speech, chat, completions, realtime):
        app.include_router(module.router)
    routes = {"/v1/models": models, "/v1/models/{name:path}": model, "/health": health, "/metrics": metrics}
    for path, function in routes.items():
        app.add_api_route(path, function, response_model=None)
    app.add_exception_handler(RequestValidationError, _validation_response)
    for kind in (ApiError, InputError, Exception):
        app.add_exception_handler(kind, _exception_response)
    app.add_exception_handler(HTTPException, _http_error_response)
    return app


async def models(request: Request) -> JSONResponse:
    """List the models that are served."""
    server = server_of(request)
    return JSONResponse({"object": "list", "data": [_row(server, name) for name in server.models]})


async def model(request: Request, name: str) -> JSONResponse:
    """Return one of the models that are served.

    Args:
        name: As in the list; a Hugging Face id may hold slashes.
    """
    server = server_of(request)
    if name not in server.models:
        raise unknown_model(name, server.models)
    return JSONResponse(_row(server, name))


def _row(server: Server, name: str) -> dict[str, Any]:
    task = server.models[name].task
    return {"id": name, "object": "model", "created": server.began, "owned_by": "mmdec", "task": task}


async def health(request: Request) -> JSONResponse:
    """Return status 200 once requests are answered, and the numbers of waiting and decoding requests."""
    loads = server_of(request).load().values()
    waiting, decoding = sum(load.waiting for load in loads), sum(load.rows for load in loads)
    return JSONResponse({"status": "ok", "waiting": waiting, "decoding": decoding})


async def metrics(request: Request) -> PlainTextResponse:
    """Return the counters in Prometheus' text format."""
    server = server_of(request)
    loads = server.load()
    gauges = {
        "requests_waiting": ("Requests that wait for room.", {name: load.waiting for name, load in loads.items()}),
        "rows_running": ("Rows that are decoded now.", {name: load.rows for name, load in loads.items()}),
        "cache_tokens": (
            "Tokens that the caches of running rows may come to hold.",
            {name: load.tokens for name, load in loads.items()},
        ),
        "cache_tokens_limit": ("Maximum of cache_tokens over all models.", {"": server.limits.cache_tokens}),
        "requests_open": ("Requests that are not answered yet.", {"": server.open}),
        "live_sessions": ("Open sessions of live transcription.", {"": server.sessions}),
    }
    return PlainTextResponse(server.metrics.text(gauges), media_type="text/plain; version=0.0.4")


async def _exception_response(_: Request, error: Exception) -> JSONResponse:
    return ApiError.from_error(error).response()


async def _validation_response(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    location = [str(part) for part in first["loc"][1:]]
    param = ".".join(location) or None
    return ApiError(400, f"`{param or 'body'}`: {first['msg']}.", param=param).response()


async def _http_error_response(_: Request, error: Exception) -> JSONResponse:
    """Answer requests that FastAPI itself refuses: unknown addresses, wrong HTTP methods, broken bodies."""
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, f"{error.detail}.", headers=error.headers).response()


@contextmanager
def listening_sockets(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Context manager that yields sockets which listen at an address, and closes them at the end.

    Connections are queued as soon as the block begins, even if the server starts later.

    Raises:
        MmdecError: If the address cannot be used.
    """

    async def bind() -> list[socket.socket]:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port, start_serving=False)
        # the host may have several addresses, each with a socket
        sockets = [listener.dup() for listener in server.sockets]
        server.close()
        return sockets

    with ExitStack() as stack:
        try:
            sockets = [stack.enter_context(listener) for listener in asyncio.run(bind())]
            for listener in sockets:
                listener.listen(BACKLOG)
        except (OSError, UnicodeError) as error:
            raise MmdecError(
                f"`port` must be free, but nothing can listen at {host}:{port} ({error}). End what listens there, or "
                "choose another port or host."
            ) from error
        yield sockets


def make_server(
    names: Sequence[str],
    *,
    token: str | None = None,
    limits: ServerLimits | None = None,
    threads: int | None = None,
    device: str | None = None,
    dtype: Any = None,
    origins: Sequence[str] = (),
) -> tuple[uvicorn.Server, list[str]]:
    """Load models and make a server.

    To start it, call its method `run` with `listening_sockets`. It runs until it receives a signal to stop, then
    finishes the open requests.

    Args:
        names: Names, folders or Hugging Face ids of models; empty: the shipped models.
        token: The access token that clients must send; None: all clients are accepted.
        limits: Limits on requests; None: the defaults.
        threads: torch's CPU threads for decoding.
        device, dtype: Those of the models.
        origins: Web pages that may call the server from a browser, such as "https://example.org"; "*": all.

    Returns:
        The server, and the names of the models.

    Raises:
        InputError: For a model that cannot be loaded, or two models of the same name.
    """
    config = uvicorn.Config("", timeout_graceful_shutdown=SHUTDOWN_SECONDS, log_level="warning")
    options = EngineOptions(threads, mmdec.DecodingStatistics())
    engines = dict[str, AnyEngine]()
    for model in names or MODELS:
        name, engine = load_engine(model, options, device, dtype)
        if name in engines:
            raise InputError(f"`models` must differ in their names, but two are called {name!r}. Rename a folder.")
        engines[name] = engine
    server = Server(engines, limits or ServerLimits(), token, threads)
    config.app = build_app(server, origins)
    return uvicorn.Server(config), list(engines)
