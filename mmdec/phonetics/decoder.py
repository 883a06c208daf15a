"""Converts phones to English text with a pronunciation lexicon, an n-gram model of the training text, and a beam
search.

Punctuation marks are tokens without phones; a comma may stand where the phones have a pause. In the language model, the
mark that ends a sentence comes *before* the sentence. So a trigram sees the mark together with the words that decide
which mark it is: "Is the ..." is a question. Each comma repeats that mark (",?" is the comma of a question), so that
"Hello, is the ..." is a question, too. Tokens keep the case of the training text, except the capital at a sentence's
start: this capital is removed, and restored in the output.
The phones are first split into words that match the lexicon exactly. Only if that is impossible, or the result is
improbable, the search may replace, insert and delete phones at a cost (`lexicon.py`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain as joined
from itertools import pairwise
from pathlib import Path
from typing import final

from mmdec.phonetics.lexicon import PAUSE, ApproximateLexicon, pronounce, read_lexicon, spoken
from mmdec.phonetics.ngram import END, START, NGram
from mmdec.types import InputError

TRIGRAMS = 40_000  # maximum number of trigrams of the language model, so that its file stays small
BEAM = 16  # maximum number of hypotheses at each phone position
MARGIN = 12.0  # in nats: at each phone position, hypotheses with a score this far below the best score are dropped
MARK_ELSEWHERE = 4.0  # cost in nats of a punctuation mark at a place where the phones have no pause
OTHER_KIND = 5.0  # cost in nats of a comma whose kind (statement or question) differs from that of its sentence
BARE_PAUSE = 6.0  # cost in nats of a pause in the phones where the text has no punctuation mark
NEXT_SENTENCE = 3.0  # cost in nats of each sentence after the first in one recording
# nats added to the score of an exact match of all words: phones that were misrecognised seldom form words by chance
TRUST = 8.0
# in nats: if the score of an exact match is below minus this number per token, approximate matches are tried, too
IMPROBABLE = 3.0
# a word's wrong phones may cost at most EDIT_BASE + EDIT_SLOPE * (number of its phones), in nats; else it does not
# match
EDIT_BASE, EDIT_SLOPE = 8.0, 3.0
FAR_BELOW = -1e9  # score of a position that no state has reached
# in nats: a word whose wrong phones cost more must form a bigram of the training text with the token before it
UNSEEN = 7.0
CANDIDATES = 80  # maximum number of approximate matches that are tried at each phone position without a known bigram
MAX_PHONES = 20_000

Match = tuple[int, str, float]  # end position, word, cost in nats
Chain = tuple[str, "Chain"] | None  # the hypothesis's tokens as a linked list, the newest first
CLOSING, INNER = ".?!", ",;:"
TOKEN = re.compile(rf"[^\W_]+(?:['’.\-][^\W_]+)*|[{re.escape(CLOSING + INNER)}]")


@final
class WordDecoder:
    """Converts phones to text. Holds the lexicon's prefix tree and the language model; calls do not change them."""

    def __init__(self, pronunciations: Mapping[str, Sequence[Sequence[str]]], model: NGram) -> None:
        self._pronunciations = {word: [tuple(phones) for phones in pronunciations[word]] for word in pronunciations}
        self._model = model
        self._closing = sorted(set(CLOSING) & model.vocabulary)
        self._inner = sorted(word for word in model.vocabulary if is_mark(word) and word[0] in INNER)
        self._tree: dict = {}
        for word, variants in self._pronunciations.items():
            for phones in variants:
                node = self._tree
                for phone in phones:
                    node = node.setdefault(phone, {})
                node.setdefault("", []).append(word)
        self._approximate: ApproximateLexicon | None = None  # built when phones without an exact match first occur

    @classmethod
    def build(cls, lexicon: Mapping[str, Sequence[Sequence[str]]], sentences: Iterable[str]) -> WordDecoder:
        """Make the decoder, and estimate its language model.

        lexicon: word, in upper or lower case -> its pronunciations, each a sequence of phones. A hyphenated word that
            is missing may use the pronunciations of its parts.
        sentences: training text of the language model.
        Raises: InputError, which lists the words of `sentences` that have no pronunciation.
        """
        texts = restore_case([tokens for tokens in map(tokenize, sentences) if tokens])
        folded: dict[str, list[tuple[str, ...]]] = {}
        for word, variants in lexicon.items():
            distinct = folded.setdefault(word.casefold(), [])
            for phones in variants:
                # pauses are left out, because they belong to punctuation marks, not to words
                spoken = tuple(phone for phone in phones if phone != PAUSE)
                if spoken and spoken not in distinct:
                    distinct.append(spoken)
        used = {token for tokens in texts for token in tokens if not is_mark(token)}
        pronunciations = {word: pronounce(word, folded) for word in sorted(used)}
        missing = [word for word, variants in pronunciations.items() if not variants]
        if missing:
            raise InputError(
                f"`lexicon` must hold every word of `sentences`, but lacks {len(missing)}: {', '.join(missing[:8])}. "
                "Add their phones."
            )
        written = {word.casefold() for word in used}
        extra = {
            case_of_stem(word, used): folded[word.casefold()]
            for word in lexicon
            if word.casefold() not in written
            and TOKEN.fullmatch(word)
            and not is_mark(word)
            and folded[word.casefold()]
        }
        model = NGram.build(texts, vocabulary=extra, max_entries=TRIGRAMS)
        return cls(pronunciations | extra, model)

    def save(self, directory: str | Path) -> None:
        """Write lexicon.tsv (word, tab, phones) and lm.arpa to a directory."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        lines = [
            f"{word}\t{' '.join(phones)}\n"
            for word, variants in sorted(self._pronunciations.items())
            for phones in variants
        ]
        (directory / "lexicon.tsv").write_text("".join(lines), encoding="utf-8")
        self._model.save(directory / "lm.arpa")

    @classmethod
    def load(cls, directory: str | Path) -> WordDecoder:
        """Read what `save` wrote. Raises InputError if a file is missing, too large or malformed."""
        pronunciations = read_lexicon(Path(directory) / "lexicon.tsv")
        model = NGram.load(Path(directory) / "lm.arpa")
        mute = sorted(word for word in model.vocabulary if word not in pronunciations and not is_mark(word))
        if mute:
            raise InputError(
                f"`directory` must hold a lexicon for all words of its model, but {directory} lacks "
                f"{', '.join(mute[:8])}. Save the decoder anew."
            )
        return cls(pronunciations, model)

    def decode(self, phones: Sequence[str]) -> str:
        """Return the most probable text of the phones, with case and punctuation; "" if there are no phones."""
        if isinstance(phones, str) or not all(isinstance(phone, str) and phone for phone in phones):
            raise InputError(f"`phones` must be a sequence of phone names, but is {phones!r:.80}. Split the string.")
        if len(phones) > MAX_PHONES:
            raise InputError(f"`phones` must be at most {MAX_PHONES}, but are {len(phones)}. Cut the speech at pauses.")
        phones = list(phones[spoken(phones)])
        if not phones:
            return ""
        score, tokens = self._search(phones, self._exact(phones), UNSEEN)
        if score >= -IMPROBABLE * (len(tokens) + 1):
            return render(tokens)
        score += TRUST
        if self._approximate is None:
            self._approximate = ApproximateLexicon(
                (word, sounds) for word, variants in self._pronunciations.items() for sounds in variants
            )
        base, slope, unseen = EDIT_BASE, EDIT_SLOPE, UNSEEN
        while True:
            matches = self._approximate.match(phones, base, slope)
            score, tokens = max((score, tokens), self._search(phones, matches.__getitem__, unseen))
            if tokens:
                return render(tokens)
            # widen the limits until each span of phones matches some word
            base, slope, unseen = 2 * base, 2 * slope, 4 * unseen

    def _exact(self, phones: Sequence[str]) -> Callable[[int], Iterable[Match]]:
        def at(start: int) -> Iterator[Match]:
            node = self._tree
            for end in range(start, len(phones)):
                if phones[end] not in node:
                    return
                node = node[phones[end]]
                for word in node.get("", ()):
                    yield end + 1, word, 0.0

        return at

    def _search(
        self, phones: Sequence[str], matches: Callable[[int], Iterable[Match]], unseen: float
    ) -> tuple[float, list[str]]:
        """Find the most probable sequence of words and punctuation marks for the phones by beam search.

        matches: a function from a start position to the words that match there, each as (end position, word, cost in
            nats). unseen: in nats: a word that costs more must form a bigram of the training text with the token before
            it.
        Returns: (score in nats, tokens); (-inf, []) if no sequence matches.
        """
        model, end = self._model, len(phones)
        beams: list[dict[str, tuple[float, Chain]]] = [{} for _ in range(end + 1)]
        opening = model.advance("", START)
        beams[0][opening] = (0.0, None)
        for position in range(end):
            states = self._pruned(beams[position])
            if not states:
                continue
            pause = phones[position] == PAUSE
            marks: list[tuple[str, float, Chain]] = []
            for context, score, chain in states:
                if pause:
                    _keep(beams[position + 1], context, score - BARE_PAUSE, chain)
                if chain is None:
                    marks += self._with_marks(opening, score, chain, self._closing)
                if chain is None or is_mark(chain[0]):
                    continue
                toll = 0.0 if pause else MARK_ELSEWHERE
                endings = list(self._with_marks(context, score - toll, chain, self._closing + self._inner))
                if pause:
                    after = score + model.score(context, END) - NEXT_SENTENCE
                    endings += self._with_marks(opening, after, chain, self._closing)
                    for target, value, longer in endings:
                        _keep(beams[position + 1], target, value, longer)
                else:
                    marks += endings
            if marks:
                best = max(states[0][1], max(mark[1] for mark in marks))
                states = [state for state in states + marks if state[1] > best - MARGIN]
            self._extend(beams, position, states, matches(position), unseen)
        final = [
            (score + model.score(context, END), chain)
            for context, (score, chain) in beams[end].items()
            if chain is not None
        ]
        if not final:
            return float("-inf"), []
        score, chain = max(final, key=lambda state: state[0])
        tokens = []
        while chain is not None:
            tokens.append(chain[0])
            chain = chain[1]
        return score, tokens[::-1]

    def _with_marks(
        self, context: str, score: float, chain: Chain, marks: Iterable[str]
    ) -> Iterator[tuple[str, float, Chain]]:
        kind = _kind(chain)
        for mark in marks:
            toll = OTHER_KIND if mark[0] in INNER and kind and mark[1:] != kind else 0.0
            yield self._model.advance(context, mark), score + self._model.score(context, mark) - toll, (mark, chain)

    def _extend(
        self,
        beams: list[dict[str, tuple[float, Chain]]],
        position: int,
        states: list[tuple[str, float, Chain]],
        matches: Iterable[Match],
        unseen: float,
    ) -> None:
        """Extend the hypotheses at `position` by each word that matches there.

        beams: for each phone position, the best hypothesis of each language model context: context -> (score in nats,
            tokens). The extended hypotheses are added to `beams`.
        states: the hypotheses at `position`, each as (context, score, tokens). matches: the words, each as (end
            position, word, cost in nats). unseen: words of a higher cost must form a known bigram.
        A word may match with all of its phones deleted. It then ends at `position`, and is tried once for each
        hypothesis.
        """
        model = self._model
        ordered = sorted(matches, key=lambda match: match[2])
        nearest = [match for match in ordered if match[2] <= unseen][:CANDIDATES]
        distant: dict[str, list[Match]] = {}
        for match in ordered[len(nearest) :]:
            distant.setdefault(match[1], []).append(match)
        floors: dict[int, float] = {}
        for stop in {match[0] for match in ordered}:
            floors[stop] = max((entry[0] for entry in beams[stop].values()), default=FAR_BELOW) - MARGIN
        for turn in range(2):
            still: list[tuple[str, float, Chain]] = []
            for context, score, chain in states:
                rows = model.rows(context)
                seen = distant.keys() & {word for row, _ in rows[:-1] for word in row} if distant else ()
                for stop, word, cost in joined(nearest, *(distant[word] for word in seen)):
                    value = score - cost
                    # skip the match: its value is too low already, and further probabilities can only lower it
                    if value < floors[stop]:
                        continue
                    for row, weight in rows:
                        if word in row:
                            value += row[word] + weight
                            break
                    else:
                        value += rows[-1][1] + model.unknown
                    if stop == position:
                        if not turn:
                            still.append((model.advance(context, word), value, (word, chain)))
                    elif value >= floors[stop]:
                        floors[stop] = max(floors[stop], value - MARGIN)
                        _keep(beams[stop], model.advance(context, word), value, (word, chain))
            states = still

    def _pruned(self, beam: dict[str, tuple[float, Chain]]) -> list[tuple[str, float, Chain]]:
        """Return the best hypotheses of one phone position, as (context, score, tokens), best first."""
        states = sorted(((context, *entry) for context, entry in beam.items()), key=lambda state: -state[1])[:BEAM]
        return [state for state in states if state[1] > states[0][1] - MARGIN]


def _kind(chain: Chain) -> str:
    """Return the mark that will end the current sentence (".", "?" or "!"), which the newest mark in the tokens tells;
    "" if there is no mark."""
    while chain is not None and not is_mark(chain[0]):
        chain = chain[1]
    return "" if chain is None else chain[0][-1] if chain[0][-1] in CLOSING else ""


def _keep(beam: dict[str, tuple[float, Chain]], context: str, score: float, chain: Chain) -> None:
    if context not in beam or score > beam[context][0]:
        beam[context] = (score, chain)


def tokenize(text: str) -> list[str]:
    """Split a text into words and punctuation marks. The mark that ends a sentence is put before the sentence, and is
    repeated after each mark inside it.

    >>> tokenize("Hello. Where is it, please?")
    ['.', 'Hello', '?', 'Where', 'is', 'it', ',?', 'please']
    """
    tokens: list[str] = []
    sentence: list[str] = []
    for token in TOKEN.findall(text.replace("’", "'")):
        if token not in CLOSING:
            sentence.append(token)
        elif sentence:
            tokens += [token, *(word + token if word in INNER else word for word in sentence)]
            sentence = []
    return tokens + (["."] if tokens and sentence else []) + sentence


def render(tokens: Iterable[str]) -> str:
    """Convert tokens of `tokenize` back to text, with a capital at the start of each sentence.

    Among the tokens a sentence's closing mark stands before its words, and each comma repeats it (",?"). The last of
    them is written at the sentence's end.
    """
    text, pending, start = "", "", True
    for token in tokens:
        if token in CLOSING:
            text, pending, start = text + pending, token, True
        elif token[0] in INNER:
            text, pending = text + token[0], token[1:]
        else:
            text += (" " if text else "") + (token[0].upper() + token[1:] if start else token)
            start = False
    return text + ("" if start else pending)


def is_mark(token: str) -> bool:
    """Return whether a token is a punctuation mark, such as "?" or ",", or a comma of a question, ",?"."""
    return token[0] in CLOSING + INNER


def restore_case(texts: list[list[str]]) -> list[list[str]]:
    """Make the first letter of each sentence's first word lower case, unless the word usually has a capital inside
    sentences.

    texts: the tokens of each text. Returns: the changed tokens of each text.
    """
    inside: Counter[str] = Counter()
    for tokens in texts:
        inside.update(token for before, token in pairwise([".", *tokens]) if before not in CLOSING)

    def plain(word: str) -> str:
        lowered = word[0].lower() + word[1:]
        return lowered if inside[lowered] >= inside[word] and not _shouted(word) else word

    return [
        [plain(token) if before in CLOSING else token for before, token in pairwise([".", *tokens])] for tokens in texts
    ]


def case_of_stem(word: str, used: Collection[str]) -> str:
    """Return a word with the capital that its stem has in the training text (Mondays, Paul's), or unchanged. The word
    itself is not in that text.

    used: all words of the training text.
    """
    stem = word.removesuffix("s").removesuffix("'")
    capital = stem[:1].upper() + stem[1:]
    return capital + word[len(stem) :] if stem not in used and capital in used else word


def _shouted(word: str) -> bool:
    """Return whether the word has capitals wherever it stands in a sentence, such as I, I'd, TV."""
    return word.split("'")[0] == "I" or (len(word) > 1 and word.isupper())
