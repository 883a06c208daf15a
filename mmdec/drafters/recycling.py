"""Token Recycling (Luo et al. 2024): stores the target's top tokens after each token, and drafts a tree of them.

The tokens stored for a token are called its successors. Every output of the target, at accepted and at rejected nodes,
replaces the successors of that node's token (section 3.1 of the paper). A draft is a fixed tree over the successors,
cut to the planned size (section 3.2). There are no weights. This code was written from the paper.

An addition: if the last two or three tokens occurred before, the text after them may become the tree's best path (as in
SAM-Decoding, Hu et al. 2024). This happens if such copies have been right more often than best successors. How often
copies and best successors were right is counted over the prompt and the new text. Successors are counted in groups, by
the lead of the best logit over the second best. A chain ends where its next token is too unlikely (`Plan.threshold`). A
chain is left out if too few of its tokens are expected to be accepted (`Plan.min_expected_accepted`).
"""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from mmdec.core.tree import top_indices, trees_from_lists
from mmdec.core.tree_shape import Path, likeliest_paths
from mmdec.drafters.lookup import NgramIndex
from mmdec.drafters.registry import built_in_drafter
from mmdec.drafters.without_weights import HitRate, masked_rows, worthwhile_prefix
from mmdec.errors import InputError
from mmdec.types import Context, Draft, Needs, Plan, Scores, Target, Verdict

MAX_SUCCESSORS = 8  # maximum successors (likely next tokens) that are stored for each token
MAX_TREE_NODES = 80  # nodes of the largest tree
HIT_PROBABILITY = 0.85  # assumed probability that one of a token's stored successors is the next token
# The assumed probability that the k-th successor is right falls as 1 / k^1.7. With it, the largest tree has levels of
# 8, 21, 25, 18, 6, 1, 1 nodes; the paper's has 8, 21, 25, 15, ...
RANK_DECAY = 1.7
MIN_MATCH, MAX_MATCH = 2, 3  # shortest and longest n-gram, in tokens, whose earlier continuation may be copied
# a token's successors belong to a group by the best logit minus the second best, in nats; bounds between the groups
LEAD_BOUNDS = (1.0, 2.5, 5.0)
PRIOR_HIT_RATES = (0.15, 0.25, 0.4, 0.6, 0.25)  # for each group, the assumed share of best successors that are right
# index of the last group: successors that come from the prompt or from `initial`, without logits
PROMPT_GROUP = len(LEAD_BOUNDS) + 1


@final
class Successors:
    """The drafter's state of one `generate` call: each token's successors (likely next tokens), the best first.

    All rows of the batch share them. `rows` holds each row's text and its n-grams.
    """

    def __init__(self, initial: Tensor | None) -> None:
        self._initial = initial
        self._seen: dict[int, list[int]] = {}
        self._groups: dict[int, int] = {}  # token -> number of the group of its best successor
        self._rates = [HitRate.assumed(rate) for rate in PRIOR_HIT_RATES]  # of each group's best successors
        self.rows: list[NgramIndex] = []

    def probability(self, token: int) -> float:
        """Return the probability in [0, 1] that the token's best successor is right.

        It is the share that was right in its group.
        """
        return self._rates[self._groups.get(token, PROMPT_GROUP)].value

    def count(self, token: int, successor: int) -> None:
        """Record whether the token's best successor was right.

        Args:
            successor: The token that followed in the text.
        """
        if best := self.after(token)[:1]:
            self._rates[self._groups.get(token, PROMPT_GROUP)].count(best[0] == successor)

    def after(self, token: int) -> list[int]:
        successors = self._seen.get(token)
        if successors is None:
            initial = self._initial
            successors = (
                [] if initial is None or token >= len(initial) else [t for t in initial[token].tolist() if t >= 0]
            )
            self._seen[token] = successors
        return successors

    def best(self, root: int, depth: int) -> tuple[list[int], list[float]]:
        """Follow the best successors from `root` on, at most `depth` tokens.

        Returns:
            The tokens, and for each of them the probability that it and all tokens before it are right.
        """
        chain, probabilities, probability = list[int](), list[float](), 1.0
        while len(chain) < depth and (best := self.after(root)[:1]):
            probability *= self.probability(root)
            root = best[0]
            chain.append(root)
            probabilities.append(probability)
        return chain, probabilities

    def replace(self, token: int, successors: list[int], lead: float) -> None:
        """Replace a token's successors.

        Args:
            lead: The target's logit of the first successor minus that of the second, in nats.
        """
        self._seen[token] = successors
        self._groups[token] = bisect(LEAD_BOUNDS, lead)

    def put_first(self, token: int, successor: int) -> None:
        self._seen[token] = [successor, *(t for t in self.after(token) if t != successor)][:MAX_SUCCESSORS]


