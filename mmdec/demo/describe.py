"""The tab that answers questions about pictures.

It compares the speed of several drafters (the page calls this the race), and tells which visual tokens each drafter
uses.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np

from mmdec.demo import samples as shipped
from mmdec.demo.background import Report
from mmdec.demo.html import SHARE_OF_ANSWERS, confidence_html, output_html, require, status
from mmdec.demo.layout import Controls, bind, connect, intro, run_and_stop, sample_button, say_waiting, status_line
from mmdec.demo.race import compare_with_plain, milliseconds, race_html, round_listener, run_in_turn
from mmdec.io.images import read_image, to_pil
from mmdec.pretrained import DEFAULT_VLM
from mmdec.pretrained.vlm import load_vlm
from mmdec.tasks.confidence import read_calibrations
from mmdec.types import Round
from mmdec.vision.answer import Description
from mmdec.vision.describe import available_drafters, describe

DRAFT = (24, 5)  # nodes and depth of each drafted tree: fixed, because a learned size would change between calls
MAX_NEW_TOKENS = 200
MAX_LETTERS = 500  # the most characters of a question
MAX_PIXELS = 16_000_000  # the most pixels of an upload: visitors share the machine, so fewer than the library accepts
SIDE = 1024  # pixels; a longer side is scaled down once, not again for each drafter that is compared
MAX_SENT_SIDE = 640  # the longest side in pixels of the picture that the browser gets
QUESTION = "Describe this image."
NOTE = (
    "A small model answers questions about drawn pictures: menus, timetables, streets, rooms, tickets, maps. A drafter "
    "(a much smaller network) guesses the next tokens (pieces of words), and the model checks all guesses in one pass. "
    "The answer is the same as without it. The model knows drawings of these kinds only."
)
START = (
    "The clock starts with the first pass, which reads picture and question. Tokens per pass are those of the later "
    "passes."
)
TOKEN = "A visual token is a small square of the picture, as the model sees it."
ID = "mm-describe"
PLAIN = ""  # plain decoding in the race; not the name of a drafter
_CHOSEN = "Its gate, which reads the question, chose to"
COMPRESSED = {  # compressor's name -> what it did to the picture's visual tokens, in words
    "prune": f"{_CHOSEN} keep the squares that count most.",
    "pool": f"{_CHOSEN} average neighbours.",
    "conv": f"{_CHOSEN} fold neighbours into one (a convolution).",
    "resampler": f"{_CHOSEN} sum the picture up in a few learned vectors (a resampler).",
    "text-only": f"{_CHOSEN} draft from the text alone.",
    "queries": "A few learned queries sum them up.",
    "latents": "Learned vectors (latents) sum them up.",
}


def drafters() -> dict[str, str]:
    """List the drafters that have weights for the demo's model: name -> a one-line description."""
    return available_drafters(load_vlm(DEFAULT_VLM))


def picture(path: str | Path | None) -> np.ndarray:
    """Read an upload as (H, W, 3) uint8, and scale it down if it is large.

    Raises:
        InputError: If there is none, or it cannot be read.
    """
    require(bool(path), "Choose a picture, or press one of the samples first.")
    pixels = read_image(str(path), max_pixels=MAX_PIXELS)
    if max(pixels.shape) <= SIDE:
        return pixels
    smaller = to_pil(pixels)
    smaller.thumbnail((SIDE, SIDE))
    return np.array(smaller)


def check_question(question: str | None) -> str:
    """Return a question without spaces around it.

    Raises:
        InputError: If it is empty or too long.
    """
    text = (question or "").strip()
    require(bool(text), "The question must be text, but is empty. Ask something about the picture.")
    require(
        len(text) <= MAX_LETTERS,
        f"The question must have at most {MAX_LETTERS} letters, but has {len(text)}. Make it shorter.",
    )
    return text


def decode(
    report: Report, pixels: np.ndarray, question: str, drafter: str | None, live: bool = False
) -> tuple[Description, list[Round]]:
    """Answer the question once.

    Args:
        report: Reports to the page.
        pixels: (H, W, 3) uint8.
        drafter: Name of the drafter; None: plain decoding.
        live: Show the text as it is accepted.

    Returns:
        The answer, and its rounds.

    Raises:
        WorkStopped: Between rounds, if the visitor stopped the request.
    """
    rounds: list[Round] = []
    tokenizer = load_vlm(DEFAULT_VLM).tokenizer
    nodes = None if drafter is None else DRAFT
    result = describe(
        pixels,
        question,
        drafter=drafter,
        num_speculative_tokens=nodes,
        max_new_tokens=MAX_NEW_TOKENS,
        on_round=round_listener(report, tokenizer, rounds, question_html(question) if live else None),
    )
    return result, rounds


