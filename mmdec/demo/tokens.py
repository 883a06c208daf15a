"""Rounds of tokens as pieces of text, and as the race's lanes: what each token adds to what was read before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from mmdec.decode.loop import Round
from mmdec.demo.race import Lane, Step, equality

BROKEN = "\ufffd"  # a token that is part of a letter shows nothing until the letter is whole


class Decoded(Protocol):
    """A result that has its tokens."""

    @property
    def tokens(self) -> list[int]: ...


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


def against_plain(
    tokenizer: Any,
    drafted: Iterable[tuple[str, str, tuple[Decoded, Sequence[Round]]]],
    plain: tuple[Decoded, Sequence[Round]],
) -> list[Lane]:
    """A lane for each drafted run (name, note, result with its rounds), then plain decoding, with which they are
    compared."""
    lanes: list[Lane] = []
    for name, note, (result, rounds) in drafted:
        equal = result.tokens == plain[0].tokens
        verdict = equality(equal, "plain decoding", "token")
        lanes.append(Lane(name, note, steps(tokenizer, rounds), verdict, equal))
    lanes.append(Lane("Plain decoding", "One token in each pass.", steps(tokenizer, plain[1])))
    return lanes
