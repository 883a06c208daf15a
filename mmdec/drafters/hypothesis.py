"""Drafts from another text of the answer: a faster recogniser's transcript, subtitles, a script that is read aloud.

The text is one long draft in words, so that any vocabulary will do. It is followed by its words: those that the target
has written are compared with it in lower case without punctuation. After a difference (a word changed, added or left
out) the newest words are searched for near the place where they are expected. What the target writes between two words
(a comma, a full stop, a capital letter) may differ from the text; how often it does is counted, and the draft is the
tree of the likeliest continuations.

`Follower` is the search.

References:
    SSBD (2509.21740) drafts an earlier translation of the growing sentence; SpecASR (2507.18181) resumes a draft after
    a difference. Neither drafts text of another vocabulary.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from typing import Any, Generic, TypeVar, final

from torch import Tensor

from mmdec.core.growing_text import REPLACEMENT_CHARACTER
from mmdec.core.tree import PrefixTree, int_rows, trees_from_lists
from mmdec.drafters.without_weights import HitRate
from mmdec.types import Context, Draft, Needs, Plan, Scores, Target, Verdict

MAX_MATCH = 4  # at most this many of the newest items are compared to find where a text continues
NEAR = 10  # places at most this far from the expected one are all compared
MATCH_WORTH = 6  # one more equal item outweighs a place this many items further from the expected one
# matches farther away than `NEAR` need this many equal items; two are enough if they occur only once
FAR_MATCH = 3
MAX_CANDIDATES = 256  # beyond `NEAR`, at most this many places, the nearest, are compared
# scripts that write no spaces between words (Thai to Khmer, Japanese, Chinese): each character is followed as a word
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
WORD = re.compile(rf"[{UNSPACED}]|[^\s'{UNSPACED}]+(?:'[^\s'{UNSPACED}]+)*")
JOINING = ("Pd", "Ps", "Pi")  # Unicode categories of dashes and opening marks, after which no space stands
MAX_JOINED = 12  # at most this many words without a gap are drafted as one string
NEW_SEGMENT = "\n"  # stands for a timestamp before a word
NONE, COMMA, STOP = range(3)  # kinds of what stands between two words
MARKS = "", ",", "."  # of each kind, the mark that is drafted where the text has another
STOP_MARKS = frozenset(".?!\u2026\u3002\uff1f\uff01\u0964\u061f")
COMMA_MARKS = frozenset(",;:\u3001\uff0c\uff1b\uff1a\u060c")
# prior counts: [kind in the script][kind that the target writes]
MARK_COUNTS = ((24.0, 0.6, 0.5), (1.5, 12.0, 1.0), (0.5, 1.0, 16.0))
UNMARKED_COUNTS = (16.0, 1.4, 1.2)  # the first row for a script without any marks
FINAL_STOP = 0.8  # probability that the target ends with a full stop, if the text has no marks
WORD_HITS, WORD_TRIALS, WORD_DECAY = 7.6, 8.0, 0.98  # prior: 7.6 of 8 words match the script
SAME_CASE = 0.96  # probability that a word has the capital letter, or none, that is expected
SHIFTS = ((0, 0.6), (-1, 0.25), (1, 0.1))  # after a changed word, where the text may continue: (words, probability)
NEXT_TOKEN = 0.99  # probability of each further token of a word
# probability of the continuation with which the target went on at the same place in a rejected branch
SEEN_PROBABILITY = 0.9
UNEXPECTED_SEEN_PROBABILITY = 0.5  # the same where the text has another word there
SAME_TIME = 0.85  # probability that a segment begins with the timestamp at which the last one ended
MAX_DECODED = 24  # re-decode at most this many earlier tokens with the new ones
Item = TypeVar("Item", bound=Hashable)


@final
class Follower(Generic[Item]):
    """The place in another text at which a new text goes on, found by the new text's items (words, or tokens).

    `TextCursor` does the same for an earlier version of the new text itself.

    Args:
        items: The other text.
        occurrences: Item -> its indices in `items`, ascending, or None to collect them.
        position: Index of the item that is expected next.
    """

    def __init__(
        self, items: Sequence[Item], occurrences: dict[Item, list[int]] | None = None, position: int = 0
    ) -> None:
        self.items, self.position, self.missed = items, position, 0
        self.newest: list[Item] = []
        self._occurrences = index_of(items) if occurrences is None else occurrences

    @property
    def expected(self) -> int:
        """Index of the item that is expected next: after the last match, as many items as the new text has written."""
        return min(self.position + self.missed, len(self.items))

    def add(self, item: Item) -> bool:
        """Add the new text's next item.

        Returns:
            Whether it was the expected one.
        """
        self.newest = [*self.newest[1 - MAX_MATCH :], item]
        expected = self.expected
        hit = expected < len(self.items) and self.items[expected] == item
        found = expected + 1 if hit else self._find(expected + 1)
        if found is None:
            self.missed += 1
        else:
            self.position, self.missed = found, 0
        return hit

    def place_of(self, item: Item) -> int | None:
        """Return the index after `item` if it is the new text's next item, or None if it is not found."""
        other = Follower(self.items, self._occurrences, self.position)
        other.missed, other.newest = self.missed, self.newest
        other.add(item)
        return None if other.missed else other.position

    def _find(self, expected: int) -> int | None:
        """Find the newest items in the text.

        Returns:
            The index after them; None if they are not found.
        """
        near = range(max(expected - NEAR, 1), min(expected + NEAR, len(self.items)) + 1)
        worth = {index: MATCH_WORTH * equal - abs(index - expected) for index in near if (equal := self._equal(index))}
        best = max(worth, key=worth.__getitem__, default=0)
        if best and worth[best] > 0:
            return best
        # the rarest of the newest items has the fewest places to compare
        offsets = range(min(FAR_MATCH, len(self.newest)))
        offset = min(offsets, key=lambda back: len(self._occurrences.get(self.newest[-1 - back], ())))
        places = self._occurrences.get(self.newest[-1 - offset], [])
        middle = bisect_left(places, expected - 1 - offset)
        nearest = places[max(middle - MAX_CANDIDATES // 2, 0) : middle + MAX_CANDIDATES // 2]
        equal = {index + 1 + offset: self._equal(index + 1 + offset) for index in nearest}
        likely = {index: items for index, items in equal.items() if items >= FAR_MATCH - 1}
        best = max(likely, key=lambda index: (likely[index], -abs(index - expected)), default=0)
        return best if best and (len(likely) == 1 or likely[best] >= FAR_MATCH) else None

    def _equal(self, index: int) -> int:
        """Return how many of the newest items stand before `index`."""
        if index > len(self.items):
            return 0
        equal = 0
        while equal < min(len(self.newest), index) and self.items[index - 1 - equal] == self.newest[-1 - equal]:
            equal += 1
        return equal


def index_of(items: Sequence[Item]) -> dict[Item, list[int]]:
    """Return each item's indices, ascending."""
    places = dict[Item, list[int]]()
    for index, item in enumerate(items):
        places.setdefault(item, []).append(index)
    return places


class _WordCharacters(dict[int, str]):
    """Maps characters of words (letters, marks, numbers) to themselves, apostrophes to ', all others to a space."""

    def __missing__(self, point: int) -> str:
        character = chr(point)
        word = unicodedata.category(character)[0] in "LMN"
        self[point] = value = character if word else "'" if character in "'\u2019" else " "
        return value


_WORD_CHARACTERS = _WordCharacters()


def word_spans(text: str) -> list[tuple[int, int]]:
    """Return where each word of a text begins and ends. Punctuation and spaces belong to no word."""
    return [match.span() for match in WORD.finditer(text.translate(_WORD_CHARACTERS))]


def word_key(word: str) -> str:
    """Return what is compared of a word: lower case, without apostrophes."""
    return word.casefold().replace("'", "").replace("\u2019", "")


def mark_kind(gap: str) -> int:
    """Return the kind of what stands between two words: `NONE`, `COMMA` or `STOP`."""
    if not STOP_MARKS.isdisjoint(gap):
        return STOP
    return NONE if COMMA_MARKS.isdisjoint(gap) else COMMA


@final
class Script:
    """A text that is drafted, cut into words.

    Args:
        text: Without control characters and surrogates (`clean_text`).
        starts_at: Beginnings of parts of the text, ascending: (offset in the text, seconds in the recording). Empty:
            unknown.
    """

    def __init__(self, text: str, starts_at: Sequence[tuple[int, float]] = ()) -> None:
        self.text = text
        spans = word_spans(text)
        self.begins, self.ends = [begin for begin, _ in spans], [end for _, end in spans]
        self.keys = [word_key(text[begin:end]) for begin, end in spans]
        self.occurrences = index_of(self.keys)
        self.has_case = text.lower() != text != text.upper()
        self.has_marks = any(mark_kind(self.gap(index)) for index in range(1, len(spans) + 1))
        self._starts_at = list(starts_at)
        # word -> how it is written inside of sentences, where the text shows it
        self.forms = {
            self.keys[index]: self.word(index)
            for index in range(1, len(spans))
            if self.has_case and mark_kind(self.gap(index)) != STOP
        }

    def __len__(self) -> int:
        return len(self.keys)

    def word(self, index: int) -> str:
        return self.text[self.begins[index] : self.ends[index]]

    def gap(self, index: int) -> str:
        """Return what stands before the word `index`; after the last word, the rest of the text."""
        end = self.begins[index] if index < len(self.begins) else len(self.text)
        return self.text[self.ends[index - 1] if index else 0 : end]

    def place_at(self, seconds: float, total: float) -> int:
        """Return the index of the word that is spoken about `seconds` after the beginning of a recording of `total`."""
        if not self._starts_at:
            return min(int(len(self) * seconds / total), len(self)) if total > 0 else 0
        part = bisect_left([time for _, time in self._starts_at], seconds - 0.5)
        return bisect_left(self.begins, self._starts_at[part][0]) if part < len(self._starts_at) else len(self)


def clean_text(text: str) -> str:
    """Return a text without what no model writes: control characters become spaces, surrogates are dropped."""
    text = text.encode("utf-8", "ignore").decode()
    return "".join(" " if unicodedata.category(char) in ("Cc", "Zl", "Zp") else char for char in text)


@final
class TokenText:
    """The target's tokenizer, as far as drafts need it.

    Args:
        tokenizer: The target's tokenizer, of transformers.
        vocab_size: Number of the target's tokens.
        first_time: Id of the target's first timestamp token, or None if it writes none.
        ends: Ids of the target's end tokens.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, first_time: int | None, ends: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self.first_time, self.ends = first_time, [token for token in ends if 0 <= token < vocab_size]
        self._special = {*tokenizer.all_special_ids, *ends}
        self._ids = dict[str, list[int]]()
        self._before = self._encode("a")

    def is_time(self, token: int) -> bool:
        return self.first_time is not None and token >= self.first_time

    def is_text(self, token: int) -> bool:
        return token not in self._special and not self.is_time(token)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text that follows a word."""
        if not text:
            return []
        found = self._ids.get(text)
        if found is None:
            found = self._behind(self._before, "a", text)
            found = self._ids[text] = self._encode(text) if found is None else found
        return found

    def rest_ids(self, tokens: Sequence[int], text: str) -> list[int]:
        """Return the tokens of a text with which a word goes on, whose first part has the target's last `tokens`."""
        for size in range(1, len(tokens) + 1):
            begun = self.decode(tokens[-size:])
            if begun[:1].isspace() or size == len(tokens):
                found = self._behind(list(tokens[-size:]), begun, text)
                return self._encode(text) if found is None else found
        return self._encode(text)

    def _behind(self, tokens: list[int], begun: str, text: str) -> list[int] | None:
        whole = self._encode(begun + text)
        return whole[len(tokens) :] if whole[: len(tokens)] == tokens else None

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return [token for token in ids if token < self._vocab_size]


@dataclass(frozen=True)
class _Continuation:
    """A continuation that may be drafted: a string or tokens, and what follows it."""

    probability: float
    text: str = ""
    tokens: Sequence[int] = ()  # after the text
    place: int | None = None  # index of the word that follows, or None at the end
    is_fresh: bool = False  # whether a segment begins after it, so that no mark follows
    marked: tuple[int, str] | None = None  # the mark with which the text begins: (index of the word after it, mark)


@dataclass
class HypothesisRow:
    """The drafter's state of one batch row: what the target has written, and where it is in the text."""

    index: int  # of its text among the drafter's
    script: Script
    follower: Follower[str]
    rest: str = ""  # what the target has written after its last complete word
    words: int = 0  # number of complete words
    tokens: list[int] = field(default_factory=list[int])  # the newest text tokens, since the last special token
    decoded: str = ""  # their text, without an incomplete character at its end
    times: list[int] = field(default_factory=list[int])  # timestamps since the last text token
    is_timed: bool = False  # whether the target has written a timestamp
    segment: int = 0  # index of the word at which the last segment began
    # how often a word was the expected one
    rate: HitRate = field(default_factory=lambda: HitRate(WORD_HITS, WORD_TRIALS, WORD_DECAY))
    # nodes of the last draft before a word: (node, index of the word, what stands before it since the last word)
    openings: list[tuple[int, int, str]] = field(default_factory=list[tuple[int, int, str]])
    # (index of a word, what stands before it) -> the token with which the target went on there in a rejected branch
    seen: dict[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])


@final
class HypothesisDrafter:
    """A drafter that proposes the words of a text. It has no weights and fits every target that has a tokenizer.

    Rows that end leave their place to the next call with the same object: the windows of a recording are decoded one
    after another, and each begins where the last one ended. Make one object for each recording.

    Args:
        scripts: The text of each batch row, or one for all rows.
        token_text: The target's tokenizer.
        begins: For each script, the index of the word at which the first window begins.
        source: Where the texts come from, for the drafter's name.
    """

    needs = Needs(may_stop_early=True, may_find_nothing=True, has_other_vocabulary=True)

    def __init__(
        self, scripts: Sequence[Script], token_text: TokenText, begins: Sequence[int] = (), source: str = "text"
    ) -> None:
        self.name = f"hypothesis({source})"
        self._scripts, self._tokens = list(scripts), token_text
        self._begins = list(begins) or [0] * len(scripts)
        self._forms = [dict(script.forms) for script in scripts]
        self._marks = [[list(row) for row in MARK_COUNTS] for _ in scripts]
        for script, marks in zip(scripts, self._marks, strict=True):
            if not script.has_marks:
                marks[NONE] = list(UNMARKED_COUNTS)

    def check(self, target: Target) -> None:  # it fits every target
        pass

    def start(self, context: Context) -> list[HypothesisRow]:
        rows = len(context.tokens)
        state = list[HypothesisRow]()
        for row in range(rows):
            index = row * len(self._scripts) // rows
            script = self._scripts[index]
            state.append(HypothesisRow(index, script, Follower(script.keys, script.occurrences, self._begins[index])))
        return state

    def update(self, state: list[HypothesisRow], draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Follow the words that the target has written, and read how it would have gone on in rejected branches."""
        self._read(state, scores)
        ended = verdict.done.tolist()
        for row, tokens, done in zip(state, verdict.new_tokens, ended, strict=True):
            text = list[int]()
            for token in tokens:
                if self._tokens.is_text(token):
                    text.append(token)
                    continue
                self._write(row, text)
                text = []
                self._begin_segment(row, token)
            self._write(row, text)
            if done:  # after the last pair of timestamps, the next window begins
                open_segment = row.is_timed and not row.times
                self._begins[row.index] = row.segment if open_segment else row.follower.expected

    def select(self, state: list[HypothesisRow], live: Tensor) -> None:
        state[:] = [state[index] for index in live.tolist()]

    def propose(self, state: list[HypothesisRow], roots: Tensor, plan: Plan) -> Draft:
        """Draft the likeliest continuations of each row: a tree, or a chain where nothing else is likely enough."""
        return trees_from_lists(roots, [self._tree(row, plan) for row in state])

    def _read(self, state: list[HypothesisRow], scores: Scores) -> None:
        """Keep the target's likeliest token before each word of the draft."""
        if not any(row.openings for row in state):
            return
        for row, best in zip(state, int_rows(scores.logits.argmax(-1)), strict=True):
            for node, place, before in reversed(row.openings):  # the likeliest nodes come first, and count most
                row.seen[place, before] = best[node]
            row.openings = []

    def _write(self, row: HypothesisRow, tokens: Sequence[int]) -> None:
        """Add tokens of text to a row, and follow the words that they complete."""
        if not tokens:
            return
        row.times = []
        if len(row.tokens) > MAX_DECODED:
            row.tokens = row.tokens[-MAX_DECODED // 2 :]
            row.decoded = self._tokens.decode(row.tokens).rstrip(REPLACEMENT_CHARACTER)
        row.tokens = [*row.tokens, *tokens]
        decoded = self._tokens.decode(row.tokens).rstrip(REPLACEMENT_CHARACTER)
        if decoded.startswith(row.decoded):
            row.rest += decoded[len(row.decoded) :]
        row.decoded = decoded
        self._follow(row)

    def _begin_segment(self, row: HypothesisRow, token: int) -> None:
        """Add a timestamp or another special token to a row."""
        row.tokens, row.decoded = [], ""
        row.rest += "\n" * (not row.rest.endswith("\n"))  # the last word is complete
        self._follow(row)
        if self._tokens.is_time(token):
            row.is_timed = True
            row.times.append(token)
            row.segment = row.follower.expected

    def _follow(self, row: HypothesisRow) -> None:
        """Follow the complete words of `row.rest`, and drop them there; the last word may still grow."""
        script, forms, marks = row.script, self._forms[row.index], self._marks[row.index]
        text, done = row.rest, 0
        for begin, end in word_spans(text):
            word = text[begin:end]
            if end == len(text) and not re.match(f"[{UNSPACED}]", word):
                break
            before = None if row.follower.missed else row.follower.position
            gap = text[done:begin]
            hit = row.follower.add(word_key(word))
            row.rate.count(hit)
            if row.words and "\n" not in gap:
                if hit and before:
                    marks[mark_kind(script.gap(before))][mark_kind(gap)] += 1
                if mark_kind(gap) != STOP:
                    forms[word_key(word)] = word
            done, row.words = end, row.words + 1
        row.rest = text[done:]

    def _tree(self, row: HypothesisRow, plan: Plan) -> tuple[list[int], list[int]]:
        """Draft the likeliest nodes.

        Returns:
            Tokens and parents' indices of the nodes below the root; parent 0 is the root.
        """
        tree = PrefixTree(plan.nodes, plan.depth)
        heap, order = list[tuple[float, int, int, _Continuation]](), count()
        row.openings = []

        def push(node: int, probability: float, options: Sequence[_Continuation]) -> None:
            for option in options:
                if probability * option.probability >= max(plan.threshold, 1e-3):
                    heappush(heap, (-probability * option.probability, next(order), node, option))

        push(0, 1.0, self._roots(row))
        while heap and not tree.is_full:
            negative, _, node, option = heappop(heap)
            probability = -negative
            for index, token in enumerate((*self._tokens.ids(option.text), *option.tokens)):
                node = tree.add(node, token) if probability >= plan.threshold else tree.child(node, token)
                if not node:
                    break
                if not index and option.marked is not None and [token] == self._tokens.ids(option.marked[1]):
                    row.openings.append((node, *option.marked))
                probability *= NEXT_TOKEN
            else:
                if option.place is not None:
                    row.openings.append((node, option.place, NEW_SEGMENT if option.is_fresh else ""))
                if option.is_fresh and option.place is not None:
                    push(node, probability, self._segment(row, option.place))
                elif option.place is not None:
                    push(node, probability, self._words(row, option.place))
        return tree.tokens, tree.parents

    def _roots(self, row: HypothesisRow) -> list[_Continuation]:
        """Return what may follow the text that the target has written."""
        follower, script = row.follower, row.script
        if row.times or not row.tokens:
            place = follower.expected
            if len(row.times) != 1 or not row.words:
                return self._segment(row, place)
            # a segment has ended: the next one usually begins at the same time
            rest = 1.0 - SAME_TIME
            again, ended = (SAME_TIME, rest) if place < len(script) else (rest, SAME_TIME)
            ends = [_Continuation(ended, tokens=[end]) for end in self._tokens.ends]
            return [_Continuation(again, tokens=row.times, place=place, is_fresh=True), *ends]
        written = row.rest
        spans = word_spans(row.rest)
        place, is_found = follower.expected, not follower.missed
        if spans:  # the last word: is it complete?
            begin, end = spans[-1]
            word, written = row.rest[begin:end], row.rest[end:]
            key = word_key(word)
            expected = script.keys[place] if place < len(script) else ""
            if expected != key and expected.startswith(key) and len(script.word(place)) > len(word):
                rest = script.word(place)[len(word) :]
                ids = self._tokens.rest_ids(row.tokens, rest)
                return [_Continuation(row.rate.value, tokens=ids, place=place + 1)]
            found = follower.place_of(key)
            place, is_found = (place + 1, False) if found is None else (found, True)
        places = [(place, 1.0)] if is_found else [(place + shift, probability) for shift, probability in SHIFTS]
        return [
            replace(option, probability=probability * option.probability)
            for place, probability in places
            if 0 <= place <= len(script)
            for option in self._words(row, place, written)
        ]

    def _segment(self, row: HypothesisRow, place: int) -> list[_Continuation]:
        """Return what may follow where a segment, or the whole text, begins."""
        script = row.script
        stopped = mark_kind(row.rest) == STOP
        if not row.words:  # a window begins
            stopped = not place or not script.has_marks or mark_kind(script.gap(place)) == STOP
        if place == len(script):
            return []
        gaps = [" "] if self._tokens.first_time is not None else ["", " "]
        options = [
            option
            for index, gap in enumerate(gaps)
            for option in self._written(row, place, gap, stopped, 1 / (1 + index))
        ]
        return self._as_seen(row, place, NEW_SEGMENT, options)

    def _words(self, row: HypothesisRow, place: int, written: str = "") -> list[_Continuation]:
        """Return what may follow the word before `place`.

        Args:
            written: What the target has already written after this word.
        """
        script = row.script
        own = script.gap(place)
        kind, spaced, is_last = mark_kind(own), any(map(str.isspace, own)) or not place, place == len(script)
        if written:
            joins = written[-1].isspace() or unicodedata.category(written[-1]) in JOINING
            left = own[len(written) :] if own.startswith(written) else " " * (spaced and not joins)
            gaps = [(1.0, left, mark_kind(written))]
        else:
            counts = self._marks[row.index][kind]
            probabilities = [each / sum(counts) for each in counts]
            if is_last and not script.has_marks:
                probabilities = [(1 - FINAL_STOP) / 2, (1 - FINAL_STOP) / 2, FINAL_STOP]
            gaps = [
                (probability, own if other == kind else MARKS[other] + " " * spaced, other)
                for other, probability in enumerate(probabilities)
            ]
        if is_last:
            ends = [[]] if row.is_timed else [[end] for end in self._tokens.ends]  # a timestamp would stand before it
            options = [_Continuation(probability, gap.rstrip(), end) for probability, gap, _ in gaps for end in ends]
        else:
            options = [
                option
                for probability, gap, mark in gaps
                for option in self._written(row, place, gap, mark == STOP, probability)
            ]
        return self._as_seen(row, place, written.strip(), options)

    def _as_seen(
        self, row: HypothesisRow, place: int, before: str, options: list[_Continuation]
    ) -> list[_Continuation]:
        """Prefer what the target went on with at the same place in a rejected branch.

        Args:
            before: What stands before the word `place` since the word before it.
        """
        token = row.seen.get((place, before))
        if token is None:
            return options
        is_seen = [[*self._tokens.ids(option.text), *option.tokens][:1] == [token] for option in options]
        probability = SEEN_PROBABILITY if any(is_seen) else UNEXPECTED_SEEN_PROBABILITY
        # a sum is 0 where all probabilities are
        seen = sum(option.probability for option, same in zip(options, is_seen, strict=True) if same) or 1.0
        rest = sum(option.probability for option, same in zip(options, is_seen, strict=True) if not same) or 1.0
        options = [
            replace(option, probability=option.probability * (probability / seen if same else (1 - probability) / rest))
            for option, same in zip(options, is_seen, strict=True)
        ]
        return options if any(is_seen) else [*options, self._other(row, place, token, probability)]

    def _other(self, row: HypothesisRow, place: int, token: int, probability: float) -> _Continuation:
        """Return a continuation that the text does not have."""
        if self._tokens.is_time(token):
            return _Continuation(probability, tokens=[token, token], place=place, is_fresh=True)
        is_word = self._tokens.is_text(token) and self._tokens.decode([token])[:1].isspace()
        return _Continuation(
            probability, tokens=[token], place=place + 1 if is_word and place < len(row.script) else None
        )

    def _written(
        self, row: HypothesisRow, place: int, gap: str, stopped: bool, probability: float
    ) -> list[_Continuation]:
        """Return how the target may write the word `place`, and what is joined to it.

        Args:
            gap: What is still to be written before the word.
            stopped: Whether a sentence begins with the word.
            probability: That the target writes the word after this gap, if it is the expected one.
        """
        script, known = row.script, probability * row.rate.value
        after = place + 1
        while after < min(len(script), place + MAX_JOINED) and not script.gap(after):
            after += 1
        rest = script.text[script.ends[place] : script.ends[after - 1]]
        marked = (place, mark) if (mark := gap.strip()) else None
        return [
            _Continuation(known * share, gap + form + rest, place=after, marked=marked)
            for share, form in self._case(row, place, stopped)
        ]

    def _case(self, row: HypothesisRow, place: int, stopped: bool) -> list[tuple[float, str]]:
        """Return how the target may write a word, capital letter or not, with the probability of each spelling."""
        script = row.script
        own = script.word(place)
        inside = self._forms[row.index].get(script.keys[place])
        if inside is None:
            inside = own.lower() if not script.has_case or (own[1:] == own[1:].lower() and len(own) > 1) else own
        capital = own[:1].upper() + own[1:] if script.has_case else inside[:1].upper() + inside[1:]
        probabilities = {capital if stopped else inside: SAME_CASE}
        probabilities.setdefault(inside if stopped else capital, 1 - SAME_CASE)
        return [(probability, form) for form, probability in probabilities.items()]
