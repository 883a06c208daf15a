"""The graph as a picture: vertices in a row, their strongest links as arcs, the chosen path lit up. SVG comes out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from mmdec.pipelines.translation.passes import Graph

VERTICES = 96  # drawn at most
STRONG = 0.05  # of a link that is drawn
LINKS = 3  # of a vertex, at most
STEP, RADIUS, DOT = 34, 13, 5
ABOVE, BELOW = 96, 84  # room for arcs
READABLE = {"<s>": "start", "</s>": "end", "<unk>": "?", "<pad>": "-"}


@dataclass(frozen=True)
class Vertex:
    """What is said of one vertex."""

    index: int
    emits: list[tuple[str, float]]  # units and their probabilities, the likeliest first
    leads: list[tuple[int, float]]  # later vertices and the links' probabilities
    chosen: str | None = None  # its unit, where it is on the path
    follows: tuple[int, float] | None = None  # the next vertex on the path, and that link's probability

    @property
    def title(self) -> str:
        """For the mouse, one line for each fact."""
        says = ", ".join(f"{readable(unit)} {percent(value)}" for unit, value in self.emits)
        leads = (
            ", ".join(f"vertex {index} ({percent(value)})" for index, value in self.leads) or "nowhere: it ends here"
        )
        path = "\nOn the chosen path." if self.chosen is not None else ""
        return f"Vertex {self.index}\nsays: {says}\nleads to: {leads}{path}"


def vertices(graph: Graph) -> list[Vertex]:
    """Every vertex with its three likeliest units and its strongest links."""
    chosen = dict(zip(graph.path, graph.chosen, strict=True))
    after = dict(pairwise(graph.path))
    drawn: list[Vertex] = []
    for index in range(len(graph.links)):
        values, units = graph.emissions[index].exp().topk(min(3, len(graph.units)))
        emits = [(graph.units[unit], value) for unit, value in zip(units.tolist(), values.tolist(), strict=True)]
        links, ahead = graph.links[index].exp().topk(min(LINKS, len(graph.links)))
        leads = [(to, value) for to, value in zip(ahead.tolist(), links.tolist(), strict=True) if value >= STRONG]
        to = after.get(index)
        follows = None if to is None else (to, float(graph.links[index, to].exp()))
        drawn.append(Vertex(index, emits, leads, chosen.get(index), follows))
    return drawn


def graph_html(graph: Graph, explained: str) -> str:
    """The drawing with its heading, its explanation, and the path as a table for those who do not see it."""
    drawn = vertices(graph)
    kept = drawn[:VERTICES]
    cut = f" The first {VERTICES} of {len(drawn)} vertices are drawn." if len(drawn) > VERTICES else ""
    on_path = [vertex for vertex in drawn if vertex.chosen is not None]
    rows = "".join(
        f"<tr><td>{vertex.index}</td><td>{escape(readable(vertex.chosen or ''))}</td>"
        f"<td>{escape(', '.join(f'{readable(unit)} {percent(value)}' for unit, value in vertex.emits))}</td></tr>"
        for vertex in on_path
    )
    return (
        '<section class="mm-graph" aria-label="The graph"><h3>The graph</h3>'
        f'<p class="mm-note">{escape(explained)}{cut}</p>'
        '<div class="mm-scroll" tabindex="0" role="region" aria-label="Drawing of the graph, scrolls sideways">'
        f"{graph_svg(kept)}</div>"
        "<details><summary>The chosen path as a table</summary><table><thead><tr><th>vertex</th><th>phone</th>"
        f"<th>what it might say</th></tr></thead><tbody>{rows}</tbody></table></details></section>"
    )


def graph_svg(drawn: list[Vertex]) -> str:
    """Arcs of the path above the row, other strong links below it."""
    path = [vertex for vertex in drawn if vertex.chosen is not None]
    lit = {(vertex.index, vertex.follows[0]): vertex.follows[1] for vertex in path if vertex.follows is not None}
    width, middle = STEP * (len(drawn) + 1), ABOVE + RADIUS
    last = len(drawn) - 1
    faint = [
        arc(vertex.index, to, middle, BELOW, value)
        for vertex in drawn
        for to, value in vertex.leads
        if to <= last and (vertex.index, to) not in lit
    ]
    bright = [
        arc(start, end, middle, -ABOVE, value, order)
        for order, ((start, end), value) in enumerate(sorted(lit.items()))
        if end <= last
    ]
    dots = [dot(vertex, middle) for vertex in drawn]
    label = f"A graph of {len(drawn)} vertices; {len(path)} of them are on the chosen path."
    return (
        f'<svg class="mm-dag" role="img" aria-label="{label}" viewBox="0 0 {width} {ABOVE + BELOW + 2 * RADIUS}" '
        f'width="{width}" height="{ABOVE + BELOW + 2 * RADIUS}">{"".join(faint)}{"".join(bright)}{"".join(dots)}</svg>'
    )


def arc(start: int, end: int, middle: float, room: float, strength: float, order: int | None = None) -> str:
    """A link as a curve over the row (room < 0) or under it; its height grows with its length. order: on the path."""
    from_x, to_x = x_of(start), x_of(end)
    height = math.copysign(min(abs(room), 18 + 12 * (end - start)), room)
    side = math.copysign(RADIUS if order is not None else DOT, room)
    kind = "mm-link" if order is None else "mm-link mm-lit"
    look = f"opacity:{0.2 + 0.7 * strength:.2f}" if order is None else f"--order:{order}"
    return (
        f'<path class="{kind}" style="{look};stroke-width:{1.2 + 2.2 * strength:.1f}" pathLength="1" '
        f'd="M{from_x} {middle + side:g}C{from_x} {middle + height:g} {to_x} {middle + height:g} '
        f'{to_x} {middle + side:g}"><title>from vertex {start} to vertex {end}: {percent(strength)}</title></path>'
    )


def dot(vertex: Vertex, middle: float) -> str:
    """A vertex, with what it emits as its title."""
    title = f"<title>{escape(vertex.title)}</title>"
    x = x_of(vertex.index)
    if vertex.chosen is None:
        return f'<g class="mm-vertex">{title}<circle cx="{x}" cy="{middle}" r="{DOT}"/></g>'
    name = readable(vertex.chosen)
    small = ' class="mm-small"' if len(name) > 2 else ""
    return (
        f'<g class="mm-vertex mm-on">{title}<circle cx="{x}" cy="{middle}" r="{RADIUS}"/>'
        f'<text x="{x}" y="{middle}"{small}>{escape(name)}</text></g>'
    )


def x_of(index: int) -> int:
    """Of a vertex."""
    return STEP * (index + 1)


def readable(unit: str) -> str:
    """A unit's name; the special ones in words."""
    return READABLE.get(unit, unit)


def percent(value: float) -> str:
    """0.934 -> "93 %"; what is not nothing is at least "< 1 %"."""
    return f"{100 * value:.0f} %" if value >= 0.01 else "< 1 %"
