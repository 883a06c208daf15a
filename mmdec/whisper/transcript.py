"""`Transcript`: the text of one recording, and its formats: text, JSON, SubRip (.srt) and WebVTT (.vtt) subtitles.

Times are seconds from the recording's beginning. `words_from_tokens` makes words with times from tokens with times. A
word begins at a space; in scripts without spaces every complete character is a word. Punctuation belongs to its word.
`reconcile_times` makes the times of segments and words consistent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mmdec.checks.arguments import format_value
from mmdec.core.growing_text import REPLACEMENT_CHARACTER
from mmdec.core.summary import format_result, rounds_line
from mmdec.errors import InputError

TRANSCRIPT_FORMATS = ("text", "json", "srt", "vtt")
SUBTITLE_FORMATS = ("srt", "vtt")
UNSPACED_LANGUAGES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
FIRST_UNSPACED_LETTER = "\u0e00"  # in the order of Unicode, the first letter of the scripts without spaces
OPENING_MARKS = frozenset("\"'“‘«¿¡([{-")
MAX_CHARACTER_TOKENS = 4  # maximum number of tokens of one character, because a character has at most 4 bytes


@dataclass(frozen=True)
class Word:
    """A word with its punctuation and its times. In scripts with spaces it begins with a space."""

    text: str
    start: float
    end: float


@dataclass(frozen=True)
class Segment:
    """The text between two timestamp tokens of the model.

    Without words, `start` and `end` are the times of these two tokens. With words, they are the first word's start and
    the last word's end, which are more accurate.
    """

    start: float
    end: float
    text: str
    tokens: list[int] = field(repr=False)  # ids of the segment's tokens, both timestamp tokens included
    words: list[Word] | None = field(default=None, repr=False)  # None if no word timestamps were requested


def shift_segment(segment: Segment, by: float) -> Segment:
    """Return the segment with `by` seconds added to all times, also to those of its words."""
    words = segment.words and [replace(word, start=word.start + by, end=word.end + by) for word in segment.words]
    return replace(segment, start=segment.start + by, end=segment.end + by, words=words)


@dataclass(frozen=True)
class Transcript:
    """The text of one recording, and what decoding it took.

    Args:
        timings: Stage -> seconds: `features`, `encoder`, `drafter`, `decoder` (everything between the encoder and the
            tokens except the drafter: passes, verification, caches, language detection) and `total`, which includes
            other time. The time of a batch is divided among its recordings: features by duration, the encoder by
            windows, each round equally among its rows, everything else equally.
    """

    text: str
    language: str | None  # language code, given or detected; None if the model has only one language
    segments: list[Segment] = field(repr=False)  # empty if no timestamps were requested
    tokens: list[int] = field(repr=False)  # the token ids that `generate` returns, without padding
    rounds: int  # number of decoder passes for this recording, passes over prompts included
    tokens_per_round: float  # mean over the rounds after the prompts' passes; correction, bonus and end tokens count
    timings: Mapping[str, float] = field(repr=False)
    seconds: float = 0.0  # duration of the recording
    lossless: bool = True  # whether the text equals plain decoding; False for a lossy rule
    # in [0, 1]: expected share of right words, see `mmdec.tasks.confidence`; None: nothing was decoded (silence)
    confidence: float | None = 0.0
    # the values from which the confidence was computed
    evidence: Mapping[str, float] = field(default_factory=lambda: {}, repr=False)
    windows: int = 1  # number of decoded windows; a window counts once for each temperature at which it was decoded
    calibrated: bool = True  # whether the confidence was fitted for this model
    # what of the file could not be read, or was odd about the recording; why there is no text (a silent recording);
    # that the text was cut; or a recommendation of another model
    note: str = ""
    finish_reason: str = "stop"  # "length" if a window's text was cut at the maximum length

    def __str__(self) -> str:
        """Write three lines: the text, or why there is none; the number of rounds; the time."""
        return format_result(
            self.text or self.note, rounds_line(self.rounds, self.tokens_per_round, self.lossless), self.timings
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields except `evidence`, as lists, numbers and text."""
        content = asdict(self) | {"timings": dict(self.timings)}
        del content["evidence"]
        return content

    def format(self, kind: str = "text") -> str:
        """Write the transcript as the content of a file.

        Args:
            kind: "text" (default), "json", "srt" or "vtt". Subtitles need timestamps; with word timestamps they have a
                readable length.

        Raises:
            InputError: For another kind, or for subtitles without timestamps.
        """
        if not isinstance(kind, str) or kind not in TRANSCRIPT_FORMATS:
            raise InputError(f"`format` must be one of {', '.join(TRANSCRIPT_FORMATS)}, but is {format_value(kind)}.")
        if kind == "text":
            return self.text + "\n"
        if kind == "json":
            return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"
        if self.text and not self.segments:
            raise InputError(
                f"`timestamps` must be requested if `format` is {kind!r}, but were not. Transcribe with "
                '`timestamps="segment"` or "word".'
            )
        return srt(self.segments) if kind == "srt" else vtt(self.segments)


