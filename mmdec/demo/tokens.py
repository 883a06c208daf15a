"""Rounds of tokens as pieces of text, and as the race's lanes: what each token adds to what was read before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from mmdec.decode.loop import Round
from mmdec.demo.background import Tell
from mmdec.demo.race import Lane, Step, pieces_html
from mmdec.pipelines.comparison import verdict

REFRESH = 0.15  # seconds between two updates of text that is still being decoded
BROKEN = "\ufffd"  # a token that is part of a letter shows nothing until the letter is whole


class Decoded(Protocol):
    """A result that has its tokens."""

    @property
    def tokens(self) -> list[int]: ...

    @property
    def tokens_per_round(self) -> float: ...


def pieces(tokenizer: Any, tokens: Sequence[int], before: Sequence[int] = ()) -> list[str]:
    """The text that each of `tokens` adds, after the tokens `before`. Special tokens add nothing, and are left out."""
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
    """Rounds of one row as the race's steps; their clock counts what drafter, model and verification took."""
    seconds, before = 0.0, list[int]()
    timeline: list[Step] = []
    for round_ in rounds:
        seconds += round_.target + round_.drafter + round_.core
        new = pieces(tokenizer, round_.tokens[0], before)
        timeline.append(Step(seconds, new, len(round_.tokens[0]) - len(new)))
        before += round_.tokens[0]
    return timeline


def listener(tell: Tell, tokenizer: Any, rounds: list[Round], head: str | None = None) -> Callable[[Round], None]:
    """Keeps every round in `rounds`, and learns between two of them whether to go on.

    head: where it is given, the output "text" is told as it is accepted, below this HTML.
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
    """A lane for each drafted run (name, note, result with its rounds), then plain decoding, with which they are
    compared."""
    baseline = Lane("Plain decoding", "One token in each pass.", steps(tokenizer, plain[1]))
    lanes: list[Lane] = []
    for name, note, (result, rounds) in drafted:
        lane = Lane(name, note, steps(tokenizer, rounds), per_pass=result.tokens_per_round)
        equal = result.tokens == plain[0].tokens
        lanes.append(replace(lane, verdict=verdict(lane.seconds, baseline.seconds, equal), equal=equal))
    return [*lanes, replace(baseline, per_pass=plain[0].tokens_per_round)]
