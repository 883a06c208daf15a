"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the last tokens.

Prompt lookup decoding (Saxena 2023) and CopySpec (Dumitru et al. 2025). A dictionary maps rolling hashes of n-grams to
positions. The draft copies the text after the latest earlier occurrence of the longest n-gram that ends the text. Each
new token takes constant time.

How well a match predicts depends on its length and on the text. So each batch row counts how often the token after a
match was also the text's next token, in the prompt and in the new text. A chain is not drafted if its first token is
too unlikely (`Plan.threshold`) or if too few of its tokens are expected to be accepted
(`Plan.min_expected_accepted`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from mmdec.core.tree import merge_chains, trees_from_lists
from mmdec.drafters.registry import built_in_drafter
from mmdec.drafters.without_weights import HitRate, prompts_with_sources
from mmdec.errors import InputError
from mmdec.types import Context, Draft, Needs, Plan, Scores, Target, Verdict

HASH_BASE = 1_000_003  # base of the polynomial hash of n-grams, modulo HASH_MODULUS
HASH_MODULUS = (1 << 61) - 1
INVERSE_OF_BASE = pow(HASH_BASE, -1, HASH_MODULUS)


@final
class NgramIndex:
    """One batch row's text (prompt and new tokens), and the last positions of its n-grams.

    It also counts how often a match of each length predicted the next token correctly.
    """

    __slots__ = ("_earlier", "_hashes", "_heads", "_last", "_rates", "text")

    def __init__(self, tokens: Sequence[int], longest: int) -> None:
        self.text: list[int] = []
        self._hashes = [0] * longest  # [n - 1]: hash of the last n tokens
        self._heads = [pow(HASH_BASE, n, HASH_MODULUS) for n in range(1, longest + 1)]
        # [n - 1]: hash of an n-gram -> position after its last occurrence
        self._last: list[dict[int, int]] = [{} for _ in range(longest)]
        # [n - 1][i]: position after the last earlier occurrence of the n-gram that ends with token i; 0: there is none
        self._earlier: list[list[int]] = [[] for _ in range(longest)]
        # [n - 1]: how often matches of n tokens predict correctly
        self._rates = [HitRate.assumed(n / (n + 2)) for n in range(1, longest + 1)]
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        text, hashes, end = self.text, self._hashes, len(self.text) + 1
        length, position = self._longest()
        if length:
            self._rates[length - 1].count(text[position] == token)
        text.append(token)
        for n, head in enumerate(self._heads, 1):
            dropped = text[end - n - 1] if end > n else -1
            value = hashes[n - 1] = (hashes[n - 1] * HASH_BASE + token + 1 - (dropped + 1) * head) % HASH_MODULUS
            if end >= n:
                self._earlier[n - 1].append(self._last[n - 1].get(value, 0))
                self._last[n - 1][value] = end
            else:
                self._earlier[n - 1].append(0)

    def remove(self, count: int) -> None:
        """Remove the last `count` tokens from the text. What they showed about matches of each length stays."""
        for _ in range(count):
            end = len(self.text)
            for n, head in enumerate(self._heads, 1):
                earlier, value = self._earlier[n - 1].pop(), self._hashes[n - 1]
                if earlier:
                    self._last[n - 1][value] = earlier
                elif end >= n:
                    del self._last[n - 1][value]
                dropped = self.text[end - n - 1] if end > n else -1
                value += (dropped + 1) * head - (self.text[-1] + 1)
                self._hashes[n - 1] = value * INVERSE_OF_BASE % HASH_MODULUS
            self.text.pop()

    def _longest(self) -> tuple[int, int]:
        """Find the longest n-gram at the end of the text that occurred before.

        Returns:
            Its length, and the position after its latest earlier occurrence; (0, 0) if there is none.
        """
        for n in range(min(len(self._heads), len(self.text)), 0, -1):
            position = self._earlier[n - 1][-1]
            if position:
                return n, position
        return 0, 0

    def probability(self, shortest: int) -> float:
        """Return the probability that the longest present match predicts the next token correctly.

        It is computed from the counts so far.

        Returns:
            0 if there is no match of at least `shortest` tokens.
        """
        n, _ = self._longest()
        return self._rates[n - 1].value if n >= shortest else 0.0

    def probabilities(self, shortest: int, length: int) -> list[float]:
        """Return, for each of `length` copied tokens, the probability that it and all tokens before it are right.

        If a copied token is right, the match has become one token longer; so the next token has the probability of a
        match of that length.

        Returns:
            [] if there is no match of at least `shortest` tokens.
        """
        n, _ = self._longest()
        if n < shortest:
            return []
        probabilities, probability = list[float](), 1.0
        for size in range(n, n + length):
            probability *= self._rates[min(size, len(self._rates)) - 1].value
            probabilities.append(probability)
        return probabilities

    def matches(self, shortest: int) -> list[int]:
        """Return positions from which to copy: those after earlier occurrences of the text's end.

        They follow the latest earlier occurrence of the text's last n tokens, for each n from the longest n-gram down
        to `shortest`.
        """
        text, end, matches = self.text, len(self.text), []
        for n in range(min(len(self._heads), end), shortest - 1, -1):
            at = self._earlier[n - 1][-1]
            if at and at not in matches and text[at - n : at] == text[end - n :]:
                matches.append(at)
        return matches

    def copy(self, at: int, length: int) -> list[int]:
        """Return `length` tokens of the text from position `at` on.

        At the end of the text, it continues with the tokens copied before, so that the copy is periodic.
        """
        tail = self.text[at : at + length]
        period = len(self.text) - at
        while len(tail) < length:
            tail.append(tail[-period])
        return tail


@built_in_drafter("lookup")
@final
class LookupDrafter:
    """A drafter that copies from the prompt, from the encoder's input ids and from the new text.

    It has no weights, fits every target and takes microseconds.

    Args:
        max_ngram: Longest n-gram, in tokens, that counts as a match.
        min_ngram: Shortest n-gram, in tokens, that counts as a match.
    """

    needs = Needs(may_stop_early=True, may_find_nothing=True)

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if min_ngram < 1:
            raise InputError(f"`min_ngram` must be at least 1, but is {min_ngram}. Use 1 for a match of one token.")
        if max_ngram < min_ngram:
            raise InputError(f"`max_ngram` must be at least `min_ngram`, {min_ngram}, but is {max_ngram}.")
        self.name = f"lookup-{min_ngram}-{max_ngram}"
        self._longest, self._shortest = max_ngram, min_ngram

    def check(self, target: Target) -> None:
        """Accept every target."""

    def start(self, context: Context) -> list[NgramIndex]:
        """Return the state of each batch row: the text of the prompt and, if there is one, of the encoder's input."""
        return [NgramIndex(text, self._longest) for text in prompts_with_sources(context, context.mask)]

    def propose(self, state: list[NgramIndex], roots: Tensor, plan: Plan) -> Draft:
        """Draft the text after the longest match, if it is likely enough to be accepted.

        If the plan allows a tree, also draft the texts after shorter matches, as branches.
        """
        if plan.threshold:
            probabilities = [row.probabilities(self._shortest, plan.depth) for row in state]
            first, expected = sum(row[0] for row in probabilities if row), sum(map(sum, probabilities))
            if first < plan.threshold * len(state) or expected < plan.min_expected_accepted * len(state):
                return trees_from_lists(roots, [([], [])] * len(state))
        return trees_from_lists(roots, [self._tree(row, plan) for row in state])

    def update(self, state: list[NgramIndex], draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Append the new tokens of this round to each batch row's text."""
        self.rewrite(state, [0] * len(state), verdict.new_tokens)

    def rewrite(self, state: list[NgramIndex], removed: Sequence[int], added: Sequence[Sequence[int]]) -> None:
        for row, count, tokens in zip(state, removed, added, strict=True):
            row.remove(count)
            for token in tokens:
                row.add(token)

    def select(self, state: list[NgramIndex], live: Tensor) -> None:
        state[:] = [state[index] for index in live.tolist()]

    def _tree(self, row: NgramIndex, plan: Plan) -> tuple[list[int], list[int]]:
        """Draft a tree of copies for one batch row: after the longest match, and after shorter ones.

        Returns:
            Tokens and parents' indices of the nodes below the root; parent 0 is the root.
        """
        depth = min(plan.depth, plan.nodes)
        matches = row.matches(self._shortest)[: 1 if plan.is_chain else None]
        return merge_chains([row.copy(at, depth) for at in matches], plan.nodes)
