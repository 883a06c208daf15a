"""One page: speak or choose French, hear English. `python -m mmdec demo` serves it; `build` alone needs no server."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mmdec.pipelines.translation.load import load
from mmdec.pipelines.translation.translate import translate_speech
from mmdec.pipelines.translation.translator import STRATEGIES
from mmdec.types import MmdecError

try:
    import gradio as gr
    from gradio.themes import Soft
except ImportError as error:
    raise MmdecError("The demo needs gradio, which is not installed. pip install 'mmdec[demo]'") from error

CSS = "footer {visibility: hidden}"
NOTE = (
    "Speak a phrase a traveller would say: greetings, directions, times, prices, tickets, hotel, restaurant. "
    "The model learned from synthetic voices and knows this one domain."
)


def translate(path: str | None, strategy: str, model: str) -> tuple[tuple[int, np.ndarray], str, list[list[Any]]]:
    """A sound file to (rate, int16 samples), text, and rows of stage and milliseconds."""
    if path is None:
        raise gr.Error("Record something or choose a file first.", print_exception=False)
    start = time.perf_counter()
    try:
        result = translate_speech(path, model=load(model), strategy=strategy)
    except MmdecError as error:
        raise gr.Error(str(error), print_exception=False) from error
    taken = time.perf_counter() - start
    rows = [[stage, round(seconds * 1000, 1)] for stage, seconds in result.timings.items()]
    rows += [
        ["all, with reading", round(taken * 1000, 1)],
        ["the recording itself", round(result.seconds_source * 1000)],
    ]
    samples = (result.audio * 32767).astype(np.int16)
    return (result.sample_rate, samples), result.text, rows


def build(model: str = "daspeech-phrasebook") -> gr.Blocks:
    """The page, not yet served."""
    with gr.Blocks(title="mmdec", analytics_enabled=False) as page:
        gr.Markdown(f"# French speech in, English speech out\n\n{NOTE}")
        with gr.Tab("Translate speech"), gr.Row():
            with gr.Column():
                source = gr.Audio(sources=["microphone", "upload"], type="filepath", label="French")
                strategy = gr.Dropdown(list(STRATEGIES), value=STRATEGIES[0], label="How the path is chosen")
                button = gr.Button("Translate", variant="primary")
            with gr.Column():
                speech = gr.Audio(label="English", type="numpy", autoplay=True, interactive=False)
                text = gr.Textbox(label="Text", interactive=False)
                timings = gr.Dataframe(headers=["stage", "milliseconds"], label="Time taken", interactive=False)

        def run(path: str | None, chosen: str) -> tuple[tuple[int, np.ndarray], str, list[list[Any]]]:
            return translate(path, chosen, model)

        button.click(run, [source, strategy], [speech, text, timings], api_name="translate")
    return page


def serve(port: int = 7860, share: bool = False) -> None:
    """Build the page and serve it until interrupted."""
    build().launch(server_port=port, share=share, css=CSS, theme=Soft(), quiet=False)


if __name__ == "__main__":
    serve()
