"""Decodes phones to readable English: a lexicon, an n-gram model of the training text, and a beam search.

Punctuation marks are tokens without phones (a comma may coincide with a pause). In the language model, the mark that
closes a sentence comes *before* the sentence, so that a trigram has it together with the words that decide it: "Is the
..." is a question. Each comma repeats that mark (",?" is the comma of a question), so that "Hello, is the ..." is a
question, too. Tokens keep the case of the training text, but the capital at a sentence's start is removed, and restored
in the output.
First the phones are split into words exactly as in the lexicon. Only if that is impossible, or the result is
improbable, phones may be replaced, inserted and deleted at a cost (`lexicon.py`).
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

TRIGRAMS = 40_000  # maximum trigrams of the language model, which bound its file's size
BEAM = 16  # maximum states of the beam search at each phone position
MARGIN = 12.0  # nats: states further below the best one of their position are dropped
MARK_ELSEWHERE = 4.0  # cost in nats of a punctuation mark where no pause is spoken
OTHER_KIND = 5.0  # cost in nats of a comma that turns a statement into a question, or back
BARE_PAUSE = 6.0  # cost in nats of a spoken pause without a punctuation mark
NEXT_SENTENCE = 3.0  # cost in nats of each further sentence in a recording
TRUST = 8.0  # bonus in nats of an exact segmentation, because wrong phones seldom spell words
IMPROBABLE = 3.0  # nats per token: if an exact segmentation is less probable, others are tried
EDIT_BASE, EDIT_SLOPE = 8.0, 3.0  # maximum cost of a word's wrong phones: base in nats, plus slope in nats per phone
FAR_BELOW = -1e9  # score of a position that no state has reached
UNSEEN = 7.0  # maximum cost in nats of a word's wrong phones if it forms no known bigram
CANDIDATES = 80  # maximum words at each phone position that match only approximately
MAX_PHONES = 20_000

Match = tuple[int, str, float]  # end position, word, cost in nats
Chain = tuple[str, "Chain"] | None  # the tokens so far, newest first
CLOSING, INNER = ".?!", ",;:"
TOKEN = re.compile(rf"[^\W_]+(?:['’.\-][^\W_]+)*|[{re.escape(CLOSING + INNER)}]")


@final
class WordDecoder:
    """Decodes phones to text. Has no state between calls."""

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
        self._approximate: ApproximateLexicon | None = None  # built at the first wrong phone

    @classmethod
    def build(cls, lexicon: Mapping[str, Sequence[Sequence[str]]], sentences: Iterable[str]) -> WordDecoder:
        """Build the decoder and estimate its language model.

        lexicon: word, in upper or lower case -> its pronunciations; a hyphenated word may use those of its parts.
        sentences: training text.
        Raises: InputError that names the words without a pronunciation.
        """
        texts = restore_case([tokens for tokens in map(tokenize, sentences) if tokens])
        folded: dict[str, list[tuple[str, ...]]] = {}
        for word, variants in lexicon.items():
            distinct = folded.setdefault(word.casefold(), [])
            for phones in variants:
                spoken = tuple(phone for phone in phones if phone != PAUSE)  # a pause belongs to a mark, not to a word
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
            base, slope, unseen = 2 * base, 2 * slope, 4 * unseen  # wider limits, until every span matches some word

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
        """Find the best sequence of words and marks for the phones by beam search. Returns (score, tokens), or (-inf,
        []) if there is none. A word that costs more than `unseen` must form a known bigram."""
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
        """Append the words that match at `position` to the beams. A word whose phones were all deleted does not advance
        the position; it is tried once per state and position."""
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
                    if value < floors[stop]:  # too low already, and further probabilities only lower it
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
        """Return the best states of a position, best first."""
        states = sorted(((context, *entry) for context, entry in beam.items()), key=lambda state: -state[1])[:BEAM]
        return [state for state in states if state[1] > states[0][1] - MARGIN]


def _kind(chain: Chain) -> str:
    """Return the mark that will close the current sentence, according to its latest mark; "" without one."""
    while chain is not None and not is_mark(chain[0]):
        chain = chain[1]
    return "" if chain is None else chain[0][-1] if chain[0][-1] in CLOSING else ""


def _keep(beam: dict[str, tuple[float, Chain]], context: str, score: float, chain: Chain) -> None:
    if context not in beam or score > beam[context][0]:
        beam[context] = (score, chain)


def tokenize(text: str) -> list[str]:
    """Split a text into words and marks. Each sentence's closing mark is put first, and after each inner mark.

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
    """Return the inverse of `tokenize`, with a capital at the start of each sentence. A sentence's last mark closes
    it."""
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
    """Return whether a token is a punctuation mark: "?", ",", or the comma of a question, ",?"."""
    return token[0] in CLOSING + INNER


def restore_case(texts: list[list[str]]) -> list[list[str]]:
    """Remove the capital of each sentence's first word, unless the word usually has a capital inside sentences."""
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
    """Return a word that the training text lacks with the capital of its stem, if the text writes the stem with one
    (Mondays, Paul's). used: the text's words."""
    stem = word.removesuffix("s").removesuffix("'")
    capital = stem[:1].upper() + stem[1:]
    return capital + word[len(stem) :] if stem not in used and capital in used else word


def _shouted(word: str) -> bool:
    """Return whether the word is written with capitals at every place in a sentence, such as I, I'd, TV."""
    return word.split("'")[0] == "I" or (len(word) > 1 and word.isupper())
