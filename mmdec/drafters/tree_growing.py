"""Trees grown by a draft network, one level per pass: EAGLE-2 (Li et al. 2024, arXiv 2406.16858, section 4).

The network continues the target's features (see `mmdec.nn.draft_network`): each of its columns reads a token and the
feature of the token before. In each level the `width` nodes with the highest cumulative log-probability are expanded;
at the end the best nodes of all levels are drafted. A child is never likelier than its parent and ties go to the
earlier node, so a chosen node's ancestors are chosen, too. If the plan has no more nodes than depth, the draft is a
chain of likeliest tokens, which may end early (`Plan.threshold`). For residual and block sampling the children are
sampled, as in `small_model.py`.

The network's cache holds only accepted columns, computed from the target's features. Newly accepted columns, the prompt
included, are queued until the next draft, so a run without drafts pays nothing. For queued columns only keys and values
are computed; the last column, whose token is the root, is run through the whole layer and gives the first level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import cast, final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mmdec.decode.tree import single
from mmdec.drafters.draft_cache import DraftCache
from mmdec.drafters.draft_levels import Levels, positions_from
from mmdec.drafters.draft_memory import LastColumn, Memory, PromptInfo, Waiting, WaitingPrompt
from mmdec.nn.draft_network import DraftNetwork
from mmdec.nn.draft_step import DraftStep
from mmdec.nn.fingerprint import fingerprint
from mmdec.types import Context, Draft, InputError, Needs, Plan, Scores, Target, Verdict

WIDTH = 10  # EAGLE-2's default


@final
class TreeGrowing:
    """Drafts with a draft network, the target's embedding and its LM head. Holds weights only."""

    def __init__(self, network: DraftNetwork, embedding: nn.Module, output: nn.Linear, width: int = WIDTH) -> None:
        """network: the draft network. embedding, output: the target's own (`model.get_input_embeddings()`,
        `model.get_output_embeddings()`). width: maximum nodes of a level that are expanded."""
        config = network.config
        if tuple(output.weight.shape) != (config.vocab_size, config.hidden_size):
            raise InputError(
                f"`output` must be {config.vocab_size} x {config.hidden_size} for this network, but is "
                f"{' x '.join(map(str, output.weight.shape))}. Use a drafter trained for this model."
            )
        if width < 1:
            raise InputError(f"`width` must be at least 1, but is {width}. 10 is EAGLE-2's.")
        self.network, self.embedding, self.output, self.width = network.eval(), embedding, output, width
        self.needs = Needs(layers=config.layers, embeds=True, travels=True, stops=True)

    @property
    def name(self) -> str:
        """Names the system, the width, and a digest of the network's weights."""
        return f"{self.network.system}-{self.width}-{fingerprint(self.network, self.network.config)}"

    def check(self, target: Target) -> None:
        """Raises InputError if the network belongs to another model, device or precision."""
        config = self.network.config
        if (config.hidden_size, config.vocab_size) != (target.hidden_size, target.vocab_size):
            raise InputError(
                f"`drafter` must fit a model with {target.hidden_size} channels and {target.vocab_size} tokens, but "
                f"this one is for {config.hidden_size} and {config.vocab_size}. Use a drafter trained for this model."
            )
        weight = next(self.network.parameters())
        if weight.device != target.device or weight.dtype != self.output.weight.dtype:
            raise InputError(
                f"`drafter` must be on {target.device} in {self.output.weight.dtype}, but is on {weight.device} in "
                f"{weight.dtype}. Call `drafter.network.to(model.device, model.dtype)`."
            )

    def start(self, context: Context) -> Memory:
        """Make the memory of a run, without any pass.

        Continues the memory of the same chat if it ends where the prompt's new columns begin; otherwise reads only
        those.
        """
        if context.embeds is None or any(layer not in context.features for layer in self.needs.layers):
            raise InputError(f"`context` must hold the embeddings and the features {self.needs.layers}, but does not.")
        rows, fresh = context.embeds.shape[:2]
        memory, mask = context.carried, context.mask[:, -fresh:]
        if not (isinstance(memory, Memory) and memory.columns == [context.past] == [context.past] * rows):
            memory = Memory(DraftCache(rows), [context.past] * rows, [context.past] * rows)
        memory.packed, memory.step, memory.asked = None, None, False  # weights may have changed since an earlier run
        visual = context.visual if context.visual is not None else torch.zeros_like(mask)
        memory.queue.append(WaitingPrompt(context.embeds, self._joined(context.features), visual, mask))
        memory.columns = [old + new - 1 for old, new in zip(memory.columns, mask.sum(1).tolist(), strict=True)]
        return memory

    def update(self, memory: Memory, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Queue the accepted path with its features."""
        counts = verdict.lengths.tolist()
        memory.queue.append(Waiting.of(self._joined(scores.features), verdict, counts))
        memory.columns = [old + count for old, count in zip(memory.columns, counts, strict=True)]

    def select(self, memory: Memory, live: Tensor) -> None:
        """Keep only the rows live (K,) int64."""
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
        hidden = self.take_in(memory).hidden(self.network, memory.cache, memory.packed)
        levels = Levels(self, memory)
        if plan.temperature is not None:
            return levels.drawn(roots, hidden, plan)
        if plan.nodes <= plan.depth:
            if not memory.asked and len(roots) == 1:
                memory.asked = True
                memory.step = DraftStep.of(self.network, memory.packed, memory.carry, self.embedding, self.output)
            return levels.chain(roots, hidden, depth, plan.threshold)
        return levels.tree(roots, hidden, plan)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the target's LM head to hidden (..., H)."""
        return linear(hidden, self.output.weight, self.output.bias)

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
        """Write keys and values of columns to the cache. Returns their states (B, n, H) and queries (B, heads, n,
        d)."""
        if isinstance(part, WaitingPrompt):
            states, positions, counts = self._prompt(memory, part)
        else:
            counts = part.counts
            states = self.network.fuse(self.embedding(part.tokens), part.features, memory.carry)
            positions = positions_from(memory.positions, states.shape[1], states.device)
            memory.positions = [start + count for start, count in zip(memory.positions, counts, strict=True)]
        queries = torch.empty(0)
        if states.shape[1]:
            queries, keys, values = self.network.project(states, positions, memory.packed)
            memory.cache.append(keys, values, counts)
        return states, queries

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
        positions = [row.positions + start for row, start in zip(rows, memory.positions, strict=True)]
        lengths = part.mask.sum(1).tolist()
        memory.positions = [start + length - 1 for start, length in zip(memory.positions, lengths, strict=True)]
        pad = nn.utils.rnn.pad_sequence
        states = pad([row.states for row in rows], batch_first=True)
        return states, pad(positions, batch_first=True), [len(row.states) for row in rows]


def _joined(parts: Sequence[WaitingPrompt | Waiting]) -> Waiting:
    return Waiting.joined(cast(Sequence[Waiting], parts))
