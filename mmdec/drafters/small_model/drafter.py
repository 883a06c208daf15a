"""A small model drafts for a large one: any target with the same vocabulary can be the small model.

Deterministic trees are EAGLE-2's (Li et al. 2024, section 4): in each level of the tree, the `width` nodes with the
highest cumulative log-probability get children, and at the end the best nodes of all levels are drafted. Sampled trees
(for rejection sampling without replacement: RSD, Jeon et al. 2024; Sequoia, Chen et al. 2024) have one shape, whatever
their tokens.

Each level costs one pass of the small model. The pass for a level processes the levels above it again, because a
`Target` scores whole trees only. A tree of depth d and width k takes d passes over 1, 1 + k, ..., 1 + (d - 1) k nodes.
After the last pass, the accepted tokens stay in the small model's cache. So the next round begins with a pass over the
remaining new tokens only: usually one token, or two if the whole path was accepted.

Chains of likeliest tokens may be drafted themselves, so that a pass gives several levels (staged.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor

from mmdec.core.tree import chain_drafts, int_list, trees_from_lists
from mmdec.drafters.fit import check_drafter_device
from mmdec.drafters.growing_tree import GrowingTree, SampledTrees
from mmdec.drafters.small_model.short_prompt import Shorten, check_prompt, shorten_prompt
from mmdec.drafters.small_model.staged import InnerDrafter, StagedRow, greedy_tokens, inner_drafter, start_rows
from mmdec.drafters.without_weights import masked_rows
from mmdec.errors import InputError
from mmdec.types import Context, Draft, Needs, Plan, Scores, Target, Verdict


@dataclass
class SmallModelState:
    """The drafter's state of one `generate` call: the small model's cache, and the tokens that it lacks."""

    session: Any
    pending: list[list[int]]  # each row's tokens that the small model's cache lacks; the last one is the draft's root
    scored: list[dict[tuple[int, int], int]] | None = None  # for each row of the last pass: (parent, token) -> node
    vocab_size: int = 0  # the target's vocabulary size
    roots: list[int] = field(default_factory=list)  # the small model's position id of each batch row's last token
    staged: list[StagedRow] | None = None  # each row's chain and what drafts it; None without an inner drafter


@final
class SmallModelDrafter:
    """A drafter that uses a small model with the target's vocabulary.

    It holds the small model only; the state of a `generate` call is in `SmallModelState`.

    Placeholders of images or sound that the small model cannot read are left out of its input. It drafts nothing beyond
    its maximum number of positions, after a token outside its vocabulary, or if it needs encoder states and has none.

    Args:
        model: The small model, as a `Target`.
        width: Maximum nodes of a tree level that get children.
        reads_encoder: Whether the small model reads hidden states of an encoder: the target's encoder, or its own.
        positions: The model's maximum number of positions, or None if unlimited.
        images: Whether it reads the images of the target's prompt.
        nodes_take_positions: Whether it needs a separate position id for each node of a tree; it then drafts chains
            only.
        encode: Its own encoder: input features -> hidden states, or None if it cannot read the features. Used if the
            target's hidden states have another size.
        inner: Drafts the small model's chains, so that they take fewer passes: "lookup", "recycling" or an
            `InnerDrafter`. The rest of the last chain, which the target rejected, drafts them, too. None: each level
            of a chain takes a pass. Trees and sampled chains always do.
        prompt: What the small model reads of a long prompt of text: at most this many tokens (the first, those most
            like the end, and the last), or a function of the prompt's ids that returns those to read. None: all.

    Raises:
        InputError: If `width` is below 1, or if `inner` or `prompt` is none of these.
    """

    def __init__(
        self,
        model: Target,
        width: int = 10,
        reads_encoder: bool = False,
        positions: int | None = None,
        images: bool = False,
        nodes_take_positions: bool = False,
        encode: Callable[[Tensor], Tensor | None] | None = None,
        inner: str | InnerDrafter | None = None,
        prompt: int | Shorten | None = None,
    ) -> None:
        if width < 1:
            raise InputError(f"`width` must be at least 1, but is {width}. 10 is EAGLE-2's.")
        self._model = model
        self._width = width
        self._positions = positions
        self._images = images
        self._nodes_take_positions = nodes_take_positions
        self._encode = encode
        self._inner = None if inner is None else inner_drafter(inner)
        self._prompt = check_prompt(prompt)
        self.needs = Needs(encoder=reads_encoder, may_stop_early=True)

    @property
    def name(self) -> str:
        inner = "" if self._inner is None else f"-{self._inner.name}"
        prompt = self._prompt
        if callable(prompt):
            prompt = getattr(prompt, "__qualname__", type(prompt).__name__)
        return f"small-model-{self._width}{inner}{'' if prompt is None else f'-prompt-{prompt}'}({self._model.name})"

    def check(self, target: Target) -> None:
        """Raise InputError if the vocabularies do not fit, or if the two models are on different devices."""
        if self._model.vocab_size > target.vocab_size:
            raise InputError(
                f"`drafter` must have at most the target's {target.vocab_size} tokens, but {self._model.name} has "
                f"{self._model.vocab_size}. Choose a small model with the target's tokenizer."
            )
        # a speech model with another vocabulary size has other token ids for the same words
        if self.needs.encoder and self._model.vocab_size != target.vocab_size:
            raise InputError(
                f"`drafter` must have the target's {target.vocab_size} tokens, but {self._model.name} has "
                f"{self._model.vocab_size}. Choose a smaller model with the target's tokenizer."
            )
        if self.needs.encoder and self._model.hidden_size != target.hidden_size and self._encode is None:
            raise InputError(
                f"`drafter` must read the target's states of {target.hidden_size} channels, or have an encoder, but "
                f"{self._model.name} reads {self._model.hidden_size}. Choose one with the target's encoder, or a "
                "whole model."
            )
        check_drafter_device(target, self._model.device)
        if self._inner is not None:
            self._inner.check(self._model)

    def start(self, context: Context) -> SmallModelState:
        """Run the small model over the prompt.

        If the small model cannot read the prompt, nothing is drafted in this `generate` call.

        Returns:
            The drafter's state.
        """
        state = None
        if self._images:
            # images may be missing or not match the placeholders, or the placeholders are for sound
            with suppress(InputError):
                state = self._run_prompt(context, context.mask, (context.media and context.media.inputs) or {})
        state = state or self._run_prompt(context, context.text_mask, {})
        if state is None:
            return SmallModelState(None, [[] for _ in context.tokens])
        if self._inner is not None:
            state.staged = start_rows(self._inner, context, self._model)
        return state

    def _run_prompt(self, context: Context, mask: Tensor, images: Mapping[str, Any]) -> SmallModelState | None:
        """Run the small model over the prompt tokens where `mask` (B, P) is True.

        Args:
            images: The processor's outputs for images, or empty.

        Returns:
            None if the small model cannot read the prompt.
        """
        encoder, tokens = context.encoder, context.tokens.masked_fill(~mask, 0)
        if self._prompt is not None and encoder is None and not images:
            rows = masked_rows(tokens, mask)
            tokens, mask = _pad([shorten_prompt(row, self._prompt, self._model.vocab_size) for row in rows], tokens)
        lengths = mask.sum(1).tolist()
        # a decoder that reads an encoder counts padding as positions, too
        longest = max(lengths) if encoder is None else mask.shape[1]
        too_long = self._positions is not None and longest > self._positions
        if too_long or int(tokens.max()) >= self._model.vocab_size or not bool(mask[:, -1].all()):
            return None
        inputs: dict[str, Any] = {"input_ids": tokens, **images}
        if encoder is None:
            inputs["attention_mask"] = mask.long()
        else:
            states: Tensor | None = encoder.states
            if encoder.states.shape[-1] != self._model.hidden_size:
                features = encoder.input_features
                states = self._encode(features) if self._encode and features is not None else None
            if states is None:
                return None  # the sound is not known here, or the small model's encoder needs other features
            inputs |= {"decoder_attention_mask": mask.long(), "encoder_outputs": (states,)}
        output = self._model.prefill(inputs, Needs())
        session, context_of_small = output.session, output.context
        rows = len(context.tokens)
        state = SmallModelState(
            session, [[] for _ in range(rows)], roots=[place - 1 for place in context_of_small.next_position.tolist()]
        )
        self._commit(state, [[0] for _ in range(rows)])
        return state

    def update(self, state: SmallModelState, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Keep the accepted tokens in the small model's cache, as far as its last pass has processed them.

        The other new tokens, at least the last one, are stored in `pending`.
        """
        if state.session is None:
            return
        state.vocab_size = scores.logits.shape[-1]
        if int(verdict.tokens.masked_fill(verdict.done[:, None], 0).max()) >= self._model.vocab_size:
            state.session = None
            return
        new = verdict.new_tokens
        state.roots = [root + len(tokens) for root, tokens in zip(state.roots, new, strict=True)]
        if state.staged is not None:
            for row, tokens in zip(state.staged, new, strict=True):
                row.accept(tokens)
        texts = [row + tokens for row, tokens in zip(state.pending, new, strict=True)]
        state.pending = texts
        if state.scored is None:
            return
        paths = []
        for text, edges in zip(texts, state.scored, strict=True):
            path: list[int] = [0]
            for token in text[1:-1]:
                node = edges.get((path[-1], token))
                if node is None:
                    break
                path.append(node)
            paths.append(path)
        state.pending = [text[len(path) :] for text, path in zip(texts, paths, strict=True)]
        self._commit(state, paths)

    def select(self, state: SmallModelState, live: Tensor) -> None:
        if state.session is None:
            return
        self._model.select(state.session, live)
        state.pending = [state.pending[row] for row in live.tolist()]
        state.roots = [state.roots[row] for row in live.tolist()]
        if state.staged is not None:
            state.staged = [state.staged[row] for row in live.tolist()]

    def propose(self, state: SmallModelState, roots: Tensor, plan: Plan) -> Draft:
        """Draft a tree after each batch row's last token; a chain if `plan.is_chain`.

        With `plan.warp`, the tokens are sampled.
        """
        depth = min(plan.depth, plan.nodes)
        if state.session is None:
            depth = 0
        elif self._positions is not None:  # the deepest nodes need no position: they are not processed
            depth = min(depth, self._positions - max(state.roots))
        if plan.is_chain or self._nodes_take_positions:
            plan = replace(plan, nodes=max(depth, 0))
        if depth < 1:
            return trees_from_lists(roots, [([], [])] * len(roots))
        if state.staged is not None and plan.warp is None and plan.is_chain:
            return self._staged_chains(state, state.staged, roots, depth, plan.threshold)
        drawn = None if plan.warp is None else SampledTrees(roots, plan, depth, state.vocab_size)
        threshold = plan.threshold if plan.is_chain else 0.0
        trees = [GrowingTree([root]) for root in roots.tolist()] if drawn is None else drawn.trees
        frontier = [[0] for _ in trees]
        expanded: list[list[int]] = [[] for _ in trees]
        logits = self._ingest(state)
        for layer in range(depth):
            if layer:
                for nodes, row in zip(expanded, frontier, strict=True):
                    nodes += row
                logits = self._grow(state, roots, trees, expanded, frontier)
            if drawn is not None:
                frontier = drawn.grow(logits)
                if not any(frontier):
                    break
                continue
            frontier = _best(trees, frontier, logits, min(self._width, -(-plan.nodes // depth)))
            if threshold and sum(math.exp(tree.values[-1]) for tree in trees) < threshold * len(trees):
                break
        if drawn is not None:
            return drawn.draft()
        best = [tree.best(plan.nodes) for tree in trees]
        return trees_from_lists(roots, [tree.part(nodes) for tree, nodes in zip(trees, best, strict=True)])

    def _staged_chains(
        self, state: SmallModelState, rows: list[StagedRow], roots: Tensor, depth: int, threshold: float
    ) -> Draft:
        """Draft the chains that `propose` would draft level by level, but ask for several levels in each pass.

        Args:
            roots: (B,), each batch row's last token.
            depth: Length of the chains.
            threshold: The chains end with the first level at which their mean probability is below this.
        """
        firsts: list[int] = int_list(roots)
        logprobs: list[list[float]] = [[] for _ in rows]  # log-probability of each row's chain up to each of its tokens
        level = 0  # levels that all rows have
        while level < depth:
            if state.scored is not None:
                self._keep_pending(state)
            # the last token of a chain is not processed, because nothing of what follows it is drafted
            columns = max(map(len, state.pending)) if self._nodes_take_positions else 1
            guesses = [
                row.guess(root, depth - columns - len(row.chain)) for row, root in zip(rows, firsts, strict=True)
            ]
            tails = [row.chain[: depth - 1] + guess for row, guess in zip(rows, guesses, strict=True)]
            logits = self._score_pending(state, tails)
            greedy, values = greedy_tokens(logits)
            for index, (row, guess) in enumerate(zip(rows, guesses, strict=True)):
                if len(row.chain) >= depth:
                    continue
                begin = len(state.pending[index]) - 1 + len(row.chain)
                part = slice(begin, begin + 1 + len(guess))
                count = row.extend(firsts[index], guess, greedy[index][part], logits[index, part])
                for value in values[index][begin : begin + count]:
                    logprobs[index].append((logprobs[index][-1] if logprobs[index] else 0.0) + value)
            while level < min(depth, *(len(row.chain) for row in rows)):
                level += 1
                if threshold and sum(math.exp(row[level - 1]) for row in logprobs) < threshold * len(rows):
                    depth = level
        return chain_drafts(roots, [row.chain[:depth] for row in rows])

    def _ingest(self, state: SmallModelState) -> Tensor:
        """Run the small model over the accepted tokens that its cache lacks.

        Returns:
            The logits (B, 1, V) after the last one.
        """
        logits = self._score_pending(state, [[] for _ in state.pending])
        last = torch.tensor([len(row) - 1 for row in state.pending], device=logits.device)
        return logits[torch.arange(len(last), device=logits.device), last][:, None]

    def _score_pending(self, state: SmallModelState, tails: list[list[int]]) -> Tensor:
        """Run the small model over the accepted tokens that its cache lacks, and over a drafted chain after them.

        Args:
            tails: Each batch row's chain.

        Returns:
            The logits (B, N, V).
        """
        rows = [pending + tail for pending, tail in zip(state.pending, tails, strict=True)]
        firsts = torch.tensor([row[0] for row in rows], device=self._model.device)
        logits = self._model.score(state.session, chain_drafts(firsts, [row[1:] for row in rows])).logits
        state.scored = [{(node, token): node + 1 for node, token in enumerate(row[1:])} for row in rows]
        return logits

    def _keep_pending(self, state: SmallModelState) -> None:
        """Keep the accepted tokens before the roots in the small model's cache, and drop the last pass's other nodes.

        The roots stay pending.
        """
        self._commit(state, [list(range(len(row) - 1)) for row in state.pending])
        state.pending = [row[-1:] for row in state.pending]

    def _grow(
        self,
        state: SmallModelState,
        roots: Tensor,
        trees: list[GrowingTree],
        expanded: list[list[int]],
        frontier: list[list[int]],
    ) -> Tensor:
        """Run the small model over all nodes so far that get children.

        First it removes the nodes of the previous pass from the cache; accepted text stays.

        Args:
            roots: (B,), each batch row's last token.
            expanded: For each row, the nodes to process.
            frontier: For each row, the newest level's nodes, the last of `expanded`.

        Returns:
            Logits (B, L, V) after the L nodes of the frontier.
        """
        self._keep_pending(state)
        parts = [tree.part(nodes) for tree, nodes in zip(trees, expanded, strict=True)]
        logits = self._model.score(state.session, trees_from_lists(roots, parts)).logits
        state.scored = [
            {(parent, token): node for node, (token, parent) in enumerate(zip(*part, strict=True), 1)} for part in parts
        ]
        width = max(map(len, frontier))
        index = [
            [*range(1 + len(nodes) - len(row), 1 + len(nodes)), *[0] * (width - len(row))]
            for nodes, row in zip(expanded, frontier, strict=True)
        ]
        nodes = torch.tensor(index, device=logits.device)[..., None]
        return logits.gather(1, nodes.expand(-1, -1, logits.shape[2]))

    def _commit(self, state: SmallModelState, paths: list[list[int]]) -> None:
        """Keep only the nodes `paths[r]` of the last pass in the small model's cache, for each batch row r.

        Earlier text stays. Clear `scored`.
        """
        keep_columns(self._model, state.session, paths)
        state.scored = None


def _pad(rows: list[list[int]], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return token ids (B, P), padded on the left with 0, and their mask, on the device of `like`."""
    width = max(map(len, rows))
    mask = [[False] * (width - len(row)) + [True] * len(row) for row in rows]
    return like.new_tensor([[0] * (width - len(row)) + row for row in rows]), torch.tensor(mask, device=like.device)


def keep_columns(model: Target, session: Any, paths: list[list[int]]) -> None:
    """Keep the cache entries of the last pass's nodes `paths[r]` in row r, and drop those of its other nodes.

    An empty path keeps none, not even the root.

    Args:
        session: The model's decoding state, which holds the cache.
    """
    width = max(1, *map(len, paths))
    path = torch.tensor([row + [-1] * (width - len(row)) for row in paths], device=model.device)
    none = torch.zeros_like(path[:, 0])
    model.commit(session, Verdict(path, none, none.bool(), none[:, None], none + 1))


def _best(trees: list[GrowingTree], frontier: list[list[int]], logits: Tensor, width: int) -> list[list[int]]:
    """Add the `width` likeliest children of each node of the newest level to the trees.

    Args:
        frontier: For each batch row, the newest level's nodes.
        logits: (B, L, V), after these nodes.

    Returns:
        For each row, the `width` new nodes with the highest log-probability of the path.
    """
    top = logits.float().topk(min(width, logits.shape[-1]), dim=-1)
    # at most 0: by rounding, a child could otherwise be likelier than its parent
    logprobs = (top.values - logits.float().logsumexp(-1, keepdim=True)).clamp(max=0.0)
    following = []
    for tree, nodes, tokens, values in zip(trees, frontier, top.indices.tolist(), logprobs.tolist(), strict=True):
        added = [
            tree.add(node, token, tree.values[node] + value)
            for index, node in enumerate(nodes)
            for token, value in zip(tokens[index], values[index], strict=True)
        ]
        following.append(sorted(sorted(added, key=lambda node: -tree.values[node])[:width]))
    return following
