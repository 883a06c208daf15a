"""Trees grown by a draft network, one level per pass: EAGLE-2 (Li et al. 2024, arXiv 2406.16858, section 4).

The network continues the target's features (see `mmdec.nn.draft_network`): each of its columns reads a token and the
feature of the token before. In each level the `width` nodes with the highest cumulative log-probability are expanded;
at the end the best nodes of all levels are drafted. A child is never likelier than its parent and ties go to the
earlier node, so a chosen node's ancestors are chosen, too. If the plan has no more nodes than depth, the draft is a
chain of likeliest tokens, which may end early (`Plan.threshold`). For residual and block sampling the children are
sampled, as in `small_model.py`.

The network's cache holds only accepted columns, computed from the target's features. Newly accepted columns, the prompt
included, are queued until the next draft, so a run without drafts pays nothing. For queued columns only the last
layer's keys and values are computed; the last column, whose token is the root, is run through the whole layer and gives
the first level.

P-EAGLE (arXiv 2602.01469) computes all levels in one pass, from columns without tokens behind the root's: each depth
has one distribution, which does not depend on the tokens above it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Protocol, cast, final

import numpy as np
import torch
from torch import Tensor, nn

from mmdec.decode.tree import in_order, level_parents, single, top_indices, trees_from_lists
from mmdec.drafters.draft_memory import DraftCache, LastColumn, Memory, PromptInfo, Waiting, WaitingPrompt
from mmdec.drafters.small_model import Tree, draw_children, drawn_from
from mmdec.nn.draft_network import DraftNetwork
from mmdec.nn.draft_step import ColumnStep, TokenStep, Vector, column_step, quiet
from mmdec.nn.eagle3 import Eagle3, Eagle3Config
from mmdec.nn.fingerprint import fingerprint
from mmdec.types import Context, Draft, InputError, Needs, Plan, Scores, Target, Verdict

WIDTH = 10  # EAGLE-2's default
LARGE = 4096  # vocabulary size from which the best tokens are searched in chunks


@final
class TreeGrowing:
    """Drafts with a draft network, the target's embedding and its LM head. Holds weights only."""

    def __init__(self, network: DraftNetwork, embedding: nn.Module, output: nn.Linear, width: int = WIDTH) -> None:
        """network: the draft network. embedding, output: the target's own (`model.get_input_embeddings()`,
        `model.get_output_embeddings()`). width: maximum nodes of a level that are expanded."""
        config = network.config
        if tuple(output.weight.shape) != (config.vocab_size, config.target_size):
            raise InputError(
                f"`output` must be {config.vocab_size} x {config.target_size} for this network, but is "
                f"{' x '.join(map(str, output.weight.shape))}. Use a drafter trained for this model."
            )
        if width < 1:
            raise InputError(f"`width` must be at least 1, but is {width}. 10 is EAGLE-2's.")
        self.network, self.output, self.width = network.eval(), output, width
        own = isinstance(network, Eagle3)
        self.embedding: nn.Module = network.embed_tokens if own and network.config.own_embedding else embedding
        # EAGLE-3 reads the prompt's token ids; its configuration says whether it reads image columns and positions
        self._own: Eagle3Config | None = network.config if own else None
        projected = self._own is None or self._own.pictures == "projected"
        self.needs = Needs(layers=config.layers, embeds=projected, travels=True, stops=True)

    @property
    def name(self) -> str:
        """Names the system, the width, and a digest of the network's weights."""
        return f"{self.network.system}-{self.width}-{fingerprint(self.network, self.network.config)}"

    def check(self, target: Target) -> None:
        """Raises InputError if the network belongs to another model, device or precision."""
        config = self.network.config
        if (config.target_size, config.vocab_size) != (target.hidden_size, target.vocab_size):
            raise InputError(
                f"`drafter` must fit a model with {target.hidden_size} channels and {target.vocab_size} tokens, but "
                f"this one is for {config.target_size} and {config.vocab_size}. Use a drafter trained for this model."
            )
        weight = next(self.network.parameters())
        if weight.device != target.device or weight.dtype != self.output.weight.dtype:
            raise InputError(
                f"`drafter` must be on {target.device} in {self.output.weight.dtype}, but is on {weight.device} in "
                f"{weight.dtype}. Call `drafter.network.to(model.device, model.dtype)`."
            )

    def start(self, context: Context) -> Memory:
        """Make the memory of a run, without any pass.

        If the memory of the chat's previous turn ends where the prompt's new columns begin, it is continued. Otherwise
        the new memory holds only the new columns.
        """
        missing = any(layer not in context.features for layer in self.needs.layers)
        if missing or (self.needs.embeds and context.embeds is None):
            raise InputError(f"`context` must hold the embeddings and the features {self.needs.layers}, but does not.")
        features = self._joined(context.features)
        rows, fresh = features.shape[:2]
        memory, mask = context.carried, context.mask[:, -fresh:]
        if not (isinstance(memory, Memory) and memory.columns == [context.past] == [context.past] * rows):
            cache = DraftCache(rows, self.network.depth)
            memory = Memory(cache, [context.past] * rows, [context.past] * rows)
        memory.packed, memory.step, memory.asked = None, None, False  # weights may have changed since an earlier run
        visual = context.visual if context.visual is not None else torch.zeros_like(mask)
        waiting = WaitingPrompt(self._embeds(context, visual), features, visual, mask)
        own = self._own
        if own is not None and own.follows and len(context.positions) > 1:
            positions = context.positions if own.positions == "axes" else context.positions[:1]
            waiting = replace(waiting, positions=positions, next=context.next_position)
        memory.queue.append(waiting)
        memory.columns = [old + new - 1 for old, new in zip(memory.columns, mask.sum(1).tolist(), strict=True)]
        return memory

    def update(self, memory: Memory, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Queue the accepted path with its features."""
        counts = verdict.lengths.tolist()
        memory.queue.append(Waiting.of(self._joined(scores.features), verdict, counts))
        memory.columns = [old + count for old, count in zip(memory.columns, counts, strict=True)]

    def select(self, memory: Memory, live: Tensor) -> None:
        """Keep only the rows whose indices are in `live` (K,) int64, in that order."""
        rows = live.tolist()
        memory.cache.select(live)
        memory.columns = [memory.columns[row] for row in rows]
        memory.positions = [memory.positions[row] for row in rows]
        memory.queue = [part.select(live) for part in memory.queue]
        memory.carry = None if memory.carry is None else memory.carry[live]
        memory.info = [memory.info[row] for row in rows] if memory.info else []

    def propose(self, memory: Memory, roots: Tensor, plan: Plan) -> Draft:
        """Draft a tree below each root (B,), or a chain if the plan has no more nodes than depth."""
        depth = min(plan.depth, plan.nodes)
        if depth < 1:
            return single(roots)
        levels: Levels
        if self._own is not None and self._own.mask_token is not None:
            ahead = self._ahead(memory, depth)
            hidden, levels = ahead[:, :1], MaskedLevels(self, memory, ahead)
        else:
            hidden = self.take_in(memory).hidden(self.network, memory.cache, memory.packed)
            levels = Levels(self, memory)
        if plan.temperature is not None:
            return levels.drawn(roots, hidden, plan)
        if plan.nodes <= plan.depth:
            if not memory.asked and len(roots) == 1:
                memory.asked = True
                memory.step = column_step(self.network, memory.packed, memory.carry, self.embedding, self.output)
            return levels.chain(roots, hidden, depth, plan.threshold)
        return levels.tree(roots, hidden, plan)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the LM head, the target's or the network's own, to hidden (..., H)."""
        return self.network.logits(hidden, self.output)

    def _embeds(self, context: Context, visual: Tensor) -> Tensor:
        """The embeddings (B, F, H) of the prompt's new columns."""
        if self._own is None:
            return cast(Tensor, context.embeds)
        embeds = self.embedding(context.tokens[:, -visual.shape[1] :])
        return embeds if context.embeds is None else torch.where(visual[..., None], context.embeds, embeds)

    def _joined(self, features: Mapping[int, Tensor]) -> Tensor:
        parts = [features[layer] for layer in self.needs.layers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def take_in(self, memory: Memory) -> LastColumn:
        """Process the queued columns into the cache. Returns each row's last column, which always stems from a
        verdict."""
        return self.last_column(memory, self.catch_up(memory))

    def last_column(self, memory: Memory, part: Waiting) -> LastColumn:
        """The second half of `take_in`, after `catch_up`."""
        states, queries = self._columns(memory, part)
        counts, features = part.counts, part.features
        if min(counts) == states.shape[1]:
            return LastColumn(states[:, -1:], queries[:, :, -1:], features[:, -1:])
        last = torch.tensor(counts, device=states.device) - 1
        rows = torch.arange(len(counts), device=states.device)
        return LastColumn(
            states[rows, last][:, None], queries[rows, :, last][:, :, None], features[rows, last][:, None]
        )

    def catch_up(self, memory: Memory) -> Waiting:
        """The first half of `take_in`: process everything up to the last prompt. Returns the later columns."""
        if memory.packed is None:
            memory.packed = self.network.packed()
        groups = [list(parts) for _, parts in groupby(memory.queue, lambda part: isinstance(part, WaitingPrompt))]
        memory.queue = []
        for group in groups[:-1]:
            for part in group if isinstance(group[0], WaitingPrompt) else [_joined(group)]:
                self._columns(memory, part)
        return _joined(groups[-1])

    def _columns(self, memory: Memory, part: WaitingPrompt | Waiting) -> tuple[Tensor, Tensor]:
        """Write keys and values of columns to the cache. Returns the last layer's input (B, n, H) and queries (B,
        heads, n, d)."""
        if isinstance(part, WaitingPrompt):
            states, positions, counts = self._prompt(memory, part)
        else:
            states, positions, counts = self._text(memory, part)
        queries = torch.empty(0)
        if states.shape[1]:
            states, queries, keys, values = self._through(memory, states, positions, counts)
            memory.cache.append(keys, values, counts)
        return states, queries

    def _text(self, memory: Memory, part: Waiting) -> tuple[Tensor, Tensor, list[int]]:
        """The network's input for accepted columns; returns the same three things as `_prompt`."""
        states = self.network.fuse(self.embedding(part.tokens), part.features, memory.carry)
        positions = positions_from(memory.positions, states.shape[1], states.device)
        memory.positions = [start + count for start, count in zip(memory.positions, part.counts, strict=True)]
        return states, positions, part.counts

    def _through(
        self, memory: Memory, states: Tensor, positions: Tensor, counts: list[int]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run all layers but the last over columns behind the accepted ones. Returns the last layer's input (B, n, H),
        queries, keys and values (B, heads, n, d)."""
        network, cache, last = self.network, memory.cache, self.network.depth - 1
        for index in range(last):
            queries, keys, values = network.project(states, positions, None, index)
            keys, values = cache.write(keys, values, counts, index)
            mask = cache.written_mask(states.shape[1], keys.shape[2])
            states = network.attend(states, queries, keys, values, mask, None, index)
        return states, *network.project(states, positions, memory.packed, last)

    def _ahead(self, memory: Memory, count: int) -> Tensor:
        """P-EAGLE: in one pass, process the queued columns and `count` - 1 columns without tokens behind each row's
        last; only the former stay cached. Returns hidden (B, count, H) of that last column and those without tokens."""
        network, cache = cast(Eagle3, self.network), memory.cache
        states, positions, counts = self._text(memory, self.catch_up(memory))
        device = states.device
        rows = torch.arange(len(counts), device=device)[:, None]
        ends = [length + count - 1 for length in counts]
        begins = torch.tensor(counts, device=device)[:, None]
        places = begins + torch.arange(count - 1, device=device)  # indices of the columns without tokens
        token = torch.tensor(cast(Eagle3Config, self._own).mask_token, device=device)
        wide = nn.functional.pad(states, (0, 0, 0, count - 1))
        wide[rows, places] = network.masked(self.embedding(token))
        starts = positions[:, :1].expand(len(counts), -1)
        positions = starts + torch.arange(wide.shape[1], device=device)
        wide, queries, keys, values = self._through(memory, wide, positions, ends)
        keys, values = cache.write(keys, values, ends, network.depth - 1)
        chosen = begins - 1 + torch.arange(count, device=device)
        queries = queries.transpose(1, 2)[rows, chosen].transpose(1, 2)
        mask = cache.written_mask(wide.shape[1], keys.shape[2])[rows, 0, chosen][:, None]
        hidden = network.attend(wide[rows, chosen], queries, keys, values, mask, memory.packed, network.depth - 1)
        cache.accept(counts)
        return hidden

    def _prompt(self, memory: Memory, part: WaitingPrompt) -> tuple[Tensor, Tensor, list[int]]:
        """The network's input for each row's prompt: states (B, M, H), positions (B, M), padded on the right, and each
        row's count."""
        earlier = [None] * len(part.mask) if memory.carry is None else list(memory.carry[:, 0])
        prompts = zip(part.embeds, part.features, part.visual, part.mask, earlier, strict=True)
        rows = [
            self.network.prompt(embeds[mask], features[mask], visual[mask], carry)
            for embeds, features, visual, mask, carry in prompts
        ]
        memory.info = [PromptInfo(row.compressor, row.kept) for row in rows]
        carried = [row.carry for row in rows]
        if any(carry is not None for carry in carried):
            zeros = torch.zeros_like(next(carry for carry in carried if carry is not None))
            memory.step, memory.asked = None, False  # it depends on `carry`
            memory.carry = torch.stack([zeros if carry is None else carry for carry in carried])[:, None]
        pad = nn.utils.rnn.pad_sequence
        if part.positions is None or part.next is None:
            begun = [row.positions + start for row, start in zip(rows, memory.positions, strict=True)]
            positions = pad(begun, batch_first=True)
            ends = [
                length - 1 if row.end is None else row.end
                for row, length in zip(rows, part.mask.sum(1).tolist(), strict=True)
            ]
            memory.positions = [start + end for start, end in zip(memory.positions, ends, strict=True)]
        else:
            axes = [
                pad([own[mask][:-1] for own, mask in zip(axis, part.mask, strict=True)], batch_first=True)
                for axis in part.positions
            ]
            positions = axes[0] if len(axes) == 1 else torch.stack(axes)
            memory.positions = [following - 1 for following in part.next.tolist()]
        states = pad([row.states for row in rows], batch_first=True)
        return states, positions, [len(row.states) for row in rows]


def _joined(parts: Sequence[WaitingPrompt | Waiting]) -> Waiting:
    return Waiting.joined(cast(Sequence[Waiting], parts))


class Grower(Protocol):
    """What `Levels` needs of a drafter."""

    width: int

    @property
    def network(self) -> DraftNetwork: ...
    @property
    def embedding(self) -> nn.Module: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


class Levels:
    """One draft that grows behind the accepted columns of a run. FLASH overrides `expand`."""

    def __init__(self, drafter: Grower, memory: Memory) -> None:
        self.drafter, self.memory = drafter, memory
        self.level = 0  # levels expanded
        self.offset = 0  # columns of these levels
        self.visible: Tensor | None = None  # (B, n, S + T) additive: which columns the last level's nodes see

    def expand(self, tokens: Tensor, features: Tensor, above: Tensor | None) -> Tensor:
        """Run the network over one level.

        tokens: (B, n). features: (B, n, H) of their parents. above: (B, n) the parents' indices in the last level; None
            for children of the root.
        Returns: hidden (B, n, H).
        """
        network, cache, memory = self.drafter.network, self.memory.cache, self.memory
        rows, size = tokens.shape
        states = network.follow(self.drafter.embedding(tokens), features, memory.carry)
        starts = memory.positions
        positions: Tensor | int = starts[0] + self.level
        if rows > 1:
            positions = positions_from([start + self.level for start in starts], 1, tokens.device).expand(-1, size)
        mask = None
        if size > 1 or self.visible is not None or cache.uneven:
            diagonal = torch.full((size, size), -math.inf, dtype=states.dtype, device=states.device).fill_diagonal_(0)
            before = self.visible
            if before is None:
                before = cache.mask(states.new_zeros(rows, 1, self.offset))[:, 0]
                before = before.expand(-1, size, -1)
            else:
                assert above is not None
                before = before.gather(1, above[..., None].expand(-1, -1, before.shape[2]))
            self.visible = torch.cat([before, diagonal.expand(rows, -1, -1)], -1)
            mask = self.visible[:, None]
        for index in range(network.depth):
            queries, keys, values = network.project(states, positions, memory.packed, index)
            keys, values = cache.draft(keys, values, self.offset, index)
            states = network.attend(states, queries, keys, values, mask, memory.packed, index)
        self.level, self.offset = self.level + 1, self.offset + size
        return states

    def chain(self, roots: Tensor, hidden: Tensor, depth: int, threshold: float = 0.0) -> Draft:
        """Draft a chain of likeliest tokens, until `threshold` (`Plan.threshold`) or `depth` ends it.

        roots: (B,). hidden: (B, 1, H) of the root. All rows get chains of the same length, because the target runs the
            same number of columns for every row.
        """
        step = self.memory.step
        if isinstance(step, ColumnStep) and len(roots) == 1 and step.reads(hidden):
            with quiet():
                return stepwise(step, roots, hidden[0, 0].numpy(), depth, threshold, self.follow)
        tokens: list[Tensor] = []
        chances = torch.ones(len(roots), 1, device=roots.device)
        above = torch.zeros_like(roots)[:, None]
        while True:
            logits = self.drafter.logits(hidden)
            tokens.append(self.drafter.network.token_ids(logits.argmax(-1)))
            if threshold:
                chances = chances * logits.float().softmax(-1).amax(-1)
            if len(tokens) == depth or (threshold and float(chances.mean()) < threshold):
                break
            hidden = self.expand(tokens[-1], hidden, above)
        drafted = torch.cat([roots[:, None], *tokens], 1)
        parents = torch.arange(-1, len(tokens), device=roots.device).expand_as(drafted)
        return Draft(drafted, parents.contiguous(), torch.full_like(roots, len(tokens) + 1))

    def follow(self, token: int, feature: Vector) -> Vector:
        """Run the network over one token of a chain, given the feature (H,) of its parent. Returns hidden (H,)."""
        step = self.memory.step
        assert isinstance(step, ColumnStep)
        self.level += 1
        keys, values = self.memory.cache.room(self.level)
        return step(token, feature, self.memory.positions[0] + self.level - 1, keys, values)

    def tree(self, roots: Tensor, hidden: Tensor, plan: Plan) -> Draft:
        """Grow an EAGLE-2 tree from hidden (B, 1, H) of the root. Nodes are numbered from 1 in the order of their
        creation."""
        rows, _, size = hidden.shape
        width = min(self.drafter.width, plan.nodes, self.drafter.network.vocabulary)
        values, tokens = self._best(hidden, width)
        scores, tokens = values[:, 0], tokens[:, 0]  # (B, K) of the nodes to expand
        candidates = [(scores, tokens)]
        orders: list[Tensor] = []  # for each level after the first, which of its K * K nodes are expanded
        features, above = hidden.expand(-1, width, -1), None
        for level in range(1, plan.depth):
            hidden = self.expand(tokens, features, above)
            values, tokens = self._best(hidden, width)
            scores, tokens = (scores[..., None] + values).flatten(1), tokens.flatten(1)  # (B, K * K)
            candidates.append((scores, tokens))
            if level + 1 < plan.depth:
                orders.append(scores.sort(dim=1, descending=True, stable=True).indices[:, :width])
                scores, tokens, above = scores.gather(1, orders[-1]), tokens.gather(1, orders[-1]), orders[-1] // width
                features = hidden.gather(1, above[..., None].expand(-1, -1, size))
        scores, tokens = (torch.cat(parts, 1) for parts in zip(*candidates, strict=True))
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, : plan.nodes]
        expanded = torch.stack(orders, 1).tolist() if orders else [[]] * rows
        lists = zip(best.tolist(), tokens.gather(1, best).tolist(), expanded, strict=True)
        return trees_from_lists(roots, [in_order(row, ids, level_parents(row, who, width)) for row, ids, who in lists])

    def _best(self, hidden: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The `width` likeliest children of nodes with hidden (B, n, H): log-probabilities and tokens (B, n, width)."""
        values, drafted = _best(self.drafter.logits(hidden), width)
        return values, self.drafter.network.token_ids(drafted)

    def drawn(self, roots: Tensor, hidden: Tensor, plan: Plan) -> Draft:
        """Sample children without replacement, from hidden (B, 1, H) of the root. The draft's `probs` hold their
        distributions."""
        depth, vocab_size = min(plan.depth, plan.nodes), self.drafter.network.config.vocab_size
        trees = [Tree([root], values=[1.0]) for root in roots.tolist()]
        frontier = [[0] for _ in trees]
        above = [{0: 0} for _ in trees]  # node -> its index in the last level
        distributions: list[Tensor] = []  # for each level (B, n, V): the distributions of its nodes' children
        indices: list[dict[int, int]] = [{} for _ in trees]  # node -> its index over all levels
        offset = 0
        for level in range(depth):
            if level:
                size = max(map(len, frontier))
                rows = list(zip(trees, frontier, above, strict=True))
                blank = [[0] * (size - len(nodes)) for nodes in frontier]
                tokens = [
                    [tree.tokens[n] for n in nodes] + gap for (tree, nodes, _), gap in zip(rows, blank, strict=True)
                ]
                parents = [
                    [index_of[tree.parents[n]] for n in nodes] + gap
                    for (tree, nodes, index_of), gap in zip(rows, blank, strict=True)
                ]
                index = torch.tensor(parents, device=roots.device)
                features = hidden.gather(1, index[..., None].expand(-1, -1, hidden.shape[2]))
                hidden = self.expand(torch.tensor(tokens, device=roots.device), features, index if level > 1 else None)
                above = [{node: column for column, node in enumerate(nodes)} for nodes in frontier]
            probs = (self.drafter.logits(hidden).float() / cast(float, plan.temperature)).softmax(-1)
            distributions.append(self.drafter.network.spread(probs))
            for index_of, nodes in zip(indices, frontier, strict=True):
                index_of.update((node, offset + column) for column, node in enumerate(nodes))
            offset += hidden.shape[1]
            counts = [-(-(plan.nodes + 1 - len(tree.tokens)) // (depth - level)) for tree in trees]
            frontier = draw_children(trees, frontier, distributions[-1], counts, plan.generator)
            if not any(frontier):
                break
        best = [tree.best(plan.nodes) for tree in trees]
        probs = drawn_from(torch.cat(distributions, 1), indices, best, vocab_size)
        return trees_from_lists(roots, [tree.part(nodes) for tree, nodes in zip(trees, best, strict=True)], probs)


@final
class MaskedLevels(Levels):
    """One draft of P-EAGLE: all levels' hidden states are known before it grows."""

    def __init__(self, drafter: TreeGrowing, memory: Memory, hidden: Tensor) -> None:
        """hidden: (B, K, H) hidden states of the root and of the columns without tokens."""
        super().__init__(drafter, memory)
        self.hidden = hidden

    def expand(self, tokens: Tensor, features: Tensor, above: Tensor | None) -> Tensor:
        """The next level's hidden state, the same for all its nodes: (B, n, H); arguments as `Levels.expand`."""
        self.level += 1
        return self.hidden[:, self.level : self.level + 1].expand(-1, tokens.shape[1], -1)


def stepwise(
    step: TokenStep,
    roots: Tensor,
    feature: Vector,
    depth: int,
    threshold: float,
    follow: Callable[[int, Vector], Vector],
) -> Draft:
    """Do the same as `Levels.chain` for one row, token by token.

    feature: (H,) the root's feature. follow: (token, its parent's feature) -> the token's own feature.
    """
    chance, tokens = 1.0, list[int]()
    while True:
        logits = step.logits(feature)
        best = int(logits.argmax())
        tokens.append(step.token(best))
        if threshold:
            chance /= float(np.exp(logits - logits[best]).sum())
        if len(tokens) == depth or chance < threshold:
            drafted = torch.tensor([[int(roots), *tokens]])
            return Draft(drafted, torch.arange(-1, len(tokens))[None], torch.tensor([len(tokens) + 1]))
        feature = follow(tokens[-1], feature)


def _best(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` likeliest tokens, likeliest first: logits (B, n, V) -> log-probabilities and tokens (B, n, width)."""
    chances = logits.log_softmax(-1).clamp_(max=0.0)  # rounding must not make a child likelier than its parent
    if logits.shape[-1] < LARGE:
        best = chances.topk(width)
        return best.values, best.indices
    tokens = top_indices(chances, width)
    return chances.gather(-1, tokens), tokens


def positions_from(starts: Sequence[int], size: int, device: torch.device) -> Tensor:
    """Positions (B, size): each row counts up from its start."""
    if len(starts) == 1:
        return torch.arange(starts[0], starts[0] + size, device=device)[None]
    return torch.tensor(starts, device=device)[:, None] + torch.arange(size, device=device)
