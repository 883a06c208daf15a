"""Linguistic decoder: one parallel pass predicts a directed acyclic graph of tokens.

Every vertex gets a hidden state, a distribution over units (its emission) and transition probabilities to all later
vertices (its links). Source: DA-Transformer (Huang et al., ICML 2022, section 3), as used by DASpeech (Fang et al.,
NeurIPS 2023, section 3.2). The options `link_prior`, `copy_encoder` and sinusoidal positions are not in the paper; the
small shipped model uses them. For choosing a path see `ops/dag.py` and `ops/dag_decode.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdec.nn.conformer import lengths_to_mask
from mmdec.nn.transformer import DecoderLayer, PooledDropout, RowsLinear, sinusoids
from mmdec.ops import onednn
from mmdec.ops.dag import (
    PosteriorVariant,
    dag_best_alignment,
    dag_marginal,
    dag_posterior,
    expected_states,
    log_softmax_gather,
)
from mmdec.ops.dag_beam import TokenNGram, beam_path
from mmdec.ops.dag_decode import LatticePath, LatticeStrategy, decode_lattice

BOS, PAD, EOS, UNK = 0, 1, 2, 3  # the first four units of every vocabulary


@dataclass(frozen=True)
class DagConfig:
    """Sizes of the graph decoder; the defaults are DASpeech's (18 M parameters)."""

    d_model: int = 512
    ffn: int = 2048
    heads: int = 8
    layers: int = 4
    dropout: float = 0.1
    upsample: float = 0.5  # vertices per filterbank frame (lambda)
    min_vertices: int = 2
    max_vertices: int = 1024
    link_heads: int = 8
    link_dim: int = 64  # size of a head's query and key
    positions: Literal["learned", "sinusoidal"] = "learned"
    link_prior: bool = False  # penalise long jumps log-linearly, with one learned slope for each head
    copy_encoder: bool = False  # add the encoder's states, interpolated to the graph's size, to the vertices' inputs


@dataclass(frozen=True)
class Lattice:
    """A batch of graphs. Every path begins at vertex 0 and ends at vertex lengths-1."""

    hidden: Tensor  # (B, L, D): hidden states of the L vertices
    logits: Tensor  # (B, L, V): scores of the units at each vertex
    links: Tensor  # (B, L, L): ln P of the link from vertex i to j, fp32; -inf where j <= i or beyond a row's end
    lengths: Tensor  # (B,): number of vertices

    @cached_property
    def emissions(self) -> Tensor:
        """Compute the log-probabilities of all units, fp32: (B, L, V). `matches` computes only those of given units."""
        return self.logits.float().log_softmax(-1)

    def beam(self, ngram: TokenNGram | None, collapse: bool, count: int = 1) -> LatticePath:
        """Choose each row's `count` best paths by beam search, see `ops.dag_beam.beam_path`. ngram: a language model of
        the units; None: none. collapse: whether equal neighbouring units are merged."""
        return beam_path(
            self.emissions, self.links, self.lengths, ngram, count=count, collapse=collapse, specials=UNK + 1
        )

    def matches(self, units: Tensor) -> Tensor:
        """Compute log P(unit t | vertex j) of units (B, M): (B, M, L), without a log-softmax of all units."""
        return log_softmax_gather(self.logits, units)

    def path(self, strategy: str = "lookahead", **options: Any) -> LatticePath:
        """Choose each row's path and its tokens; options as for `ops.dag_decode.decode_lattice`."""
        return decode_lattice(self.emissions, self.links, self.lengths, cast(LatticeStrategy, strategy), **options)

    def marginal(self, match: Tensor, target_lengths: Tensor) -> Tensor:
        """Sum over all paths: log P(Y | X) (B,). match: (B, M, L), from `matches`. See `ops.dag.dag_marginal`."""
        return dag_marginal(match, self.links, target_lengths, self.lengths)

    def best_alignment(self, match: Tensor, target_lengths: Tensor) -> Tensor:
        """Find the most probable path that emits the target: (B, L), the index of the token at each vertex, or -1."""
        return dag_best_alignment(match, self.links, target_lengths, self.lengths)

    def posterior(self, match: Tensor, target_lengths: Tensor, variant: PosteriorVariant = "paper") -> Tensor:
        """Compute P(vertex j emits token t | X, Y): (B, M, L), without gradient. See `ops.dag.dag_posterior`."""
        return dag_posterior(match, self.links, target_lengths, self.lengths, variant=variant)

    def expected_states(self, posterior: Tensor) -> Tensor:
        """Average the vertices' hidden states for each token, weighted by posterior (B, M, L). Returns: (B, M, D)."""
        return expected_states(posterior.to(self.hidden.dtype), self.hidden)


