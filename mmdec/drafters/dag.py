"""Drafts for a speech translator from the graph (DAG) of its fast decoder.

The graph gives the distribution of the next unit exactly, given the units accepted so far. With
alpha_t(j) = P(y_1..y_t, a_t = v_j) and the links E, it is P(y | y_1..y_t) ~ sum_j (alpha_t E)_j P(y | v_j). Every path
reaches the last vertex, which emits </s>. An accepted prefix therefore needs no alignment, only one product with E for
each unit, also where it differs from the graph's best path.

The drafter holds the graphs of one batch instead of weights: make one drafter for each call.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import final

import numpy as np
from torch import Tensor

from mmdec.decode.tree import trees_from_lists
from mmdec.types import Context, Draft, InputError, Needs, Plan, Scores, Target, Verdict

FLOOR = 1e-6  # minimum emission probability: the verifier may accept units that the graph rules out
ALTERNATIVE = 0.02  # a second-best unit is drafted if the probability of it and all units before it is at least this
TAIL = 6  # maximum units drafted after a second-best unit


@dataclass
class RowState:
    """One row's graph, and the distribution over the vertex that emitted its last unit."""

    links: np.ndarray  # (L, L), [i, j]: probability of the jump from vertex i to j
    emissions: np.ndarray  # (L, V), probability of each unit on each vertex
    alpha: np.ndarray  # (L,), the probability of each vertex to have emitted the last unit

    def next_distributions(self, alpha: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return distributions over the next vertex (L,) and over the next unit (V,)."""
        ahead = alpha @ self.links
        return ahead, ahead @ self.emissions

    def after(self, ahead: np.ndarray, unit: int) -> np.ndarray:
        """Return the new alpha (L,): the distribution over the vertices that may have emitted `unit`. ahead: (L,), the
        distribution over the next vertex, before its unit is known."""
        alpha = ahead * np.maximum(self.emissions[:, unit], FLOOR)
        total = alpha.sum()
        return alpha / total if total > 0.0 else ahead  # past the last vertex there is no distribution


@final
class DagDrafter:
    """Drafts the graph's most probable continuation, with a second branch where the graph is unsure."""

    name = "lattice"
    needs = Needs()

    def __init__(self, emissions: Tensor, links: Tensor, lengths: Tensor, eos: int) -> None:
        """emissions: (B, L, V) log-probabilities. links: (B, L, L) log-probabilities. lengths: (B,) vertices of each
        graph.
        eos: the unit that ends a path.
        """
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

    def propose(self, memory: list[RowState], roots: Tensor, plan: Plan) -> Draft:
        """Draft the most probable units after each root, with a second branch where the graph is unsure."""
        return trees_from_lists(roots, [self._tree(state, plan) for state in memory])

    def _tree(self, state: RowState, plan: Plan) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        second: list[tuple[float, int, int, np.ndarray, int]] = []  # (-probability, node, unit, next vertices, depth)
        alpha, node, chance = state.alpha, 0, 1.0
        for depth in range(1, min(plan.depth, plan.nodes) + 1):
            ahead, units = state.next_distributions(alpha)
            unit, other = _two(units)
            total = float(units.sum())
            if total <= 0.0:
                break
            if chance * float(units[other]) / total >= ALTERNATIVE:
                heapq.heappush(second, (-chance * float(units[other]) / total, node, other, ahead, depth))
            tokens.append(unit)
            parents.append(node)
            node, chance = len(tokens), chance * float(units[unit]) / total
            if unit == self.eos:
                break
            alpha = state.after(ahead, unit)
        while second and len(tokens) < plan.nodes:
            _, node, unit, ahead, depth = heapq.heappop(second)
            for _ in range(min(TAIL + 1, plan.nodes - len(tokens), plan.depth - depth + 1)):
                tokens.append(unit)
                parents.append(node)
                if unit == self.eos:
                    break
                node, alpha = len(tokens), state.after(ahead, unit)
                ahead, units = state.next_distributions(alpha)
                unit = int(units.argmax())
        return tokens, parents

    def update(self, memory: list[RowState], draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Advance each row's distribution over the last unit's vertex (alpha) by the accepted units."""
        for state, units, length in zip(memory, verdict.tokens.tolist(), verdict.lengths.tolist(), strict=True):
            for unit in units[:length]:
                state.alpha = state.after(state.alpha @ state.links, unit)

    def select(self, memory: list[RowState], live: Tensor) -> None:
        """Keep only the rows whose indices are in `live` (K,) int64, in that order."""
        memory[:] = [memory[row] for row in live.tolist()]


def _two(chances: np.ndarray) -> tuple[int, int]:
    """Return the most probable and the second most probable unit of chances (V,)."""
    first = int(chances.argmax())
    kept = chances[first]
    chances[first] = -1.0
    second = int(chances.argmax())
    chances[first] = kept
    return first, second
