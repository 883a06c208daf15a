"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the last tokens.

Prompt lookup decoding (Saxena 2023) and CopySpec (Dumitru et al. 2025): a dictionary maps rolling hashes of n-grams to
positions, and the draft copies the text after the latest earlier match of the longest n-gram. Each new token takes
constant time; the draft is the only tensor.

A match of one token predicts little, a match of three often much; how much depends on the text. So each row counts, as
the text grows, prompt included, how often the token after the match was also the text's next token. A chain whose first
token is too unlikely (`Plan.threshold`), or that promises too few tokens in all (`Plan.least`), is not drafted: in a
short answer, chance matches cost more than they gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from mmdec.decode.tree import joined, trees_from_lists
from mmdec.types import Context, Draft, InputError, Needs, Plan, Scores, Target, Verdict

BASE = 1_000_003  # base of the polynomial hash of n-grams, modulo MODULUS
MODULUS = (1 << 61) - 1
FADE = 0.97  # for each token that a match predicted, the weight of earlier predictions decays by this factor
PRIOR_WEIGHT = 4.0  # before a run has predictions, the assumed chance of a match counts as so many of them


@final
class Row:
    """A row's text, and the last position of each of its n-grams."""

    __slots__ = ("_hashes", "_heads", "_last", "_right", "_told", "text")

    def __init__(self, tokens: Sequence[int], longest: int) -> None:
        self.text: list[int] = []
        self._hashes = [0] * longest  # [n - 1]: hash of the last n tokens
        self._heads = [pow(BASE, n, MODULUS) for n in range(1, longest + 1)]
        # [n - 1]: hash of an n-gram -> the positions after its last occurrence and after the one before that
        self._last: list[dict[int, tuple[int, int]]] = [{} for _ in range(longest)]
        # for each match length n: the number of predicted tokens, and of correct ones; the share begins at n / (n + 2)
        self._told = [PRIOR_WEIGHT] * longest
        self._right = [PRIOR_WEIGHT * n / (n + 2) for n in range(1, longest + 1)]
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        text, hashes, end = self.text, self._hashes, len(self.text) + 1
        n, at = self._longest()
        if n:
            self._told[n - 1] = FADE * self._told[n - 1] + 1
            self._right[n - 1] = FADE * self._right[n - 1] + (text[at] == token)
        text.append(token)
        for n, head in enumerate(self._heads, 1):
            gone = text[end - n - 1] if end > n else -1
            value = hashes[n - 1] = (hashes[n - 1] * BASE + token + 1 - (gone + 1) * head) % MODULUS
            if end >= n:
                table = self._last[n - 1]
                ends = table.get(value)
                table[value] = (end, ends[0] if ends else 0)

    def _longest(self) -> tuple[int, int]:
        """Return the length of the longest n-gram at the text's end that occurred before, and the position after its
        latest earlier occurrence; (0, 0) if there is none."""
        for n in range(min(len(self._heads), len(self.text)), 0, -1):
            at = self._last[n - 1][self._hashes[n - 1]][1]
            if at:
                return n, at
        return 0, 0

    def chance(self, shortest: int) -> float:
        """Return how often matches as long as the present one (at least `shortest` tokens) predicted the next token
        correctly so far, in [0, 1]; 0 without a match."""
        n, _ = self._longest()
        return self._right[n - 1] / self._told[n - 1] if n >= shortest else 0.0

    def chances(self, shortest: int, length: int) -> list[float]:
        """Return, for each of the `length` tokens of a copy, the chance that it and all before it are right; [] without
        a match. The first token has the chance of the present match. Each later token has the chance of a match that is
        one token longer, because the token before it must be right."""
        n, _ = self._longest()
        found, alive = list[float](), 1.0
        for group in range(n - 1, n - 1 + length * (n >= shortest)):
            group = min(group, len(self._heads) - 1)
            alive *= self._right[group] / self._told[group]
            found.append(alive)
        return found

    def matches(self, shortest: int) -> list[int]:
        """Return the positions after the latest earlier occurrences of the text's last n tokens, the longest n first.
        shortest: minimum of n."""
        text, end, matches = self.text, len(self.text), []
        for n in range(min(len(self._heads), end), shortest - 1, -1):
            at = self._last[n - 1][self._hashes[n - 1]][1]
            if at and at not in matches and text[at - n : at] == text[end - n :]:
                matches.append(at)
        return matches

    def copy(self, at: int, length: int) -> list[int]:
        """Copy `length` tokens from position `at` on. A copy that reaches the end of the text continues with the tokens
        that it has already copied."""
        tail = self.text[at : at + length]
        period = len(self.text) - at
        while len(tail) < length:
            tail.append(tail[-period])
        return tail


@final
class Lookup:
    """Copies drafts from the prompt, the encoder's input ids and the new text. It has no weights, fits every target,
    and takes microseconds."""

    needs = Needs(stops=True)

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        """max_ngram, min_ngram: the longest and the shortest match in tokens; longer ones are tried first."""
        if min_ngram < 1:
            raise InputError(f"`min_ngram` must be at least 1, but is {min_ngram}. Use 1 for a match of one token.")
        if max_ngram < min_ngram:
            raise InputError(f"`max_ngram` must be at least `min_ngram`, {min_ngram}, but is {max_ngram}. Raise it.")
        self.name = f"lookup-{min_ngram}-{max_ngram}"
        self._longest, self._shortest = max_ngram, min_ngram

    def check(self, target: Target) -> None:
        """Accept every target."""

    def start(self, context: Context) -> list[Row]:
        """Store each row's prompt without padding. An encoder's tokens are inserted between two copies of the prompt,
        so that the first draft copies their beginning."""
        texts = zip(context.tokens.tolist(), context.mask.tolist(), strict=True)
        prompts = [[t for t, kept in zip(row, mask, strict=True) if kept] for row, mask in texts]
        if context.source is not None:
            prompts = [[*own, *source, *own] for own, source in zip(prompts, context.source, strict=True)]
        return [Row(prompt, self._longest) for prompt in prompts]

    def propose(self, memory: list[Row], roots: Tensor, plan: Plan) -> Draft:
        """Draft a chain after the longest match, if it is likely enough; in a tree also chains after shorter ones."""
        if plan.threshold:
            chances = [row.chances(self._shortest, plan.depth) for row in memory]
            first, expected = sum(own[0] for own in chances if own), sum(map(sum, chances))
            if first < plan.threshold * len(memory) or expected < plan.least * len(memory):
                return trees_from_lists(roots, [([], [])] * len(memory))
        return trees_from_lists(roots, [self._tree(row, plan) for row in memory])

    def update(self, memory: list[Row], draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Append the round's tokens to the text, the next root included."""
        for row, tokens, length in zip(memory, verdict.tokens.tolist(), verdict.lengths.tolist(), strict=True):
            for token in tokens[:length]:
                row.add(token)

    def select(self, memory: list[Row], live: Tensor) -> None:
        """Keep only the rows whose indices are in `live` (K,) int64, in that order."""
        memory[:] = [memory[index] for index in live.tolist()]

    def _tree(self, row: Row, plan: Plan) -> tuple[list[int], list[int]]:
        """Return tokens and parents of the nodes below the root."""
        depth = min(plan.depth, plan.nodes)
        matches = row.matches(self._shortest)[: 1 if plan.nodes <= depth else None]
        return joined([row.copy(at, depth) for at in matches], plan.nodes)
