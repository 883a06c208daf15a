"""Drafts with prompt tokens (PPD, Chen et al. 2024, arXiv 2405.18628; PaSS, Monea et al. 2023, arXiv 2311.13581).

Below a node of the draft stands a chain of soft nodes, whose inputs are trained embeddings. The target's logits at the
i-th of them guess the token i places after the one that the target chooses at the node. A round's pass so verifies one
draft and guesses the next; the guesses below the last accepted node are drafted. Where it ends is not known before, so
soft nodes stand below several nodes.

The plan's nodes are divided greedily. A token's gain is the probability that its whole path is accepted. The gain of
the j-th soft node below a node is the probability that the accepted path ends there, times the probability that the
next round accepts j tokens; PPD searches its trees by the same expectation, but in advance and for all states at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import final

import torch
from torch import Tensor

from mmdec.checks.fingerprint import fingerprint
from mmdec.core.tree import int_list, int_rows, top_indices, trees_from_lists
from mmdec.core.tree_shape import HeadAccuracy, Path, count_ranks, default_probabilities
from mmdec.drafters.fit import check_drafter_device, check_target_sizes
from mmdec.drafters.prompt_tokens.network import PromptTokens
from mmdec.errors import InputError
from mmdec.types import Context, Draft, Needs, Plan, Prior, Scores, Target, TreeShape, Verdict


@dataclass
class PromptTokensState:
    """The drafter's state of one `generate` call."""

    shape: TreeShape
    guesses: list[list[list[int]]]  # [row][place][rank] -> token, of the soft nodes below the last accepted node


@final
class PromptTokensDrafter:
    """A drafter that reads the target's logits at soft nodes. It holds the embeddings only.

    Args:
        network: The trained embeddings.
    """

    def __init__(self, network: PromptTokens) -> None:
        self.network = network.eval()
        self._prior = Prior(
            network.ranks or tuple(map(tuple, default_probabilities(network.max_depth))),
            is_measured=bool(network.ranks),
        )
        self.needs = Needs(prior=self._prior)

    @property
    def name(self) -> str:
        """A name made of the number of places and copies, and a hash of the embeddings and probabilities."""
        network = self.network
        return f"prompt_tokens-{network.max_depth}-{network.copies}-{fingerprint(network, self._prior)}"

    def check(self, target: Target) -> None:
        """Raise InputError for a target of other sizes, or one that cannot read soft nodes."""
        config = self.network.config
        check_target_sizes(target, config.hidden_size, config.vocab_size)
        if not getattr(target, "reads_soft_nodes", False):
            raise InputError(
                "`drafter` must suit the model, but prompt tokens need a decoder-only model without recurrent layers, "
                f"and {target.name} is not. Use lookup."
            )
        check_drafter_device(target, self.network.embeddings.device)

    def start(self, context: Context) -> PromptTokensState:
        """Return the state of one call. The prompt's pass has no soft nodes, so the first round drafts no tokens."""
        return PromptTokensState(context.tree_shape or HeadAccuracy(self._prior.ranks), [[] for _ in context.tokens])

    def propose(self, state: PromptTokensState, roots: Tensor, plan: Plan) -> Draft:
        """Draft the last pass's guesses, and soft nodes for those of the next."""
        probabilities = state.shape.probabilities()
        trees, indices = list[tuple[list[int], list[int]]](), list[list[int]]()
        for root, guesses in zip(int_list(roots), state.guesses, strict=True):
            places = divide_nodes(probabilities, len(guesses), plan, self.network.copies)
            paths = sorted(places)  # the likeliest path first: if it is accepted, no cache entry must be moved
            node_of = {path: node for node, path in enumerate(paths)}
            tokens = [guesses[len(path) - 1][path[-1]] for path in paths if path]
            parents = [node_of[path[:-1]] for path in paths if path]
            inputs = [-1] * len(paths)
            for path in paths:
                below = self.network.chains_below(node_of[path], 1 + len(parents), places[path])
                parents += below[0]
                inputs += below[1]
            trees.append((tokens + [root] * (len(parents) - len(tokens)), parents))
            indices.append(inputs)
        draft = trees_from_lists(roots, trees)
        size = draft.tokens.shape[1]
        table = torch.tensor([[*row, *[-1] * (size - len(row))] for row in indices], device=roots.device)
        return replace(draft, soft=self.network.inputs_of(table))

    def update(self, state: PromptTokensState, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Count which guesses were right, and read those of the soft nodes below the last accepted node."""
        count_ranks(state.shape, state.guesses, verdict)
        logits, counts = list[Tensor](), list[int]()
        rows = zip(int_rows(draft.parents), draft.soft_nodes, int_rows(verdict.path), strict=True)
        for row, (parents, soft, path) in enumerate(rows):
            place, above = 0, {max(path)}  # a parent's index is lower than its children's
            while place < self.network.max_depth:
                above = {node for node, parent in enumerate(parents) if soft[node] and parent in above}
                if not above:
                    break
                logits.append(scores.logits[row, sorted(above)].float().mean(0))
                place += 1
            counts.append(place)
        ranked = int_rows(top_indices(torch.stack(logits), state.shape.width)) if logits else []
        ends = accumulate(counts)
        state.guesses = [ranked[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def select(self, state: PromptTokensState, live: Tensor) -> None:
        state.guesses = [state.guesses[row] for row in int_list(live)]


def divide_nodes(
    probabilities: Sequence[Sequence[float]], guessed: int, plan: Plan, copies: int = 1
) -> dict[Path, int]:
    """Divide a plan's nodes between guessed tokens and soft nodes.

    Args:
        probabilities: [place][rank], the probability that a guess is right if those above it are.
        guessed: Number of places for which there are guesses.
        plan: The size of the draft.
        copies: Number of soft nodes that guess one place.

    Returns:
        The ranks along the path of each chosen token, () for the root; and the number of places that soft nodes below
        it guess.
    """
    ahead = list(accumulate((row[0] for row in probabilities), mul))
    levels, left = probabilities[: min(guessed, plan.depth)], plan.nodes
    ends: dict[Path, float] = {(): 1.0}  # path -> probability that the accepted path ends there
    places: dict[Path, int] = {(): 0}
    heap: list[tuple[float, bool, Path]] = [(-ahead[0] / copies, True, ())]  # of equal gains, the token's comes first
    if levels:
        heap.append((-levels[0][0], False, (0,)))
    heapq.heapify(heap)
    while heap and left > 0:
        value, is_soft, path = heapq.heappop(heap)
        if is_soft:
            gain = ends[path] * ahead[places[path]] / copies
            if gain <= 0 or copies > left:
                continue
            if gain < -value:  # a token below the path has taken a part of its probability meanwhile
                heapq.heappush(heap, (-gain, True, path))
                continue
            places[path] += 1
            left -= copies
            if places[path] < len(ahead):
                heapq.heappush(heap, (-ends[path] * ahead[places[path]] / copies, True, path))
            continue
        probability, (*above, rank) = -value, path
        if probability <= 0:
            continue
        ends[path], places[path] = probability, 0
        ends[path[:-1]] -= probability
        left -= 1
        heapq.heappush(heap, (-probability * ahead[0] / copies, True, path))
        row = levels[len(above)]
        if len(path) < len(levels):
            heapq.heappush(heap, (-probability * levels[len(path)][0], False, (*path, 0)))
        if rank + 1 < len(row):
            heapq.heappush(heap, (-probability / row[rank] * row[rank + 1], False, (*above, rank + 1)))
    return places
