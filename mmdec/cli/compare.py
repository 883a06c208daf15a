"""`--compare`: each input is decoded plainly, too; how much faster the drafter is, and whether the text is the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from mmdec import InputError
from mmdec.checks.files import printable
from mmdec.pipelines.comparison import verdict

TURNS = 2  # runs of either kind, in turn; the faster one counts, for the first also makes what later ones find
DIFFERS = 2  # exit code

Compare = Annotated[
    bool,
    typer.Option("--compare", help="Decode without drafts, too: how much faster is the drafter, is the text the same?"),
]


@dataclass(frozen=True)
class Comparison:
    """One input's best times, in seconds, and whether both ways gave the same tokens."""

    drafted: float
    plain: float
    same: bool

    def __str__(self) -> str:
        """ "2.9 times faster, same text"; with the times."""
        said = verdict(self.drafted, self.plain, self.same)
        return f"{said}: {self.drafted:.3f} s with drafts, {self.plain:.3f} s without"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        ratio = self.plain / self.drafted if self.drafted > 0 else None
        return {"seconds": self.drafted, "seconds_plain": self.plain, "times_faster": ratio, "same_text": self.same}


class Comparer:
    """Makes calls that decode both ways. compare: False makes it do nothing. Raises InputError for what has no plain
    counterpart: `drafter`, and `refused`, option names with whether they were given."""

    def __init__(self, compare: bool, drafter: str, **refused: bool) -> None:
        self._on = compare
        self._last: Comparison | None = None
        self._differs = False
        if compare and drafter == "none":
            raise InputError("`--compare` must come with a drafter, but `--drafter` is none. Leave that out.")
        for name, given in refused.items():
            if compare and given:
                raise InputError(f"`--compare` must come without `--{name}`, but that is given. Drop one of them.")

    def both(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` of a list with one input, which is made with drafts and without, in turn; the drafted results."""
        if not self._on:
            return call

        def compared(batch: list[Any]) -> list[Any]:
            self._last = None
            drafted, plain = [], []
            for _ in range(TURNS):
                drafted += call(batch)
                plain += call(batch, drafter=None)
            fast, slow = (min(result.timings["total"] for result in results) for results in (drafted, plain))
            same = all(result.tokens == plain[0].tokens for result in (*drafted, *plain))
            self._last = Comparison(fast, slow, same)
            self._differs = self._differs or not same
            return drafted[:1]

        return compared

    def fields(self) -> dict[str, Any]:
        """What the last input's JSON has beside its result."""
        return {"compared": self._last.to_dict()} if self._last is not None else {}

    def tell(self, source: object, several: bool) -> None:
        """Say on stderr what came of the last input."""
        if self._last is not None:
            name = f"{printable(str(source))}: " if several else ""
            print(f"{name}{self._last}", file=sys.stderr, flush=True)

    @property
    def code(self) -> int:
        """The exit code: 2 where a text differed."""
        return DIFFERS if self._differs else 0
