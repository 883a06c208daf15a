"""Counts what a recording costs: rounds, tokens and seconds."""

from __future__ import annotations

from typing import final

from mmdec.core.steps import Round
from mmdec.tasks.usage import Usage


@final
class UsageMeter:
    """Counts the rounds of one recording.

    A window may be decoded again, at a higher temperature or with more of its sound encoded. Rounds and seconds of all
    its decodings count; log-probabilities and cuts are those of the last.

    Args:
        first_timestamp: Id of the first timestamp token; the confidence ignores timestamp tokens.
        drafts: Whether there is a drafter.
    """

    def __init__(self, first_timestamp: int, drafts: bool) -> None:
        self.usage, self.first_timestamp = Usage(), first_timestamp
        self.loop_seconds = 0.0  # seconds in the loop of `mmdec.core` and in the drafter
        self._drafts = drafts
        self._room = 0  # tokens that the model can write after the prompt of this window
        self._tokens = 0  # in this decoding of the window
        self._earlier = 0  # number of log-probabilities of earlier windows
        self._cut_before = 0, True  # `Usage.cut` and `Usage.raisable` after earlier windows

    def begin_window(self, room: int, again: bool) -> None:
        """Begin to decode a window.

        Args:
            room: Number of tokens that the model can write after the prompt.
            again: Whether the window was decoded before.
        """
        self._room = room
        if not again:
            self._earlier = len(self.usage.logprobs)
            self._cut_before = self.usage.cut, self.usage.raisable
        self.restart()

    def restart(self) -> None:
        """Drop the log-probabilities and cuts of this window's text, because it is decoded again."""
        del self.usage.logprobs[self._earlier :]
        self.usage.cut, self.usage.raisable = self._cut_before
        self._tokens = 0

    def count(self, round_: Round) -> None:
        """Add a round of the recording."""
        tokens, usage = round_.tokens[0], self.usage
        usage.count(round_, 0, self._drafts)
        self._tokens += len(tokens)
        if any(round_.cut):
            usage.note_cut(self._tokens, self._tokens < self._room)
        logprobs = [0.0] * len(tokens) if round_.logprobs is None else round_.logprobs[0].tolist()
        usage.logprobs += [
            logprob for token, logprob in zip(tokens, logprobs, strict=False) if token < self.first_timestamp
        ]
        self.loop_seconds += round_.core + round_.drafter
        usage.seconds["decoder"] += round_.target + round_.core + (0.0 if self._drafts else round_.drafter)
