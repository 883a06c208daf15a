"""The option `--compare`: each input is decoded with and without drafts, and text and speed are compared."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from mmdec import InputError
from mmdec.checks.files import printable
from mmdec.tasks.comparison import comparison_words

TURNS = 2  # number of calls with drafts, and without, in turn. The fastest of each counts: the first also fills caches
DIFFERENT_EXIT = 2  # exit code if a text with drafts differs from the text without drafts

Compare = Annotated[
    bool,
    typer.Option("--compare", help="Decode without drafts, too: how much faster is the drafter, is the text the same?"),
]


@dataclass(frozen=True)
class DraftComparison:
    """A comparison of decoding one input with and without drafts."""

    drafted: float  # fewest seconds with drafts
    plain: float  # fewest seconds without drafts
    same: bool  # whether all calls gave the same tokens

    def __str__(self) -> str:
        """Write the comparison in words, with the times: "2.9 times faster, same text"."""
        outcome = comparison_words(self.drafted, self.plain, self.same)
        return f"{outcome}: {self.drafted:.3f} s with drafts, {self.plain:.3f} s without"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict for JSON."""
        ratio = self.plain / self.drafted if self.drafted > 0 else None
        return {"seconds": self.drafted, "seconds_plain": self.plain, "times_faster": ratio, "same_text": self.same}


class Comparer:
    """Decodes inputs with and without drafts, for `--compare`.

    Holds the comparison for the last input.

    Args:
        compare: Whether the option was given; if not, do nothing.
        drafter: Value of `--drafter`.
        refused: Option name -> whether it was given; these options do not go with `--compare`.

    Raises:
        InputError: If `--compare` was given, and `drafter` is "none" or an option in `refused` was given, too.
    """

    def __init__(self, compare: bool, drafter: str, **refused: bool) -> None:
        self.on = compare
        self._last: DraftComparison | None = None
        self._differs = False
        if compare and drafter == "none":
            raise InputError("`--compare` must be used with a drafter, but `--drafter` is none. Leave `--drafter` out.")
        for name, reason in refused.items():
            if compare and reason:
                raise InputError(f"`--compare` must come without `--{name}`, but that is given. Drop one of them.")

    def both(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `call`, which decodes a list of one input, to decode it with and without drafts, in turn.

        `call` has a keyword `drafter`. The wrapped call stores the comparison, and returns the first drafted result.
        Without `--compare`, return `call` itself.
        """
        if not self.on:
            return call

        def compared(batch: list[Any]) -> list[Any]:
            self._last = None
            drafted, plain = [], []
            for _ in range(TURNS):
                drafted += call(batch)
                plain += call(batch, drafter=None)
            fast, slow = (min(result.timings["total"] for result in results) for results in (drafted, plain))
            same = all(result.tokens == plain[0].tokens for result in (*drafted, *plain))
            self._last = DraftComparison(fast, slow, same)
            self._differs = self._differs or not same
            return drafted[:1]

        return compared

    def fields(self) -> dict[str, Any]:
        """Return {"compared": ...}, the comparison for the last input, to add to its JSON; {} without `--compare`."""
        return {"compared": self._last.to_dict()} if self._last is not None else {}

    def print_comparison(self, source: object, has_many_files: bool) -> None:
        """Print on stderr the comparison for the last input, with its name if there are several inputs."""
        if self._last is not None:
            name = f"{printable(str(source))}: " if has_many_files else ""
            print(f"{name}{self._last}", file=sys.stderr, flush=True)

    @property
    def code(self) -> int:
        """The exit code: 2 if a text differed with and without drafts, else 0."""
        return DIFFERENT_EXIT if self._differs else 0
