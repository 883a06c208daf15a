"""A small n-gram language model with modified Kneser-Ney smoothing.

A context is written as one string: its tokens, separated by spaces (tokens contain no white space). So it can be a
dictionary key. Probabilities are natural logarithms. Source: Chen and Goodman (1998), section 3, for the discounts.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import final

from mmdec.errors import InputError

START, END = "<s>", "</s>"
LN10 = math.log(10.0)
MAX_ORDER = 5

Table = dict[str, dict[str, float]]  # context -> word -> ln P


@final
class NGram:
    """A back-off language model: ln P(word | context).

    Args:
        successors: Context -> {word: ln P(word | context)}; the context "" holds the unigrams.
        backoff: Context -> natural logarithm of its back-off weight; 0 for a context that is missing.
    """

    def __init__(self, order: int, successors: Table, backoff: dict[str, float]) -> None:
        self.order = order
        self.successors = successors
        self.backoff = backoff
        self.unknown = min(successors[""].values(), default=-20.0) - LN10

    @property
    def vocabulary(self) -> frozenset[str]:
        """All tokens that can be predicted, without the end-of-sentence token."""
        return frozenset(self.successors[""]) - {END, START}

    def score(self, context: str, word: str) -> float:
        """Return ln P(word | context), with back-off."""
        total = 0.0
        while True:
            cost = self.successors.get(context, {}).get(word)
            if cost is not None:
                return total + cost
            if not context:
                return total + self.unknown
            total += self.backoff.get(context, 0.0)
            context = shorter(context)

    def advance(self, context: str, word: str) -> str:
        """Return the context after one more word.

        It is the longest suffix of `context` and `word` that the model contains. Texts with equal contexts have the
        same probabilities for all further words.
        """
        if self.order == 1:
            return ""
        context = f"{context} {word}".lstrip()
        while context and (context.count(" ") + 2 > self.order or context not in self.successors):
            context = shorter(context)
        return context

    def sentence(self, tokens: Sequence[str]) -> float:
        """Return ln P of a whole sentence, its end-of-sentence token included."""
        context, total = self.advance("", START), 0.0
        for token in (*tokens, END):
            total += self.score(context, token)
            context = self.advance(context, token)
        return total

    @classmethod
    def build(
        cls,
        sentences: Iterable[Sequence[str]],
        *,
        order: int = 3,
        vocabulary: Iterable[str] = (),
        max_entries: int | Sequence[int] | None = None,
    ) -> NGram:
        """Estimate the model from sentences, each a sequence of tokens.

        Args:
            order: N of the n-grams.
            vocabulary: Further tokens, which may be missing in the sentences.
            max_entries: Maximum number of n-grams of the highest order, or a list with one maximum for each order from
                2.

        Raises:
            InputError: If there are no tokens.
        """
        counts = _continuation_counts(sentences, order)
        if not counts[0]:
            raise InputError("`sentences` must hold at least one token, but is empty. Give the training text.")
        words = (set(counts[0][""]) | set(vocabulary) | {END}) - {START}
        successors: Table = {}
        backoff: dict[str, float] = {}
        lower: dict[str, dict[str, float]] = {"": dict.fromkeys(words, 1.0 / len(words))}
        for level, table in enumerate(counts):
            discounts = _discounts(table)
            probabilities: dict[str, dict[str, float]] = {}
            for context, followers in table.items():
                total = sum(followers.values())
                weight = sum(discounts[min(count, 3)] for count in followers.values()) / total
                below = lower["" if level == 0 else shorter(context)]
                candidates = words if level == 0 else followers
                probabilities[context] = {
                    word: max(0.0, count - discounts[min(count, 3)]) / total + weight * below[word]
                    for word in candidates
                    for count in (followers.get(word, 0),)
                }
                if level > 0:
                    backoff[context] = math.log(max(weight, 1e-7))
            for context, row in probabilities.items():
                successors[context] = {word: math.log(p) for word, p in row.items() if p > 0.0}
            lower = probabilities
        model = cls(order, successors, backoff)
        if max_entries is not None and order > 1:
            most = [max_entries] if isinstance(max_entries, int) else max_entries
            for table, entries in zip(reversed(counts[1:]), reversed(most), strict=False):
                model._prune(table, entries)
        return model

    def _prune(self, counts: Mapping[str, Mapping[str, int]], max_entries: int) -> None:
        """Remove n-grams of one order until at most `max_entries` remain; first those that back-off predicts best.

        The criterion is the weighted difference of Seymore and Rosenfeld (1996), with the back-off weight as it would
        be without the n-gram. An n-gram that is the context of a longer n-gram is not removed.

        Args:
            counts: How often each n-gram of this order occurred: context -> word -> count.
        """
        if sum(map(len, counts.values())) <= max_entries:
            return
        gains: list[tuple[float, str, str]] = []
        for context, followers in counts.items():
            here = {word: math.exp(self.successors[context][word]) for word in followers}
            below = {word: math.exp(self.score(shorter(context), word)) for word in followers}
            total, seen_below = sum(here.values()), sum(below.values())
            for word, count in followers.items():
                weight = max(1.0 - total + here[word], 1e-7) / max(1.0 - seen_below + below[word], 1e-7)
                gain = count * math.log(here[word] / (weight * below[word]))
                gains.append((math.inf if f"{context} {word}" in self.successors else gain, context, word))
        gains.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))
        touched = set()
        for gain, context, word in gains[max_entries:]:
            if gain < math.inf:
                del self.successors[context][word]
                touched.add(context)
        for context in touched:
            successors = self.successors[context]
            if not successors:
                del self.successors[context], self.backoff[context]
                continue
            left = 1.0 - sum(math.exp(value) for value in successors.values())
            below = 1.0 - sum(math.exp(self.score(shorter(context), word)) for word in successors)
            self.backoff[context] = math.log(max(left, 1e-7) / max(below, 1e-7))


def shorter(context: str) -> str:
    """Return the context without its oldest token."""
    return context.partition(" ")[2]


def _continuation_counts(sentences: Iterable[Sequence[str]], order: int) -> list[dict[str, Counter[str]]]:
    """Count the words after each context, for each order: order -> context -> word -> count.

    The highest order, and contexts that begin with a sentence's start, have plain counts. Lower orders have the number
    of different preceding tokens, as Kneser-Ney smoothing requires.
    """
    if not 1 <= order <= MAX_ORDER:
        raise InputError(f"`order` must be from 1 to {MAX_ORDER}, but is {order}. Use 3.")
    counts: list[dict[str, Counter[str]]] = [defaultdict(Counter) for _ in range(order)]
    for tokens in sentences:
        if any(not token or token in (START, END) or token.split() != [token] for token in tokens):
            raise InputError(f"`sentences` must hold plain tokens, but one is {list(tokens)!r}. Split it at spaces.")
        history = [START]
        for token in (*tokens, END):
            tail = history[max(0, len(history) - order + 1) :] if order > 1 else []
            counts[len(tail)][" ".join(tail)][token] += 1
            history.append(token)
    for level in range(order - 1, 0, -1):
        for context, followers in counts[level].items():
            below = counts[level - 1][shorter(context)]
            for word in followers:
                below[word] += 1
    return counts


def _discounts(table: Mapping[str, Mapping[str, int]]) -> list[float]:
    """Compute the discounts of modified Kneser-Ney for n-grams of one order that occur 0, 1, 2, and 3 or more times.

    They are limited to valid values, because generated text may have few n-grams of some counts.

    Args:
        table: Context -> word -> count.
    """
    counts: Counter[int] = Counter()
    for followers in table.values():
        counts.update(min(count, 4) for count in followers.values())
    ratio = counts[1] / max(1, counts[1] + 2 * counts[2])
    discounts = [0.0]
    for count in (1, 2, 3):
        raw = count - (count + 1) * ratio * counts[count + 1] / max(1, counts[count])
        discounts.append(min(max(raw, 0.1), 0.9 * count))
    return discounts
