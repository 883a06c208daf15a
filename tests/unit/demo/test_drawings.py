"""Tests the demo's drawings: the graph and the overlay of visual tokens as SVG, and words with their times."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from mmdec.daspeech.passes import Graph
from mmdec.demo.describe import (
    MAX_SENT_SIDE,
    data_address,
    grid_side,
    picture_html,
    read_html,
    visual_tokens_sentence,
    visual_tokens_svg,
)
from mmdec.demo.transcribe import words_html
from mmdec.demo.translate import DOT, VERTICES, graph_html, graph_svg, percent, vertices
from mmdec.whisper.transcript import Segment, Word

UNITS = ["<s>", "<pad>", "</s>", "<unk>", "b", "iy", "<ch>"]


def graph(size: int = 5) -> Graph:
    """Return a chain with jumps of one (0.7) and two (0.3): vertex i says unit 4 + i % 3 most of the time."""
    links = torch.full((size, size), -torch.inf)
    for index in range(size - 1):
        links[index, index + 1] = 0.0 if index == size - 2 else np.log(0.7)
        if index < size - 2:
            links[index, index + 2] = np.log(0.3)
    emissions = torch.full((size, len(UNITS)), 0.02)
    emissions[torch.arange(size), 4 + torch.arange(size) % 3] = 0.88
    path = [0, 1, 3, size - 1]
    return Graph(emissions.log(), links, UNITS, path, ["<s>", "iy", "b", "</s>"])


def test_a_vertex_knows_what_it_says_and_where_it_leads() -> None:
    result = vertices(graph())
    assert [vertex.chosen for vertex in result] == ["<s>", "iy", None, "b", "</s>"]
    assert result[0].leads == [(1, pytest.approx(0.7)), (2, pytest.approx(0.3))]
    assert result[4].leads == []
    assert result[1].emits[0] == ("iy", pytest.approx(0.88))
    assert result[1].title.splitlines()[0] == "Vertex 1"
    assert "iy 88 %" in result[1].title
    assert "vertex 2 (70 %)" in result[1].title
    assert "nowhere" in result[4].title
    assert "On the chosen path" not in result[2].title


def test_the_graph_is_drawn() -> None:
    svg = ElementTree.fromstring(graph_svg(vertices(graph())))
    lit = [path for path in svg.iter("path") if "mm-lit" in path.get("class", "")]
    faint = [path for path in svg.iter("path") if "mm-lit" not in path.get("class", "")]
    assert len(lit) == 3  # 0-1, 1-3, 3-4
    assert len(faint) == 4  # 0-2, 1-2, 2-3, 2-4: those of the path are not drawn twice
    assert len(list(svg.iter("circle"))) == 1  # the vertex that is not on the path
    assert len(list(svg.iter("rect"))) == 4
    assert [text.text for text in svg.iter("text")] == ["start", "iy", "b", "end"]
    assert all(group.find("title") is not None for group in svg.iter("g"))
    titles = [path.findtext("title") for path in lit]
    assert titles == [
        "from vertex 0 to vertex 1: 70 %",
        "from vertex 1 to vertex 3: 30 %",
        "from vertex 3 to vertex 4: 100 %",
    ]


def test_a_large_graph_is_cut_and_says_so() -> None:
    html = graph_html(graph(VERTICES + 20), "Explained.")
    assert f"The first {VERTICES} of {VERTICES + 20} vertices are drawn." in html
    assert html.count("<circle") + html.count("<rect") == VERTICES
    ElementTree.fromstring(html)


def test_long_pieces_do_not_touch_their_neighbours() -> None:
    wide = replace(graph(), chosen=["<s>", "▁understand", "ing", "</s>"])
    svg = ElementTree.fromstring(graph_svg(vertices(wide)))
    edges = [(float(rect.get("x", "")), float(rect.get("width", ""))) for rect in svg.iter("rect")]
    edges += [(float(dot.get("cx", "")) - DOT, 2 * DOT) for dot in svg.iter("circle")]
    edges.sort()
    assert all(x + wide < after for (x, wide), (after, _) in pairwise(edges))
    assert edges[-1][0] + edges[-1][1] < float(svg.get("width", ""))
    assert [text.text for text in svg.iter("text")] == ["start", "·understand", "ing", "end"]


def test_a_unit_that_looks_like_markup_is_text() -> None:
    html = graph_html(graph(), "a < b")
    root = ElementTree.fromstring(html)
    assert any("<ch>" in (title.text or "") for title in root.iter("title"))


def test_percentages_are_rounded() -> None:
    assert [percent(value) for value in (0.934, 0.01, 0.004, 1.0)] == ["93 %", "1 %", "< 1 %", "100 %"]


def test_each_word_is_shown_with_its_time() -> None:
    words = [Word(" We're", 0.1, 0.4), Word(" <late>", 0.42, 0.9)]
    segments = [Segment(0.0, 1.0, "We're <late>", [], words)]
    html = words_html(SimpleNamespace(segments=segments))  # type: ignore[arg-type] # what is read of a transcript
    root = ElementTree.fromstring(f"<p>{html}</p>")
    assert [span.text for span in root.iter("span")] == ["We're", "<late>"]
    assert "".join(root.itertext()) == "We're at 0.1 s, <late> at 0.4 s"


def test_dropped_visual_tokens_are_darkened() -> None:
    svg = ElementTree.fromstring(visual_tokens_svg([1.0, 0.0, 0.5, 1.0]))
    veils = [rect.get("style") for rect in svg.iter("rect")]
    assert veils == [f"fill-opacity:{value}" for value in ("0.00", "0.75", "0.38", "0.00")]
    assert [(rect.get("x"), rect.get("y")) for rect in svg.iter("rect")] == [
        ("0", "0"),
        ("1", "0"),
        ("0", "1"),
        ("1", "1"),
    ]
    assert [grid_side(count) for count in (0, 64, 96)] == [None, 8, None]
    assert visual_tokens_svg([1.0] * 6) == ""


def test_kept_visual_tokens_are_described() -> None:
    assert "reads 2 of 4" in visual_tokens_sentence("pool 4x", [1.0, 0.0, 0.5, 0.0], "specvlm")
    assert "chose the compressor “pool 4x”" in visual_tokens_sentence("pool 4x", [1.0, 0.0, 0.5, 0.0], "specvlm")
    assert "Darker" not in visual_tokens_sentence(None, [1.0, 0.0, 0.5], "flash")
    assert "Darker squares count for less." in visual_tokens_sentence("queries", [1.0, 0.2, 0.5, 0.3], "vispec")
    assert "Darker" not in visual_tokens_sentence("pool", [1.0] * 4, "specvlm")
    assert "Its gate, which reads the question, chose to average" in visual_tokens_sentence(
        "pool", [1.0] * 4, "specvlm"
    )
    assert "gate" not in visual_tokens_sentence("queries", [1.0] * 4, "vispec")  # neither has one
    assert "gate" not in visual_tokens_sentence("latents", [1.0] * 4, "flash")
    assert "every visual token" in visual_tokens_sentence(None, None, "msd")


def test_the_reading_is_drawn_where_it_differs() -> None:
    drafted = [("msd", None, None), ("<vispec>", "queries", [1.0, 0.2, 0.5, 0.3]), ("specvlm", "pool", [0.3] * 4)]
    root = ElementTree.fromstring(read_html(drafted))
    items = list(root.iter("li"))
    assert [item.findtext("span", "").split()[0] for item in items] == ["msd", "<vispec>", "specvlm"]
    assert [len(list(item.iter("svg"))) for item in items] == [0, 1, 0]
    assert not list(root.iter("img"))  # the picture itself is shown once, above
    assert read_html([]) == ""


def test_a_picture_is_embedded_with_its_name() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (900, 700, 3), dtype=np.uint8)
    root = ElementTree.fromstring(picture_html(pixels, 'a "quoted" <name>'))
    image = root.find(".//img")
    assert image is not None
    assert image.get("alt") == 'a "quoted" <name>, 700 by 900 pixels'
    written = base64.b64decode(image.get("src", "").partition(",")[2])
    assert max(Image.open(io.BytesIO(written)).size) == MAX_SENT_SIDE
    assert data_address(np.zeros((4, 4, 3), np.uint8)).startswith("data:image/png;base64,")
