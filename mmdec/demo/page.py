"""Puts the tabs on one page and serves it: `mmdec demo`, or `python demos/app.py`."""

from __future__ import annotations

from mmdec.types import MmdecError

try:
    import gradio as gr
    from gradio.themes import Soft
except ImportError as error:
    raise MmdecError("The demo needs gradio, which is not installed. pip install 'mmdec[demo]'") from error

from mmdec.demo import translate

CSS = "footer {visibility: hidden}"
TABS = (translate.tab,)  # a function for each tab, in order


def build() -> gr.Blocks:
    """The page, not yet served."""
    with gr.Blocks(title="mmdec", analytics_enabled=False) as page:
        gr.Markdown("# mmdec: French speech in, English speech out")
        for tab in TABS:
            tab()
    return page


def serve(port: int = 7860, share: bool = False) -> None:
    """Build the page and serve it until interrupted."""
    build().launch(server_port=port, share=share, css=CSS, theme=Soft(), quiet=False)