@dataclass(frozen=True)
class Cue:
    """One subtitle: its text, and when it is shown."""

    start: float
    end: float
    text: str


# maximum letters and seconds of a subtitle: two lines of 42 letters, as in broadcasting
MAX_CUE_LETTERS, MAX_CUE_SECONDS = 84, 6.0
MIN_CUE_LETTERS = 21  # minimum letters of a subtitle that ends at a sentence or clause
SENTENCE_MARKS, CLAUSE_MARKS = tuple(".?!…。？！"), tuple(",;:–—、，；：")
CLOSING_MARKS = "\"'”’»)]"  # characters that may follow a sentence or clause mark
SUBTITLE_PAUSE = 0.5  # seconds of silence at which a subtitle ends


def cues(segments: Iterable[Segment]) -> list[Cue]:
    """Convert segments to subtitles.

    Segments with words are cut to a readable length, empty segments are dropped. A subtitle ends at a pause and at the
    end of a sentence; a subtitle that would be too long ends after its last clause.
    """
    cues = []
    for segment in segments:
        if not segment.words:
            if segment.text:
                cues.append(Cue(segment.start, segment.end, segment.text))
            continue
        group: list[Word] = []
        for word, following in zip(segment.words, [*segment.words[1:], None], strict=True):
            while group and (_letters([*group, word]) > MAX_CUE_LETTERS or word.end - group[0].start > MAX_CUE_SECONDS):
                cut = _clause(group)
                cues.append(_cue(group[:cut]))
                group = group[cut:]
            group.append(word)
            paused = following is not None and following.start - word.end >= SUBTITLE_PAUSE
            if paused or (_ends(word, SENTENCE_MARKS) and _letters(group) >= MIN_CUE_LETTERS):
                cues.append(_cue(group))
                group = []
        if group:
            cues.append(_cue(group))
    return cues


def _clause(group: Sequence[Word]) -> int:
    """Find where to cut a subtitle that is too long.

    Returns:
        The number of words up to the end of its last clause; without a clause, all words.
    """
    able = (
        count
        for count in range(len(group), 0, -1)
        if _ends(group[count - 1], SENTENCE_MARKS + CLAUSE_MARKS) and _letters(group[:count]) >= MIN_CUE_LETTERS
    )
    return next(able, len(group))


def _letters(words: Iterable[Word]) -> int:
    return sum(len(word.text) for word in words)


def _ends(word: Word, marks: tuple[str, ...]) -> bool:
    return word.text.rstrip(CLOSING_MARKS).endswith(marks)


def srt(segments: Iterable[Segment], first: int = 1) -> str:
    """Write segments as subtitles in SubRip format.

    Args:
        first: Number of the first subtitle.
    """
    blocks = [
        f"{number}\n{format_clock(cue.start, ',')} --> {format_clock(cue.end, ',')}\n{cue.text}\n"
        for number, cue in enumerate(cues(segments), first)
    ]
    return "\n".join(blocks)


def vtt(segments: Iterable[Segment]) -> str:
    """Write segments as subtitles in WebVTT format. &, < and > in a text are escaped, because they would be markup."""
    blocks = ["WEBVTT\n"]
    for cue in cues(segments):
        text = cue.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        blocks.append(f"{format_clock(cue.start)} --> {format_clock(cue.end)}\n{text}\n")
    return "\n".join(blocks)


