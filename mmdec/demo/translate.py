"""The tab that translates: French speech in, English speech out, the graph drawn, and the race of three decodings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import Any

import gradio as gr
from torch import Tensor

from mmdec.demo import samples as shipped
from mmdec.demo.background import Tell
from mmdec.demo.graph_svg import graph_html
from mmdec.demo.layout import (
    RATE,
    Controls,
    bind,
    intro,
    playable,
    recording,
    recording_input,
    run_and_stop,
    sample_button,
    status_line,
)
from mmdec.demo.race import Lane, Step, milliseconds, race_html
from mmdec.demo.sentences import confidence, said, status
from mmdec.pipelines.comparison import faster, verdict
from mmdec.pipelines.translation.load import load
from mmdec.pipelines.translation.passes import Pass
from mmdec.pipelines.translation.translate import Translation, translate_speech

WAYS = {
    "link and phone together (lookahead, the default)": "lookahead",
    "link by link (greedy)": "greedy",
    "the most probable path (Viterbi)": "viterbi",
    "the most probable path and phones (Joint-Viterbi)": "joint-viterbi",
}
NOTE = (
    "Say a phrase that a traveller would say: greetings, directions, times, prices, tickets, hotel, restaurant. "
    "The model learned from synthetic voices and knows this one domain; anything else comes out as the nearest thing "
    "it knows."
)
GRAPH = (
    "In one pass the network fills all these vertices at once. Each can say a sound of English (a phone: ‘iy’ is the "
    "vowel of ‘beach’), and links say which vertex may follow. A path from left to right is a sentence: the bright one "
    "was chosen; the thicker an arc, the likelier its link. Point at a vertex to see what else it might have "
    "said. The drawing is wide: scroll it sideways."
)
START = "The clock starts when the French sound has been encoded, which all three share."
ID = "mm-translate"


def decode(tell: Tell, samples: Tensor, strategy: str) -> tuple[Translation, list[Pass]]:
    """One run with its passes. Between two passes it looks whether it was stopped."""
    passes: list[Pass] = []

    def on_pass(pass_: Pass) -> None:
        passes.append(pass_)
        tell()

    return translate_speech(samples, sample_rate=RATE, strategy=strategy, on_pass=on_pass), passes


def steps(passes: Sequence[Pass]) -> list[Step]:
    """Passes on one clock: the pieces of a long recording follow one another."""
    timeline: list[Step] = []
    before, last = 0.0, 0.0
    piece = 0
    for pass_ in passes:
        if pass_.piece != piece:
            piece, before = pass_.piece, before + last
        last = pass_.seconds
        silent = 0 if pass_.graph is not None else pass_.tokens - len(pass_.units)  # the end
        timeline.append(Step(before + pass_.seconds, pass_.units, silent))
    return timeline


def lanes(graph: list[Pass], verified: list[Pass], autoregressive: list[Pass]) -> list[Lane]:
    """The three ways, compared with the last."""
    drawn, checked, baseline = (
        [unit for pass_ in passes for unit in pass_.units] for passes in (graph, verified, autoregressive)
    )
    slow = Lane("One by one", "Autoregressive: every phone waits for the one before it.", steps(autoregressive))
    fast = Lane("Graph", "All phones in one pass, along the brightest path.", steps(graph))
    note = "The graph drafts, the one-by-one decoder checks many phones in a pass. The first pass drafts."
    both = Lane("Verified", note, steps(verified), equal=checked == baseline)
    others = "here the same phones" if drawn == baseline else "other phones, which may be as good"
    return [
        replace(fast, verdict=f"{faster(fast.seconds, slow.seconds)}, {others}"),
        replace(both, verdict=verdict(both.seconds, slow.seconds, checked == baseline, "phones")),
        slow,
    ]


def text_html(result: Translation, french: str = "") -> str:
    """What was said, in both languages, and where the time went."""
    heard = f'<p class="mm-from" lang="fr">{escape(french)}</p>' if french else ""
    rows = "".join(
        f"<tr><td>{stage}</td><td>{milliseconds(value)}</td></tr>" for stage, value in result.timings.items()
    )
    spent = sum(result.timings.values())
    return (
        f'<div class="mm-said">{heard}{said(result.text)}'
        f"{confidence(result.confidence, 'words', bool(load().calibrations))}"
        f'<p class="mm-note">{result.seconds_source:.1f} s of French, translated and spoken in '
        f"{milliseconds(spent)}.</p>"
        f"<details><summary>Time of each stage</summary><table><tbody>{rows}</tbody></table></details></div>"
    )


def work(tell: Tell, path: str | None, way: str) -> None:
    """Translate an upload."""
    tell(status=status("Reading the recording …", "busy"), text="", speech=None, race="", graph="")
    translated(tell, recording(path), way)


def sample_work(tell: Tell, number: int, way: str) -> None:
    """Translate a shipped sample."""
    sample = shipped.french()[number]
    samples = recording(sample.path)
    tell(status=status("Translating …", "busy"), text="", speech=None, race="", graph="")
    translated(tell, samples, way, sample.text)
    tell(source=(RATE, playable(samples)))


def translated(tell: Tell, samples: Tensor, way: str, french: str = "") -> None:
    """Sound and text first; then the other two decodings, for the race."""
    result, passes = decode(tell, samples, WAYS[way])
    tell(
        first=True,
        status=status("Translated. Now the other two ways, for the race …", "busy"),
        speech=(result.sample_rate, playable(result.audio)),
        text=text_html(result, french),
    )
    _, checked = decode(tell, samples, "verified")
    _, slow = decode(tell, samples, "autoregressive")
    drawn = next(pass_.graph for pass_ in passes if pass_.graph is not None)
    several = " The first piece of this long recording is drawn." if passes[-1].piece else ""
    tell(
        status=status(f"Done. {result.text}", "done"),
        race=race_html(lanes(passes, checked, slow), "phones", " ", START),
        graph=graph_html(drawn, GRAPH + several),
    )


def warm() -> None:
    """Load the model and run it once in each way."""
    for sample in shipped.french()[:1]:
        for strategy in ("lookahead", "verified", "autoregressive"):
            translate_speech(sample.path, strategy=strategy)


def tab() -> None:
    """Add the tab to the page that is being built."""
    with gr.Tab("Translate", id="translate"):
        with gr.Row(equal_height=False):
            with gr.Column(scale=2, min_width=300):
                intro("French speech to English speech", NOTE)
                with gr.Row(elem_classes="mm-samples"):
                    buttons = [sample_button(sample.text) for sample in shipped.french()]
                source = recording_input(ID, "French")
                run, stop = run_and_stop(ID, "Translate")
                with gr.Accordion("How English is read off the graph", open=False):
                    way = gr.Radio(list(WAYS), value=next(iter(WAYS)), label="From vertex to vertex by")
            with gr.Column(scale=3, min_width=300, elem_id=f"{ID}-results"):
                line = status_line("Press a sample, or record a phrase and press Translate.")
                text = gr.HTML()
                speech = gr.Audio(
                    label="English", type="numpy", autoplay=True, interactive=False, elem_id=f"{ID}-speech"
                )
                race = gr.HTML()
        graph = gr.HTML()
        outputs: dict[str, Any] = {
            "status": line, "text": text, "speech": speech, "race": race, "graph": graph, "source": source,
        }  # fmt: skip
        bind(ID, Controls(buttons, run, stop, [source], [way]), outputs, work, sample_work)
