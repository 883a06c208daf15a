"""The tab that translates French speech to English.

It draws the graph of English pieces that the model fills in one pass, and compares the speed of three ways of decoding
(the page calls this the race).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import pairwise
from typing import Any

import gradio as gr
from torch import Tensor

from mmdec.daspeech.passes import Graph, Pass
from mmdec.daspeech.translate import Translation, load_translator, translate_speech
from mmdec.demo import samples as shipped
from mmdec.demo.background import Report
from mmdec.demo.html import TRANSLATION_QUALITY, confidence_html, output_html, status
from mmdec.demo.layout import (
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
from mmdec.demo.race import Lane, Step, make_lane, milliseconds, race_html, run_in_turn
from mmdec.io.audio import SAMPLE_RATE

STRATEGY_LABELS = {  # a way of decoding, as the page names it -> its strategy
    "the graph drafts, the one-by-one decoder checks (verified)": "verified",
    "by the graph, its best texts read by the one-by-one decoder (reranked)": "reranked",
    "one by one (autoregressive)": "autoregressive",
    "by the graph, link and piece together (lookahead)": "lookahead",
    "by the graph, with what English words look like (beam)": "beam",
    "by the graph, link by link (greedy)": "greedy",
    "by the graph, the most probable path (Viterbi)": "viterbi",
    "by the graph, the most probable path and pieces (Joint-Viterbi)": "joint-viterbi",
}
NOTE = (
    "Say an everyday sentence, clearly and not too long. The model learned from little sound, all of it synthetic: it "
    "mishears rare words, names and many voices, and what it mishears comes out as something else. Look at the "
    "confidence."
)
GRAPH = (
    "In one pass the network fills all these vertices at once. Each can write a piece of English (a short word, or "
    "part of a longer one; ‘·’ begins a word), and links say which vertex may follow. A path from left to right is a "
    "sentence: the bright one was taken; the thicker an arc, the likelier its link. Point at a vertex to see "
    "what else it might have said. The drawing is wide: scroll it sideways."
)
START = "The clock starts when the French sound has been encoded, which all share."
GRAPH_ALONE = "lookahead"  # the graph's strategy in the race, unless another one was chosen
ID = "mm-translate"
VERTICES = 96  # the most vertices that are drawn
MIN_LINK_PROBABILITY = 0.05  # least probability of a link that is drawn
LINKS = 3  # maximum links that are drawn from a vertex, besides the path's
STEP, RADIUS, DOT = 34, 13, 5  # in pixels: minimum distance between vertices, half height of a label, radius of a dot
LETTER = 7.5  # pixels: width of a letter in a label
ABOVE, BELOW = 96, 84  # pixels for arcs above and below the row of vertices
READABLE = {"<s>": "start", "</s>": "end", "<unk>": "?", "<pad>": "-"}
SPACE = "▁"  # SentencePiece's mark for a piece that begins a word


def decode(report: Report, samples: Tensor, strategy: str) -> tuple[Translation, list[Pass]]:
    """Translate samples (T,) of 16 kHz.

    Args:
        report: Called with the progress after each pass; it raises WorkStopped if the visitor has stopped the request.
        strategy: A value of `STRATEGY_LABELS`.

    Returns:
        The translation, and a record of each of the decoder's passes.
    """
    passes: list[Pass] = []

    def on_pass(pass_: Pass) -> None:
        passes.append(pass_)
        report()

    return translate_speech(samples, sample_rate=SAMPLE_RATE, strategy=strategy, on_pass=on_pass), passes


def steps_from_passes(passes: Sequence[Pass]) -> list[Step]:
    """Convert passes to steps on one clock.

    A long recording is cut into parts that are decoded one after another; each part's clock starts at 0, so the times
    of earlier parts are added.
    """
    timeline: list[Step] = []
    before, last = 0.0, 0.0
    segment = 0
    for pass_ in passes:
        if pass_.segment != segment:
            segment, before = pass_.segment, before + last
        last = pass_.seconds
        # the end token is counted, but has no text
        silent = 0 if pass_.graph is not None else pass_.tokens - len(pass_.units)
        timeline.append(Step(before + pass_.seconds, [unit.replace(SPACE, " ") for unit in pass_.units], silent))
    return timeline


def lanes(runs: Mapping[str, Sequence[list[Pass]]]) -> list[Lane]:
    """Make a `Lane`, which the page compares with others, for each way of decoding.

    Autoregressive decoding is the baseline, and the last one. Only verified decoding must write the baseline's pieces.

    Args:
        runs: Strategy -> the passes of each of its runs.
    """

    def units(strategy: str) -> list[list[str]]:
        return [[unit for pass_ in run for unit in pass_.units] for run in runs[strategy]]

    def timelines(strategy: str) -> list[list[Step]]:
        return [steps_from_passes(run) for run in runs[strategy]]

    pieces = units("autoregressive")[0]
    note = "Autoregressive: every piece waits for the one before it."
    slow = make_lane("One by one", note, timelines("autoregressive"))
    compared: list[Lane] = []
    for strategy in runs:
        if strategy == "autoregressive":
            continue
        same = all(run == pieces for run in units(strategy))
        more: dict[str, Any] = {"baseline": slow.seconds}
        if strategy == "verified":
            name, note = "Verified", "The graph drafts, the one-by-one decoder checks many pieces in a pass. "
            note += "The first pass drafts."
            more |= {"equal": same, "output": "same pieces" if same else "not the same pieces"}
        elif strategy == "reranked":
            name = "Graph, reranked"
            note = "The graph's best texts, read by the one-by-one decoder, all in one more pass. The likeliest wins."
            # each part of a recording is reported at once, after both of its passes
            more |= {"passes": 2 * len(runs[strategy][0]), "output": _others(same)}
        else:
            name, note = "Graph", "All pieces in one pass, along the best path."
            more |= {"output": _others(same)}
        compared.append(make_lane(name, note, timelines(strategy), **more))
    return [*compared, slow]


def _others(same: bool) -> str:
    return "here the same pieces" if same else "other pieces, which may be as good"


def text_html(result: Translation, french: str = "") -> str:
    """Write the text in both languages, and the seconds of each stage, as HTML.

    Args:
        french: The correct French text.
    """
    french_html = f'<p class="mm-from" lang="fr">{escape(french)}</p>' if french else ""
    rows = "".join(
        f"<tr><td>{stage}</td><td>{milliseconds(value)}</td></tr>" for stage, value in result.timings.items()
    )
    spent = sum(result.timings.values())
    return (
        f'<div class="mm-said">{french_html}{output_html(result.text)}'
        f"{confidence_html(result.confidence, TRANSLATION_QUALITY if load_translator().calibrations else None)}"
        f'<p class="mm-note">{result.source_seconds:.1f} s of French, translated and spoken in '
        f"{milliseconds(spent)}.</p>"
        f"<details><summary>Time of each stage</summary><table><tbody>{rows}</tbody></table></details></div>"
    )


def work(report: Report, path: str | None, way: str) -> None:
    """Translate the upload at `path`, and report to the page by `report`.

    Args:
        way: A key of `STRATEGY_LABELS`, the way of decoding to show first.
    """
    report(status=status("Reading the recording …", "busy"), text="", speech=None, race="", graph="")
    show_translation(report, recording(path), way)


def sample_work(report: Report, number: int, way: str) -> None:
    """Translate the shipped sample with this index, and report to the page by `report`.

    Args:
        way: A key of `STRATEGY_LABELS`.
    """
    sample = shipped.french()[number]
    samples = recording(sample.path)
    report(status=status("Translating …", "busy"), text="", speech=None, race="", graph="")
    show_translation(report, samples, way, sample.text)
    report(source=(SAMPLE_RATE, playable(samples)))


def show_translation(report: Report, samples: Tensor, way: str, french: str = "") -> None:
    """Show sound and text of the chosen way first.

    Then decode in several ways in turn, to compare their speed (the race), and draw the graph.

    Args:
        report: Reports to the page.
        samples: (T,) of 16 kHz.
        way: A key of `STRATEGY_LABELS`.
        french: The correct French text; "": not known.
    """
    chosen = STRATEGY_LABELS[way]
    result, passes = decode(report, samples, chosen)
    report(
        first=True,
        status=status("Translated. Now the race …", "busy"),
        speech=(result.sample_rate, playable(result.audio)),
        text=text_html(result, french),
    )
    # reranking is the graph and a pass of the other decoder, so it is compared with the graph alone
    alone = GRAPH_ALONE if chosen in ("reranked", "verified", "autoregressive") else chosen
    race = [alone, *(["reranked"] if chosen == "reranked" else []), "verified", "autoregressive"]
    results = run_in_turn(report, "Translated.", {way: partial(decode, report, samples, way) for way in race})
    runs = {way: [run for _, run in outcomes] for way, outcomes in results.items()}
    by_graph = passes if chosen == "reranked" else runs[alone][0]
    graph = next(pass_.graph for pass_ in by_graph if pass_.graph is not None)
    note = " The first part of this long recording is drawn." if by_graph[-1].segment else ""
    report(
        status=status(f"Done. {result.text}", "done"),
        race=race_html(lanes(runs), "pieces", start=START),
        graph=graph_html(graph, GRAPH + note),
    )


def default_way() -> str:
    """Return the key of `STRATEGY_LABELS` whose strategy is the default in the model's config.json."""
    return next(way for way, strategy in STRATEGY_LABELS.items() if strategy == load_translator().decoding.strategy)


