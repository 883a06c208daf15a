"""Puts the tabs on one page and serves it: `mmdec demo`, or `python demos/app.py`."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from mmdec import MmdecError

try:
    import gradio as gr
except ImportError as error:
    raise MmdecError("The demo needs gradio, which is not installed. Run `pip install 'mmdec[demo]'`.") from error

from starlette.middleware import Middleware

from mmdec.demo import describe, samples, transcribe, translate
from mmdec.demo.background import MAX_DECODERS
from mmdec.demo.layout import style, theme
from mmdec.demo.limits import MAX_BYTES, MAX_FILE_AGE, RequestGuard, private_uploads
from mmdec.kernels.threads import one_pool

TABS = (translate, transcribe, describe)  # modules of the tabs, in the page's order
MAX_QUEUED = 64  # the most requests in the queue; further ones are refused
SWEEP_SECONDS = 600  # seconds between two deletions of uploads and sounds that are older than `MAX_FILE_AGE` seconds
LOCAL = "127.0.0.1"  # Gradio tests at this address whether the port is free, even if `host` is another
TITLE = "mmdec: parallel decoding, pass by pass"
LEAD = (
    "<h1>mmdec</h1><p class='mm-lead'>Speech and vision-language models that write many tokens in one pass. Where a "
    "draft is verified, they write exactly what they would have written one by one; each race says whether the outputs "
    "are equal. Press a sample in any tab and watch.</p>"
)


def build_page() -> gr.Blocks:
    """Build the page, without serving it."""
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(SWEEP_SECONDS, MAX_FILE_AGE)) as page:
        gr.HTML(LEAD)
        with gr.Tabs():
            for tab in TABS:
                tab.tab()
    page.queue(max_size=MAX_QUEUED, default_concurrency_limit=MAX_DECODERS)
    return page


def options(page: gr.Blocks, host: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return options for Gradio's `launch`.

    The server gives out only uploads and samples, and `RequestGuard` refuses requests of other sites.

    Args:
        host: The address to listen on.
        names: Further host names under which the page is reached.
    """

    def host_names() -> Iterable[str]:
        shared = urlsplit(getattr(page, "share_url", None) or "").hostname  # Gradio sets it once the page is served
        return (*names, shared) if shared else names

    return {
        "server_name": host,
        "app_kwargs": {"middleware": [Middleware(RequestGuard, host=host, names=host_names)]},
        "css": style(),
        "theme": theme(),
        "max_file_size": MAX_BYTES,
        "allowed_paths": [str(samples.folder())],
        "ssr_mode": False,
        "footer_links": [],
    }


def warm_up() -> None:
    """Load and run every model once, and import what Gradio imports late, so that the first visitor does not wait."""
    with suppress(ImportError):
        # imported in advance: otherwise Gradio imports it in the first request, which takes a second
        import_module("matplotlib.pyplot")
    for tab in TABS:
        tab.warm_up()


def serve(port: int = 7860, share: bool = False, host: str = "127.0.0.1", names: Sequence[str] = ()) -> None:
    """Warm the models, build the page and serve it until interrupted.

    Args:
        host: The address to listen on; "0.0.0.0" allows requests from other machines.
        names: Further host names of the page, such as a Space's or a proxy's. Requests to other names are refused.

    Raises:
        MmdecError: Before a model is loaded, if no page can be served at this address.
    """
    with private_uploads(), one_pool():
        with ExitStack() as stack:
            for name in dict.fromkeys((host, LOCAL)):
                stack.enter_context(reserve(name, port))
            warm_up()
            page = build_page()
        page.launch(server_port=port, share=share, quiet=False, **options(page, host, names))


def reserve(host: str, port: int) -> socket.socket:
    """Open a socket that reserves the address while the models are loaded.

    The caller must close it before serving.

    Raises:
        MmdecError: If the host is not an address of this machine, or the port is not free.
    """
    # browsers put an IPv6 address in brackets
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise _no_host(host) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise _no_host(host) from error
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
        raise MmdecError(f"`--port` must be free on {host}, but {port} {why}. Choose another, above 1023.") from error
    return listener


def _no_host(host: str) -> MmdecError:
    return MmdecError(
        f"`--host` must be an address of this machine, but is {host!r:.80}. Leave it out, or use 0.0.0.0 to let other "
        "machines in."
    )