def format_clock(seconds: float, mark: str = ".") -> str:
    """Format seconds as hours, minutes, seconds and milliseconds: 00:01:02.340.

    Args:
        mark: The character before the milliseconds.
    """
    minutes, milliseconds = divmod(round(max(seconds, 0.0) * 1000), 60_000)
    second, thousandths = divmod(milliseconds, 1000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{second:02d}{mark}{thousandths:03d}"


def _cue(words: list[Word]) -> Cue:
    return Cue(words[0].start, words[-1].end, join_words(words))


def join_words(words: Iterable[Word]) -> str:
    """Join consecutive words to a text."""
    return "".join(word.text for word in words).strip()


@dataclass
class _Piece:
    """Consecutive tokens that together form complete characters: their text and times."""

    text: str
    start: float
    end: float


def words_from_tokens(
    tokens: Sequence[int],
    starts: Sequence[float],
    ends: Sequence[float],
    decode: Callable[[list[int]], str],
    spaced: bool = True,
) -> list[Word]:
    """Make words with times from tokens with times. No word ends before it begins.

    Args:
        tokens: Ids of the text, without timestamp tokens.
        starts, ends: Times of each token in seconds.
        decode: Function from token ids to text.
        spaced: Whether the script writes spaces between words.
    """
    joined: list[_Piece] = []
    opening = False
    for piece in _pieces(tokens, starts, ends, decode):
        bare = piece.text.strip()
        mark = bool(bare) and not any(letter.isalnum() for letter in bare)
        opens = mark and piece.text.startswith(" ") and bare in OPENING_MARKS
        new = not joined or (not mark if not spaced else piece.text.startswith(" ") and (opens or not mark))
        if new and not opening:
            joined.append(piece)
        else:
            # an opening mark has no sound, so its start is not used
            start = piece.start if opening else joined[-1].start
            joined[-1] = _Piece(joined[-1].text + piece.text, start, piece.end)
        opening = opens
    return [Word(piece.text, piece.start, max(piece.start, piece.end)) for piece in joined if piece.text.strip()]


def reconcile_times(segments: Sequence[Segment]) -> list[Segment]:
    """Let segments begin and end with their words, and remove overlaps.

    Segment times are timestamp tokens that the model writes. Word times come from an alignment to the audio, which is
    more accurate. If two words overlap, the first one ends where the second one starts. A segment without words keeps
    its times, unless it overlaps its neighbours.
    """
    begins, floors, at = list[list[float]](), list[float](), 0.0
    for segment in segments:
        floors.append(at)
        begins.append([at := max(at, word.start) for word in segment.words or ()])
    agreed, after = list[Segment](), float("inf")
    for segment, starts, floor in zip(reversed(segments), reversed(begins), reversed(floors), strict=True):
        if segment.words:
            limits = [*starts[1:], after]
            spoken = [
                Word(word.text, start, max(start, min(word.end, limit)))
                for word, start, limit in zip(segment.words, starts, limits, strict=True)
            ]
            agreed.append(replace(segment, start=starts[0], end=spoken[-1].end, words=spoken))
        else:
            start = min(max(segment.start, floor), after)
            agreed.append(replace(segment, start=start, end=min(max(segment.end, start), after)))
        after = agreed[-1].start
    return agreed[::-1]


def word_beginnings(tokens: Sequence[int], *, decode: Callable[[list[int]], str]) -> list[bool | None]:
    """Return for each token whether it begins a word; None for a token without sound, such as punctuation.

    In scripts without spaces (Thai and all scripts after it in Unicode) each token may begin a word.

    Args:
        decode: Function from token ids to text, without special tokens.
    """
    begins = list[bool | None]()
    for token in tokens:
        text = decode([token])
        bare = text.strip()
        if REPLACEMENT_CHARACTER not in bare and not any(letter.isalnum() for letter in bare):
            begins.append(None)
        else:
            begins.append(
                text.startswith(" ") or (REPLACEMENT_CHARACTER not in bare and bare[0] >= FIRST_UNSPACED_LETTER)
            )
    return begins


def _pieces(
    tokens: Sequence[int], starts: Sequence[float], ends: Sequence[float], decode: Callable[[list[int]], str]
) -> list[_Piece]:
    pieces, group = list[_Piece](), list[int]()
    begin = 0.0
    for index, (token, start, end) in enumerate(zip(tokens, starts, ends, strict=True)):
        begin = begin if group else start
        group.append(token)
        text = decode(group)
        if REPLACEMENT_CHARACTER not in text or len(group) == MAX_CHARACTER_TOKENS or index == len(tokens) - 1:
            pieces.append(_Piece(text, begin, end))
            group = []
    return pieces
