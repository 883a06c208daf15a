"""Puts the tabs on one page and serves it: `mmdec demo`, or `python demos/app.py`."""

from __future__ import annotations

from typing import Any

from mmdec.types import MmdecError

try:
    import gradio as gr
    from gradio.themes import Soft
except ImportError as error:
    raise MmdecError("The demo needs gradio, which is not installed. pip install 'mmdec[demo]'") from error

from mmdec.demo import describe, samples, transcribe, translate
from mmdec.demo.background import DECODERS
from mmdec.demo.layout import MAX_BYTES, style

TABS = (translate, transcribe, describe)  # in order
WAITING = 64  # requests in the queue; further ones are told that it is full
SWEEP, AGE = 600, 3600  # seconds: every so often, uploads and sounds that are older are deleted
TITLE = "mmdec: parallel decoding, pass by pass"
LEAD = (
    "<h1>mmdec</h1><p class='mm-lead'>Speech and vision-language models that write many tokens in one pass. Where a "
    "draft is verified, they write exactly what they would have written one by one; each race says whether the outputs "
    "are equal. Press a sample in any tab and watch.</p>"
)
FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif"]  # nothing is fetched


def build() -> gr.Blocks:
    """The page, not yet served."""
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(SWEEP, AGE)) as page:
        gr.HTML(LEAD)
        with gr.Tabs():
            for one in TABS:
                one.tab()
    page.queue(max_size=WAITING, default_concurrency_limit=DECODERS)
    return page


def options() -> dict[str, Any]:
    """What `launch` is given beside host and port. Nothing outside of uploads and samples can be read."""
    return {
        "css": style(),
        "theme": Soft(primary_hue="teal", font=FONTS, font_mono=["ui-monospace", "DejaVu Sans Mono", "monospace"]),
        "max_file_size": MAX_BYTES,
        "allowed_paths": [str(samples.folder())],
        "ssr_mode": False,
        "footer_links": [],
    }


def warm() -> None:
    """Load every model and run it once, so that the first visitor does not wait."""
    for one in TABS:
        one.warm()


def serve(port: int = 7860, share: bool = False, host: str = "127.0.0.1") -> None:
    """Warm the models, build the page and serve it until interrupted. host: "0.0.0.0" lets other machines in."""
    warm()
    build().launch(server_name=host, server_port=port, share=share, quiet=False, **options())