@built_in_drafter("recycling")
@final
class RecyclingDrafter:
    """A drafter that proposes trees of tokens that the target found likely after the same token earlier.

    It has no weights; it may hold initial successors.

    Args:
        initial: (V, 8) int64, initial successors (likely next tokens) of each token, the best first, -1 for none. None:
            tokens begin without successors.
    """

    needs = Needs(may_stop_early=True, may_find_nothing=True)

    def __init__(self, initial: Tensor | None = None) -> None:
        if initial is not None and (
            initial.ndim != 2 or initial.shape[1] != MAX_SUCCESSORS or initial.is_floating_point()
        ):
            raise InputError(
                f"`initial` must be a (V, {MAX_SUCCESSORS}) matrix of token ids, but is {tuple(initial.shape)} "
                f"{initial.dtype}. Give each token's successors, -1 for none."
            )
        self._initial = None if initial is None else initial.to("cpu", torch.long, copy=True)
        self.name = "recycling"
        if self._initial is not None:
            self.name += "-" + hashlib.blake2b(self._initial.numpy().tobytes(), digest_size=6).hexdigest()

    def check(self, target: Target) -> None:
        """Raise InputError if the initial successors are for another vocabulary size."""
        if self._initial is None:
            return
        rows, max_token = len(self._initial), int(self._initial.max()) if len(self._initial) else -1
        if rows != target.vocab_size or max_token >= target.vocab_size:
            raise InputError(
                f"`initial` must have a row for each of the target's {target.vocab_size} tokens and only such tokens, "
                f"but has {rows} rows and tokens up to {max_token}. Use a matrix of the same tokenizer, or none."
            )

    def start(self, context: Context) -> Successors:
        """Return the drafter's state: each prompt token's successor is the token after it. No model is run."""
        state = Successors(self._initial)
        for text in masked_rows(context.tokens, context.mask):
            for token, successor in pairwise(text):
                state.count(token, successor)
                state.put_first(token, successor)
            state.rows.append(NgramIndex(text, MAX_MATCH))
        return state

    def propose(self, state: Successors, roots: Tensor, plan: Plan) -> Draft:
        """Draft a tree after each batch row's last token: the nodes of the fixed tree for which successors are stored.

        If `plan.is_chain`, draft the best path, up to the first token that is too unlikely.
        """
        trees = []
        for root, row in zip(roots.tolist(), state.rows, strict=True):
            depth = min(plan.depth, plan.nodes)
            copy_is_likelier = row.probability(MIN_MATCH) > state.probability(root)
            copied = row.copy(matches[0], depth) if copy_is_likelier and (matches := row.matches(MIN_MATCH)) else []
            if depth == plan.nodes:
                chain = worthwhile_prefix(copied, row.probabilities(MIN_MATCH, depth), plan)
                chain = chain or worthwhile_prefix(*state.best(root, depth), plan)
                trees.append((chain, list(range(len(chain)))))
                continue
            tokens: dict[Path, int] = {(): root}
            below: dict[Path, list[int]] = {(): _move_to_front(copied[:1], state.after(root))}
            for path in tree_template(max(plan.nodes, MAX_TREE_NODES), depth):
                if len(tokens) > plan.nodes:
                    break
                successors = below.get(path[:-1], ())
                if path[-1] < len(successors):
                    token = tokens[path] = successors[path[-1]]
                    copy = [] if any(path) else copied[len(path) : len(path) + 1]
                    below[path] = _move_to_front(copy, state.after(token))
            # depth first: if the likeliest path is accepted, no cache entry must be moved
            nodes = {path: node for node, path in enumerate(sorted(tokens))}
            trees.append(([tokens[path] for path in nodes][1:], [nodes[path[:-1]] for path in nodes if path]))
        return trees_from_lists(roots, trees)

    def update(self, state: Successors, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Store the target's top tokens at each node as successors of the node's token.

        If two nodes have the same token, those at the accepted node are stored. Append the new tokens to the rows'
        texts.
        """
        self.rewrite(state, [0] * len(state.rows), verdict.new_tokens)
        best = top_indices(scores.logits, MAX_SUCCESSORS)
        two = scores.logits.gather(2, best[..., :2]).float()
        leads = (two[..., 0] - two[..., -1]).tolist()
        trees = zip(
            draft.tokens.tolist(), draft.size.tolist(), verdict.path.tolist(), best.tolist(), leads, strict=True
        )
        for tokens, size, path, successors, lead in trees:
            for node in (*range(size), *(node for node in path if node >= 0)):
                state.replace(tokens[node], successors[node], lead[node])

    def rewrite(self, state: Successors, removed: Sequence[int], added: Sequence[Sequence[int]]) -> None:
        for row, count, tokens in zip(state.rows, removed, added, strict=True):
            row.remove(count)
            for token in tokens:
                state.count(row.text[-1], token)
                row.add(token)

    def select(self, state: Successors, live: Tensor) -> None:
        """Keep only the texts of the batch rows with the indices `live` (K,) int64.

        The successors are shared by all rows and stay.
        """
        state.rows = [state.rows[index] for index in live.tolist()]


def _move_to_front(best: list[int], successors: list[int]) -> list[int]:
    """Return the successors with one token moved to the front.

    Args:
        best: A list of that token; [] leaves the order unchanged.
    """
    return [*best, *(token for token in successors if token not in best)]


@lru_cache(maxsize=64)
def tree_template(nodes: int, depth: int) -> tuple[Path, ...]:
    """Return the `nodes` likeliest nodes of a tree of successors, at most `depth` deep, the likeliest first.

    Returns:
        For each node, the ranks along its path from the root; rank k is a token's k-th best successor, from 0.
    """
    total = sum((rank + 1) ** -RANK_DECAY for rank in range(MAX_SUCCESSORS))
    probabilities = [HIT_PROBABILITY * (rank + 1) ** -RANK_DECAY / total for rank in range(MAX_SUCCESSORS)]
    return tuple(likeliest_paths([probabilities] * depth, nodes))
