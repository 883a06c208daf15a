"""`Transcript`: the text of one recording, and its formats: text, JSON, SubRip (.srt) and WebVTT (.vtt) subtitles.

Times are seconds from the recording's beginning.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mmdec.checks.arguments import show
from mmdec.decode.summary import rounds_line, three_lines
from mmdec.types import InputError

FORMATS = ("text", "json", "srt", "vtt")
SUBTITLES = ("srt", "vtt")


@dataclass(frozen=True)
class Word:
    """A word with its punctuation, and with a leading space if its script uses spaces."""

    text: str
    start: float
    end: float


@dataclass(frozen=True)
class Segment:
    """The text between two timestamp tokens of the model.

    Without words, `start` and `end` are these two timestamps. With words, `start` is the start of the first word, which
    is more exact, and the last word ends at `end`: see `mmdec.pipelines.transcription.word_timestamps.agree`.
    """

    start: float
    end: float
    text: str
    tokens: list[int] = field(repr=False)  # including both timestamp tokens
    words: list[Word] | None = field(default=None, repr=False)  # only for word timestamps


@dataclass(frozen=True)
class Transcript:
    """The text of one recording, and its cost.

    timings: stage -> seconds: `features`, `encoder`, `drafter`, `decoder` (everything between the encoder and the
        tokens except the drafter: passes, verification, caches, language detection) and `total`, which includes other
        time. In a batch each recording has a share, and the shares sum to the batch's time: features are divided by
        length, the encoder by windows, a round equally among its rows, everything else equally.
    """

    text: str
    language: str | None  # a code, detected if not given; None if the model has only one language
    segments: list[Segment] = field(repr=False)  # empty unless timestamps were requested
    tokens: list[int] = field(repr=False)  # as `generate` returns them, without padding
    rounds: int  # passes that this recording took part in, prompts' passes included
    tokens_per_round: float  # correction or bonus and end of text included; without prompts' passes
    timings: Mapping[str, float] = field(repr=False)
    seconds: float = 0.0  # the recording's length
    lossless: bool = True  # False for typical acceptance
    confidence: float = 0.0  # in [0, 1]: the share of words that are likely right, see `mmdec.pipelines.confidence`
    evidence: Mapping[str, float] = field(default_factory=lambda: {}, repr=False)  # the evidence for the confidence
    windows: int = 1  # prompts' passes: one per window and temperature

    def __str__(self) -> str:
        """Three lines: the text, the number of rounds, the seconds."""
        return three_lines(self.text, rounds_line(self.rounds, self.tokens_per_round, self.lossless), self.timings)

    def to_dict(self) -> dict[str, Any]:
        """All fields except `evidence`, as plain lists, numbers and text."""
        content = asdict(self) | {"timings": dict(self.timings)}
        del content["evidence"]
        return content

    def format(self, kind: str = "text") -> str:
        """The transcript as the content of a file.

        kind: "text" (default), "json", "srt" or "vtt". Subtitles need timestamps; word timestamps give cues of readable
            length.
        Raises: InputError for another kind, or for subtitles without timestamps.
        """
        if not isinstance(kind, str) or kind not in FORMATS:
            raise InputError(f"`format` must be one of {', '.join(FORMATS)}, but is {show(kind)}. Choose one.")
        if kind == "text":
            return self.text + "\n"
        if kind == "json":
            return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"
        if self.text and not self.segments:
            raise InputError(
                f"`timestamps` must be asked for where `format` is {kind!r}, but were not. Transcribe with "
                'timestamps="segment" or "word".'
            )
        return srt(self.segments) if kind == "srt" else vtt(self.segments)


@dataclass(frozen=True)
class Cue:
    """One subtitle: text that is shown at once."""

    start: float
    end: float
    text: str


CUE_LETTERS, CUE_SECONDS = 84, 6.0  # two lines of 42 letters, as broadcasters have it


def cues(segments: Iterable[Segment]) -> list[Cue]:
    """Turn segments into subtitles: those with words are cut to readable length, empty ones are dropped."""
    cues = []
    for segment in segments:
        if not segment.words:
            if segment.text:
                cues.append(Cue(segment.start, segment.end, segment.text))
            continue
        group: list[Word] = []
        for word in segment.words:
            letters = sum(len(part.text) for part in [*group, word])
            if group and (letters > CUE_LETTERS or word.end - group[0].start > CUE_SECONDS):
                cues.append(_cue(group))
                group = []
            group.append(word)
        cues.append(_cue(group))
    return cues


def srt(segments: Iterable[Segment]) -> str:
    """SubRip: numbered cues, a comma before the milliseconds."""
    blocks = [
        f"{number}\n{clock(cue.start, ',')} --> {clock(cue.end, ',')}\n{cue.text}\n"
        for number, cue in enumerate(cues(segments), 1)
    ]
    return "\n".join(blocks)


def vtt(segments: Iterable[Segment]) -> str:
    """WebVTT, whose text may not hold markup: &, < and > are escaped."""
    blocks = ["WEBVTT\n"]
    for cue in cues(segments):
        text = cue.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        blocks.append(f"{clock(cue.start)} --> {clock(cue.end)}\n{text}\n")
    return "\n".join(blocks)


def clock(seconds: float, mark: str = ".") -> str:
    """Hours, minutes, seconds and milliseconds: 00:01:02.340."""
    whole, thousandths = divmod(round(max(seconds, 0.0) * 1000), 1000)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}{mark}{thousandths:03d}"


def _cue(words: list[Word]) -> Cue:
    return Cue(words[0].start, words[-1].end, spoken(words))


def spoken(words: Iterable[Word]) -> str:
    """The text of consecutive words."""
    return "".join(word.text for word in words).strip()