def question_html(question: str) -> str:
    """Write the question as HTML, to be put above its answer."""
    return f'<p class="mm-from">{escape(question)}</p>'


def text_html(result: Description, question: str, truth: str = "") -> str:
    """Write question and answer as HTML.

    Args:
        truth: The right answer; "": not known.
    """
    calibrated = bool(read_calibrations(load_vlm(DEFAULT_VLM).directory))
    truth_note = f'<p class="mm-note">Really drawn: {escape(truth)}</p>' if truth and truth != result.text else ""
    return (
        f'<div class="mm-said">{question_html(question)}'
        f"{output_html(result.text)}"
        f"{confidence_html(result.confidence, SHARE_OF_ANSWERS if calibrated else None)}{truth_note}"
        f'<p class="mm-note">Answered in {milliseconds(result.timings["total"])}.</p></div>'
    )


def work(report: Report, path: str | None, question: str | None, chosen: list[str]) -> None:
    """Answer a question about an upload, and report to the page by `report`.

    Args:
        path: The uploaded file.
        chosen: Names of the drafters to compare.
    """
    report(status=status("Reading the picture …", "busy"), text="", race="")
    show_answer(report, picture(path), Path(str(path)).name, check_question(question), chosen)


def sample_work(report: Report, number: int, chosen: list[str]) -> None:
    """Answer the question of a shipped sample, and report to the page by `report`.

    Args:
        number: Index of the sample.
        chosen: Names of the drafters to compare.
    """
    sample = shipped.pictures()[number]
    report(status=status("Looking …", "busy"), text="", race="", source=str(sample.path), question=sample.question)
    show_answer(report, picture(sample.path), f"Drawn picture: {sample.text}", sample.question, chosen, sample.answer)


def preview(report: Report, path: str | None) -> None:
    """Show a picture that was just selected: report it to `report`."""
    if path:
        report(picture=picture_html(picture(path), Path(path).name), status=status("Now ask a question about it."))


def show_answer(
    report: Report, pixels: np.ndarray, name: str, question: str, chosen: list[str], truth: str = ""
) -> None:
    """Answer with the first drafter, showing the text as it is accepted.

    Then time all drafters and plain decoding in turn, without showing text, because updates of the page would slow
    decoding down, and compare them (the race).

    Args:
        report: Reports to the page.
        pixels: (H, W, 3) uint8.
        name: The picture's alternative text.
        chosen: Names of the drafters.
        truth: The right answer; "": not known.
    """
    report(picture=picture_html(pixels, name))
    first, _ = decode(report, pixels, question, chosen[0] if chosen else None, live=True)
    report(text=text_html(first, question, truth))
    ways = {way: partial(decode, report, pixels, question, way or None) for way in (*dict.fromkeys(chosen), PLAIN)}
    *drafted, (_, plain) = run_in_turn(report, "Answered.", ways).items()
    notes = drafters()
    named = [(drafter, notes.get(drafter) or "A drafter.", runs) for drafter, runs in drafted]
    lanes = compare_with_plain(load_vlm(DEFAULT_VLM).tokenizer, named, plain)
    # the texts are equal and the passes nearly so: one drafter is drawn, the others are rows of a table
    lanes = [replace(lane, brief=0 < index < len(drafted)) for index, lane in enumerate(lanes)]
    report(
        status=status(f"Done. {lanes[0].name}: {lanes[0].verdict}." if drafted else "Done.", "done"),
        picture=picture_html(pixels, name)
        + read_html([(drafter, runs[0][0].compressor, runs[0][0].visual_weights) for drafter, runs in drafted]),
        race=race_html(lanes, "tokens", start=START),
    )


def warm_up() -> None:
    """Load the model and its drafters, and run each drafter once."""
    for sample in shipped.pictures()[:1]:
        for drafter in (*drafters(), None):
            nodes = None if drafter is None else DRAFT
            describe(str(sample.path), QUESTION, drafter=drafter, num_speculative_tokens=nodes, max_new_tokens=8)


