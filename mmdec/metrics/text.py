"""How good a translation is: errors, exact sentences, numbers, BLEU; text in, figures out. No audio and no model.

Sentences may have several licensed renderings of different counts; a figure says what it compares with. jiwer and
sacrebleu load on first use and belong to the extra `mmdec[eval]`.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from mmdec.phonetics.lexicon import PAUSE
from mmdec.types import InputError

Lexicon = Mapping[str, Sequence[Sequence[str]]]

CARDINALS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred hundreds thousand thousands"
)
ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth "
    "sixteenth seventeenth eighteenth nineteenth twentieth thirtieth"
)
CLOCK = {"oclock", "noon", "midnight", "half", "quarter", "am", "pm"}
MONEY = {"euro", "euros", "cent", "cents", "pound", "pounds", "dollar", "dollars", "franc", "francs", "percent"}
SPOKEN_NUMBERS = {*CARDINALS.split(), *ORDINALS.split(), *CLOCK, *MONEY}
INSIDE = {"and", "past", "to", "a", "minutes", "after", "before"}  # part of a span only between two of its words


@dataclass(frozen=True)
class Rate:
    """A share of n sentences, with its 95 % Wilson interval."""

    right: int
    n: int

    @property
    def value(self) -> float:
        return self.right / self.n if self.n else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        if not self.n:
            return math.nan, math.nan
        z, p = 1.96, self.value
        centre = p + z * z / (2 * self.n)
        spread = z * math.sqrt(p * (1 - p) / self.n + z * z / (4 * self.n**2))
        return (centre - spread) / (1 + z * z / self.n), (centre + spread) / (1 + z * z / self.n)

    def summary(self) -> dict[str, float | int | None]:
        """A JSON object: value, low, high, n; null where n is 0."""
        low, high = self.interval
        figures = {"value": self.value, "low": low, "high": high}
        return {**(figures if self.n else dict.fromkeys(figures)), "n": self.n}


@dataclass(frozen=True)
class Score:
    """A corpus score, 0 to 100, and the signature that says how it was computed."""

    value: float
    signature: str


def normalise(text: str) -> str:
    """Lower case, no punctuation, single spaces: "It's half past two!" -> "its half past two".

    An apostrophe vanishes, any other mark parts two words.
    """
    text = unicodedata.normalize("NFKC", text).lower()
    text = re.sub("['’]", "", text)
    return " ".join(re.sub(r"[^\w]|_", " ", text).split())


def exact(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> list[bool]:
    """Whether each hypothesis equals one of its references, both normalised."""
    _check_aligned(hypotheses, references)
    return [
        normalise(hypothesis) in {normalise(text) for text in licensed}
        for hypothesis, licensed in zip(hypotheses, references, strict=True)
    ]


def word_error_rate(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Errors per reference word, over the corpus; both sides normalised."""
    _check_aligned(hypotheses, references)
    return _error_rate([normalise(text) for text in hypotheses], [normalise(text) for text in references])


