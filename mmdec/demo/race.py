"""Draws the race, as the page calls it: the speed of several ways of decoding, compared side by side, pass by pass, at
a pace that people can follow.

Nothing is decoded here. Each way of decoding has a lane, a strip of the page. It is drawn from the rounds of a finished
call: the pieces of text that each pass accepted, and when. The browser shows the lanes as an animation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from mmdec.demo.background import Tell
from mmdec.pipelines.call import Round
from mmdec.pipelines.comparison import verdict
from mmdec.pipelines.description.answer import Description
from mmdec.pipelines.transcription.transcript import Transcript

Decoded = Transcript | Description
# Factors from which the page chooses how much slower than real time it shows a race; below 1: faster.
PACES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
SHOWN = 7.0  # maximum seconds that the animation of the slowest way of decoding takes
AGAIN = (
    "const race=this.closest('.mm-race');race.classList.remove('mm-go');void race.offsetWidth;"
    "race.classList.add('mm-go')"
)
REFRESH = 0.15  # seconds between two updates of text that is still being decoded
BROKEN = "\ufffd"  # tokenizers decode half a character to this; such text is hidden until the rest comes


@dataclass(frozen=True)
class Step:
    """One pass of the model in a race: the pieces of text that it accepted, and when it ended."""

    seconds: float  # seconds from the start of decoding to the end of this pass
    pieces: list[str]  # texts of the tokens that the pass accepted, with their spaces
    silent: int = 0  # number of accepted tokens without visible text: timestamps, the end

    @property
    def count(self) -> int:
        """Return the number of accepted tokens."""
        return len(self.pieces) + self.silent


@dataclass(frozen=True)
class Lane:
    """One way of decoding that the page compares with others, and shows in one strip (lane): its passes, and how it
    compares with the baseline."""

    name: str
    note: str  # a note about this way of decoding, in words
    steps: list[Step]
    verdict: str = ""  # a comparison of time and output with the baseline, in words
    equal: bool | None = None  # whether the output equals the baseline's; None if it is not compared
    per_pass: float | None = None  # tokens per round, as the library reports them; None: computed from the steps

    @property
    def seconds(self) -> float:
        """Return the seconds of all passes."""
        return self.steps[-1].seconds if self.steps else 0.0

    @property
    def pieces(self) -> list[str]:
        return [piece for step in self.steps for piece in step.pieces]


def pace(lanes: Sequence[Lane]) -> float:
    """Choose how much slower than real time the page shows the race: the largest factor from `PACES` with which no way
    of decoding takes more than `SHOWN` seconds."""
    longest = max((lane.seconds for lane in lanes), default=0.0)
    return max((factor for factor in PACES if factor * longest <= SHOWN), default=PACES[0])


def race_html(lanes: Sequence[Lane], unit: str, start: str = "") -> str:
    """Write the race as HTML. start: a sentence on when the clock starts.

    unit: what the pieces are called, in the plural: "tokens" or "pieces".
    """
    factor = pace(lanes)
    longest = max((lane.seconds for lane in lanes), default=0.0) or 1.0
    parts = [
        '<section class="mm-race mm-go" aria-label="The race">',
        f'<div class="mm-head"><h3>The race</h3><button type="button" class="mm-again" onclick="{escape(AGAIN)}">'
        "Show it again</button></div>",
        f'<p class="mm-note">Shown {pace_words(factor)}. Each colour is one pass of the network. {escape(start)}</p>',
        *(lane_html(lane, unit, factor, longest) for lane in lanes),
        "</section>",
    ]
    return "".join(parts)


def pace_words(factor: float) -> str:
    """Write in words how much slower (above 1) or faster (below 1) than real time the race is shown."""
    if factor == 1:
        return "at the speed at which it ran"
    return f"{factor:g} times slower than it ran" if factor > 1 else f"{1 / factor:g} times faster than it ran"


def lane_html(lane: Lane, unit: str, factor: float, longest: float) -> str:
    """Write the strip of one way of decoding as HTML: its name, pieces of text, bar and figures.

    unit: what the pieces are called, in the plural: "tokens" or "pieces".
    factor: the animation is this many times slower than decoding. longest: seconds of the slowest way of decoding,
        which has the full bar.
    """
    seconds = lane.seconds * factor
    width = 100 * lane.seconds / longest
    verdict = ""
    if lane.verdict:
        kind = "" if lane.equal is None else " mm-equal" if lane.equal else " mm-differs"
        verdict = f'<span class="mm-verdict{kind}">{escape(lane.verdict)}</span>'
    return (
        f'<article class="mm-lane"><h4>{escape(lane.name)}</h4><p class="mm-note">{escape(lane.note)}</p>'
        f'<p class="mm-pieces" lang="en">{pieces_html(lane.steps, unit, factor)}</p>'
        f'<div class="mm-track" aria-hidden="true"><div class="mm-bar" style="width:{width:.1f}%;'
        f'--run:{seconds:.3f}s"></div></div>'
        f'<p class="mm-facts"><span>{figures(lane, unit)}</span>{verdict}</p>{steps_svg(lane.steps, unit)}</article>'
    )


def figures(lane: Lane, unit: str) -> str:
    """Write the figures of one way of decoding as HTML: number of passes, milliseconds, and pieces per pass.

    unit: what the pieces are called, in the plural: "tokens" or "pieces".
    """
    passes, pieces = len(lane.steps), sum(step.count for step in lane.steps)
    per_pass = lane.per_pass if lane.per_pass is not None else pieces / passes if passes else None
    each = "" if per_pass is None else f" · {per_pass:.1f} {unit} per pass"
    return f"<b>{passes}</b> {'pass' if passes == 1 else 'passes'} · <b>{milliseconds(lane.seconds)}</b>{each}"


def milliseconds(seconds: float) -> str:
    """Format seconds: 3.4 ms, 120 ms, 2.4 s."""
    value = seconds * 1000
    if value >= 1000:
        return f"{seconds:.1f} s"
    return f"{value:.1f} ms" if value < 10 else f"{value:.0f} ms"


def pieces_html(steps: Sequence[Step], unit: str, factor: float = 1.0) -> str:
    """Write pieces of text as HTML, in the colour of their pass. A piece appears when its pass has ended.

    unit: what the pieces are called, in the plural: "tokens" or "pieces".
    factor: the animation is this many times slower than decoding; 0: show all at once.
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


