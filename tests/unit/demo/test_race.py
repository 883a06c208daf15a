"""Tests the race's HTML: its pace, its lanes, and the escaping of text."""

from __future__ import annotations

import re
from html import unescape
from xml.etree import ElementTree

import pytest

from mmdec.demo.race import PACES, SHOWN, Lane, Step, figures, milliseconds, pace, pieces_html, race_html, steps_svg

FAST = Lane("Fast", "All at once.", [Step(0.004, ["a", "b", "c"])], "equal", True)
SLOW = Lane("Slow", "One by one.", [Step(0.01, ["a"]), Step(0.02, ["b"]), Step(0.03, ["c"]), Step(0.04, [], 1)])


@pytest.mark.parametrize("seconds", [0.0004, 0.003, 0.04, 0.9, 6.9])
def test_the_pace_is_the_slowest_that_fits(seconds: float) -> None:
    chosen = pace([Lane("x", "", [Step(seconds, ["a"])])])
    assert chosen in PACES
    assert chosen * seconds <= SHOWN
    assert chosen == PACES[-1] or PACES[PACES.index(chosen) + 1] * seconds > SHOWN


def test_what_takes_longer_than_shown_is_shown_faster() -> None:
    slow = Lane("x", "", [Step(20.0, ["a"])])
    assert pace([slow]) == 0.2
    assert "Shown 5 times faster than it ran." in race_html([slow], "tokens")
    assert pace([]) == PACES[-1]


def test_every_piece_appears_when_its_pass_was_over() -> None:
    html = race_html([FAST, SLOW], "pieces")
    assert "100 times slower than it ran" in html
    late = [float(value) for value in re.findall(r"--at:([\d.]+)s", html)]
    assert late == [0.4, 0.4, 0.4, 1.0, 2.0, 3.0]
    assert re.findall(r"width:([\d.]+)%", html) == ["10.0", "100.0"]
    ElementTree.fromstring(html)


def test_verdicts_are_marked_by_more_than_colour() -> None:
    assert "mm-equal" in race_html([FAST], "pieces")
    differs = Lane("x", "", FAST.steps, "not equal", False)
    assert "mm-differs" in race_html([differs], "pieces")
    assert "mm-equal" not in race_html([SLOW], "pieces")


def test_figures() -> None:
    assert re.sub("<.*?>", "", figures(FAST, "pieces")) == "1 pass · 4.0 ms · 3.0 pieces per pass"
    assert re.sub("<.*?>", "", figures(SLOW, "pieces")) == "4 passes · 40 ms · 1.0 pieces per pass"
    of_the_library = Lane("x", "", SLOW.steps, per_pass=3.25)  # its first pass is not counted there
    assert re.sub("<.*?>", "", figures(of_the_library, "tokens")) == "4 passes · 40 ms · 3.2 tokens per pass"
    assert [milliseconds(value) for value in (0.0034, 0.12, 2.41)] == ["3.4 ms", "120 ms", "2.4 s"]


def test_markup_in_a_text_is_text() -> None:
    nasty = '<script>alert("x")</script>&'
    html = pieces_html([Step(0.1, [nasty])], "tokens")
    element = ElementTree.fromstring(html)
    assert element.text == nasty
    assert "<script" not in html
    lane = Lane(nasty, nasty, [Step(0.1, [nasty])], nasty, True)
    assert "<script" not in race_html([lane], "tokens", start=nasty)
    assert nasty in unescape(race_html([lane], "tokens"))


def test_passes_have_colours_in_turn_and_say_their_number() -> None:
    html = pieces_html([Step(0.1 * number, [f"{number}"]) for number in range(8)], "tokens")
    assert re.findall(r"mm-c(\d)", html) == ["0", "1", "2", "3", "4", "5", "0", "1"]
    assert 'title="pass 8: 1 token"' in html


def test_columns_are_as_high_as_their_passes_are_long() -> None:
    assert steps_svg(FAST.steps, "tokens") == ""
    svg = ElementTree.fromstring(steps_svg([Step(0.1, ["a"]), Step(0.2, ["b", "c", "d", "e"])], "tokens"))
    assert [float(bar.get("height", "")) for bar in svg.iter("rect")] == [9.0, 36.0]
    assert svg.get("aria-label") == "tokens settled in each of 2 passes: 1, 4"
