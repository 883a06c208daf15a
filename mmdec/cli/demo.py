"""`mmdec demo`: the demo page."""

from __future__ import annotations

from typing import Annotated

import typer


def demo(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the web server.")] = 7860,
    share: Annotated[bool, typer.Option(help="Ask Gradio for a public link.")] = False,
) -> None:
    """Start a web page that records or uploads French speech and plays its English translation."""
    from mmdec.demo.page import serve

    serve(port=port, share=share)
