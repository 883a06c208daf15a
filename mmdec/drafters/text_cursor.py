"""Copies from an earlier text that is nearly the new one: after each difference it finds where the text continues.

`mmdec.drafters.hypothesis.Follower` does the same for texts of other origin. They are words, may leave out or add whole
passages, and may be long: so it prefers the expected place, mistrusts single matches far away, and says where it has
found none. Here any match is better than none, and the whole text is searched. Each is worse at the other's task, as
docs/log/drafters.md shows. A third one, `KnownTextDrafter` in ctc/training/transcripts.py, follows a text that differs
little and looks a few tokens ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

MAX_MATCH = 4  # at most this many of the newest tokens are compared to find where the earlier text continues
MAX_GUESSED_TOKENS = 6  # maximum tokens copied from a guessed place (`TextCursor.is_match` is False)


@final
class TextCursor:
    """An earlier text, and the place in it from which the new text is expected to continue.

    Args:
        tokens: The earlier text.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._next = 0  # index of the token that is expected next
        # whether the new text's last token is before `_next` in the earlier text; else the place is a guess
        self.is_match = True
        self._newest: list[int] = []

    def rest(self, length: int) -> list[int]:
        """Return at most `length` tokens expected next, and at most `MAX_GUESSED_TOKENS` from a guessed place."""
        length = length if self.is_match else min(length, MAX_GUESSED_TOKENS)
        return list(self._tokens[self._next : self._next + length])

    def add(self, token: int) -> None:
        """Follow the new text by one token.

        If it is not the expected one, the newest tokens are searched for in the earlier text: the place with most equal
        tokens is taken, and of those the nearest. If there is none, the token is taken for a replacement of the
        expected one.
        """
        tokens, newest = self._tokens, [*self._newest[1 - MAX_MATCH :], token]
        self._newest = newest
        if self._next < len(tokens) and tokens[self._next] == token:
            self._next, self.is_match = self._next + 1, True
            return
        best: tuple[int, int, int] | None = None  # (number of equal tokens, -distance, index after the match)
        for index, other in enumerate(tokens):
            if other != token:
                continue
            equal = 1
            while equal < len(newest) and equal <= index and tokens[index - equal] == newest[-1 - equal]:
                equal += 1
            match = (equal, -abs(index + 1 - self._next), index + 1)
            best = match if best is None else max(best, match)
        self._next, self.is_match = (self._next + 1, False) if best is None else (best[2], True)
