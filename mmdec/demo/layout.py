"""Shared parts of the tabs: samples, Run and Stop, how work reports to the page, limits of uploads, and colours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
from gradio.themes import Base, Soft
from torch import Tensor

from mmdec.demo.background import MAX_DECODERS, updates
from mmdec.demo.html import require, status
from mmdec.tasks.audio import read_audio

MAX_SECONDS = 60.0  # seconds of the longest recording
SHORT = 0.7  # after a click, the page scrolls to results that begin below this share of the window's height
WAITING = status("Waiting for a free place …", "busy")
FAILED = status("The server did not take this. Please try again.", "error")

Work = Callable[..., None]  # takes `report`, which reports to the page, and the values of the input components
# fonts of the visitor's system: none is downloaded
FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif"]
COLOURS = {  # Gradio's own teal has too little contrast with white
    "background_fill_primary": "*neutral_50",  # the soft theme's value, repeated here because `set` resets it
    "block_label_text_color": "*primary_800",
    "block_label_background_fill_dark": "*primary_700",
    "block_title_text_color": "*primary_800",
    "block_info_text_color": "*neutral_600",
    "body_text_color_subdued": "*neutral_600",
    "button_primary_background_fill": "*primary_700",
    "button_primary_background_fill_dark": "*primary_700",
    "button_primary_background_fill_hover": "*primary_800",
    "button_primary_background_fill_hover_dark": "*primary_800",
    "checkbox_label_background_fill_selected": "*primary_700",
    "checkbox_label_background_fill_selected_dark": "*primary_700",
    "checkbox_background_color_selected": "*primary_900",
    "checkbox_background_color_selected_dark": "*primary_900",
    "link_text_color": "*primary_700",
    "link_text_color_dark": "*primary_300",
}


@dataclass(frozen=True)
class Controls:
    """A tab's buttons, and the input components whose values a click passes to the work."""

    samples: Sequence[Any]  # one button for each sample
    run: Any
    stop: Any
    inputs: Sequence[Any]  # the visitor's recording, picture or question; a click on a sample does not read them
    settings: Sequence[Any] = ()  # inputs that every click reads, such as the choice of drafters


def recording(path: str | Path | None) -> Tensor:
    """Read an uploaded recording as samples (T,), 16 kHz mono.

    Raises:
        InputError: If it is missing, damaged or too long.
    """
    require(bool(path), "Record something, choose a file, or press one of the samples first.")
    return read_audio(str(path), max_seconds=MAX_SECONDS)


def playable(samples: Tensor | np.ndarray) -> np.ndarray:
    """Convert samples (T,) in [-1, 1] to int16, which gr.Audio plays without changing their loudness."""
    return (np.clip(np.asarray(samples), -1, 1) * 32767).astype(np.int16)


def handler(work: Work, outputs: Mapping[str, Any]) -> Callable[..., Iterator[Any]]:
    """Wrap work as a handler for Gradio: a generator of new values by component.

    Closing the generator stops the work.

    Args:
        work: Takes `report` and the values of the inputs.
        outputs: The name under which the work reports a value -> component.
    """

    def handle(*values: Any) -> Iterator[Any]:
        reports = updates(lambda report: work(report, *values))
        try:
            for update in reports:
                yield {outputs[name]: value for name, value in update.items()} if update else gr.skip()
        finally:
            reports.close()

    return handle


def connect(event: Any, work: Work, inputs: Sequence[Any], outputs: Mapping[str, Any]) -> Any:
    """Call work on an event of a component, in the queue that all decoding shares.

    Args:
        event: A method such as `button.click`.
        work: Takes `report` and the values of the components `inputs`.
        outputs: The name under which the work reports a value -> component.

    Returns:
        Gradio's event.
    """
    return event(
        handler(work, outputs),
        list(inputs),
        list(outputs.values()),
        concurrency_id="decoding",
        concurrency_limit=MAX_DECODERS,
        show_progress="hidden",
        trigger_mode="once",
        api_visibility="private",
    )


