"""Tests the race's HTML: its pace, its lanes, and the escaping of text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mmdec.demo import race
from mmdec.demo.race import (
    BARS,
    ENOUGH_SECONDS,
    MAX_ANIMATION_SECONDS,
    MAX_TURNS,
    MIN_TURNS,
    SLOWDOWNS,
    Lane,
    Step,
    chart_html,
    figures,
    make_lane,
    milliseconds,
    pace,
    pieces_html,
    race_html,
    run_in_turn,
    span,
    steps_svg,
)

FAST = Lane("Fast", "All at once.", [Step(0.004, ["a", "b", "c"])], output="same", equal=True)
SLOW = Lane("Slow", "One by one.", [Step(0.01, ["a"]), Step(0.02, ["b"]), Step(0.03, ["c"]), Step(0.04, [], 1)])


@pytest.mark.parametrize("seconds", [0.0004, 0.003, 0.04, 0.9, 6.9])
def test_the_pace_is_the_slowest_that_fits(seconds: float) -> None:
    chosen = pace([Lane("x", "", [Step(seconds, ["a"])])])
    assert chosen in SLOWDOWNS
    assert chosen * seconds <= MAX_ANIMATION_SECONDS
    assert chosen == SLOWDOWNS[-1] or SLOWDOWNS[SLOWDOWNS.index(chosen) + 1] * seconds > MAX_ANIMATION_SECONDS


def test_long_runs_are_replayed_faster() -> None:
    slow = Lane("x", "", [Step(20.0, ["a"])])
    assert pace([slow]) == 0.2
    assert "Shown 5 times faster than it ran." in race_html([slow], "tokens")
    assert pace([]) == SLOWDOWNS[-1]


def test_every_piece_appears_when_its_pass_was_over() -> None:
    html = race_html([FAST, SLOW], "pieces")
    assert "100 times slower than it ran" in html
    late = [float(value) for value in re.findall(r"--at:([\d.]+)s", html)]
    assert late == [0.4, 0.4, 0.4, 1.0, 2.0, 3.0]
    assert re.findall(r"width:([\d.]+)%", html) == ["10.0", "100.0"]
    ElementTree.fromstring(html)


def test_verdicts_do_not_rely_on_colour() -> None:
    assert "mm-equal" in race_html([FAST], "pieces")
    differs = Lane("x", "", FAST.steps, output="not equal", equal=False)
    assert "mm-differs" in race_html([differs], "pieces")
    assert "mm-equal" not in race_html([SLOW], "pieces")


def test_figures_are_written_with_units() -> None:
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
    lane = Lane(nasty, nasty, [Step(0.1, [nasty])], output=nasty, equal=True)
    for shown in (lane, replace(lane, brief=True)):
        assert "<script" not in race_html([shown], "tokens", start=nasty)
        assert unescape(race_html([shown], "tokens")).count(nasty) >= 3


def test_passes_have_colours_in_turn_and_say_their_number() -> None:
    html = pieces_html([Step(0.1 * number, [f"{number}"]) for number in range(8)], "tokens")
    assert re.findall(r"mm-c(\d)", html) == ["0", "1", "2", "3", "4", "5", "0", "1"]
    assert 'title="pass 8: 1 token"' in html


def test_columns_are_as_high_as_their_passes_are_long() -> None:
    assert steps_svg(FAST.steps, "tokens") == ""
    svg = ElementTree.fromstring(steps_svg([Step(0.1, ["a"]), Step(0.2, ["b", "c", "d", "e"])], "tokens"))
    assert [float(bar.get("height", "")) for bar in svg.iter("rect")] == [9.0, 36.0]
    assert svg.get("aria-label") == "tokens settled in each of 2 passes: 1, 4"
    assert [text.text for text in svg.iter("text")] == ["1", "1", "4", "2"]  # above and below each bar


def test_a_long_chart_is_cut_and_numbers_few_passes() -> None:
    steps = [Step(float(number), ["a", "b"]) for number in range(BARS + 7)]
    figure = ElementTree.fromstring(chart_html(steps, "tokens"))
    assert len(list(figure.iter("rect"))) == BARS
    assert f"The first {BARS} of {BARS + 7} passes are drawn." in "".join(figure.itertext())
    ticks = [text.text for text in figure.iter("text") if text.get("class") == "mm-tick"]
    assert ticks == ["1", *map(str, range(5, BARS + 1, 5))]


def test_passes_of_one_piece_each_need_no_chart() -> None:
    assert chart_html(SLOW.steps, "pieces") == ""
    assert "Above each bar: pieces" in chart_html([Step(0.1, ["a"]), Step(0.2, ["b", "c"])], "pieces")


def run_of(seconds: float) -> list[Step]:
    return [Step(seconds, ["a"])]


@pytest.mark.parametrize(
    ("times", "median"),
    [([0.9], 0.9), ([0.3, 0.1, 0.2], 0.2), ([0.4, 0.1, 0.3, 0.2], 0.2), ([9.0, 0.1, 0.2, 0.1, 0.3], 0.2)],
)
def test_a_lane_shows_its_median_run_and_its_range(times: list[float], median: float) -> None:
    lane = make_lane("x", "", [run_of(seconds) for seconds in times])
    assert lane.seconds == median
    assert lane.times == times
    shown = re.sub("<.*?>", "", figures(lane, "tokens"))
    spread = f" ({span(min(times), max(times))})" if len(times) > 1 else ""
    assert shown == f"1 pass · {milliseconds(median)}{spread} · 1.0 tokens per pass"
    assert (f"run {len(times)} times in turn" in race_html([lane], "tokens")) == (len(times) > 1)


def test_ranges_are_rounded_alike() -> None:
    ranges = [(0.018, 0.153), (0.93, 1.24), (1.3, 2.4), (0.0034, 0.12)]
    assert [span(*both) for both in ranges] == ["18 to 153 ms", "930 ms to 1.2 s", "1.3 to 2.4 s", "3.4 to 120 ms"]


@pytest.mark.parametrize("brief", [False, True])
@pytest.mark.parametrize("equal", [True, False, None])
@pytest.mark.parametrize(
    ("baseline", "speed"), [(0.2, "2.0 times faster"), (0.05, "2.0 times slower"), (0.1, "as fast")]
)
def test_only_a_gain_is_marked_as_good(baseline: float, speed: str, equal: bool | None, brief: bool) -> None:
    """Equality of the outputs is said elsewhere, without a mark."""
    lane = Lane("x", "", run_of(0.1), baseline=baseline, output="the output", equal=equal, brief=brief)
    root = ElementTree.fromstring(race_html([lane], "pieces"))
    spans = {(at.text or ""): (at.get("class") or "").split() for at in root.iter("span")}
    assert spans[speed] == (["mm-speed", "mm-gain"] if "faster" in speed else ["mm-speed"])
    assert spans["the output"] == ["mm-output", *([] if equal is None else ["mm-equal" if equal else "mm-differs"])]
    assert lane.verdict == f"{speed}, the output"


def test_the_style_has_no_mark_for_equality() -> None:
    css = Path(race.__file__).with_name("style.css").read_text(encoding="utf-8")
    assert "✓" not in css
    assert ".mm-equal" not in css


def test_brief_lanes_are_table_rows() -> None:
    brief = replace(FAST, name="Brief", brief=True, steps=[Step(9.0, ["a", "b", "c"])])
    root = ElementTree.fromstring(race_html([FAST, brief, SLOW], "pieces"))
    assert [at.text for at in root.iter("h4")] == ["Fast", "Slow"]
    assert [at.text for at in root.iter("th")] == ["Brief"]
    widths = re.findall(r"width:([\d.]+)%", race_html([FAST, brief, SLOW], "pieces"))
    assert widths == ["10.0", "100.0"]  # the slowest of those that are drawn


def race_of(seconds: float, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Mapping[str, list[int]], list[str]]:
    """Return a race of two ways that take `seconds` each: the order of runs, the counted results, the status lines."""
    clock, order, statuses = 0.0, list[str](), list[str]()

    def way(name: str) -> Callable[[], int]:
        def run() -> int:
            nonlocal clock
            clock += seconds
            order.append(name)
            return len(order)

        return run

    def report(*, first: bool = False, **values: Any) -> None:
        statuses.append(values["status"])

    monkeypatch.setattr(race.time, "monotonic", lambda: clock)
    results = run_in_turn(report, "Done.", {"a": way("a"), "b": way("b")})
    return "".join(order), results, statuses


def test_methods_run_in_turn_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    order, results, statuses = race_of(0.0, monkeypatch)
    assert order == "ab" * (1 + MAX_TURNS)
    assert results == {"a": [3, 5, 7, 9, 11], "b": [4, 6, 8, 10, 12]}  # the first run of each is not counted
    assert len(statuses) == 1 + MAX_TURNS
    assert f"turn 1 of up to {MAX_TURNS}" in statuses[1]


@pytest.mark.parametrize(
    ("seconds", "turns"), [(ENOUGH_SECONDS, MIN_TURNS), (ENOUGH_SECONDS / 7, 4), (ENOUGH_SECONDS / 100, MAX_TURNS)]
)
def test_slow_methods_run_fewer_times(seconds: float, turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    order, results, _ = race_of(seconds, monkeypatch)
    assert order == "ab" * (1 + turns)
    assert {len(runs) for runs in results.values()} == {turns}