def steps_svg(steps: Sequence[Step], unit: str) -> str:
    """Draw a bar chart of the number of pieces that each pass accepted; "" for fewer than two passes.

    unit: what the pieces are called, in the plural: "tokens" or "pieces".
    """
    if len(steps) < 2:
        return ""
    counts = [step.count for step in steps]
    top, width, height = max(1, *counts), 8, 36
    bars = "".join(
        f'<rect class="mm-c{index % 6}" x="{index * width}" y="{height - height * count / top:.1f}" '
        f'width="{width - 2}" height="{max(1.0, height * count / top):.1f}" rx="1">'
        f"<title>pass {index + 1}: {count} {escape(unit)}</title></rect>"
        for index, count in enumerate(counts)
    )
    label = f"{unit} settled in each of {len(counts)} passes: {', '.join(map(str, counts[:40]))}"
    return (
        f'<svg class="mm-steps" role="img" aria-label="{escape(label)}" viewBox="0 0 {width * len(counts)} {height}" '
        f'style="max-width:{width * len(counts)}px" preserveAspectRatio="none" height="{height}">{bars}</svg>'
    )


def pieces(tokenizer: Any, tokens: Sequence[int], before: Sequence[int] = ()) -> list[str]:
    """Return the text that each token adds. Tokens that add no text are left out: special tokens, and parts of a
    character.

    tokens: token ids. before: token ids of the text before these tokens.
    """
    seen = list(before)
    text: str = tokenizer.decode(seen, skip_special_tokens=True).rstrip(BROKEN)
    special = set(tokenizer.all_special_ids)
    added: list[str] = []
    for token in tokens:
        seen.append(token)
        if token in special:
            continue
        longer: str = tokenizer.decode(seen, skip_special_tokens=True)
        if longer.endswith(BROKEN) or not longer.startswith(text):
            continue
        if len(longer) > len(text):
            added.append(longer[len(text) :])
            text = longer
    return added


def steps(tokenizer: Any, rounds: Iterable[Round]) -> list[Step]:
    """Convert the rounds of a batch of one to steps. The time of a step is the sum of the drafter's, the target's and
    all other seconds of the rounds so far."""
    seconds, before = 0.0, list[int]()
    timeline: list[Step] = []
    for round_ in rounds:
        seconds += round_.target + round_.drafter + round_.core
        new = pieces(tokenizer, round_.tokens[0], before)
        timeline.append(Step(seconds, new, len(round_.tokens[0]) - len(new)))
        before += round_.tokens[0]
    return timeline


def listener(tell: Tell, tokenizer: Any, rounds: list[Round], head: str | None = None) -> Callable[[Round], None]:
    """Make a callback for decoding that stores every round in `rounds`, and raises Stopped if the work was stopped.

    tell: reports to the page.
    head: HTML to show above the text, which is then shown as it is accepted; None: show no text.
    """
    told = -REFRESH

    def on_round(round_: Round) -> None:
        nonlocal told
        rounds.append(round_)
        tell()
        if head is not None and time.monotonic() - told >= REFRESH:
            told = time.monotonic()
            coloured = pieces_html(steps(tokenizer, rounds), "tokens", factor=0.0)
            tell(text=f'<div class="mm-said">{head}<p class="mm-text mm-live" lang="en">{coloured}</p></div>')

    return on_round


def against_plain(
    tokenizer: Any,
    drafted: Iterable[tuple[str, str, tuple[Decoded, Sequence[Round]]]],
    plain: tuple[Decoded, Sequence[Round]],
) -> list[Lane]:
    """Make a `Lane` for each drafter, with a comparison with plain decoding; and, as the last one, a `Lane` for plain
    decoding.

    drafted: for each drafter its name, a note in words, and (result, rounds) of its call.
    plain: (result, rounds) of plain decoding.
    """
    baseline = Lane("Plain decoding", "One token in each pass.", steps(tokenizer, plain[1]))
    lanes: list[Lane] = []
    for name, note, (result, rounds) in drafted:
        lane = Lane(name, note, steps(tokenizer, rounds), per_pass=result.tokens_per_round)
        equal = result.tokens == plain[0].tokens
        lanes.append(replace(lane, verdict=verdict(lane.seconds, baseline.seconds, equal), equal=equal))
    return [*lanes, replace(baseline, per_pass=plain[0].tokens_per_round)]