def graph_sizes(config: DagConfig, frame_lengths: Tensor) -> Tensor:
    """Compute the numbers of vertices (B,) for frame_lengths (B,): clamp(floor(config.upsample * frames))."""
    sizes = (config.upsample * frame_lengths.to(torch.float64)).floor().to(torch.long)
    return sizes.clamp(config.min_vertices, config.max_vertices)


class Links(nn.Module):
    """Transition scores between vertices: a mixture of heads, with gates computed from the source vertex."""

    def __init__(self, config: DagConfig) -> None:
        super().__init__()
        self.config = config
        d, width = config.d_model, config.link_heads * config.link_dim
        self.link_positional = nn.Embedding(config.max_vertices + 2, d) if config.positions == "learned" else None
        self.query_linear = RowsLinear(2 * d, width)
        self.key_linear = RowsLinear(2 * d, width)
        self.gate_linear = nn.Linear(2 * d, config.link_heads)
        if config.link_prior:
            # softplus of these gives initial penalties of .6 ... .15 nats a vertex, so that early jumps do not skip the
            # graph
            slopes = torch.logspace(math.log10(0.6), math.log10(0.15), config.link_heads)
            self.prior = nn.Parameter(torch.log(torch.expm1(slopes)))
        else:
            self.register_parameter("prior", None)

    def forward(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        """Compute ln P of all links between vertices. hidden: (B, L, d). lengths: (B,). Returns: (B, L, L) fp32."""
        b, size, d = hidden.shape
        config = self.config
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.float()
            if self.link_positional is None:
                position = sinusoids(size, d, hidden.device)
            else:
                position = self.link_positional.weight[:size]
            x = torch.cat([hidden, position.expand(b, -1, -1)], dim=-1)  # (B, L, 2d)
            q = self.query_linear(x).view(b, size, config.link_heads, -1).transpose(1, 2)
            k = self.key_linear(x).view(b, size, config.link_heads, -1).transpose(1, 2)
            if not torch.is_grad_enabled():
                return self._decoded(x, q, k, lengths)
            scores = q @ k.transpose(2, 3) * config.link_dim**-0.5  # (B, H, L, L)
            steps = torch.arange(size, device=hidden.device)
            jump = steps[None, :] - steps[:, None]  # j - i
            if self.prior is not None:
                scores = scores - F.softplus(self.prior)[:, None, None] * jump
            allowed = (jump > 0) & lengths_to_mask(lengths, size)[:, None, :]  # (B, L, L)
            # a finite floor avoids NaN in softmax and its gradient for rows without a successor
            scores = scores.masked_fill(~allowed[:, None], -1e30)
            heads = scores.log_softmax(-1)  # (B, H, L, L)
            gates = self.gate_linear(x).log_softmax(-1).transpose(1, 2)[..., None]  # (B, H, L, 1)
            links = torch.logsumexp(heads + gates, dim=1)
            return links.masked_fill(~allowed, -torch.inf)

    def _decoded(self, x: Tensor, q: Tensor, k: Tensor, lengths: Tensor) -> Tensor:
        """Do what `forward` does, but without gradient: add up the heads' probabilities one by one.

        Three buffers (B, L, L) fit in the CPU's cache; one of (B, H, L, L) would not. Prior and mask are written into a
        buffer, and the matrix product is added to it. Links below 1e-38 become -inf; no decoded path uses them.
        """
        b, heads, size, _ = q.shape
        toll = jump_toll(size, self.prior is not None, q.device)[None]
        if b > 1:
            toll = torch.where(lengths_to_mask(lengths, size)[:, None], toll, _NO_JUMP)
        # with slope 0 the mask would have no effect
        slopes = q.new_ones(heads) if self.prior is None else F.softplus(self.prior).clamp(min=1e-20)
        gates = self.gate_linear(x).softmax(-1)  # (B, L, H)
        links = q.new_zeros(b, size, size)
        scores, weights = torch.empty_like(links), torch.empty_like(links)
        for head in range(heads):
            torch.mul(toll, -slopes[head], out=scores)
            scores.baddbmm_(q[:, head], k[:, head].transpose(1, 2), alpha=self.config.link_dim**-0.5)
            torch.softmax(scores, -1, out=weights)
            links.addcmul_(weights, gates[..., head, None])
        links.log_()
        if b == 1:  # one row has no padding
            links[:, -1] = -torch.inf
            return links
        # the last vertex and padding have no successors: their softmax is meaningless
        return links.masked_fill_((torch.arange(size, device=q.device) >= lengths[:, None] - 1)[..., None], -torch.inf)


_NO_JUMP = 1e30  # penalty of an impossible jump; finite, so that a row without any jump gives no NaN in softmax


def jump_toll(size: int, prior: bool, device: torch.device) -> Tensor:
    """Make the penalties (L, L) fp32 of jumps from vertex i to j: j - i (times a head's slope, it is subtracted from
    the link's score), or 0 without `prior`. For j <= i the penalty is 1e30. size: L."""
    rows = 1 << max(size - 1, 255).bit_length()
    return _toll_table(rows, prior, device)[:size, :size]


@lru_cache(maxsize=8)
def _toll_table(rows: int, prior: bool, device: torch.device) -> Tensor:
    """Return a cached table (rows, rows) of penalties. They depend on j - i: a smaller table is its top left corner."""
    with torch.inference_mode(False):  # a table made while decoding must also work in training
        steps = torch.arange(rows, dtype=torch.float32, device=device)
        jump = steps[None, :] - steps[:, None]
        return torch.where(jump > 0, jump if prior else 0.0, _NO_JUMP)


class DagDecoder(nn.Module):
    """Computes a graph from encoder states in one pass.

    forward: states (B, S, d_memory), state_lengths (B,), frame_lengths (B,). given: (B, L), the tokens whose embeddings
        some vertices get as input, -1 for none (glancing training, as in GLAT). Returns: a `Lattice`.
    """

    def __init__(self, config: DagConfig, num_units: int, d_memory: int) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(num_units, config.d_model)
        nn.init.normal_(self.embed_tokens.weight, std=config.d_model**-0.5)
        if config.positions == "learned":
            self.embed_positions = nn.Embedding(config.max_vertices + 2, config.d_model)
            nn.init.normal_(self.embed_positions.weight, std=0.02)
        else:
            self.embed_positions = None
        self.copy = nn.Linear(d_memory, config.d_model) if config.copy_encoder else None
        self.layers = nn.ModuleList(
            [
                DecoderLayer(config.d_model, config.ffn, config.heads, config.dropout, d_memory)
                for _ in range(config.layers)
            ]
        )
        self.links = Links(config)
        self.dropout = PooledDropout(config.dropout)

    def inputs(self, states: Tensor, state_lengths: Tensor, lengths: Tensor, given: Tensor | None) -> Tensor:
        """Compute the first layer's input at the vertices, (B, L, d). lengths: (B,), numbers of vertices. states,
        state_lengths, given: as for `forward`."""
        size, d = int(lengths.max()), self.config.d_model
        steps = torch.arange(size, device=states.device)
        tokens = torch.full((states.shape[0], size), UNK, device=states.device)
        tokens = torch.where(steps == lengths[:, None] - 1, EOS, tokens)
        tokens[:, 0] = BOS
        if given is not None:
            tokens = torch.where(given >= 0, given, tokens)
        x = math.sqrt(d) * self.embed_tokens(tokens)
        if self.embed_positions is None:
            x = x + sinusoids(size, d, states.device)
        else:
            x = x + self.embed_positions.weight[:size]
        if self.copy is not None:
            # vertex j interpolates the encoder's states at j (S-1)/(L-1)
            b, s, _ = states.shape
            last = (state_lengths - 1)[:, None]
            point = steps * (last / (lengths[:, None] - 1).clamp(min=1))
            point = torch.minimum(point, last.to(point.dtype))  # (B, L)
            low = point.to(torch.long)
            part = (point - low)[..., None].to(x.dtype)
            # `index_select` of whole rows is three times faster than a gather of numbers
            copied = self.copy(states).flatten(0, 1)
            first = s * torch.arange(b, device=states.device)[:, None]
            before, after = (
                copied.index_select(0, (index + first).flatten()).view(b, size, d).to(x.dtype)
                for index in (low, torch.minimum(low + 1, last))
            )
            x = x + torch.lerp(before, after, part)
        return self.dropout(x)

    def forward(
        self, states: Tensor, state_lengths: Tensor, frame_lengths: Tensor, given: Tensor | None = None
    ) -> Lattice:
        lengths = graph_sizes(self.config, frame_lengths)
        x = self.inputs(states, state_lengths, lengths, given)
        if states.shape[0] == 1:  # one row has no padding to hide
            states, self_mask, memory_mask = states[:, : int(state_lengths[0])], None, None
        else:
            self_mask = additive(lengths_to_mask(lengths, x.shape[1]))
            memory_mask = additive(lengths_to_mask(state_lengths, states.shape[1]))
        for layer in self.layers:
            x = layer(x, self_mask, states, memory_mask)
        return Lattice(x, onednn.linear(x, self.embed_tokens.weight), self.links(x, lengths), lengths)


def additive(real: Tensor) -> Tensor:
    """Make an additive mask (B, 1, 1, S) from real (B, S) bool: 0 where True, a large negative number elsewhere."""
    return torch.zeros(real.shape, device=real.device).masked_fill(~real, -1e9)[:, None, None]
