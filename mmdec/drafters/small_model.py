"""A small model drafts for a large one: any target with the same vocabulary can be the small model.

Deterministic trees are EAGLE-2's (Li et al. 2024, section 4): in each layer the `width` nodes with the highest
cumulative log-probability are expanded, and at the end the best nodes of all layers are kept. Sampled trees (for
residual sampling without replacement: RSD, Jeon et al. 2024; Sequoia, Chen et al. 2024) spend a layer's nodes where
acceptance is likely, as DySpec does (Xiong et al. 2024). The number of a node's children never depends on which child
would come next, which keeps the verdict lossless.

Each layer costs one pass of the small model. Since a target scores whole trees only, the pass for layer l scores the
layers above it again: a tree of depth d and width k takes d passes over 1, 1 + k, ..., 1 + (d - 1) k nodes. The columns
that the target accepted stay in the cache after the last pass, so the next round begins with a pass over the pending
tokens only: usually one token, and two if the whole path was accepted.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor

from mmdec.decode.tree import chains, trees_from_lists
from mmdec.types import Context, Draft, InputError, Needs, Plan, Scores, Target, Verdict


@dataclass
class Tree:
    """A row's draft while it grows: node 0 is the root, and a parent comes before its children."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    values: list[float] = field(default_factory=lambda: [0.0])  # log-probability, or chance to be accepted

    def add(self, parent: int, token: int, value: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.values.append(value)
        return len(self.tokens) - 1

    def best(self, count: int) -> list[int]:
        """Return the `count` nodes with the highest values, without the root. Of equal nodes the earlier one is taken.

        A child's value is at most its parent's, so each node's parent is in the result. The order is depth first, the
        first child first.
        """
        best = set(sorted(range(1, len(self.tokens)), key=lambda node: -self.values[node])[:count])
        below: list[list[int]] = [[] for _ in self.tokens]
        for node in sorted(best, reverse=True):
            below[self.parents[node]].append(node)
        order, stack = [], below[0]
        while stack:
            node = stack.pop()
            order.append(node)
            stack += below[node]
        return order

    def part(self, nodes: list[int]) -> tuple[list[int], list[int]]:
        """Return tokens and parents of these nodes, without the root, in this order."""
        indices = {0: 0} | {node: index for index, node in enumerate(nodes, 1)}
        return [self.tokens[node] for node in nodes], [indices[self.parents[node]] for node in nodes]


@dataclass
class Memory:
    """The small model's state of a run."""

    session: Any
    pending: list[list[int]]  # each row's tokens that the small model's cache lacks; the last is the draft's root
    scored: list[dict[tuple[int, int], int]] | None = None  # nodes of each row's last pass: (parent, token) -> node
    vocab_size: int = 0  # the target's number of tokens
    roots: list[int] = field(default_factory=list)  # the small model's position of each row's last token


@final
class SmallModel:
    """Drafts with a small model, whose own cache holds the accepted text.

    It does not see the columns of pictures or sound that it cannot read: its positions count without them. It drafts
    nothing beyond its positions, after a token outside its vocabulary, or if it needs an encoder's states and has none.
    (`transcribe` passes the sound on; `model.generate` has encoded it before the loop begins.)
    """

    def __init__(
        self,
        model: Target,
        width: int = 10,
        memory: bool = False,
        positions: int | None = None,
        images: bool = False,
        columns: bool = False,
        encode: Callable[[Tensor], Tensor | None] | None = None,
    ) -> None:
        """model: the small model, as a `Target`. width: maximum nodes of a layer that are expanded.
        memory: whether it reads the encoder states of the large model (a distilled decoder has no encoder).
        positions: its maximum number of positions; None: unlimited.
        images: whether it reads the images of the large model's prompt.
        columns: whether each node takes a position of its own; it then drafts chains only.
        encode: the model's own encoder, features -> states or None. It is used where the target's states have another
            size; a distilled decoder reads the target's.
        Raises: InputError if `width` is below 1.
        """
        if width < 1:
            raise InputError(f"`width` must be at least 1, but is {width}. 10 is EAGLE-2's.")
        self._model, self._width, self._positions, self._images = model, width, positions, images
        self._columns, self._encode = columns, encode
        self.needs = Needs(memory=memory, stops=True)

    @property
    def name(self) -> str:
        return f"small-model-{self._width}({self._model.name})"

    def check(self, target: Target) -> None:
        """Raises InputError if the vocabularies do not fit, or the two models lie on different devices."""
        if self._model.vocab_size > target.vocab_size:
            raise InputError(
                f"`drafter` must have at most the target's {target.vocab_size} tokens, but {self._model.name} has "
                f"{self._model.vocab_size}. Choose a small model with the target's tokenizer."
            )
        # with another vocabulary, token ids mean other words
        if self.needs.memory and self._model.vocab_size != target.vocab_size:
            raise InputError(
                f"`drafter` must have the target's {target.vocab_size} tokens, but {self._model.name} has "
                f"{self._model.vocab_size}. Choose a smaller model with the target's tokenizer."
            )
        if self.needs.memory and self._model.hidden_size != target.hidden_size and self._encode is None:
            raise InputError(
                f"`drafter` must read the target's states of {target.hidden_size} channels, or have an encoder, but "
                f"{self._model.name} reads {self._model.hidden_size}. Choose one with the target's encoder, or a "
                "whole model."
            )
        if self._model.device != target.device:
            raise InputError(
                f"`drafter` must be on the target's device, {target.device}, but is on {self._model.device}. Move it."
            )

    def start(self, context: Context) -> Memory:
        """Run the small model over the prompt. If the prompt is too long for it, it drafts nothing in this run."""
        if self._images:
            try:
                memory = self._started(context, context.mask, context.images or {})
            except InputError:  # the images were not passed on, do not cover the text's placeholders, or are sound
                memory = None
            if memory is not None:
                return memory
        blind = context.mask if context.pictures is None else context.mask & ~context.pictures
        return self._started(context, blind, {}) or Memory(None, [[] for _ in context.tokens])

    def _started(self, context: Context, mask: Tensor, images: Mapping[str, Any]) -> Memory | None:
        """Run the small model over the tokens where `mask` (B, P) is True. Returns None if it cannot read them."""
        lengths, tokens = mask.sum(1).tolist(), context.tokens.masked_fill(~mask, 0)
        too_long = self._positions is not None and max(lengths) > self._positions
        if too_long or int(tokens.max()) >= self._model.vocab_size or not bool(mask[:, -1].all()):
            return None
        inputs: dict[str, Any] = {"input_ids": tokens, **images}
        if context.memory is None:
            inputs["attention_mask"] = mask.long()
        else:
            states: Tensor | None = context.memory
            if context.memory.shape[-1] != self._model.hidden_size:
                states = self._encode(context.sound) if self._encode and context.sound is not None else None
            if states is None:
                return None  # the target did not pass the sound on, or the small model's encoder reads other features
            inputs |= {"decoder_attention_mask": mask.long(), "encoder_outputs": (states,)}
        session, _, _, _ = self._model.prefill(inputs, Needs())
        rows = len(context.tokens)
        memory = Memory(session, [[] for _ in range(rows)], roots=[length - 1 for length in lengths])
        self._commit(memory, [[0] for _ in range(rows)])
        return memory

    def update(self, memory: Memory, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Keep the accepted columns of the last pass in the cache. Tokens without a column become pending; the last
        token always does."""
        if memory.session is None:
            return
        memory.vocab_size = scores.logits.shape[-1]
        if int(verdict.tokens.masked_fill(verdict.done[:, None], 0).max()) >= self._model.vocab_size:
            memory.session = None
            return
        memory.roots = [root + more for root, more in zip(memory.roots, verdict.lengths.tolist(), strict=True)]
        emitted = zip(verdict.tokens.tolist(), verdict.lengths.tolist(), strict=True)
        texts = [row + tokens[:length] for row, (tokens, length) in zip(memory.pending, emitted, strict=True)]
        memory.pending = texts
        if memory.scored is None:
            return
        paths = []
        for text, edges in zip(texts, memory.scored, strict=True):
            path: list[int] = [0]
            for token in text[1:-1]:
                node = edges.get((path[-1], token))
                if node is None:
                    break
                path.append(node)
            paths.append(path)
        memory.pending = [text[len(path) :] for text, path in zip(texts, paths, strict=True)]
        self._commit(memory, paths)

    def select(self, memory: Memory, live: Tensor) -> None:
        """Keep only the rows whose indices are in `live` (K,) int64, in that order."""
        if memory.session is None:
            return
        self._model.select(memory.session, live)
        memory.pending = [memory.pending[row] for row in live.tolist()]
        memory.roots = [memory.roots[row] for row in live.tolist()]

    def propose(self, memory: Memory, roots: Tensor, plan: Plan) -> Draft:
        """Draft a tree, or a chain if the plan has no more nodes than depth; with a temperature, sample."""
        depth = min(plan.depth, plan.nodes)
        if memory.session is None:
            depth = 0
        elif self._positions is not None:  # the deepest nodes are proposed, but not run
            depth = min(depth, self._positions - max(memory.roots))
        if plan.nodes <= plan.depth or self._columns:
            plan = replace(plan, nodes=max(depth, 0))
        if depth < 1:
            return trees_from_lists(roots, [([], [])] * len(roots))
        drawn = plan.temperature is not None
        threshold = 0.0 if drawn or plan.nodes > plan.depth else plan.threshold
        trees = [Tree([root], values=[1.0 if drawn else 0.0]) for root in roots.tolist()]
        frontier = [[0] for _ in trees]
        expanded: list[list[int]] = [[] for _ in trees]
        distributions: list[Tensor] = []  # for each layer (B, L, V): the distributions of its nodes' children
        columns: list[dict[int, int]] = [{} for _ in trees]  # node -> its index over all layers
        offset = 0
        logits = self._ingest(memory)
        for layer in range(depth):
            if layer:
                for nodes, row in zip(expanded, frontier, strict=True):
                    nodes += row
                logits = self._grow(memory, roots, trees, expanded, frontier)
            if plan.temperature is None:
                frontier = _best(trees, frontier, logits, min(self._width, -(-plan.nodes // depth)))
                if threshold and sum(math.exp(tree.values[-1]) for tree in trees) < threshold * len(trees):
                    break
                continue
            distributions.append((logits.float() / plan.temperature).softmax(-1))
            for indices, nodes in zip(columns, frontier, strict=True):
                indices.update((node, offset + index) for index, node in enumerate(nodes))
            offset += logits.shape[1]
            counts = [-(-(plan.nodes + 1 - len(tree.tokens)) // (depth - layer)) for tree in trees]
            frontier = draw_children(trees, frontier, distributions[-1], counts, plan.generator)
            if not any(frontier):
                break
        best = [tree.best(plan.nodes) for tree in trees]
        probs = drawn_from(torch.cat(distributions, 1), columns, best, memory.vocab_size) if drawn else None
        return trees_from_lists(roots, [tree.part(nodes) for tree, nodes in zip(trees, best, strict=True)], probs)

    def _ingest(self, memory: Memory) -> Tensor:
        """Run the model over the pending tokens. Returns the logits (B, 1, V) after the roots."""
        firsts = torch.tensor([row[0] for row in memory.pending], device=self._model.device)
        logits = self._model.score(memory.session, chains(firsts, [row[1:] for row in memory.pending])).logits
        memory.scored = [{(node, token): node + 1 for node, token in enumerate(row[1:])} for row in memory.pending]
        last = torch.tensor([len(row) - 1 for row in memory.pending], device=logits.device)
        return logits[torch.arange(len(last), device=logits.device), last][:, None]

    def _grow(
        self, memory: Memory, roots: Tensor, trees: list[Tree], expanded: list[list[int]], frontier: list[list[int]]
    ) -> Tensor:
        """Run the model over all nodes expanded so far. Returns the logits (B, L, V) of the frontier, the last L nodes.

        It first drops the columns that the previous pass left in the cache, except those of pending text.
        """
        self._commit(memory, [list(range(len(row) - 1)) for row in memory.pending])
        memory.pending = [row[-1:] for row in memory.pending]
        parts = [tree.part(nodes) for tree, nodes in zip(trees, expanded, strict=True)]
        logits = self._model.score(memory.session, trees_from_lists(roots, parts)).logits
        memory.scored = [
            {(parent, token): node for node, (token, parent) in enumerate(zip(*part, strict=True), 1)} for part in parts
        ]
        width = max(map(len, frontier))
        index = [
            [*range(1 + len(nodes) - len(row), 1 + len(nodes)), *[0] * (width - len(row))]
            for nodes, row in zip(expanded, frontier, strict=True)
        ]
        nodes = torch.tensor(index, device=logits.device)[..., None]
        return logits.gather(1, nodes.expand(-1, -1, logits.shape[2]))

    def _commit(self, memory: Memory, paths: list[list[int]]) -> None:
        """Do what `keep_columns` does, and forget which nodes the last pass scored."""
        keep_columns(self._model, memory.session, paths)
        memory.scored = None


def keep_columns(model: Target, session: Any, paths: list[list[int]]) -> None:
    """Keep the columns of the last pass's nodes `paths[r]` in row r of the cache, and drop the others. An empty path
    keeps none, not even the root."""
    width = max(1, *map(len, paths))
    path = torch.tensor([row + [-1] * (width - len(row)) for row in paths], device=model.device)
    none = torch.zeros_like(path[:, 0])
    model.commit(session, Verdict(path, none, none.bool(), none[:, None], none + 1))


def _best(trees: list[Tree], frontier: list[list[int]], logits: Tensor, width: int) -> list[list[int]]:
    """Add the `width` likeliest children of each frontier node. Returns, by row, the `width` likeliest of all."""
    top = logits.float().topk(min(width, logits.shape[-1]), dim=-1)
    # a child must not be likelier than its parent, which rounding could make it
    chances = (top.values - logits.float().logsumexp(-1, keepdim=True)).clamp(max=0.0)
    following = []
    for tree, nodes, tokens, values in zip(trees, frontier, top.indices.tolist(), chances.tolist(), strict=True):
        added = [
            tree.add(node, token, tree.values[node] + value)
            for index, node in enumerate(nodes)
            for token, value in zip(tokens[index], values[index], strict=True)
        ]
        following.append(sorted(sorted(added, key=lambda node: -tree.values[node])[:width]))
    return following


def draw_children(
    trees: list[Tree], frontier: list[list[int]], probs: Tensor, counts: list[int], generator: torch.Generator | None
) -> list[list[int]]:
    """Sample children without replacement from probs (B, L, V): in each row `counts` of them, where acceptance is
    likeliest.

    Sorting p / Exp(1) gives the order of successive draws. All draws are made at once and used one by one; whether
    another child is used depends only on earlier ones. Returns: the new children, by row.
    """
    most = min(max(counts), probs.shape[-1])
    noise = torch.empty_like(probs).exponential_(generator=generator)
    tokens = (probs / noise).topk(most, dim=-1).indices  # (B, L, most)
    chances = probs.gather(-1, tokens).tolist()
    following = []
    for tree, nodes, ids, mass, count in zip(trees, frontier, tokens.tolist(), chances, counts, strict=True):
        added: list[int] = []
        # (-chance that the verifier reaches this draw, index of the node, draw number, remaining probability)
        heap = [(-tree.values[node], index, 0, 1.0) for index, node in enumerate(nodes)]
        heapq.heapify(heap)
        while heap and len(added) < count:
            reached, index, number, remaining = heapq.heappop(heap)
            chance = mass[index][number]
            if chance <= 0:
                continue
            share = min(1.0, chance / remaining) if remaining > 0 else 1.0
            added.append(tree.add(nodes[index], ids[index][number], -reached * share))
            if number + 1 < most:
                heapq.heappush(heap, (reached * (1 - share), index, number + 1, remaining - chance))
        following.append(added)
    return following


def drawn_from(probs: Tensor, columns: list[dict[int, int]], chosen: list[list[int]], vocab_size: int) -> Tensor:
    """Select the root's and chosen nodes' distributions (B, N, vocab_size) from probs (B, M, V); 0 for leaves."""
    batch, count, size = probs.shape
    padded = torch.nn.functional.pad(probs, (0, max(vocab_size - size, 0), 0, 1))
    width = 1 + max(map(len, chosen))
    index = [
        [indices.get(node, count) for node in (0, *nodes)] + [count] * (width - 1 - len(nodes))
        for indices, nodes in zip(columns, chosen, strict=True)
    ]
    rows = torch.arange(batch, device=probs.device)[:, None]
    return padded[rows, torch.tensor(index, device=probs.device)]
