"""Drafts with Medusa heads for an encoder-decoder speech model (arXiv 2409.15869; after Medusa, Cai et al. 2024).

Medusa heads of language models are a kind of `drafters/heads`.

The heads read the target's last hidden state at the last accepted node, which the verifying pass has computed. Head k
proposes the token k positions after the token that this pass chose. The variant Medusa-Block has an extra decoder layer
below the heads, which needs the states of all positions. New states are stored until the next draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from mmdec.checks.fingerprint import fingerprint
from mmdec.core.tree import int_rows, top_indices, trees_from_lists
from mmdec.core.tree_shape import HeadAccuracy, count_ranks, default_probabilities
from mmdec.drafters.fit import check_drafter_placement, check_target_sizes
from mmdec.drafters.medusa.network import HeadLayer, KeyValues, MedusaHeads
from mmdec.drafters.networks.kv_cache import DraftCache
from mmdec.drafters.registry import built_in_drafter
from mmdec.errors import InputError
from mmdec.types import Context, Draft, Needs, Plan, Prior, Scores, Target, TreeShape, Verdict


@dataclass
class Block:
    """What Medusa-Block's extra decoder layer has read."""

    memory: KeyValues  # keys and values of the encoder's states, for cross-attention
    cache: DraftCache  # those of the positions that the layer has processed, for self-attention
    pending: list[list[Tensor]]  # for each batch row the states (n, H) that the layer has not processed yet


@dataclass
class MedusaState:
    """The drafter's state of one `generate` call: the heads' next input, and their last proposals."""

    hidden: Tensor | None  # (B, H), the target's last hidden state at the last accepted node
    block: Block | None
    heads: tuple[Tensor, Tensor]  # weights (K * H, H) and biases (K * H,) of all K heads, for one matrix product
    shape: TreeShape
    prompt_done: bool = False  # whether `update` was called for the pass over the prompt
    candidates: list[list[list[int]]] | None = None  # the last draft's candidates: [row][head][rank] -> token


