"""Scores of texts: error rates with intervals, exact sentences, numbers, BLEU, and answers about pictures.

A sentence may have several references. The packages jiwer, rapidfuzz and sacrebleu belong to the extra `mmdec[eval]`
and are imported at first use. The 95 % interval of a word error rate is the percentile bootstrap over utterances
(Bisani and Ney, ICASSP 2004), because words of one utterance are not independent.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from mmdec.errors import InputError
from mmdec.phonetics.lexicon import PAUSE_PHONE
from mmdec.phonetics.spelling import read_figures

Lexicon = Mapping[str, Sequence[Sequence[str]]]

CARDINALS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred hundreds thousand thousands"
)
ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth "
    "sixteenth seventeenth eighteenth nineteenth twentieth thirtieth"
)
CLOCK_WORDS = {"oclock", "noon", "midnight", "half", "quarter", "am", "pm"}
MONEY_WORDS = {"euro", "euros", "cent", "cents", "pound", "pounds", "dollar", "dollars", "franc", "francs", "percent"}
SPOKEN_NUMBERS = {*CARDINALS.split(), *ORDINALS.split(), *CLOCK_WORDS, *MONEY_WORDS}
BOOTSTRAP_SAMPLES = 1000  # number of samples of the paired bootstrap
# words that belong to a number only if they stand between two number words
JOINING_WORDS = {"and", "past", "to", "a", "minutes", "after", "before"}


@dataclass(frozen=True)
class Rate:
    """The number of right sentences among n, as a share with its 95 % Wilson interval."""

    right: int  # number of right sentences
    n: int  # number of sentences

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
        low, high = ((centre + side) / (1 + z * z / self.n) for side in (-spread, spread))
        return max(0.0, low), min(1.0, high)  # rounding errors may give a bound below 0 or above 1

    def summary(self) -> dict[str, float | int | None]:
        """Return the share as a JSON object: value, low and high (from 0 to 1; None if n is 0), and n."""
        low, high = self.interval
        figures = {"value": self.value, "low": low, "high": high}
        return {**(figures if self.n else dict.fromkeys(figures)), "n": self.n}


@dataclass(frozen=True)
class CorpusScore:
    """A score of a whole corpus, from 0 to 100."""

    value: float
    signature: str  # sacrebleu's string of version and settings


def normalise(text: str) -> str:
    """Return a text in lower case, without punctuation, with single spaces.

    "It's half past two!" becomes "its half past two". An apostrophe is deleted; any other punctuation becomes a space.
    """
    text = unicodedata.normalize("NFKC", text).lower()
    text = re.sub("['’]", "", text)
    return " ".join(re.sub(r"[^\w]|_", " ", text).split())


def exact_matches(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> list[bool]:
    """Return for each hypothesis whether it equals one of its references, apart from case and punctuation."""
    _check_aligned(hypotheses, references)
    return [
        normalise(hypothesis) in {normalise(text) for text in accepted}
        for hypothesis, accepted in zip(hypotheses, references, strict=True)
    ]


def word_error_rate(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Return the word errors per reference word over the corpus, apart from case and punctuation."""
    _check_aligned(hypotheses, references)
    return _error_rate([normalise(text) for text in hypotheses], [normalise(text) for text in references])