def tab() -> None:
    """Add this tab to the page."""
    names = list(drafters())
    with gr.Tab("Describe", id="describe"):
        with gr.Row(equal_height=False):
            with gr.Column(scale=2, min_width=300):
                intro("Questions about pictures", NOTE)
                with gr.Row(elem_classes="mm-samples"):
                    buttons = [sample_button(sample.text.capitalize(), sample.path) for sample in shipped.pictures()]
                source = gr.File(type="filepath", label="Your picture", height=150)
                question = gr.Textbox(label="Question", value=QUESTION, max_lines=3, max_length=MAX_LETTERS)
                run, stop = run_and_stop(ID, "Ask")
                chosen = gr.CheckboxGroup(
                    names,
                    value=names[:1],
                    label="Drafters in the race",
                    info="Each adds its time. Plain decoding always runs.",
                )
            with gr.Column(scale=3, min_width=300, elem_id=f"{ID}-results"):
                line = status_line("Press a sample, or choose a picture and ask.")
                text = gr.HTML()
                tokens_view = gr.HTML()
                race = gr.HTML()
        outputs: dict[str, Any] = {
            "status": line, "picture": tokens_view, "text": text, "race": race, "source": source, "question": question,
        }  # fmt: skip
        controls = Controls(buttons, run, stop, [source, question], [chosen])
        say_waiting(question.submit, line, f"{ID}-results")
        others = [
            connect(question.submit, work, [source, question, chosen], outputs),
            connect(source.upload, preview, [source], outputs),
        ]
        bind(ID, controls, outputs, work, sample_work, others)


def data_address(pixels: np.ndarray) -> str:
    """Write the picture (H, W, 3) uint8 as a data URL."""
    picture = to_pil(pixels)
    picture.thumbnail((MAX_SENT_SIDE, MAX_SENT_SIDE))
    written = io.BytesIO()
    picture.save(written, format="PNG")
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode("ascii")


def grid_side(tokens: int) -> int | None:
    """Return the side of the square grid of this number of visual tokens, as for LLaVA; None if it is no square."""
    side = math.isqrt(tokens)
    return side if tokens and side * side == tokens else None


def visual_tokens_svg(weights: Sequence[float]) -> str:
    """Draw the grid of visual tokens as SVG, and darken those that the drafter uses less.

    Args:
        weights: For each visual token, row by row, how much of it the drafter uses, from 0 to 1.

    Returns:
        "" if the tokens form no square grid.
    """
    side = grid_side(len(weights))
    if side is None:
        return ""
    highest = max(*weights, 1e-6)
    cells = "".join(
        f'<rect x="{index % side}" y="{index // side}" width="1" height="1" '
        f'style="fill-opacity:{0.75 * (1 - value / highest):.2f}"><title>visual token {index + 1}: '
        f"{100 * value / highest:.0f} % of the most</title></rect>"
        for index, value in enumerate(weights)
    )
    return f'<svg class="mm-visual-tokens" aria-hidden="true" viewBox="0 0 {side} {side}">{cells}</svg>'


def visual_tokens_sentence(compressor: str | None, weights: Sequence[float] | None, drafter: str) -> str:
    """Write a sentence on how many visual tokens the drafter uses.

    Args:
        compressor: Name of the drafter's image compressor; None: it has none.
        weights: For each visual token, how much of it the drafter uses, from 0 to 1; None: it uses all.
    """
    if weights is None:
        return f"{drafter} reads every visual token."
    count = sum(value > 0.0 for value in weights)
    how = f" {COMPRESSED.get(compressor, f'Its gate chose the compressor “{compressor}”.')}" if compressor else ""
    legend = ""
    if grid_side(len(weights)) and min(weights) < max(weights):
        legend = "Darker squares are those it left out." if count < len(weights) else "Darker squares count for less."
    return f"{drafter} reads {count} of {len(weights)} visual tokens.{how} {legend}".strip()


def read_html(drafted: Sequence[tuple[str, str | None, Sequence[float] | None]]) -> str:
    """Write what each drafter reads of the picture as HTML, folded up; "" without a drafter.

    Args:
        drafted: For each drafter its name, its image compressor's name or None, and for each visual token how much of
            it the drafter uses, from 0 to 1; None: it uses all.
    """
    if not drafted:
        return ""
    items = "".join(
        f"<li>{visual_tokens_svg(weights) if weights and min(weights) < max(weights) else ''}"
        f"<span>{escape(visual_tokens_sentence(compressor, weights, drafter))}</span></li>"
        for drafter, compressor, weights in drafted
    )
    return (
        '<details class="mm-read"><summary>What the drafters read of the picture</summary>'
        f'<p class="mm-note">{TOKEN}</p><ul>{items}</ul></details>'
    )


def picture_html(pixels: np.ndarray, name: str) -> str:
    """Write the picture (H, W, 3) as HTML.

    Args:
        name: Its alternative text.
    """
    height, width = pixels.shape[:2]
    return (
        f'<figure class="mm-figure"><img src="{data_address(pixels)}" '
        f'alt="{escape(name)}, {width} by {height} pixels"/></figure>'
    )
