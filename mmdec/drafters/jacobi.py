"""Jacobi and lookahead decoding: drafts the target's own predictions at places that it has not reached yet.

What the target predicts after a wrong token is often right one place further on. Each pass predicts all places of a
window again, so that guesses improve from round to round. A chain (`Plan.is_chain`) is Jacobi decoding:
the predictions after the first mismatch. A tree is lookahead decoding. It is a comb: a trunk of guesses, and below
each of its nodes a tooth with the guesses of the following rounds. A tooth and the prediction at its end are an n-gram
that the target wrote by itself. These n-grams, and those of the text, are stored by their first token; when it is the
newest, they are drafted as further branches. Models that were trained for it (consistency large language models)
predict several places rightly at once; they need nothing else.

References:
    Jacobi decoding (Santilli et al. 2023). Lookahead decoding (Fu et al. 2024, 2402.02057); there the nodes of the
    window are not accepted, here they are. CLLM (2403.00835), Jacobi Forcing (2512.14681).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import final

from torch import Tensor

from mmdec.core.tree import int_rows, merge_chains, trees_from_lists
from mmdec.drafters.registry import built_in_drafter
from mmdec.drafters.without_weights import HitRate, masked_rows, worthwhile_prefix
from mmdec.types import Context, Draft, Needs, Plan, Scores, Target, Verdict

MAX_LEVELS = 4  # tokens of a stored n-gram after its first, and levels of the comb; the paper's N is one more
MAX_NGRAMS = 12  # of each first token, at most this many n-grams are stored, the newest
MAX_GUESS_TEXT = 1024  # the first guesses are drawn from so many tokens of the prompt
MAX_STORED = 2**15  # first tokens of n-grams that are stored; the oldest are forgotten
PRIOR_RATE = 0.3  # the assumed probability that a guess is right, before anything was counted


@final
class JacobiRow:
    """The state of a batch row.

    Args:
        text: The prompt.
    """

    def __init__(self, text: Sequence[int]) -> None:
        self.newest = list(text[-MAX_LEVELS - 1 :])
        # levels[k][j]: guess for the place j + k after the newest token, made k rounds after that of levels[0][j];
        # [0][0] is the newest token itself
        self.levels: list[list[int]] = [[]]
        self.capacity = 1  # number of levels of the last plan's comb
        self.ngrams = dict[int, list[tuple[int, ...]]]()  # first token -> what may follow it, the newest last
        # how often the first token of the comb, and of the newest stored n-gram, was right
        self.rates = {"comb": HitRate.assumed(PRIOR_RATE), "stored": HitRate.assumed(PRIOR_RATE)}
        self.first_tokens = dict[str, int]()  # those of the last draft
        self._text = list(text)[-MAX_GUESS_TEXT:] or [0]
        self._rng = random.Random(0)
        for at in range(len(text) - 1):
            self.store(text[at], text[at + 1 : at + 1 + MAX_LEVELS])

    def random_token(self) -> int:
        """Return a token of the prompt, as the first guess of a place."""
        return self._rng.choice(self._text)

    def store(self, first: int, following: Sequence[int]) -> None:
        if not following:
            return
        ngrams = self.ngrams.pop(first, [])
        self.ngrams[first] = [*(ngram for ngram in ngrams if ngram != tuple(following)), tuple(following)][-MAX_NGRAMS:]
        if len(self.ngrams) > MAX_STORED:
            del self.ngrams[next(iter(self.ngrams))]

    def stored_ngrams(self, first: int) -> list[list[int]]:
        """Return the n-grams stored for a token, the newest first; longer ones before those that they begin with."""
        newest = self.ngrams.get(first, [])[::-1]
        newest.sort(key=len, reverse=True)
        return [list(ngram) for ngram in newest]

    def fit(self, root: int, width: int, levels: int) -> None:
        """Cut and fill up the comb to `width` columns and at most `levels` levels."""
        self.levels, self.capacity = self.levels[:levels], levels
        for level in self.levels:
            del level[width:]
            level += [self.random_token() for _ in range(width - len(level))]
        self.levels[0][0] = root
        first = self.levels[1][:1] if len(self.levels) > 1 else self.levels[0][1:2]
        self.first_tokens = {
            kind: ngram[0] for kind, ngram in (("comb", first), ("stored", self.follow(root, 1))) if ngram
        }

    def follow(self, token: int, length: int) -> list[int]:
        """Return at most `length` tokens that stored n-grams put after a token."""
        chain = list[int]()
        while len(chain) < length and (stored := self.stored_ngrams(chain[-1] if chain else token)):
            chain += stored[0]
        return chain[:length]

    def columns(self) -> list[list[int]]:
        """Return the path below the root to the end of each tooth."""
        trunk = self.levels[0]
        return [[*trunk[1 : j + 1], *(level[j] for level in self.levels[1:])] for j in range(len(trunk))]

    def move(self, nodes: dict[tuple[int, int], int], best: Sequence[int], length: int) -> None:
        """Add a round's predictions to the comb, store its n-grams, and move it on.

        Args:
            nodes: (parent, token) -> node of the draft.
            best: The likeliest token after each node.
            length: Number of new tokens.
        """
        if not nodes:  # nothing was drafted
            self.levels = [level[length:] for level in self.levels]
            return
        trunk, teeth, newest = self.levels[0], self.levels[1:], list[int]()
        for column, path in enumerate(self.columns()):
            node = 0
            for token in path:
                node = nodes.get((node, token), -1) if node >= 0 else -1
            if node >= 0:
                newest.append(best[node])
            else:  # the column was not drafted: its place keeps its guess
                newest.append((trunk[column + len(self.levels) :] or [self.random_token()])[0])
            if node >= 0 and teeth:
                self.store(trunk[column], [*(level[column] for level in teeth), newest[-1]])
        if not teeth:  # a chain: predictions after guesses that were predicted again are n-grams, too
            for column in range(len(trunk) - 1):
                run = column
                while run + 1 < len(trunk) and trunk[run + 1] == newest[run]:
                    run += 1
                if run > column:
                    self.store(trunk[column], newest[column : run + 1][:MAX_LEVELS])
        # levels[k][j] is the guess for the place j + k: without the first level, all are one place nearer
        is_full = len(self.levels) >= self.capacity
        self.levels = [level[length - is_full :] for level in (*(teeth if is_full else self.levels), newest)]


@built_in_drafter("jacobi")
@final
class JacobiDrafter:
    """A drafter that proposes the target's own predictions at unaccepted nodes. It has no weights."""

    name = "jacobi"
    needs = Needs(may_stop_early=True)

    def check(self, target: Target) -> None:
        """Accept every target."""

    def start(self, context: Context) -> list[JacobiRow]:
        """Return the state of each batch row, which stores the n-grams of the prompt's text."""
        return [JacobiRow(text) for text in masked_rows(context.tokens, context.text_mask)]

    def propose(self, state: list[JacobiRow], roots: Tensor, plan: Plan) -> Draft:
        """Draft the comb and the stored n-grams of the newest token; as a chain, the likelier of the two."""
        rows = zip(roots.tolist(), state, strict=True)
        return trees_from_lists(roots, [self._tree(row, root, plan) for root, row in rows])

    def update(self, state: list[JacobiRow], draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Store the n-grams of this round, and move the comb on by the new tokens."""
        predicted = int_rows(scores.logits.argmax(-1))
        trees = zip(int_rows(draft.tokens), int_rows(draft.parents), draft.size.tolist(), predicted, strict=True)
        for row, (tokens, parents, size, best), new in zip(state, trees, verdict.new_tokens, strict=True):
            for kind, token in row.first_tokens.items():
                row.rates[kind].count(token == new[0])
            row.first_tokens = {}
            row.move({(parents[node], tokens[node]): node for node in range(size - 1, 0, -1)}, best, len(new))
            for token in new:
                row.newest = [*row.newest[-MAX_LEVELS:], token]
                row.store(row.newest[0], row.newest[1:])

    def select(self, state: list[JacobiRow], live: Tensor) -> None:
        state[:] = [state[index] for index in live.tolist()]

    def _tree(self, row: JacobiRow, root: int, plan: Plan) -> tuple[list[int], list[int]]:
        """Draft a tree for one batch row.

        Returns:
            Tokens and parents' indices of the nodes below the root; parent 0 is the root.
        """
        depth = min(plan.depth, plan.nodes)
        if plan.is_chain:
            row.fit(root, depth + 1, 1)
            rates = {kind: row.rates[kind].value for kind in row.first_tokens}
            if not rates:
                return [], []
            best = max(rates, key=rates.__getitem__)
            chain = row.levels[0][1:] if best == "comb" else row.follow(root, depth)
            probabilities = [rates[best] ** (step + 1) for step in range(len(chain))]
            chain = worthwhile_prefix(chain, probabilities, plan)
            return chain, list(range(len(chain)))
        # about half of the nodes are the comb's, width * levels, and half are stored n-grams
        levels = min(MAX_LEVELS, depth)
        width = max(1, min((plan.nodes + 1) // (2 * levels), depth - levels + 2))
        row.fit(root, width, levels)
        comb = row.columns()
        room = plan.nodes - (width * len(row.levels) - 1)
        stored = [ngram[:depth] for ngram in row.stored_ngrams(root)[: max(1, room // levels)]]
        return merge_chains([*stored, *comb], plan.nodes)
