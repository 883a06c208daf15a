"""Answers of models that write text: the text as it grows, and the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from mmdec.core.growing_text import GrowingText
from mmdec.serving.job import Job
from mmdec.tasks.usage import Usage

SPACES = " \t\r\n"


@final
@dataclass(frozen=True)
class AnswerPiece:
    """A piece of a streamed answer: text that will not change, and the tokens since the piece before."""

    text: str
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()


@final
@dataclass(frozen=True)
class Answer:
    """The answer to a request."""

    text: str  # ends before the first stop string
    tokens: list[int]  # ids of all new tokens, the end token included
    logprobs: list[float]  # log-probability of each token
    rounds: int
    timings: Mapping[str, float]  # stage of decoding -> seconds
    finish_reason: str  # "stop", or "length" if the text was cut at the maximum length
    note: str = ""  # that the answer was cut, and what to do
    confidence: float | None = None  # None: the model has none


@final
class TextDeltas:
    """Divides a growing text into pieces for streaming.

    Holds how much of the text was sent; text that was sent never changes.

    Args:
        stops: Strings at which the text ends. The first of them, and what follows it, is not sent.
        strips: Whether spaces at both ends of the text are dropped.
    """

    def __init__(self, stops: Sequence[str] = (), strips: bool = True) -> None:
        self._stops, self._strips, self._sent = stops, strips, 0

    def until_stop(self, text: str) -> str:
        """Return the text up to the first stop string."""
        return text[: min((text.find(stop) for stop in self._stops if stop in text), default=len(text))]

    def next_delta(self, text: str) -> str:
        """Return the part of the text that can be sent now and was not sent before.

        Not yet sent: trailing spaces that may be dropped, and an end that may be the beginning of a stop string.

        Args:
            text: The whole text so far, up to its last complete character.
        """
        text = self.until_stop(text.lstrip() if self._strips else text)
        ends = [n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        text = text[: len(text) - max(ends, default=0)]
        return self._new(text.rstrip(SPACES) if self._strips else text)

    def end(self, text: str) -> str:
        """Return the part of the final text that was not sent before.

        Args:
            text: The whole text.
        """
        return self._new(text)

    def _new(self, text: str) -> str:
        new, self._sent = text[self._sent :], max(self._sent, len(text))
        return new


@final
class AnswerText:
    """The text of one job's answer: sends pieces while it grows, if the client streams, and makes the final text.

    Args:
        usage: Counts the answer's rounds, and holds its tokens so far.
        tokenizer: Of the model.
        stops: Strings at which the text ends.
        strips: Whether spaces at both ends of the text are dropped.
    """

    def __init__(self, job: Job, usage: Usage, tokenizer: Any, stops: Sequence[str], strips: bool) -> None:
        self._job, self._usage, self._tokenizer, self._stops, self._strips = job, usage, tokenizer, stops, strips
        self._text, self._deltas, self._sent = GrowingText(tokenizer), TextDeltas(stops, strips), 0

    def send(self) -> None:
        """Send what is new and will not change."""
        if self._job.streams and (new := self._deltas.next_delta(self._decoded(done=False))):
            self._put(new)

    def finish(self, timings: Mapping[str, float], **fields: Any) -> Answer:
        """Send the rest of the text, and return the answer.

        Args:
            timings: Seconds of each stage.
            fields: Further fields of `Answer`.
        """
        usage, decoded = self._usage, self._decoded(done=True)
        text = self._deltas.until_stop(decoded.strip() if self._strips else decoded)
        text = text.strip() if self._strips else text
        if self._job.streams and (len(usage.tokens) > self._sent or len(text)):
            self._put(self._deltas.end(text))
        # the last token may complete a stop string
        written = (decoded, self._tokenizer.decode(usage.tokens, skip_special_tokens=False))
        stopped = any(stop in text_form for stop in self._stops for text_form in written)
        reason = "stop" if stopped else usage.finish_reason
        note = "" if stopped else usage.note
        return Answer(text, usage.tokens, usage.logprobs, usage.rounds, timings, reason, note, **fields)

    def _put(self, text: str) -> None:
        new = slice(self._sent, len(self._usage.tokens))
        self._sent = len(self._usage.tokens)
        self._job.put_event("text", AnswerPiece(text, self._usage.tokens[new], self._usage.logprobs[new]))

    def _decoded(self, done: bool) -> str:
        self._text.add(self._usage.tokens[len(self._text.tokens) :], done)
        return self._text.text