def phone_error_rate(hypotheses: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> float:
    """Return the phone errors per reference phone over the corpus. Pauses inside a sentence count as phones."""
    _check_aligned(hypotheses, references)
    return _error_rate([" ".join(phones) for phones in hypotheses], [" ".join(phones) for phones in references])


def phone_distance(phones: Sequence[object], reference: Sequence[object]) -> int:
    """Return the edit distance (Levenshtein) between two sequences of phones, given as names or ids."""
    return int(import_extra("rapidfuzz.distance").Levenshtein.distance(phones, reference))


def closest_phone_errors(phones: Sequence[str], references: Sequence[str], lexicon: Lexicon) -> int | None:
    """Return the edit distance from phones to the nearest pronunciation of the nearest reference text.

    Pauses are ignored.

    Args:
        lexicon: Lower-case word -> pronunciations; each word may be spoken with any of its pronunciations.

    Returns:
        The distance; None if each reference has a word that the lexicon lacks.
    """
    phones = [phone for phone in phones if phone != PAUSE_PHONE]
    distances = [_confusion_network_distance(phones, normalise_words(text), lexicon) for text in references]
    return min((distance for distance in distances if distance is not None), default=None)


def nearest_phone_errors(
    phones: Sequence[str], recorded: Sequence[str], references: Sequence[str], lexicon: Lexicon
) -> int:
    """Return the edit distance from phones to the nearest of a recording's and the references' phones.

    The recording's are the phones `recorded` of the target recording; the references' are the pronunciations of the
    reference texts. Pauses are ignored.

    Args:
        lexicon: Lower-case word -> pronunciations.
    """
    phones_without_pauses, expected = ([phone for phone in row if phone != PAUSE_PHONE] for row in (phones, recorded))
    errors = phone_distance(phones_without_pauses, expected)
    other = closest_phone_errors(phones_without_pauses, references, lexicon) if errors else 0
    return errors if other is None else min(errors, other)


def count_phones(phones: Sequence[str]) -> int:
    """Return the number of phones, pauses not counted."""
    return sum(phone != PAUSE_PHONE for phone in phones)


def normalise_words(text: str) -> list[str]:
    """Split a text into lower-case words as the lexicon has them, with apostrophes and hyphens inside a word."""
    return re.findall(r"[^\W_]+(?:['\-.][^\W_]+)*", text.replace("’", "'").lower())


def number_spans(text: str) -> list[str]:
    """Find numbers, times and prices in words: "Ten euros at half past two" -> ["ten euros", "half past two"].

    A span is a longest sequence of number words, without punctuation. Up to two words of `JOINING_WORDS`, such as "and"
    and "past", may stand between two number words. "one hundred" and "one thousand" become "hundred" and "thousand".
    """
    spans: list[str] = []
    span: list[str] = []
    pending: list[str] = []
    for word in [*normalise(text).split(), ""]:
        if word in SPOKEN_NUMBERS:
            span += [*pending, word]
            pending = []
        elif span and word in JOINING_WORDS and len(pending) < 2:
            pending.append(word)
        elif span:
            spans.append(re.sub(r"\bone (hundred|thousand)\b", r"\1", " ".join(span)))
            span, pending = [], []
    return spans


def span_kind(span: str) -> str:
    """Return the kind of a sequence of number words: "times", "prices" or "numbers"."""
    words = set(span.split())
    if words & MONEY_WORDS:
        return "prices"
    return "times" if words & CLOCK_WORDS or words & {"past", "to"} else "numbers"


def number_accuracy(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Rate]:
    """Return the share of hypotheses with the numbers, times and prices of one of their references, in any order.

    Sentences whose references have no numbers, times or prices are not counted. Keys: all, numbers, times, prices.
    """
    _check_aligned(hypotheses, references)
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for hypothesis, accepted in zip(hypotheses, references, strict=True):
        expected = [Counter(number_spans(text)) for text in accepted]
        kinds = {span_kind(span) for spans in expected for span in spans}
        equal = Counter(number_spans(hypothesis)) in expected
        for kind in {*kinds, "all"} if kinds else ():
            total[kind] += 1
            right[kind] += equal
    return {kind: Rate(right[kind], total[kind]) for kind in ("all", "numbers", "times", "prices")}


def bleu(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> CorpusScore:
    """Compute corpus BLEU. Each sentence may have any number of references. Texts are not normalised."""
    return _corpus_score(import_extra("sacrebleu").BLEU(), hypotheses, references)


def chrf(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> CorpusScore:
    """Compute corpus chrF. Each sentence may have any number of references. Texts are not normalised."""
    return _corpus_score(import_extra("sacrebleu").CHRF(), hypotheses, references)


def asr_bleu(transcripts: Sequence[str], references: Sequence[Sequence[str]]) -> CorpusScore:
    """Compute ASR-BLEU: BLEU of a speech recogniser's transcripts.

    Case and punctuation are ignored, and figures are spelled out. Empty transcripts count, too.
    """
    return bleu(*normalise_all_for_asr(transcripts, references))


def normalise_all_for_asr(
    transcripts: Sequence[str], references: Sequence[Sequence[str]]
) -> tuple[list[str], list[tuple[str, ...]]]:
    """Normalise transcripts, and the references of each, for ASR-BLEU: no case, no punctuation, figures spelled out.

    Returns:
        The normalised transcripts and references.
    """
    return [normalise_for_asr(text) for text in transcripts], [
        tuple(map(normalise_for_asr, accepted)) for accepted in references
    ]


def normalise_for_asr(text: str) -> str:
    """Normalise a text for ASR-BLEU: lower case, no punctuation, and figures spelled out.

    "At 7:30, Tom!" becomes "at seven thirty tom". CVSS's references, with which DASpeech is scored, have the same form.
    Source: Jia et al., "CVSS corpus and massively multilingual speech-to-speech translation", 2022.
    """
    return normalise(read_figures(text))


def paired_scores(
    texts: Mapping[str, Sequence[str]], references: Sequence[Sequence[str]]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Compute BLEU and chrF for several systems, with intervals and significance tests against the first system.

    Args:
        texts: Each system's outputs, by its name, in the order of the references. Texts are not normalised.
        references: The reference translations of each sentence.

    Returns:
        For each system "bleu" and "chrf", each a dict: value, low and high (95 % interval of a bootstrap over
        sentences), p (p value of a paired bootstrap; None for the first system), signature (sacrebleu's settings).
        Source: Koehn, "Statistical significance tests for machine translation evaluation", 2004; computed by sacrebleu.
    """
    package = import_extra("sacrebleu")
    columns: list[list[str | None]] = []
    for hypotheses in texts.values():
        columns = _columns(hypotheses, references)
    named = {"bleu": package.BLEU(), "chrf": package.CHRF()}
    test = import_extra("sacrebleu.significance").PairedTest(
        [(name, list(hypotheses)) for name, hypotheses in texts.items()], named, columns, "bs", BOOTSTRAP_SAMPLES
    )
    signatures, scores = test()
    keys = {next(key for key in named if name.lower().startswith(key)): name for name in signatures}
    return {
        system: {
            key: {
                "value": float(result.score),
                "low": max(float(result.mean - result.ci), 0.0),
                "high": min(float(result.mean + result.ci), 100.0),
                "p": _p_value(result, scores[name][0]),
                "signature": str(signatures[name]),
            }
            for key, name in keys.items()
            for result in (scores[name][place],)
        }
        for place, system in enumerate(texts)
    }


def _p_value(result: Any, first: Any) -> float | None:
    """Compute the p value of a system's result against the first system's; None for the first system.

    For equal scores the p value is 1; sacrebleu reports 0.001.
    """
    if result.p_value is None:
        return None
    return 1.0 if result.score == first.score else float(result.p_value)


def sentence_chrf(text: str, references: Sequence[str]) -> float:
    """Compute chrF of one sentence against the nearest of its references, from 0 to 100."""
    return float(import_extra("sacrebleu").CHRF().sentence_score(text, list(references)).score)


def real_time_factor(seconds_taken: Sequence[float], seconds_audio: Sequence[float]) -> float:
    """Return the seconds of computation per second of audio, summed over the corpus."""
    _check_aligned(seconds_taken, seconds_audio)
    if sum(seconds_audio) <= 0:
        raise InputError(f"`seconds_audio` must sum to more than 0, but sums to {sum(seconds_audio)}. Check the audio.")
    return sum(seconds_taken) / sum(seconds_audio)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share (0 to 1) of the values lies; NaN if there are no values.

    Between two values it is interpolated linearly.
    """
    return float(np.quantile(values, share)) if len(values) else math.nan


def _confusion_network_distance(phones: Sequence[str], words: Sequence[str], lexicon: Lexicon) -> int | None:
    """Return the edit distance from phones to the nearest pronunciation of a sentence's words.

    None if a word has no pronunciation.
    """
    row = list(range(len(phones) + 1))
    for word in words:
        variants = [[phone for phone in sounds if phone != PAUSE_PHONE] for sounds in _pronunciations(word, lexicon)]
        if not variants:
            return None
        row = [min(column) for column in zip(*(_advance(row, phones, variant) for variant in variants), strict=True)]
    return row[-1]


def _advance(row: list[int], phones: Sequence[object], pronunciation: Sequence[object]) -> list[int]:
    """Extend a Levenshtein table by one word's pronunciation.

    Args:
        row: Entry i is the distance from the first i phones to the words so far.

    Returns:
        The row with this word added.
    """
    for phone in pronunciation:
        following = [row[0] + 1]
        for index, other in enumerate(phones):
            following.append(min(row[index] + (other != phone), row[index + 1] + 1, following[index] + 1))
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
    return float(import_extra("jiwer").wer(list(references), list(hypotheses)))


def _corpus_score(metric: Any, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> CorpusScore:
    score = metric.corpus_score(list(hypotheses), _columns(hypotheses, references))
    return CorpusScore(float(score.score), str(metric.get_signature()))


def _columns(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> list[list[str | None]]:
    """Arrange references as sacrebleu wants them.

    List k holds the k-th reference of each sentence, or None if the sentence has fewer references.
    """
    _check_aligned(hypotheses, references)
    if any(not accepted for accepted in references) or not references:
        raise InputError("`references` must hold at least one text for each sentence, but lack some. Leave them out.")
    max_references = max(len(accepted) for accepted in references)
    return [
        [accepted[rank] if rank < len(accepted) else None for accepted in references] for rank in range(max_references)
    ]


def _check_aligned(hypotheses: Sequence[Any], references: Sequence[Any]) -> None:
    if len(hypotheses) != len(references):
        raise InputError(
            f"`references` must be as many as the hypotheses, {len(hypotheses)}, but are {len(references)}. Align them."
        )


def import_extra(name: str) -> Any:
    """Import and return a package of the extra `mmdec[eval]`.

    Raises:
        InputError: If it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise InputError(
            f"Scoring needs the package {package}, which is not installed. Run `pip install 'mmdec[eval]'`."
        ) from error


_CLAUSE = re.compile(r"[.;,:](?:\s+|$)|\n")
_NUMBER = re.compile(r"-?\d+")
_DENIAL = re.compile(r"\b(?:not|no|never)\b|n't\b")
_STATED = r"(?:(?:[\w'-]+ )*(?:is|are|has|have|costs|says|shows|reads|leaves|at) )?(?:(?:(?:in|at|on) )?(?:the|an?) )?"


def plain_answer(text: str) -> str:
    """Return an answer in lower case, with single spaces and without a full stop at its end."""
    return " ".join(text.casefold().split()).rstrip(".").rstrip()


def right_answer(answer: str, reference: str, expected: str, task: str) -> bool:
    """Return whether a short answer equals the reference, apart from case and a full stop at the end.

    For the task "count", only the last number in the answer must be right: it must equal `expected`.
    """
    if task == "count":
        numbers = _NUMBER.findall(answer)
        return bool(numbers) and numbers[-1] == expected
    return plain_answer(answer) == plain_answer(reference)


def right_in_other_words(answer: str, expected: str) -> bool:
    """Return whether a short answer equals `expected`, or is a sentence that states it and negates nothing.

    "The house is red." states "red". This is less strict than `right_answer`.
    """
    answer_text, expected_text = plain_answer(answer), plain_answer(expected)
    if not expected_text or (_DENIAL.search(answer_text) and not _DENIAL.search(expected_text)):
        return False
    return re.fullmatch(_STATED + re.escape(expected_text) + "(?: degrees)?", answer_text) is not None


def count_claims(answer: str, claims: Iterable[Sequence[str]]) -> int:
    """Return how many of the claims an answer makes.

    A claim is a sequence of words. The answer makes it if one clause has these words in this order; other words may be
    between them.
    """
    clauses = [clause for clause in _CLAUSE.split(answer.casefold()) if clause]
    return sum(any(_has_words(clause, claim) for clause in clauses) for claim in claims)


def _has_words(clause: str, claim: Sequence[str]) -> bool:
    pattern = ".*?".join(rf"(?<![\w-]){re.escape(word.casefold())}(?![\w])" for word in claim)
    return re.search(pattern, clause) is not None


RATIO_RESAMPLES = 2000
RATIO_SEED = 0


@dataclass(frozen=True)
class Edits:
    """The number of edits of each kind that turn a reference into a hypothesis."""

    substitutions: int
    deletions: int  # missing words or characters of the reference
    insertions: int
    length: int  # number of words or characters in the reference

    @property
    def errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions


def word_edits(reference: str, hypothesis: str) -> Edits:
    """Count the fewest word edits from a reference to a hypothesis.

    Words are separated by white space; texts are not normalised.
    """
    return _edits("process_words", reference, hypothesis, str.split)


def character_edits(reference: str, hypothesis: str) -> Edits:
    """Count the fewest character edits from a reference to a hypothesis, spaces between words included."""
    return _edits("process_characters", reference, hypothesis, list)


def rate(edits: Sequence[Edits]) -> dict[str, float | int | None]:
    """Compute the error rate over all utterances.

    Returns:
        A JSON object: value (the error rate, from 0), low and high (its 95 % interval), each None if all references are
        empty; and the sums substitutions, deletions, insertions and length.
    """
    bounds = ratio([edit.errors for edit in edits], [edit.length for edit in edits])
    named = zip(("value", "low", "high"), bounds, strict=True)
    counts = ("substitutions", "deletions", "insertions", "length")
    return {
        **{name: None if math.isnan(value) else value for name, value in named},
        **{name: sum(getattr(edit, name) for edit in edits) for name in counts},
    }


def ratio(tops: Sequence[float], bottoms: Sequence[float]) -> tuple[float, float, float]:
    """Return sum(tops) / sum(bottoms), and the low and the high end of its 95 % interval.

    The interval is by a bootstrap over pairs (top, bottom). All are NaN if `bottoms` sum to 0.
    """
    top, bottom = np.asarray(tops, np.float64), np.asarray(bottoms, np.float64)
    if bottom.sum() <= 0:
        return math.nan, math.nan, math.nan
    value = float(top.sum() / bottom.sum())
    draws = np.random.default_rng(RATIO_SEED).multinomial(len(top), np.full(len(top), 1 / len(top)), RATIO_RESAMPLES)
    below = draws @ bottom
    low, high = np.quantile((draws @ top)[below > 0] / below[below > 0], (0.025, 0.975))
    return value, float(low), float(high)


def _edits(process: str, reference: str, hypothesis: str, parts: Any) -> Edits:
    reference, hypothesis = " ".join(reference.split()), " ".join(hypothesis.split())
    if not reference:  # jiwer refuses an empty reference
        return Edits(0, 0, len(parts(hypothesis)), 0)
    alignment = getattr(import_extra("jiwer"), process)(reference, hypothesis)
    return Edits(alignment.substitutions, alignment.deletions, alignment.insertions, len(parts(reference)))
