"""Draws the race, as the page calls it: the speed of several ways of decoding, compared side by side.

It is shown pass by pass, at a pace that people can follow. Each way of decoding has a lane, a strip of the page. It is
run once to warm up, then several times in turn with the others, because a single run says more about the machine than
about the way of decoding. The lane shows the run with the median time: the pieces of text that each pass accepted, and
when. The browser shows the lanes as an animation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, TypeVar

from mmdec.core.growing_text import GrowingText
from mmdec.demo.background import Report
from mmdec.demo.html import status
from mmdec.tasks.comparison import speedup_words
from mmdec.types import Round
from mmdec.vision.answer import Description
from mmdec.whisper.transcript import Transcript

DecodingResult = Transcript | Description
Run = TypeVar("Run")
# Factors from which the page chooses how much slower than real time it shows a race; below 1: faster.
SLOWDOWNS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
MAX_ANIMATION_SECONDS = 7.0  # maximum seconds that the animation of the slowest way of decoding takes
REPLAY_SCRIPT = (
    "const race=this.closest('.mm-race');race.classList.remove('mm-go');void race.offsetWidth;"
    "race.classList.add('mm-go')"
)
REFRESH_SECONDS = 0.15  # seconds between two updates of text that is still being decoded
MAX_TURNS = 5  # the most timed runs of each way of decoding
MIN_TURNS = 3  # timed runs of each way, however long they take
ENOUGH_SECONDS = 15.0  # seconds after which no further turn begins once there were MIN_TURNS
BARS = 60  # the most passes that a bar chart shows
BAR_WIDTH, MAX_BAR_HEIGHT, LABEL_HEIGHT = 20, 36, 14  # in pixels, of a bar chart
LABEL_INTERVAL = 5  # of more than twice as many passes, only the first and every fifth have their number below the bar


@dataclass(frozen=True)
class Step:
    """One pass of the model in a race: the pieces of text that it accepted, and when it ended."""

    seconds: float  # seconds from the start of decoding to the end of this pass
    pieces: list[str]  # texts of the tokens that the pass accepted, with their spaces
    silent: int = 0  # number of accepted tokens without visible text: timestamps, the end

    @property
    def count(self) -> int:
        """The number of accepted tokens."""
        return len(self.pieces) + self.silent


@dataclass(frozen=True)
class Lane:
    """One way of decoding that the page compares with others, and shows in one strip (lane).

    Holds the passes of the run with the median time, and how it compares with the baseline.
    """

    name: str
    note: str  # a note about this way of decoding, in words
    steps: list[Step]
    times: list[float] = field(default_factory=list[float])  # seconds of all timed runs
    baseline: float | None = None  # the baseline's seconds; None: the lane is the baseline, or is not compared
    output: str = ""  # a comparison of the output with the baseline's, in words
    equal: bool | None = None  # whether the output must equal the baseline's, and does; None: it need not
    per_pass: float | None = None  # tokens per round, as the library reports them; None: computed from the steps
    passes: int | None = None  # number of passes, where a step is more than one; None: the number of steps
    brief: bool = False  # whether the lane is a row of the table below the others, without its text

    @property
    def seconds(self) -> float:
        """The seconds of all passes."""
        return duration(self.steps)

    @property
    def pieces(self) -> list[str]:
        return [piece for step in self.steps for piece in step.pieces]

    @property
    def speed(self) -> str:
        """Compare the time with the baseline's in words; "" without a baseline."""
        return "" if self.baseline is None else speedup_words(self.seconds, self.baseline)

    @property
    def verdict(self) -> str:
        """Compare time and output with the baseline in words."""
        return ", ".join(part for part in (self.speed, self.output) if part)


def duration(steps: Sequence[Step]) -> float:
    """Return the seconds of all passes of a run."""
    return steps[-1].seconds if steps else 0.0


def run_in_turn(report: Report, head: str, ways: Mapping[str, Callable[[], Run]]) -> dict[str, list[Run]]:
    """Run each way of decoding once without counting it, then all of them in turn, up to `MAX_TURNS` times.

    Args:
        report: Reports the progress to the page.
        head: Begins the status line.
        ways: Name -> function that decodes once.

    Returns:
        Name -> results of the counted runs.
    """
    results: dict[str, list[Run]] = {name: [] for name in ways}
    report(status=status(f"{head} The race warms up …", "busy"))
    for run in ways.values():
        run()
    start = time.monotonic()
    for turn in range(1, MAX_TURNS + 1):
        if turn > MIN_TURNS and time.monotonic() - start > ENOUGH_SECONDS:
            break
        report(status=status(f"{head} The race, turn {turn} of up to {MAX_TURNS} …", "busy"))
        for name, run in ways.items():
            results[name].append(run())
    return results