def warm_up() -> None:
    """Load the model and run it once with each strategy that the page compares."""
    for sample in shipped.french()[:1]:
        for strategy in ("lookahead", "reranked", "verified", "autoregressive"):
            translate_speech(sample.path, strategy=strategy)


def tab() -> None:
    """Add this tab to the page."""
    with gr.Tab("Translate", id="translate"):
        with gr.Row(equal_height=False):
            with gr.Column(scale=2, min_width=300):
                intro("French speech to English speech", NOTE)
                with gr.Row(elem_classes="mm-samples"):
                    buttons = [sample_button(sample.text) for sample in shipped.french()]
                source = recording_input(ID, "French")
                run, stop = run_and_stop(ID, "Translate")
                with gr.Accordion("How English is decoded", open=False):
                    way = gr.Radio(list(STRATEGY_LABELS), value=default_way(), label="Decode")
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


@dataclass(frozen=True)
class Vertex:
    """A vertex of the graph (DAG).

    Holds the likeliest pieces of English that it may write, its likeliest links to later vertices, and the link that
    the chosen path takes from it.
    """

    index: int
    emits: list[tuple[str, float]]  # pieces and their probabilities, the likeliest first
    leads: list[tuple[int, float]]  # later vertices and the links' probabilities
    chosen: str | None = None  # the piece that it writes on the chosen path; None: the vertex is not on the path
    follows: tuple[int, float] | None = None  # the next vertex on the path, and that link's probability

    @property
    def title(self) -> str:
        """Write the tooltip's text, one line for each fact."""
        says = ", ".join(f"{readable(unit)} {percent(value)}" for unit, value in self.emits)
        leads = (
            ", ".join(f"vertex {index} ({percent(value)})" for index, value in self.leads) or "nowhere: it ends here"
        )
        path = "\nOn the chosen path." if self.chosen is not None else ""
        return f"Vertex {self.index}\nsays: {says}\nleads to: {leads}{path}"


