"""Pieces that the tabs share: how work reaches the page, what may be uploaded, the Stop button."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
from torch import Tensor

from mmdec.demo.background import DECODERS, updates
from mmdec.demo.sentences import require, status
from mmdec.pipelines.inputs import read

RATE = 16_000  # Hz of every recording that `read` gives
MAX_BYTES = 20_000_000  # of an upload
MAX_SECONDS = 60.0  # of a recording
SHORT = 0.7  # of the window's height: results that begin below are scrolled to

Work = Callable[..., None]  # (tell, *values of the inputs)


def recording(path: str | Path | None) -> Tensor:
    """An upload as 16 kHz mono (T,). Raises InputError."""
    require(bool(path), "Record something, choose a file, or press one of the samples first.")
    samples = read(str(path))
    seconds = len(samples) / RATE
    require(
        seconds <= MAX_SECONDS,
        f"The recording must last at most {MAX_SECONDS:g} seconds here, but lasts {seconds:.0f}. Cut it, or use the "
        "command line, which takes an hour.",
    )
    return samples


def playable(samples: Tensor | np.ndarray) -> np.ndarray:
    """Samples (T,) in [-1, 1] as gr.Audio takes them without changing their loudness: int16."""
    return (np.clip(np.asarray(samples), -1, 1) * 32767).astype(np.int16)


def handler(work: Work, outputs: Mapping[str, Any]) -> Callable[..., Iterator[Any]]:
    """Work as Gradio calls it: a generator of new values by component. Closing it stops the work."""

    def handle(*values: Any) -> Iterator[Any]:
        reports = updates(lambda tell: work(tell, *values))
        try:
            for update in reports:
                yield {outputs[name]: value for name, value in update.items()} if update else gr.skip()
        finally:
            reports.close()

    return handle


def connect(event: Any, work: Work, inputs: Sequence[Any], outputs: Mapping[str, Any]) -> Any:
    """Bind work to a component's event, in the queue that all decoding shares. Returns Gradio's event."""
    return event(
        handler(work, outputs),
        list(inputs),
        list(outputs.values()),
        concurrency_id="decoding",
        concurrency_limit=DECODERS,
        show_progress="hidden",
        trigger_mode="once",
        api_visibility="private",
    )


def results_into_view(button: Any, results: str) -> None:
    """On a small screen the results lie below what is pressed: scroll to the element of this id."""
    button.click(
        None,
        js=f"() => {{const at = document.getElementById('{results}');"
        f" if (at && at.getBoundingClientRect().top > {SHORT} * innerHeight)"
        " at.scrollIntoView({behavior: 'smooth', block: 'start'});}",
    )


def stop_button() -> Any:
    """The button; `bind_stop` gives it its events."""
    return gr.Button("Stop", variant="stop", size="md", min_width=90, scale=0)


def bind_stop(button: Any, line: Any, events: Sequence[Any]) -> None:
    """End these events; decoding ends with its present round. line: where it is said."""
    button.click(
        lambda: status("Stopped. Nothing is being decoded for you any more."),
        None,
        line,
        cancels=list(events),
        queue=False,
        show_progress="hidden",
        api_visibility="private",
    )


@cache
def style() -> str:
    """The page's CSS."""
    return Path(__file__).with_name("style.css").read_text(encoding="utf-8")