def say_waiting(event: Any, line: Any, results: str = "") -> None:
    """Show in the browser, at once after a click, that a request waits.

    Args:
        event: A method such as `button.click`.
        line: The component of the status line.
        results: Id of the element to scroll to, because on a small screen the results are below the button; "": do not
            scroll.
    """
    event(
        None,
        line,
        line,
        js=f"(said) => {{const at = document.getElementById('{results}');"
        f" if (at && at.getBoundingClientRect().top > {SHORT} * innerHeight)"
        " at.scrollIntoView({behavior: 'smooth', block: 'start'});"
        f" return said.includes('mm-busy') ? said : {json.dumps(WAITING)};}}",
    )


def status_line(text: str) -> Any:
    """Add the status line above the results. Screen readers read out its changes."""
    return gr.HTML(status(text), js_on_load="element.setAttribute('role', 'status');")


def bind_stop(button: Any, line: Any, events: Sequence[Any]) -> None:
    """Let a button stop these events of Gradio after the current round of decoding.

    Args:
        line: The component that then shows that the request was stopped.
    """
    button.click(
        lambda: status("Stopped. Nothing is being decoded for you any more."),
        None,
        line,
        cancels=list(events),
        queue=False,
        show_progress="hidden",
        api_visibility="private",
    )


def intro(title: str, note: str) -> None:
    """Add the tab's heading, a note on what its model can do, and a line above the samples."""
    gr.HTML(f'<h2>{title}</h2><p class="mm-note">{note}</p><h3>Press one to try</h3>')


def sample_button(label: str, picture: Path | None = None) -> Any:
    """Add a sample's button; a button with a picture is narrower."""
    return gr.Button(label, size="sm", min_width=90 if picture else 120, icon=str(picture) if picture else None)


def recording_input(tab: str, language: str) -> Any:
    """Add the component for recording or uploading speech.

    Args:
        tab: Prefix of its elements' ids.
    """
    return gr.Audio(
        sources=["upload", "microphone"],
        type="filepath",
        elem_id=f"{tab}-source",
        # the label is short, because on a phone there is little room next to the player's buttons
        label=f"{language}, up to {MAX_SECONDS:g} s",
    )


def run_and_stop(tab: str, label: str) -> tuple[Any, Any]:
    """Add the buttons Run and Stop, side by side, and return both.

    Args:
        label: The words on Run.
    """
    with gr.Row():
        run = gr.Button(label, variant="primary", elem_id=f"{tab}-go")
        return run, gr.Button("Stop", variant="stop", min_width=90, scale=0)


def bind(
    tab: str,
    controls: Controls,
    outputs: Mapping[str, Any],
    work: Work,
    sample_work: Work,
    others: Sequence[Any] = (),
) -> None:
    """Connect a tab's buttons with its work.

    Args:
        tab: Prefix of its elements' ids.
        outputs: The name under which work reports a value -> component.
        work: Takes `report`, and the values of `controls.inputs` and `controls.settings`.
        sample_work: Takes `report`, the sample's index, and the values of `controls.settings`.
        others: Further events of Gradio that Stop ends.
    """
    # this handler is bound first, because the browser runs a click's handlers in the order of binding
    for button in (*controls.samples, controls.run):
        say_waiting(button.click, outputs["status"], f"{tab}-results")
    events = [connect(controls.run.click, work, [*controls.inputs, *controls.settings], outputs), *others]
    for number, button in enumerate(controls.samples):
        events.append(connect(button.click, bind_sample(sample_work, number), controls.settings, outputs))
    for event in events:
        event.failure(None, None, outputs["status"], js=f"() => {json.dumps(FAILED)}")
    bind_stop(controls.stop, outputs["status"], events)


def bind_sample(sample_work: Work, number: int) -> Work:
    """Return a function that does `sample_work` for the sample `number`, and passes on its other arguments."""
    return lambda report, *values: sample_work(report, number, *values)


@cache
def style() -> str:
    """Return the page's CSS."""
    return Path(__file__).with_name("style.css").read_text(encoding="utf-8")


def theme() -> Base:
    """Return Gradio's soft theme in teal, with contrasts of at least WCAG's AA. Other colours are in style.css."""
    soft = Soft(primary_hue="teal", font=FONTS, font_mono=["ui-monospace", "DejaVu Sans Mono", "monospace"])
    return soft.set(**COLOURS)