def vertices(graph: Graph) -> list[Vertex]:
    """List all vertices, each with its three likeliest pieces and its strongest links."""
    chosen = dict(zip(graph.path, graph.chosen, strict=True))
    after = dict(pairwise(graph.path))
    shown_vertices: list[Vertex] = []
    for index in range(len(graph.links)):
        values, units = graph.emissions[index].exp().topk(min(3, len(graph.units)))
        emits = [(graph.units[unit], value) for unit, value in zip(units.tolist(), values.tolist(), strict=True)]
        links, ahead = graph.links[index].exp().topk(min(LINKS, len(graph.links)))
        leads = [
            (to, value)
            for to, value in zip(ahead.tolist(), links.tolist(), strict=True)
            if value >= MIN_LINK_PROBABILITY
        ]
        to = after.get(index)
        follows = None if to is None else (to, float(graph.links[index, to].exp()))
        shown_vertices.append(Vertex(index, emits, leads, chosen.get(index), follows))
    return shown_vertices


def graph_html(graph: Graph, explained: str) -> str:
    """Draw the graph as HTML, with a heading, the explanation `explained`, and the path as a table.

    The table is for screen readers.
    """
    shown_vertices = vertices(graph)
    first_vertices = shown_vertices[:VERTICES]
    cut = (
        f" The first {VERTICES} of {len(shown_vertices)} vertices are drawn." if len(shown_vertices) > VERTICES else ""
    )
    on_path = [vertex for vertex in shown_vertices if vertex.chosen is not None]
    rows = "".join(
        f"<tr><td>{vertex.index}</td><td>{escape(readable(vertex.chosen or ''))}</td>"
        f"<td>{escape(', '.join(f'{readable(unit)} {percent(value)}' for unit, value in vertex.emits))}</td></tr>"
        for vertex in on_path
    )
    return (
        '<section class="mm-graph" aria-label="The graph"><h3>The graph</h3>'
        f'<p class="mm-note">{escape(explained)}{cut}</p>'
        '<div class="mm-scroll" tabindex="0" role="region" aria-label="Drawing of the graph, scrolls sideways">'
        f"{graph_svg(first_vertices)}</div>"
        "<details><summary>The chosen path as a table</summary><table><thead><tr><th>vertex</th><th>piece</th>"
        f"<th>what it might say</th></tr></thead><tbody>{rows}</tbody></table></details></section>"
    )


