"""Counts what the recordings of one `generate` call of Whisper cost: rounds, tokens and seconds of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from mmdec.core.loop import Round
from mmdec.core.timing import Stopwatch
from mmdec.tasks.usage import Usage


@final
class UsageMeter:
    """Counts the rounds of one `generate` call, for each recording, and divides the call's time among recordings.

    A window may be decoded again, at a higher temperature or with more of its sound encoded. Rounds and seconds of all
    its decodings count; log-probabilities and cuts are those of the last.

    Args:
        recordings: Batch size.
        first_timestamp: Id of the first timestamp token; the confidence ignores timestamp tokens.
        drafts: Whether there is a drafter.
        device: The model's.
    """

    def __init__(self, recordings: int, first_timestamp: int, drafts: bool, device: torch.device) -> None:
        self.usage = [Usage() for _ in range(recordings)]
        self._first_timestamp, self._drafts = first_timestamp, drafts
        self._stopwatch = Stopwatch(device)
        self._rows: Sequence[int] = range(recordings)  # the recording of each row that is decoded now
        self._room = 0  # tokens that the model can write behind the prompts of this window
        # for each recording, how many of its log-probabilities are from earlier windows
        self._earlier = [0] * recordings
        # for each recording, `Usage.cut` and `Usage.raisable` after earlier windows, and its tokens in this window
        self._cut_before, self._tokens = [(0, True)] * recordings, [0] * recordings
        self._rounds: dict[int, float] = {}  # recording -> its share of the rounds of this decoding
        self._drafter = 0.0  # seconds of the drafter in this decoding
        self._encoder = 0.0  # seconds of the encoder that were not yet divided among recordings

    def start(self) -> None:
        """Start the clock: time before `generate` is called does not count."""
        self._stopwatch.lap()

    def count_encoder(self, seconds: float) -> None:
        """Add the seconds of a pass of the encoder."""
        self._encoder += seconds

    def end_detection(self) -> None:
        """Divide the time before the first window among all recordings: the decoder detects their languages in it."""
        self._divide(self._stopwatch.lap() - self._encoder)

    def begin(self, rows: Sequence[int], room: int, again: bool) -> None:
        """Begin to decode a window.

        Args:
            rows: The recording of each row.
            room: Number of tokens that the model can write behind the prompts.
            again: Whether these rows of the window were decoded before.
        """
        self._rows, self._room = rows, room
        if not again:
            for index in rows:
                usage = self.usage[index]
                self._earlier[index] = len(usage.logprobs)
                self._cut_before[index] = usage.cut, usage.raisable
        self.restart()
        self._rounds, self._drafter = {}, 0.0
        self._divide(0.0)
        self._stopwatch.lap()

    def restart(self) -> None:
        """Drop the log-probabilities and cuts of this window's text, because it is decoded again."""
        for index in self._rows:
            del self.usage[index].logprobs[self._earlier[index] :]
            self.usage[index].cut, self.usage[index].raisable = self._cut_before[index]
            self._tokens[index] = 0

    def count(self, round_: Round) -> None:
        """Add a round to the counts of its recordings."""
        logprobs = (
            [[0.0] * len(tokens) for tokens in round_.tokens] if round_.logprobs is None else round_.logprobs.tolist()
        )
        for index, (row, tokens, chosen) in enumerate(zip(round_.rows, round_.tokens, logprobs, strict=True)):
            recording = self._rows[row]
            usage = self.usage[recording]
            usage.count(round_, index, self._drafts)
            self._tokens[recording] += len(tokens)
            if any(round_.cut[index : index + 1]):
                usage.note_cut(self._tokens[recording], self._tokens[recording] < self._room)
            pairs = zip(tokens, chosen, strict=False)
            usage.logprobs += [logprob for token, logprob in pairs if token < self._first_timestamp]
            self._rounds[recording] = self._rounds.get(recording, 0.0) + 1 / len(round_.rows)
        if self._drafts:
            self._drafter += round_.drafter

    def end(self) -> None:
        """Divide the time of this decoding among the recordings that were decoded."""
        self._divide(self._stopwatch.lap() - self._encoder - self._drafter)

    def _divide(self, decoder: float) -> None:
        """Divide seconds among the recordings that are decoded now.

        The encoder's seconds are divided equally, the decoder's seconds (`decoder`) by each recording's share of the
        rounds.
        """
        rounds = sum(self._rounds.values())
        for index in self._rows:
            self.usage[index].seconds["encoder"] += self._encoder / len(self._rows)
            part = self._rounds.get(index, 0.0) / rounds if rounds else 1 / len(self._rows)
            self.usage[index].seconds["decoder"] += decoder * part
        self._encoder = 0.0
