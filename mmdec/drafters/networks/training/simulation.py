"""Simulates decoding to measure a drafter's tokens per round, without running the model.

Each text of n tokens, EOS included, is a matrix of ranks (n - 1, K). Row i belongs to a draft whose root is token i.
Column k is the rank that the drafter gives to the true token i + k; rank 0 is the likeliest token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mmdec.core.tree_shape import MAX_RANKS, HeadAccuracy, Node, default_probabilities

SIMULATIONS = 3  # number of simulations with a tree; each measures the accuracies that shape the next tree


@dataclass(frozen=True)
class Simulation:
    """Totals of simulated decoding over all texts. The model's passes over prompts are not counted."""

    tokens: int
    rounds: int
    hits: list[list[int]]  # (K, R) how often the true token had rank r at depth k
    trials: list[int]  # (K,) how often depth k was reached

    @property
    def tokens_per_round(self) -> float:
        """The new tokens per pass of the target model, with the token that the target itself adds."""
        return self.tokens / self.rounds if self.rounds else 1.0


def simulate(texts: Sequence[Tensor], tree: Sequence[Node], heads: int) -> Simulation:
    """Simulate decoding with the same draft tree in all rounds.

    Args:
        texts: For each text the ranks (n - 1, K) of its true tokens.
        tree: The nodes of the draft tree without the root.
        heads: Number of heads, K.
    """
    children = {(parent, rank): node for node, (parent, _, rank) in enumerate(tree, 1)}
    hits, trials = [[0] * MAX_RANKS for _ in range(heads)], [0] * heads
    tokens = rounds = 0
    for text in texts:
        rows: list[list[int]] = text.tolist()
        at = 0
        while at < len(rows):
            node, accepted, left = 0, 0, len(rows) - at
            while (child := children.get((node, rows[at][accepted]) if accepted < heads else (-1, 0))) is not None:
                node, accepted = child, accepted + 1
                if accepted == left:
                    break
            gained = min(accepted + 1, left)
            for depth in range(min(gained, heads, 1 + max((level for _, level, _ in tree), default=-1))):
                trials[depth] += 1
                if rows[at][depth] < MAX_RANKS:
                    hits[depth][rows[at][depth]] += 1
            tokens, rounds, at = tokens + gained, rounds + 1, at + gained
    return Simulation(tokens, rounds, hits, trials)


def measure(texts: Sequence[Tensor], heads: int, nodes: int) -> tuple[float, float, list[list[float]]]:
    """Simulate decoding, first with a chain of one token from each head, then with trees.

    Args:
        texts: For each text the ranks (n - 1, K) of its true tokens.
        heads: K.
        nodes: Size of a tree.

    Returns:
        Tokens per round with chains, tokens per round with trees, and the accuracies (K, R): how often rank r was
        right at depth k, from 0 to 1.
    """
    chain = simulate(texts, HeadAccuracy(default_probabilities(heads)).tree(heads, heads), heads)
    probabilities, tree = estimate(chain), chain
    for _ in range(SIMULATIONS if nodes > 0 else 0):
        tree = simulate(texts, HeadAccuracy(probabilities).tree(nodes, min(heads, max(nodes - 1, 1))), heads)
        probabilities = estimate(tree)
    return chain.tokens_per_round, tree.tokens_per_round, probabilities


def estimate(simulation: Simulation) -> list[list[float]]:
    """Compute accuracies (K, R) from the counts of a simulation: how often rank r is right at depth k, from 0 to 1.

    For smoothing, the accuracies of depth k - 1 count as one more trial.
    """
    guess = default_probabilities(1)[0]
    probabilities = []
    for hits, trials in zip(simulation.hits, simulation.trials, strict=True):
        guess = [(hit + before) / (trials + 1) for hit, before in zip(hits, guess, strict=True)]
        probabilities.append(guess)
    return probabilities


def spread(texts: Sequence[Tensor], head: int, ranks: Sequence[int]) -> list[float]:
    """Return for each r in `ranks` how often, from 0 to 1, the true token is among a head's r likeliest tokens.

    Earlier heads do not have to be right.

    Args:
        texts: For each text the ranks (n - 1, K) of its true tokens.
        head: The head's index, from 0.
    """
    accepted_ranks = [rank for text in texts for rank in text[: len(text) - head, head].tolist()]
    return [sum(rank < limit for rank in accepted_ranks) / max(len(accepted_ranks), 1) for limit in ranks]