def phone_error_rate(hypotheses: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> float:
    """Errors per reference phone, over the corpus; pauses inside a sentence count as phones."""
    _check_aligned(hypotheses, references)
    return _error_rate([" ".join(phones) for phones in hypotheses], [" ".join(phones) for phones in references])


def phone_distance(phones: Sequence[object], reference: Sequence[object]) -> int:
    """Edits between two phone sequences, as names or as unit numbers."""
    return _advance(list(range(len(phones) + 1)), phones, reference)[-1]


def closest_phone_errors(phones: Sequence[str], renderings: Sequence[str], lexicon: Lexicon) -> int | None:
    """Edits between phones and the nearest pronunciation of the nearest rendering; None if a word is unknown in all.

    Each word takes any of its pronunciations; a pause may stand between two words or not.
    """
    phones = [phone for phone in phones if phone != PAUSE]
    found = [_sausage_distance(phones, normalise_words(text), lexicon) for text in renderings]
    known = [distance for distance in found if distance is not None]
    return min(known) if known else None


def nearest_phone_errors(
    phones: Sequence[str], recorded: Sequence[str], renderings: Sequence[str], lexicon: Lexicon
) -> int:
    """Edits between phones and what was recorded or, where fewer, any licensed rendering; pauses are left out.

    `lexicon` is in lower case.
    """
    said, meant = ([phone for phone in row if phone != PAUSE] for row in (phones, recorded))
    own = phone_distance(said, meant)
    other = closest_phone_errors(said, renderings, lexicon) if own else 0
    return own if other is None else min(own, other)


def normalise_words(text: str) -> list[str]:
    """The words as a lexicon spells them: lower case, apostrophes and hyphens inside kept."""
    return re.findall(r"[^\W_]+(?:['\-.][^\W_]+)*", text.replace("’", "'").lower())


def number_spans(text: str) -> list[str]:
    """Numbers, times and prices as they are spoken: "Ten euros at half past two" -> ["ten euros", "half past two"].

    A span is a longest run of number words, whatever the punctuation; "and", "past", "to" belong to it only between two
    of them.
    """
    spans: list[str] = []
    span: list[str] = []
    pending: list[str] = []
    for word in [*normalise(text).split(), ""]:
        if word in SPOKEN_NUMBERS:
            span += [*pending, word]
            pending = []
        elif span and word in INSIDE and len(pending) < 2:
            pending.append(word)
        elif span:
            spans.append(re.sub(r"\bone (hundred|thousand)\b", r"\1", " ".join(span)))
            span, pending = [], []
    return spans


def span_kind(span: str) -> str:
    """ "times", "prices" or "numbers"."""
    words = set(span.split())
    if words & MONEY:
        return "prices"
    return "times" if words & CLOCK or words & {"past", "to"} else "numbers"


def number_accuracy(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Rate]:
    """Of the sentences with a number, time or price in a reference: how many hypotheses carry the same spans as one
    of the references, as a multiset. Keys: all, numbers, times, prices."""
    _check_aligned(hypotheses, references)
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for hypothesis, licensed in zip(hypotheses, references, strict=True):
        wanted = [Counter(number_spans(text)) for text in licensed]
        kinds = {span_kind(span) for spans in wanted for span in spans}
        found = Counter(number_spans(hypothesis)) in wanted
        for kind in {*kinds, "all"} if kinds else ():
            total[kind] += 1
            right[kind] += found
    return {kind: Rate(right[kind], total[kind]) for kind in ("all", "numbers", "times", "prices")}


def bleu(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Score:
    """Corpus BLEU against all references of each sentence, whose counts may differ. Text goes in as it is."""
    return _corpus_score(extra("sacrebleu").BLEU(), hypotheses, references)


def chrf(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Score:
    """Corpus chrF against all references of each sentence."""
    return _corpus_score(extra("sacrebleu").CHRF(), hypotheses, references)


def asr_bleu(transcripts: Sequence[str], references: Sequence[Sequence[str]]) -> Score:
    """BLEU of a recogniser's transcripts, both sides lower-cased without punctuation. An empty transcript counts."""
    return bleu(
        [normalise(text) for text in transcripts], [[normalise(text) for text in licensed] for licensed in references]
    )


def real_time_factor(seconds_taken: Sequence[float], seconds_audio: Sequence[float]) -> float:
    """Seconds of work per second of source audio, over the corpus."""
    _check_aligned(seconds_taken, seconds_audio)
    if sum(seconds_audio) <= 0:
        raise InputError(f"`seconds_audio` must sum to more than 0, but sums to {sum(seconds_audio)}. Check the audio.")
    return sum(seconds_taken) / sum(seconds_audio)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, interpolated between neighbours."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _sausage_distance(phones: Sequence[str], words: Sequence[str], lexicon: Lexicon) -> int | None:
    """Levenshtein distance from phones to a chain of words with alternative pronunciations."""
    row = list(range(len(phones) + 1))
    for word in words:
        variants = [[phone for phone in sounds if phone != PAUSE] for sounds in _pronunciations(word, lexicon)]
        if not variants:
            return None
        row = [min(column) for column in zip(*(_advance(row, phones, variant) for variant in variants), strict=True)]
    return row[-1]


def _advance(row: list[int], phones: Sequence[object], pronunciation: Sequence[object]) -> list[int]:
    for phone in pronunciation:
        following = [row[0] + 1]
        for place, heard in enumerate(phones):
            following.append(min(row[place] + (heard != phone), row[place + 1] + 1, following[place] + 1))
        row = following
    return row


def _pronunciations(word: str, lexicon: Lexicon) -> Sequence[Sequence[str]]:
    if word in lexicon:
        return lexicon[word]
    variants: list[list[str]] = [[]]
    for part in word.split("-"):
        variants = [[*before, *after] for before in variants for after in lexicon.get(part, ())]
    return variants


def _error_rate(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    if any(not text for text in references) or not references:
        raise InputError("`references` must all hold words, but one or all are empty. Leave those sentences out.")
    return float(extra("jiwer").wer(list(references), list(hypotheses)))


def _corpus_score(metric: Any, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Score:
    _check_aligned(hypotheses, references)
    if any(not licensed for licensed in references) or not references:
        raise InputError("`references` must hold at least one text for each sentence, but lack some. Leave them out.")
    most = max(len(licensed) for licensed in references)
    # sacrebleu wants one list for each rank of reference, with None where a sentence has no more
    columns = [[licensed[rank] if rank < len(licensed) else None for licensed in references] for rank in range(most)]
    score = metric.corpus_score(list(hypotheses), columns)
    return Score(float(score.score), str(metric.get_signature()))


def _check_aligned(hypotheses: Sequence[Any], references: Sequence[Any]) -> None:
    if len(hypotheses) != len(references):
        raise InputError(
            f"`references` must be as many as the hypotheses, {len(hypotheses)}, but are {len(references)}. Align them."
        )


def extra(name: str) -> Any:
    """A package of the extra `mmdec[eval]`; raises InputError where it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise InputError(
            f"Scoring needs the package {name}, which is not installed. pip install mmdec[eval]"
        ) from error