def make_lane(name: str, note: str, runs: Sequence[list[Step]], **more: Any) -> Lane:
    """Make a lane from the steps of all counted runs.

    Of an even number, the faster middle run is shown.

    Args:
        more: Further fields of `Lane`.
    """
    ordered = sorted(runs, key=duration)
    return Lane(name, note, ordered[(len(ordered) - 1) // 2], [duration(run) for run in runs], **more)


def pace(lanes: Sequence[Lane]) -> float:
    """Choose how much slower than real time the page shows the race.

    The factor is the largest of `SLOWDOWNS` with which no way of decoding takes more than `MAX_ANIMATION_SECONDS`
    seconds.
    """
    longest = max((lane.seconds for lane in lanes), default=0.0)
    return max((factor for factor in SLOWDOWNS if factor * longest <= MAX_ANIMATION_SECONDS), default=SLOWDOWNS[0])


def race_html(lanes: Sequence[Lane], unit: str, start: str = "") -> str:
    """Write the race as HTML.

    Args:
        start: A sentence on when the clock starts.
        unit: What the pieces are called, in the plural: "tokens" or "pieces".
    """
    shown_lanes = [lane for lane in lanes if not lane.brief]
    factor = pace(shown_lanes)
    longest = max((lane.seconds for lane in shown_lanes), default=0.0) or 1.0
    parts = [
        '<section class="mm-race mm-go" aria-label="The race">',
        f'<div class="mm-head"><h3>The race</h3><button type="button" class="mm-again" '
        f'onclick="{escape(REPLAY_SCRIPT)}">Show it again</button></div>',
        f'<p class="mm-note">Shown {pace_words(factor)}. Each colour is one pass of the network. {turns_words(lanes)}'
        f"{escape(start)}</p>",
        *(lane_html(lane, unit, factor, longest) for lane in shown_lanes),
        table_html([lane for lane in lanes if lane.brief], unit),
        "</section>",
    ]
    return "".join(parts)


def pace_words(factor: float) -> str:
    """Write in words how much slower (above 1) or faster (below 1) than real time the race is shown."""
    if factor == 1:
        return "at the speed at which it ran"
    return f"{factor:g} times slower than it ran" if factor > 1 else f"{1 / factor:g} times faster than it ran"


def turns_words(lanes: Sequence[Lane]) -> str:
    """Write in words how often each way of decoding was run, with a space after it; "" if it was not counted."""
    turns = max((len(lane.times) for lane in lanes), default=0)
    if turns < 2:
        return ""
    return f"Each way was warmed up, then run {turns} times in turn; times are medians, with the range of all runs. "


def lane_html(lane: Lane, unit: str, factor: float, longest: float) -> str:
    """Write the strip of one way of decoding as HTML: its name, pieces of text, bar and figures.

    Args:
        unit: What the pieces are called, in the plural: "tokens" or "pieces".
        factor: The animation is this many times slower than decoding.
        longest: Seconds of the slowest way of decoding, which has the full bar.
    """
    seconds = lane.seconds * factor
    width = 100 * lane.seconds / longest
    return (
        f'<article class="mm-lane"><h4>{escape(lane.name)}</h4><p class="mm-note">{escape(lane.note)}</p>'
        f'<p class="mm-pieces" lang="en">{pieces_html(lane.steps, unit, factor)}</p>'
        f'<div class="mm-track" aria-hidden="true"><div class="mm-bar" style="width:{width:.1f}%;'
        f'--run:{seconds:.3f}s"></div></div>'
        f'<p class="mm-facts"><span>{figures(lane, unit)}</span>{comparison_html(lane)}</p>'
        f"{chart_html(lane.steps, unit)}</article>"
    )


def comparison_html(lane: Lane) -> str:
    """Write the comparison with the baseline as HTML: speed and output apart. Only a gain is marked as good."""
    parts = []
    if lane.speed:
        kind = "mm-speed mm-gain" if lane.speed.endswith("faster") else "mm-speed"
        parts.append(f'<span class="{kind}">{escape(lane.speed)}</span>')
    if lane.output:
        kind = "mm-output"
        if lane.equal is not None:
            kind += " mm-equal" if lane.equal else " mm-differs"
        parts.append(f'<span class="{kind}">{escape(lane.output)}</span>')
    return "".join(parts)


def table_html(lanes: Sequence[Lane], unit: str) -> str:
    """Write the brief lanes as a table; "" if there are none.

    Args:
        unit: What the pieces are called, in the plural.
    """
    if not lanes:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{escape(lane.name)}<p class="mm-note">{escape(lane.note)}</p></th>'
        f'<td>{figures(lane, unit)}<p class="mm-facts">{comparison_html(lane)}</p></td></tr>'
        for lane in lanes
    )
    return f'<table class="mm-others"><caption>The others</caption><tbody>{rows}</tbody></table>'


def figures(lane: Lane, unit: str) -> str:
    """Write the figures of one way of decoding as HTML: number of passes, time with its range, and pieces per pass.

    Args:
        unit: What the pieces are called, in the plural: "tokens" or "pieces".
    """
    passes, pieces = lane.passes or len(lane.steps), sum(step.count for step in lane.steps)
    per_pass = lane.per_pass
    if per_pass is None and passes:
        per_pass = pieces / passes
    each = "" if per_pass is None else f" · {per_pass:.1f} {unit} per pass"
    spread = f" ({span(min(lane.times), max(lane.times))})" if len(lane.times) > 1 else ""
    return f"<b>{passes}</b> {'pass' if passes == 1 else 'passes'} · <b>{milliseconds(lane.seconds)}</b>{spread}{each}"


def milliseconds(seconds: float) -> str:
    """Format seconds: 3.4 ms, 120 ms, 2.4 s."""
    value = seconds * 1000
    if value >= 1000:
        return f"{seconds:.1f} s"
    return f"{value:.1f} ms" if value < 10 else f"{value:.0f} ms"


def span(shortest: float, longest: float) -> str:
    """Format a range of seconds: 18 to 153 ms, 930 ms to 1.2 s."""
    low, high = milliseconds(shortest), milliseconds(longest)
    unit = high.partition(" ")[2]
    return f"{low.removesuffix(f' {unit}')} to {high}"


def pieces_html(steps: Sequence[Step], unit: str, factor: float = 1.0) -> str:
    """Write pieces of text as HTML, in the colour of their pass.

    A piece appears when its pass has ended.

    Args:
        unit: What the pieces are called, in the plural: "tokens" or "pieces".
        factor: The animation is this many times slower than decoding; 0: show all at once.
    """
    spans = []
    for number, step in enumerate(steps, 1):
        colour, late = (number - 1) % 6, step.seconds * factor
        many = step.count
        for piece in step.pieces:
            spans.append(
                f'<span class="mm-piece mm-c{colour}" style="--at:{late:.3f}s" '
                f'title="pass {number}: {many} {unit[:-1] if many == 1 else unit}">{escape(piece)}</span>'
            )
    return "".join(spans)


def chart_html(steps: Sequence[Step], unit: str) -> str:
    """Draw the bar chart with a line that says what it shows.

    Return "" if each pass accepted one piece, or if there is only one pass.

    Args:
        unit: What the pieces are called, in the plural: "tokens" or "pieces".
    """
    svg = steps_svg(steps, unit)
    if not svg or max(step.count for step in steps) < 2:
        return ""
    cut = f" The first {BARS} of {len(steps)} passes are drawn." if len(steps) > BARS else ""
    return (
        '<figure class="mm-chart"><div class="mm-wide" tabindex="0" role="region" '
        f'aria-label="Bar chart of passes, scrolls sideways">{svg}</div>'
        f"<figcaption>Above each bar: {unit} that the pass settled. Below: the pass.{cut}</figcaption></figure>"
    )


def steps_svg(steps: Sequence[Step], unit: str) -> str:
    """Draw a bar chart of the number of pieces that each pass accepted, with the numbers; "" for fewer than two passes.

    Args:
        unit: What the pieces are called, in the plural: "tokens" or "pieces".
    """
    if len(steps) < 2:
        return ""
    counts = [step.count for step in steps][:BARS]
    top, bottom = max(1, *counts), LABEL_HEIGHT + MAX_BAR_HEIGHT
    bars = []
    for index, count in enumerate(counts):
        high, middle, number = MAX_BAR_HEIGHT * count / top, (index + 0.5) * BAR_WIDTH, index + 1
        bars.append(
            f'<rect class="mm-c{index % 6}" x="{index * BAR_WIDTH + 2}" y="{bottom - high:.1f}" '
            f'width="{BAR_WIDTH - 4}" height="{max(1.0, high):.1f}" rx="1">'
            f"<title>pass {number}: {count} {escape(unit[:-1] if count == 1 else unit)}</title></rect>"
            f'<text x="{middle:g}" y="{bottom - high - 3:.1f}">{count}</text>'
        )
        if len(counts) <= 2 * LABEL_INTERVAL or number == 1 or number % LABEL_INTERVAL == 0:
            bars.append(f'<text class="mm-tick" x="{middle:g}" y="{bottom + LABEL_HEIGHT - 2}">{number}</text>')
    label = f"{unit} settled in each of {len(steps)} passes: {', '.join(map(str, counts[:40]))}"
    width, height = BAR_WIDTH * len(counts), bottom + LABEL_HEIGHT
    return (
        f'<svg class="mm-steps" role="img" aria-label="{escape(label)}" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">{"".join(bars)}</svg>'
    )


def steps_from_rounds(tokenizer: Any, rounds: Iterable[Round]) -> list[Step]:
    """Convert the rounds of a batch of one to steps.

    Each token is a piece of text, except those that add none: special tokens, and parts of a character.
    The time of a step is the sum of the drafter's, the target's and all other seconds of the rounds so far.
    """
    seconds, text = 0.0, GrowingText(tokenizer)
    timeline: list[Step] = []
    for round_ in rounds:
        seconds += round_.target_seconds + round_.drafter_seconds + round_.core_seconds
        pieces = [piece for token in round_.tokens[0] if (piece := text.add([token]))]
        timeline.append(Step(seconds, pieces, len(round_.tokens[0]) - len(pieces)))
    return timeline


def round_listener(
    report: Report, tokenizer: Any, rounds: list[Round], head: str | None = None
) -> Callable[[Round], None]:
    """Make a callback for decoding that stores every round in `rounds`, and raises WorkStopped if the work was stopped.

    Args:
        report: Reports to the page.
        head: HTML to show above the text, which is then shown as it is accepted; None: show no text.
    """
    last_update = -REFRESH_SECONDS

    def on_round(round_: Round) -> None:
        nonlocal last_update
        rounds.append(round_)
        report()
        if head is not None and time.monotonic() - last_update >= REFRESH_SECONDS:
            last_update = time.monotonic()
            coloured = pieces_html(steps_from_rounds(tokenizer, rounds), "tokens", factor=0.0)
            report(text=f'<div class="mm-said">{head}<p class="mm-text mm-live" lang="en">{coloured}</p></div>')

    return on_round


def compare_with_plain(
    tokenizer: Any,
    drafted: Iterable[tuple[str, str, Sequence[tuple[DecodingResult, Sequence[Round]]]]],
    plain: Sequence[tuple[DecodingResult, Sequence[Round]]],
) -> list[Lane]:
    """Make a `Lane` for each drafter, compared with plain decoding, and a last one for plain decoding.

    Args:
        drafted: For each drafter its name, a note in words, and (result, rounds) of each of its runs.
        plain: (result, rounds) of each run of plain decoding.
    """

    def timelines(runs: Sequence[tuple[DecodingResult, Sequence[Round]]]) -> list[list[Step]]:
        return [steps_from_rounds(tokenizer, rounds) for _, rounds in runs]

    text, per_pass = plain[0][0].tokens, plain[0][0].tokens_per_round
    slow = make_lane("Plain decoding", "One token in each pass.", timelines(plain), per_pass=per_pass)
    lanes: list[Lane] = []
    for name, note, runs in drafted:
        equal = all(result.tokens == text for result, _ in runs)
        compared = {"baseline": slow.seconds, "equal": equal, "output": "same text" if equal else "not the same text"}
        lanes.append(make_lane(name, note, timelines(runs), per_pass=runs[0][0].tokens_per_round, **compared))
    return [*lanes, slow]
