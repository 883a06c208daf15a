"""`mmdec demo`: starts the web page that demonstrates the models."""

from __future__ import annotations

from typing import Annotated

import typer


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
