"""`mmdec serve`: a server for other programs; `mmdec demo`: the web page that demonstrates the models."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from mmdec import InputError
from mmdec.cli.options import Device, Dtype, Threads, resolve_dtype

TOKEN = "MMDEC_TOKEN"
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#@]+")  # as browsers send it: scheme, host and port


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...", help="Models to serve, as for --model elsewhere. Default: the shipped ones."
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the web server.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    token: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"A file with the token that clients must bring. Or the variable {TOKEN}."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="A web page that may call the server from a browser, as https://example.org; * is all. Repeatable.",
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, max=256, metavar="N", help="Requests decoded at the same time; the others wait.")
    ] = 8,
    cache_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens of these requests, prompts and answers together.")
    ] = 32_768,
    requests: Annotated[int, typer.Option(min=1, metavar="N", help="Open requests; more are answered 429.")] = 64,
    sessions: Annotated[int, typer.Option(min=0, metavar="N", help="Open live transcriptions.")] = 8,
    megabytes: Annotated[float, typer.Option(min=0.001, help="Size of a request.")] = 25.0,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="Length of a recording.")] = 900.0,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens of an answer.")] = 1024,
    wait: Annotated[float, typer.Option(min=1, help="Seconds until a request must be answered.")] = 300.0,
    device: Device = None,
    dtype: Dtype = None,
    threads: Threads = None,
) -> None:
    """Serve models at OpenAI's endpoints: chats (with pictures, too), texts, transcriptions, translations, live sound.

    A request joins the running ones at any round. SIGTERM or Ctrl-C ends the server after the running requests.
    """
    secret = os.environ.get(TOKEN) or None
    if token is not None:
        try:
            secret = token.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"`token` must be a readable file, but '{token}' is not ({error}). Check it.") from error
    if secret is not None and not (secret and secret.isascii() and secret.isprintable()):
        raise InputError("`token` must hold one line of printable ASCII, but does not. Write one.")
    origins = [each.strip().rstrip("/").lower() for each in allow_origin or ()]
    for origin in origins:
        if not ORIGIN.fullmatch(origin):
            raise InputError(
                f"`--allow-origin` must be * or the beginning of an address, as https://example.org, but is "
                f"{origin!r}. Leave out its path."
            )
    from mmdec.kernels.threads import one_pool
    from mmdec.serving.app import listening_sockets, make_server
    from mmdec.serving.server import ServerLimits

    limits = ServerLimits(
        requests=requests,
        sessions=sessions,
        megabytes=megabytes,
        audio_seconds=seconds,
        answer_tokens=tokens,
        answer_seconds=wait,
        rows=batch_size,
        cache_tokens=cache_tokens,
    )
    precision = resolve_dtype(dtype, device, integers=True)
    with listening_sockets(host, port) as sockets, one_pool():
        server, names = make_server(
            models or [],
            token=secret,
            limits=limits,
            threads=threads,
            device=device,
            dtype=precision,
            origins=origins,
        )
        print(f"mmdec serves {', '.join(names)} at http://{host}:{port}/v1", flush=True)
        server.run(sockets)


def demo(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the web server.")] = 7860,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A host name under which the page is reached, too. Repeat it for more."),
    ] = None,
    share: Annotated[bool, typer.Option(help="Ask Gradio for a public link.")] = False,
) -> None:
    """Start a web page: speech translated, speech transcribed, questions about pictures, and how they are decoded."""
    from mmdec.demo.page import serve

    serve(port=port, share=share, host=host, names=allow_host or ())
