"""Drafts for a speech translator from the directed acyclic graph (DAG) of its non-autoregressive decoder.

The graph (as in DA-Transformer) gives the exact distribution of the next unit (token) after the accepted ones. With
alpha_t(j) = P(y_1..y_t, a_t = v_j), the probability that vertex j emitted unit t, and the transition matrix E, it is
P(y | y_1..y_t) ~ sum_j (alpha_t E)_j P(y | v_j). So each accepted unit costs one product with E, even if it is not on
the graph's best path. Every path ends at the last vertex, which emits </s>.

The drafter holds the graphs of one batch, not weights: make one drafter for each call.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import final

import numpy as np
from torch import Tensor

from mmdec.core.tree import trees_from_lists
from mmdec.errors import InputError
from mmdec.types import Context, Draft, Needs, Plan, Scores, Target, Verdict

MIN_EMISSION = 1e-6  # least emission probability, because the accepted text may have units to which the graph gives 0
# a branch begins at a second-best unit if it and all units before it have at least this probability
MIN_BRANCH_PROBABILITY = 0.02
MAX_BRANCH_TAIL = 6  # maximum units of a branch after its first one


@dataclass
class RowState:
    """One row's graph, and for each vertex the probability that it emitted the row's last unit."""

    links: np.ndarray  # (L, L), [i, j]: probability of the transition from vertex i to vertex j
    emissions: np.ndarray  # (L, V), probability of each unit at each vertex
    alpha: np.ndarray  # (L,), probability that the vertex emitted the last unit

    def next_distributions(self, alpha: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the distributions over the next vertex (L,) and over the next unit (V,).

        Args:
            alpha: (L,), probability that each vertex emitted the last unit.
        """
        ahead = alpha @ self.links
        return ahead, ahead @ self.emissions

    def after(self, ahead: np.ndarray, unit: int) -> np.ndarray:
        """Return the probability (L,) of each vertex that it emitted the next unit, once this unit is known.

        Args:
            ahead: (L,), probability of each vertex to be the next one, before the unit is known.
            unit: The unit's id.
        """
        alpha = ahead * np.maximum(self.emissions[:, unit], MIN_EMISSION)
        total = alpha.sum()
        # the sum is 0 if no vertex is left, that is, after the last vertex
        return alpha / total if total > 0.0 else ahead


@final
class DagDrafter:
    """Proposes the graph's most probable next units, and a branch where a second unit is likely, too.

    It holds the graphs of one batch.

    Args:
        emissions: (B, L, V), log-probability of each unit at each vertex.
        links: (B, L, L), [b, i, j]: log-probability of the transition from vertex i to j.
        lengths: (B,), each graph's number of vertices.
        eos: Id of the unit that ends a text.
    """

    name = "lattice"
    needs = Needs()

    def __init__(self, emissions: Tensor, links: Tensor, lengths: Tensor, eos: int) -> None:
        self.vocab_size, self.eos = emissions.shape[2], eos
        self.graphs = [
            (link[:size, :size].exp().float().cpu().numpy(), emission[:size].exp().float().cpu().numpy())
            for link, emission, size in zip(links, emissions, lengths.tolist(), strict=True)
        ]

    def check(self, target: Target) -> None:
        if target.vocab_size != self.vocab_size:
            raise InputError(
                f"`drafter` must have the target's {target.vocab_size} units, but its graph has {self.vocab_size}. "
                "Use the graph of the same model."
            )

    def start(self, context: Context) -> list[RowState]:
        states = []
        for links, emissions in self.graphs:
            alpha = np.zeros(len(links), np.float32)
            alpha[0] = 1.0  # the first vertex emits <s>, which is the prompt
            states.append(RowState(links, emissions, alpha))
        return states

    def propose(self, state: list[RowState], roots: Tensor, plan: Plan) -> Draft:
        return trees_from_lists(roots, [self._tree(row, plan) for row in state])

    def _tree(self, state: RowState, plan: Plan) -> tuple[list[int], list[int]]:
        """Return tokens and parents of the most probable path, then of the most probable branches beside it."""
        tokens: list[int] = []
        parents: list[int] = []
        # Branches to draft later, the most probable first. Each is (-its probability, node below which it begins, its
        # first unit, distribution over the next vertex before that unit, depth of that unit).
        second: list[tuple[float, int, int, np.ndarray, int]] = []
        alpha, node, probability = state.alpha, 0, 1.0
        for depth in range(1, min(plan.depth, plan.nodes) + 1):
            ahead, units = state.next_distributions(alpha)
            unit, other = _two_most_probable(units)
            total = float(units.sum())
            if total <= 0.0:
                break
            if probability * float(units[other]) / total >= MIN_BRANCH_PROBABILITY:
                heapq.heappush(second, (-probability * float(units[other]) / total, node, other, ahead, depth))
            tokens.append(unit)
            parents.append(node)
            node, probability = len(tokens), probability * float(units[unit]) / total
            if unit == self.eos:
                break
            alpha = state.after(ahead, unit)
        while second and len(tokens) < plan.nodes:
            _, node, unit, ahead, depth = heapq.heappop(second)
            for _ in range(min(MAX_BRANCH_TAIL + 1, plan.nodes - len(tokens), plan.depth - depth + 1)):
                tokens.append(unit)
                parents.append(node)
                if unit == self.eos:
                    break
                node, alpha = len(tokens), state.after(ahead, unit)
                ahead, units = state.next_distributions(alpha)
                unit = int(units.argmax())
        return tokens, parents

    def update(self, state: list[RowState], draft: Draft, scores: Scores, verdict: Verdict) -> None:
        for row, units in zip(state, verdict.new_tokens, strict=True):
            for unit in units:
                row.alpha = row.after(row.alpha @ row.links, unit)

    def select(self, state: list[RowState], live: Tensor) -> None:
        state[:] = [state[row] for row in live.tolist()]


def _two_most_probable(probabilities: np.ndarray) -> tuple[int, int]:
    """Return the most probable and the second most probable unit.

    Args:
        probabilities: (V,), probability of each unit.
    """
    first = int(probabilities.argmax())
    highest = probabilities[first]
    probabilities[first] = -1.0
    second = int(probabilities.argmax())
    probabilities[first] = highest
    return first, second