@built_in_drafter(
    "medusa",
    loader="mmdec.drafters.medusa.checkpoint:load_heads",
    published="mmdec.drafters.medusa.checkpoint",
)
@final
class MedusaDrafter:
    """A drafter that uses Medusa heads.

    It holds weights only; the state of a `generate` call is in `MedusaState`.

    Trees are chosen by `Context.tree_shape`, which counts how often each head's first, second, ... token was right.

    Args:
        heads: The trained heads.
        output: The target's LM head.
        ranks: [head][rank], measured probability that the head's k-th best token (rank k) is right; it has the weight
            of 20 observations. None: default values.

    Raises:
        InputError: If `output` or `ranks` do not fit the heads.
    """

    def __init__(self, heads: MedusaHeads, output: nn.Linear, ranks: Sequence[Sequence[float]] | None = None) -> None:
        config = heads.config
        if tuple(output.weight.shape) != (config.vocab_size, config.hidden_size):
            raise InputError(
                f"`output` must be {config.vocab_size} x {config.hidden_size} for these heads, but is "
                f"{' x '.join(map(str, output.weight.shape))}. Use heads trained for this model."
            )
        if ranks is not None and len(ranks) != config.heads:
            raise InputError(
                f"`ranks` must have a row for each of {config.heads} heads, but has {len(ranks)}. Leave them out for "
                "the default probabilities."
            )
        self.heads, self.output = heads.eval(), output
        probabilities = ranks or default_probabilities(config.heads)
        # raises InputError if a row's probabilities are negative or sum to more than 1
        width = HeadAccuracy(probabilities).width
        if width > config.vocab_size:
            raise InputError(
                f"`heads` must be for a model of at least {width} tokens, one for each rank, but are "
                f"for {config.vocab_size}. Use another drafter."
            )
        self._prior = Prior(tuple(map(tuple, probabilities)), is_measured=ranks is not None)
        self.needs = Needs(layers=(-1,), encoder=config.kind == "block", prior=self._prior)

    @property
    def name(self) -> str:
        """A name made of the heads' variant (`kind`) and number, and a hash of their weights and probabilities."""
        config = self.heads.config
        return f"medusa-{config.kind}-{config.heads}-{fingerprint(self.heads, self._prior)}"

    def check(self, target: Target) -> None:
        """Raise InputError if the heads were made for another model, or have another device or dtype."""
        config = self.heads.config
        check_target_sizes(target, config.hidden_size, config.vocab_size)
        check_drafter_placement(target, next(self.heads.parameters()), self.output.weight.dtype)

    def start(self, context: Context) -> MedusaState:
        """Return the drafter's state for one `generate` call; nothing is run yet.

        Medusa-Block stores the target's hidden states of the prompt for its first draft.
        """
        layer = self.heads.block
        linears: list[Any] = [head.linear for head in self.heads.heads]
        heads = torch.cat([linear.weight for linear in linears]), torch.cat([linear.bias for linear in linears])
        shape = context.tree_shape or HeadAccuracy(self._prior.ranks)
        if layer is None:
            return MedusaState(None, None, heads, shape)
        hidden = context.features.get(-1)
        if context.encoder is None or hidden is None:
            raise InputError(
                "`drafter` must fit the model, but Medusa-Block reads an encoder's states, which the model does not "
                "give. Use it with a Whisper."
            )
        pending = [[row[row_mask]] for row, row_mask in zip(hidden, context.mask, strict=True)]
        memory = layer.encoder_attn.pair(context.encoder.states)
        return MedusaState(None, Block(memory, DraftCache(len(hidden)), pending), heads, shape)

    def propose(self, state: MedusaState, roots: Tensor, plan: Plan) -> Draft:
        """Draft the likeliest tree of the planned size in each batch row.

        Head k gives the tokens at depth k, whatever the tokens above are.
        """
        shape = state.shape.tree(plan.nodes, plan.depth)
        if not shape or state.hidden is None:
            return trees_from_lists(roots, [([], []) for _ in roots])
        depth = 1 + max(level for _, level, _ in shape)
        hidden = state.hidden if state.block is None else self._run_block(state.block)
        state.candidates = top_indices(self._logits(state, hidden, depth), state.shape.width).tolist()
        parents = [parent for parent, _, _ in shape]
        trees = [([row[level][rank] for _, level, rank in shape], parents) for row in state.candidates]
        return trees_from_lists(roots, trees)

    def update(self, state: MedusaState, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Store the hidden state at the last accepted node, and record which ranks of each head were right."""
        features = scores.features[-1]
        paths = [[node for node in row if node >= 0] for row in int_rows(verdict.path)]
        if len(paths) == 1:
            state.hidden = features[:, paths[0][-1]]
        else:
            last = torch.tensor([path[-1] for path in paths], device=features.device)
            state.hidden = features[torch.arange(len(paths), device=features.device), last]
        # the first call of `update` is for the prompt, whose states `start` has stored already
        if state.block is not None and state.prompt_done:
            for row, path in enumerate(paths):
                state.block.pending[row].append(features[row, path])
        state.prompt_done = True
        if state.candidates is not None:
            count_ranks(state.shape, state.candidates, verdict)
            state.candidates = None

    def select(self, state: MedusaState, live: Tensor) -> None:
        if state.hidden is not None:
            state.hidden = state.hidden[live]
        block = state.block
        if block is not None:
            block.memory = block.memory[0][live], block.memory[1][live]
            block.cache.select(live)
            block.pending = [block.pending[row] for row in live.tolist()]

    def _logits(self, state: MedusaState, hidden: Tensor, depth: int) -> Tensor:
        """Return the logits (B, depth, V) of the first `depth` heads.

        Args:
            hidden: (B, H).
        """
        rows = depth * hidden.shape[1]
        weight, bias = (part[:rows] for part in state.heads)
        moved = linear(hidden, weight, bias).view(len(hidden), depth, -1)
        return linear(hidden[:, None] + silu(moved), self.output.weight)

    def _run_block(self, block: Block) -> Tensor:
        """Run Medusa-Block's extra layer over the states that it has not processed yet.

        Returns:
            The layer's output (B, H) at the last position of each batch row.
        """
        layer = self.heads.block
        assert isinstance(layer, HeadLayer)
        fresh = [torch.cat(parts) for parts in block.pending]
        counts = [len(part) for part in fresh]
        states = nn.utils.rnn.pad_sequence(fresh, batch_first=True)  # shape (B, M, H)
        block.cache.write(*layer.pair(states), counts, 0)
        block.cache.accept(counts)
        keys, values, mask = block.cache.accepted()
        # only the last position's output is needed; of earlier positions only keys and values are needed
        rows, ends = torch.arange(len(counts), device=states.device), torch.tensor(counts, device=states.device)
        last = states[rows, ends - 1][:, None]  # shape (B, 1, H)
        block.pending = [[] for _ in counts]
        return layer(last, (keys, values), block.memory, mask)[:, 0]
