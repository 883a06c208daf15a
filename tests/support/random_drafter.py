"""A drafter for tests: random trees, in which each token is right with a given probability, and else random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mmdec.core.tree import trees_from_lists
from mmdec.types import Context, Draft, Needs, Plan, Scores, Target, Verdict


@dataclass
class Memory:
    """The drafter's memory of a run."""

    rng: random.Random
    texts: list[list[int]]  # each row's expected text, with the prompt
    tokens: list[list[int]]  # each row's text so far
    vocabulary: int = 1  # number of tokens


class RandomDrafter:
    """Drafts random trees. texts: the texts of plain decoding, with the prompts. right: probability that a node below
    right nodes has the next token of its row's text."""

    name = "wild"
    needs = Needs()

    def __init__(self, seed: float, texts: Sequence[Sequence[int]] = (), right: float = 0.6) -> None:
        self.seed, self.texts, self.right = seed, [list(text) for text in texts], right
        self._vocabulary = 1

    def check(self, target: Target) -> None:
        self._vocabulary = target.vocab_size

    def start(self, context: Context) -> Memory:
        prompts = context.tokens.tolist()
        texts = self.texts if len(self.texts) == len(prompts) else [[] for _ in prompts]
        return Memory(random.Random(self.seed), texts, prompts, self._vocabulary)

    def propose(self, state: Memory, roots: Tensor, plan: Plan) -> Draft:
        return trees_from_lists(roots, [self._tree(state, row, plan) for row in range(len(roots))])

    def _tree(self, state: Memory, row: int, plan: Plan) -> tuple[list[int], list[int]]:
        rng, text, place = state.rng, state.texts[row], len(state.tokens[row])
        count = rng.choice((0, 1, plan.nodes, rng.randint(0, plan.nodes), plan.nodes + 3))  # also more than planned
        tokens, parents, depths, faithful = list[int](), list[int](), [0], [True]
        for node in range(1, count + 1):
            parent = node - 1 if rng.random() < 0.5 else rng.randrange(node)
            if depths[parent] >= plan.depth and rng.random() < 0.9:
                parent = 0
            ahead = place + depths[parent]
            known = faithful[parent] and ahead < len(text)
            right = known and rng.random() < self.right
            tokens.append(text[ahead] if right else rng.randrange(state.vocabulary))
            parents.append(parent)
            depths.append(depths[parent] + 1)
            faithful.append(right)
        return tokens, parents

    def update(self, state: Memory, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        for row, (tokens, length) in enumerate(zip(verdict.tokens.tolist(), verdict.lengths.tolist(), strict=True)):
            state.tokens[row] += tokens[:length]

    def select(self, state: Memory, live: Tensor) -> None:
        state.tokens = [state.tokens[row] for row in live.tolist()]
        state.texts = [state.texts[row] for row in live.tolist()]