def graph_svg(shown_vertices: list[Vertex]) -> str:
    """Draw the graph as SVG: a row of vertices with arcs for links.

    The chosen path's links are above the row, other strong links below it.
    """
    path = [vertex for vertex in shown_vertices if vertex.chosen is not None]
    lit = {(vertex.index, vertex.follows[0]): vertex.follows[1] for vertex in path if vertex.follows is not None}
    middle = ABOVE + RADIUS
    *at, width = centres(shown_vertices)
    last = len(shown_vertices) - 1
    faint = [
        arc((vertex.index, to), at, middle, BELOW, value)
        for vertex in shown_vertices
        for to, value in vertex.leads
        if to <= last and (vertex.index, to) not in lit
    ]
    bright = [
        arc(link, at, middle, -ABOVE, value, order)
        for order, (link, value) in enumerate(sorted(lit.items()))
        if link[1] <= last
    ]
    dots = [dot(vertex, x, middle) for vertex, x in zip(shown_vertices, at, strict=True)]
    label = f"A graph of {len(shown_vertices)} vertices; {len(path)} of them are on the chosen path."
    return (
        f'<svg class="mm-dag" role="img" aria-label="{label}" viewBox="0 0 {width:g} {ABOVE + BELOW + 2 * RADIUS}" '
        f'width="{width:g}" height="{ABOVE + BELOW + 2 * RADIUS}">{"".join([*faint, *bright, *dots])}</svg>'
    )


def arc(
    link: tuple[int, int], at: Sequence[float], middle: float, room: float, strength: float, order: int | None = None
) -> str:
    """Draw a link as an arc.

    Longer links get higher arcs.

    Args:
        link: Indices of its two vertices.
        at: X of each vertex.
        middle: Y of their row.
        room: The greatest height in pixels; negative: the arc is above the row, else below.
        strength: The link's probability.
        order: The link's index on the chosen path; None: the link is not on it.
    """
    start, end = link
    from_x, to_x = at[start], at[end]
    height = math.copysign(min(abs(room), 18 + 12 * (end - start)), room)
    side = math.copysign(RADIUS if order is not None else DOT, room)
    kind = "mm-link" if order is None else "mm-link mm-lit"
    look = f"opacity:{0.2 + 0.7 * strength:.2f}" if order is None else f"--order:{order}"
    return (
        f'<path class="{kind}" style="{look};stroke-width:{1.2 + 2.2 * strength:.1f}" pathLength="1" '
        f'd="M{from_x:g} {middle + side:g}C{from_x:g} {middle + height:g} {to_x:g} {middle + height:g} '
        f'{to_x:g} {middle + side:g}"><title>from vertex {start} to vertex {end}: {percent(strength)}</title></path>'
    )


def dot(vertex: Vertex, x: float, middle: float) -> str:
    """Draw a vertex: a dot, or a label if it is on the path.

    Its tooltip has the pieces that it may write.

    Args:
        x: Centre of the vertex.
        middle: Y of the row of vertices.
    """
    title = f"<title>{escape(vertex.title)}</title>"
    if vertex.chosen is None:
        return f'<g class="mm-vertex">{title}<circle cx="{x:g}" cy="{middle}" r="{DOT}"/></g>'
    wide = width_of(vertex)
    return (
        f'<g class="mm-vertex mm-on">{title}<rect x="{x - wide / 2:g}" y="{middle - RADIUS}" width="{wide:g}" '
        f'height="{2 * RADIUS}" rx="{RADIUS}"/>'
        f'<text x="{x:g}" y="{middle}">{escape(readable(vertex.chosen))}</text></g>'
    )


def width_of(vertex: Vertex) -> float:
    """Return the width of a vertex's drawing in pixels: a dot, or a label if it is on the path."""
    if vertex.chosen is None:
        return 2 * DOT
    return max(2 * RADIUS, LETTER * len(readable(vertex.chosen)) + RADIUS)


def centres(shown_vertices: Sequence[Vertex]) -> list[float]:
    """Place the vertices so that labels do not touch.

    Returns:
        The x coordinate of each vertex, and, as the last item, the total width.
    """
    positions, edge = [], float(RADIUS)
    for vertex in shown_vertices:
        room = max(STEP, width_of(vertex) + 2 * DOT)
        positions.append(edge + room / 2)
        edge += room
    return [*positions, edge + RADIUS]


def readable(unit: str) -> str:
    """Return a readable name of a piece: special pieces in words, and a visible mark for the space before a word."""
    return READABLE.get(unit, unit.replace(SPACE, "·"))


def percent(value: float) -> str:
    """Format a share as a percentage: 0.934 -> "93 %"; below 0.01: "< 1 %"."""
    return f"{100 * value:.0f} %" if value >= 0.01 else "< 1 %"
