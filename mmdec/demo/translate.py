"""The tab that translates: record or upload French speech, hear its English translation."""

from __future__ import annotations

from typing import Any

import gradio as gr
import numpy as np

from mmdec.pipelines.translation.load import load
from mmdec.pipelines.translation.translate import translate_speech
from mmdec.pipelines.translation.translator import STRATEGIES
from mmdec.runtime import Stopwatch
from mmdec.types import MmdecError

DEFAULT_MODEL = "daspeech-phrasebook"
NOTE = (
    "Say a phrase that a traveller would say: greetings, directions, times, prices, tickets, hotel, restaurant. "
    "The model was trained on synthetic voices and on this one domain."
)

Result = tuple[tuple[int, np.ndarray], str, list[list[Any]]]  # (rate, int16 samples (T,)), text, rows of the table


def translate(path: str | None, strategy: str, model: str = DEFAULT_MODEL) -> Result:
    """Translate an audio file. The rows of the table are stages and their milliseconds. Raises gr.Error."""
    if path is None:
        raise gr.Error("Record something or choose a file first.", print_exception=False)
    stopwatch = Stopwatch()
    try:
        result = translate_speech(path, model=load(model), strategy=strategy)
    except MmdecError as error:
        raise gr.Error(str(error), print_exception=False) from error
    seconds = stopwatch.lap()
    rows = [[stage, round(value * 1000, 1)] for stage, value in result.timings.items()]
    rows += [
        ["all, with reading", round(seconds * 1000, 1)],
        ["the recording itself", round(result.seconds_source * 1000)],
    ]
    samples = (result.audio * 32767).astype(np.int16)
    return (result.sample_rate, samples), result.text, rows


def tab(model: str = DEFAULT_MODEL) -> None:
    """Add the tab to the page that is being built."""
    with gr.Tab("Translate speech"):
        gr.Markdown(NOTE)
        with gr.Row():
            with gr.Column():
                source = gr.Audio(sources=["microphone", "upload"], type="filepath", label="French")
                strategy = gr.Dropdown(list(STRATEGIES), value=STRATEGIES[0], label="Decoding strategy")
                button = gr.Button("Translate", variant="primary")
            with gr.Column():
                speech = gr.Audio(label="English", type="numpy", autoplay=True, interactive=False)
                text = gr.Textbox(label="Text", interactive=False)
                timings = gr.Dataframe(headers=["stage", "milliseconds"], label="Time taken", interactive=False)

        def run(path: str | None, chosen: str) -> Result:
            return translate(path, chosen, model)

        button.click(run, [source, strategy], [speech, text, timings], api_name="translate")
