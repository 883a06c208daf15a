"""Heads that let the tokens of a block depend on each other: DSpark, DFlash 2 and Domino.

DFlash predicts all depths of a draft from one pass, each as if the tokens above it were unknown. A sequential head
corrects the logits of a depth by the tokens above it, at the cost of one small product a token.

| head | logits of depth k, from base logits b, normed state n and the tokens above | state of a node |
|---|---|---|
| DSpark, vanilla | b + W2 w, where w = W1[token above] | w |
| DSpark, gated | b + W2 (sigmoid(G[n; w]) * w) | w |
| DSpark, rnn | b + W2 tanh(o), where (g, c, o) = J[s; w; n] and s is the state before | w, s |
| DFlash 2 | b + <A[token above] * P n, B[token]> for the best tokens of b, minus infinity for the others | A[token] |
| Domino | b + E[n; g], where the GRU g has read the block's tokens so far | g |

The rnn's next state is sigmoid(g) s + (1 - sigmoid(g)) tanh(c), the first is 0.

DSpark's confidence head estimates how probable it is that a token is accepted if those above it are.

References:
    DSpark: arXiv 2607.05147. DFlash 2: https://inco.ai/blog/dflash2/. Domino: sgl-project/SpecForge, pull request 571.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, cast, final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, sigmoid

if TYPE_CHECKING:
    from mmdec.drafters.dflash.network import DFlashConfig

HeadKind = Literal["none", "vanilla", "gated", "rnn", "dflash2", "domino"]
MARKOV_HEADS = ("vanilla", "gated", "rnn")  # DSpark's
PREDECESSOR_STD = 0.02  # standard deviation of a new selector's predecessor codebook


class SequentialHead(nn.Module, ABC):
    """Corrects the logits of each depth of a block by the tokens above.

    Each node of a draft has a state (..., S), which says what the head must know of the node's token and of those above
    it. Arguments of the methods: `hidden` (..., H), the block's normed states; `embed`, the embedding that the network
    uses. All leading dimensions are broadcast.
    """

    candidates: int | None = None  # number of a node's children that can have a probability above 0; all tokens if None

    @abstractmethod
    def begin(self, roots: Tensor, hidden: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the roots' state (..., S).

        Args:
            roots: (...), the blocks' first tokens.
            hidden: (..., H), the block's states at these tokens.
        """

    @abstractmethod
    def step(self, state: Tensor, tokens: Tensor, hidden: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the state (..., S) of nodes.

        Args:
            state: (..., S), their parents'.
            tokens: (...), the nodes' tokens.
            hidden: (..., H), the block's states from which these tokens were predicted.
        """

    @abstractmethod
    def logits(self, base: Tensor, hidden: Tensor, state: Tensor, depth: int) -> Tensor:
        """Return the logits (..., V) of nodes' children.

        Args:
            base: (..., V), the block's own logits at their depth.
            hidden: (..., H), its states there.
            state: (..., S), the nodes'.
            depth: The depth of the children, from 0.
        """


@final
class MarkovHead(SequentialHead):
    """DSpark's head: a low-rank bias of the token above. The rnn kind also remembers the tokens above that one."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.kind, self.rank, self.from_anchor = config.head, config.head_rank, config.from_anchor
        self.markov_w1 = nn.Embedding(config.vocab_size, self.rank)
        self.markov_w2 = nn.Linear(self.rank, config.vocabulary, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + self.rank, self.rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(config.hidden_size + 2 * self.rank, 3 * self.rank)

    def begin(self, roots: Tensor, hidden: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        token = self.markov_w1(roots)
        if self.kind != "rnn":
            return token
        state = torch.cat([token, torch.zeros_like(token)], -1)
        # a root that predicts nothing has a turn of its own in the recurrence, as in speculators
        return state if self.from_anchor else self.step(state, roots, hidden, embed)

    def step(self, state: Tensor, tokens: Tensor, hidden: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        token = self.markov_w1(tokens)
        return token if self.kind != "rnn" else torch.cat([token, self._recur(state, hidden)[0]], -1)

    def logits(self, base: Tensor, hidden: Tensor, state: Tensor, depth: int) -> Tensor:
        if self.kind == "rnn":
            _, state = self._recur(state, hidden)
        elif self.kind == "gated":
            state = sigmoid(self.gate_proj(torch.cat([_like(hidden, state), state], -1))) * state
        return base + self.markov_w2(state)

    def _recur(self, state: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the recurrent part of the next state, and the input (..., rank) of W2."""
        token, memory = state.chunk(2, -1)
        joint = self.joint_proj(torch.cat([memory, token, _like(hidden, token)], -1))
        gate, candidate, output = joint.chunk(3, -1)
        gate = sigmoid(gate)
        return gate * memory + (1 - gate) * candidate.tanh(), output.tanh()


@final
class CandidateSelector(SequentialHead):
    """DFlash 2's head: scores how well each of a depth's best tokens follows the token above."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        rank, self.candidates = config.head_rank, min(config.head_candidates, config.vocabulary)
        self.predecessor_codebook = nn.Parameter(torch.randn(config.vocab_size, rank) * PREDECESSOR_STD)
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocabulary, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def begin(self, roots: Tensor, hidden: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        return self.predecessor_codebook[roots]

    def step(self, state: Tensor, tokens: Tensor, hidden: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        return self.predecessor_codebook[tokens]

    def logits(self, base: Tensor, hidden: Tensor, state: Tensor, depth: int) -> Tensor:
        values, ids = base.topk(cast(int, self.candidates))
        match = (self.successor_codebook[ids] @ (state * self.hidden_projection(hidden))[..., None])[..., 0]
        scores = values + match
        others = scores.new_full((*scores.shape[:-1], base.shape[-1]), -math.inf)
        return others.scatter(-1, ids.expand_as(scores), scores)


@final
class DominoHead(SequentialHead):
    """Domino's head: a GRU reads the block's tokens, and its state corrects all depths after a plain prefix.

    Args:
        prefix_gru: The GRU.
        embed_proj: From the state of a depth and that of the GRU to the correction of the logits.
        plain_prefix: Number of first depths that are not corrected.
    """

    def __init__(self, prefix_gru: nn.GRU, embed_proj: nn.Sequential, plain_prefix: int) -> None:
        super().__init__()
        self.prefix_gru, self.embed_proj, self.plain_prefix = prefix_gru, embed_proj, plain_prefix

    @staticmethod
    def layers(config: DFlashConfig) -> tuple[nn.GRU, nn.Sequential]:
        """Return new layers, which have the network's published names `prefix_gru` and `embed_proj`."""
        size, rank = config.hidden_size, config.head_rank
        before, after = nn.Linear(size + config.head_state, rank, bias=False), nn.Linear(rank, config.vocabulary, False)
        return nn.GRU(size, config.head_state, bias=False), nn.Sequential(before, nn.SiLU(), after)

    def begin(self, roots: Tensor, hidden: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        return self.step(hidden.new_zeros(*roots.shape, self.prefix_gru.hidden_size), roots, hidden, embed)

    def step(self, state: Tensor, tokens: Tensor, hidden: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        # `nn.GRU` itself takes sequences and has no kernel for bfloat16 on some devices
        reset, update, new = linear(embed(tokens), cast(Tensor, self.prefix_gru.weight_ih_l0)).chunk(3, -1)
        old_reset, old_update, old_new = linear(state, cast(Tensor, self.prefix_gru.weight_hh_l0)).chunk(3, -1)
        new = (new + sigmoid(reset + old_reset) * old_new).tanh()
        update = sigmoid(update + old_update)
        return (1 - update) * new + update * state

    def logits(self, base: Tensor, hidden: Tensor, state: Tensor, depth: int) -> Tensor:
        if depth < self.plain_prefix:
            return base.expand(*state.shape[:-1], -1)
        return base + self.embed_proj(torch.cat([_like(hidden, state), state], -1))


@final
class ConfidenceHead(nn.Module):
    """DSpark's estimate of the probability that a token is accepted if all tokens above it are."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.rank = config.head_rank if config.confidence_reads_token else 0
        self.proj = nn.Linear(config.hidden_size + self.rank, 1)

    def forward(self, hidden: Tensor, state: Tensor | None) -> Tensor:
        """Return the estimate's logit (...).

        Args:
            hidden: (..., H), the block's normed states from which the tokens are predicted.
            state: (..., S), the Markov head's state of the nodes above; None without a Markov head.
        """
        if self.rank:
            assert state is not None
            hidden = torch.cat([_like(hidden, state), state[..., : self.rank]], -1)
        return self.proj(hidden)[..., 0]


def _like(hidden: Tensor, state: Tensor) -> Tensor:
    """Return hidden (..., H), repeated for each node of `state` (..., S)."""
    return hidden.expand(*state.shape[:-1], -1)
