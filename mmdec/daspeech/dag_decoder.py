"""The graph decoder: one parallel pass predicts a directed acyclic graph of tokens.

Every vertex has a hidden state, a distribution over units (its emission), and transition probabilities to all later
vertices (its links). The options `link_prior`, `copy_encoder` and sinusoidal positions are not in the papers; the small
shipped model uses them. `kernels/dag.py` and `kernels/dag_decode.py` choose a path through the graph.

References:
    DA-Transformer (Huang et al., ICML 2022, section 3), as used by DASpeech (Fang et al., NeurIPS 2023, section 3.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdec.daspeech.units import BOS, EOS, NUM_SPECIAL_UNITS, UNK
from mmdec.kernels import onednn
from mmdec.kernels.dag import (
    PosteriorVariant,
    dag_best_alignment,
    dag_marginal,
    dag_posterior,
    expected_states,
    log_softmax_gather,
)
from mmdec.kernels.dag_beam import TokenNGram, beam_path
from mmdec.kernels.dag_decode import LatticePath, LatticeStrategy, decode_lattice
from mmdec.nn.conformer import lengths_to_mask
from mmdec.nn.transformer import DecoderLayer, PooledDropout, RowsLinear, sinusoids


@dataclass(frozen=True)
class DagConfig:
    """Sizes of the graph decoder; the defaults are DASpeech's (18 M parameters)."""

    d_model: int = 512
    ffn: int = 2048
    heads: int = 8
    layers: int = 4
    dropout: float = 0.1
    upsample: float = 0.5  # vertices per input frame (lambda in the paper)
    min_vertices: int = 2
    max_vertices: int = 1024
    link_heads: int = 8
    link_dim: int = 64  # channels of each link head's query and key
    positions: Literal["learned", "sinusoidal"] = "learned"
    # subtract from a link's score a penalty proportional to the jump's length, with one learned slope for each head
    link_prior: bool = False
    # add the encoder's states, interpolated to the graph's number of vertices, to the vertices' inputs
    copy_encoder: bool = False


@dataclass(frozen=True)
class Lattice:
    """A batch of graphs with L vertices each, padding included.

    Every path begins at vertex 0 and ends at vertex lengths - 1.
    """

    hidden: Tensor  # (B, L, D): hidden states of the L vertices
    logits: Tensor  # (B, L, V): logits of the units at each vertex
    links: Tensor  # (B, L, L) fp32: ln P of the link from vertex i to j; -inf where j <= i or beyond a row's end
    lengths: Tensor  # (B,): number of vertices

    @cached_property
    def emissions(self) -> Tensor:
        """ln P of all units at each vertex, (B, L, V) fp32. (`matches` computes only those of given units.)"""
        return self.logits.float().log_softmax(-1)

    def beam(self, ngram: TokenNGram | None, collapse: bool, count: int = 1) -> LatticePath:
        """Find the `count` best texts of each row by beam search.

        Args:
            ngram: A language model of the units; None: none.
            collapse: Whether equal neighbouring units are merged.

        Returns:
            B * count paths; the paths of one row follow each other.
        """
        return beam_path(
            self.emissions,
            self.links,
            self.lengths,
            ngram,
            count=count,
            collapse=collapse,
            bos=BOS,
            eos=EOS,
            specials=NUM_SPECIAL_UNITS,
        )

    def matches(self, units: Tensor) -> Tensor:
        """Compute log P(unit t | vertex j) for given units (B, M): (B, M, L).

        A log-softmax over all units is not stored.
        """
        return log_softmax_gather(self.logits, units)

    def path(self, strategy: str = "lookahead", **options: Any) -> LatticePath:
        """Choose each row's path and its tokens by a strategy such as "lookahead" or "viterbi".

        Args:
            options: Those of `kernels.dag_decode.decode_lattice`.
        """
        return decode_lattice(self.emissions, self.links, self.lengths, cast(LatticeStrategy, strategy), **options)

    def marginal(self, match: Tensor, target_lengths: Tensor) -> Tensor:
        """Return log P(Y | X) (B,), summed over all paths.

        Args:
            match: (B, M, L), from `matches`.
            target_lengths: (B,), numbers of tokens.
        """
        return dag_marginal(match, self.links, target_lengths, self.lengths)

    def best_alignment(self, match: Tensor, target_lengths: Tensor) -> Tensor:
        """Find the most probable path that emits the target.

        Args:
            match: (B, M, L), from `matches`.
            target_lengths: (B,), numbers of tokens.

        Returns:
            (B, L), the index of the target token at each vertex, or -1.
        """
        return dag_best_alignment(match, self.links, target_lengths, self.lengths)

    def posterior(self, match: Tensor, target_lengths: Tensor, variant: PosteriorVariant = "paper") -> Tensor:
        """Compute P(vertex j emits token t | X, Y), (B, M, L), without gradient.

        Args:
            match: (B, M, L), from `matches`.
            target_lengths: (B,), numbers of tokens.
            variant: The formula of the "paper", or of the "released" code.
        """
        return dag_posterior(match, self.links, target_lengths, self.lengths, variant=variant)

    def expected_states(self, posterior: Tensor) -> Tensor:
        """Average the vertices' hidden states for each target token, weighted by its posterior (B, M, L).

        Returns:
            (B, M, D).
        """
        return expected_states(posterior.to(self.hidden.dtype), self.hidden)


def graph_sizes(config: DagConfig, frame_lengths: Tensor) -> Tensor:
    """Compute the number of vertices of each graph (B,): floor(upsample * frames), clamped to the configured range.

    Args:
        config: The decoder's sizes.
        frame_lengths: (B,), numbers of input frames.
    """
    sizes = (config.upsample * frame_lengths.to(torch.float64)).floor().to(torch.long)
    return sizes.clamp(config.min_vertices, config.max_vertices)


class Links(nn.Module):
    """Computes the transition probabilities between vertices.

    They are a mixture of attention heads, whose mixture weights depend on the source vertex.
    """

    def __init__(self, config: DagConfig) -> None:
        super().__init__()
        self.config = config
        d, width = config.d_model, config.link_heads * config.link_dim
        self.link_positional = nn.Embedding(config.max_vertices + 2, d) if config.positions == "learned" else None
        self.query_linear = RowsLinear(2 * d, width)
        self.key_linear = RowsLinear(2 * d, width)
        self.gate_linear = nn.Linear(2 * d, config.link_heads)
        if config.link_prior:
            # softplus of these parameters gives initial penalties of 0.6 ... 0.15 nats per vertex, so that at first no
            # jump skips most of the graph
            slopes = torch.logspace(math.log10(0.6), math.log10(0.15), config.link_heads)
            self.prior = nn.Parameter(torch.log(torch.expm1(slopes)))
        else:
            self.register_parameter("prior", None)

    def forward(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        """Compute ln P of all links.

        Args:
            hidden: (B, L, d), hidden states of the vertices.
            lengths: (B,), numbers of vertices.

        Returns:
            (B, L, L) fp32.
        """
        b, size, d = hidden.shape
        config = self.config
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.float()
            if self.link_positional is None:
                position = sinusoids(size, d, hidden.device)
            else:
                position = self.link_positional.weight[:size]
            x = torch.cat([hidden, position.expand(b, -1, -1)], dim=-1)  # shape (B, L, 2d)
            q = self.query_linear(x).view(b, size, config.link_heads, -1).transpose(1, 2)
            k = self.key_linear(x).view(b, size, config.link_heads, -1).transpose(1, 2)
            if not torch.is_grad_enabled():
                return self._inference_links(x, q, k, lengths)
            scores = q @ k.transpose(2, 3) * config.link_dim**-0.5  # shape (B, H, L, L)
            steps = torch.arange(size, device=hidden.device)
            jump = steps[None, :] - steps[:, None]  # j - i
            if self.prior is not None:
                scores = scores - F.softplus(self.prior)[:, None, None] * jump
            allowed = (jump > 0) & lengths_to_mask(lengths, size)[:, None, :]  # shape (B, L, L)
            # a finite number instead of -inf, so that vertices without a successor give no NaN in softmax or its
            # gradient
            scores = scores.masked_fill(~allowed[:, None], -1e30)
            heads = scores.log_softmax(-1)  # shape (B, H, L, L)
            gates = self.gate_linear(x).log_softmax(-1).transpose(1, 2)[..., None]  # shape (B, H, L, 1)
            links = torch.logsumexp(heads + gates, dim=1)
            return links.masked_fill(~allowed, -torch.inf)

    def _inference_links(self, x: Tensor, q: Tensor, k: Tensor, lengths: Tensor) -> Tensor:
        """Compute ln P of all links (B, L, L) as `forward` does, but without gradients and head by head.

        The three buffers (B, L, L) fit in the CPU's cache; one buffer (B, H, L, L) would not. Penalties and mask are
        written into a buffer, and the matrix product is added to it. Probabilities below 1e-38 become 0; no decoded
        path uses such links.

        Args:
            x: (B, L, 2d), states and positions of the vertices.
            q: (B, H, L, link_dim), queries of H heads.
            k: (B, H, L, link_dim), keys of H heads.
            lengths: (B,), numbers of vertices.
        """
        b, heads, size, _ = q.shape
        penalties = jump_penalties(size, self.prior is not None, q.device)[None]
        if b > 1:
            penalties = torch.where(lengths_to_mask(lengths, size)[:, None], penalties, _NO_JUMP)
        # at least 1e-20, because a slope of 0 would make the mask 0
        slopes = q.new_ones(heads) if self.prior is None else F.softplus(self.prior).clamp(min=1e-20)
        gates = self.gate_linear(x).softmax(-1)  # shape (B, L, H)
        links = q.new_zeros(b, size, size)
        scores, weights = torch.empty_like(links), torch.empty_like(links)
        for head in range(heads):
            torch.mul(penalties, -slopes[head], out=scores)
            scores.baddbmm_(q[:, head], k[:, head].transpose(1, 2), alpha=self.config.link_dim**-0.5)
            torch.softmax(scores, -1, out=weights)
            links.addcmul_(weights, gates[..., head, None])
        links.log_()
        if b == 1:  # a single row has no padding: only its last vertex has no successor
            links[:, -1] = -torch.inf
            return links
        # the last vertex and padding have no successors: replace the values that their softmax gave
        return links.masked_fill_((torch.arange(size, device=q.device) >= lengths[:, None] - 1)[..., None], -torch.inf)


# Penalty of an impossible jump. It is finite: with -inf, a vertex without possible jumps would give NaN in the softmax.
_NO_JUMP = 1e30


def jump_penalties(size: int, prior: bool, device: torch.device) -> Tensor:
    """Make the table (L, L) of the cost of a jump from vertex i to vertex j.

    The cost is j - i, or 0 if `prior` is False; for j <= i, which is impossible, it is 1e30. The caller multiplies the
    table by a learned slope and subtracts it from the links' scores.

    Args:
        size: L.
        prior: Whether longer jumps cost more.
        device: The table's device.
    """
    rows = 1 << max(size - 1, 255).bit_length()
    return _cached_penalties(rows, prior, device)[:size, :size]


@lru_cache(maxsize=8)
def _cached_penalties(rows: int, prior: bool, device: torch.device) -> Tensor:
    """Return a cached table (rows, rows) of the jumps' penalties, made by `jump_penalties`.

    A penalty depends on j - i only, so a smaller table is the top left corner of a larger one.
    """
    with torch.inference_mode(False):  # no inference tensor, because the cached table is used in training, too
        steps = torch.arange(rows, dtype=torch.float32, device=device)
        jump = steps[None, :] - steps[:, None]
        return torch.where(jump > 0, jump if prior else 0.0, _NO_JUMP)


class DagDecoder(nn.Module):
    """Predicts a graph from encoder states in one pass."""

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

    def inputs(self, states: Tensor, state_lengths: Tensor, lengths: Tensor, revealed: Tensor | None) -> Tensor:
        """Compute the input (B, L, d) of the first layer.

        Args:
            states: (B, S, d_memory) of the encoder.
            state_lengths: (B,), numbers of states.
            lengths: (B,), numbers of vertices.
            revealed: (B, L), token ids that some vertices get as input, -1 for none; or None.
        """
        size, d = int(lengths.max()), self.config.d_model
        steps = torch.arange(size, device=states.device)
        tokens = torch.full((states.shape[0], size), UNK, device=states.device)
        tokens = torch.where(steps == lengths[:, None] - 1, EOS, tokens)
        tokens[:, 0] = BOS
        if revealed is not None:
            tokens = torch.where(revealed >= 0, revealed, tokens)
        x = math.sqrt(d) * self.embed_tokens(tokens)
        if self.embed_positions is None:
            x = x + sinusoids(size, d, states.device)
        else:
            x = x + self.embed_positions.weight[:size]
        if self.copy is not None:
            # vertex j gets the encoder state at index j (S-1)/(L-1), interpolated between its two neighbours
            b, s, _ = states.shape
            last = (state_lengths - 1)[:, None]
            point = steps * (last / (lengths[:, None] - 1).clamp(min=1))
            point = torch.minimum(point, last.to(point.dtype))  # shape (B, L)
            low = point.to(torch.long)
            part = (point - low)[..., None].to(x.dtype)
            # `index_select` copies whole rows, which is three times faster than `gather`
            copied = self.copy(states).flatten(0, 1)
            first = s * torch.arange(b, device=states.device)[:, None]
            before, after = (
                copied.index_select(0, (index + first).flatten()).view(b, size, d).to(x.dtype)
                for index in (low, torch.minimum(low + 1, last))
            )
            x = x + torch.lerp(before, after, part)
        return self.dropout(x)

    def forward(
        self, states: Tensor, state_lengths: Tensor, frame_lengths: Tensor, revealed: Tensor | None = None
    ) -> Lattice:
        """Predict the graphs of B recordings.

        Args:
            states: (B, S, d_memory) of the encoder.
            state_lengths: (B,), numbers of states.
            frame_lengths: (B,), numbers of input frames, which decide the graphs' sizes.
            revealed: (B, L), token ids that some vertices get as input, -1 for none (glancing training, as in GLAT).
        """
        lengths = graph_sizes(self.config, frame_lengths)
        x = self.inputs(states, state_lengths, lengths, revealed)
        if states.shape[0] == 1:  # a batch of one row has no padding, so it needs no mask
            states, self_mask, memory_mask = states[:, : int(state_lengths[0])], None, None
        else:
            self_mask = padding_mask(lengths_to_mask(lengths, x.shape[1]))
            memory_mask = padding_mask(lengths_to_mask(state_lengths, states.shape[1]))
        for layer in self.layers:
            x = layer(x, self_mask, states, memory_mask)
        return Lattice(x, onednn.linear(x, self.embed_tokens.weight), self.links(x, lengths), lengths)


def padding_mask(real: Tensor) -> Tensor:
    """Make an additive mask (B, 1, 1, S) from real (B, S) bool: 0 where True, a large negative number elsewhere."""
    return torch.zeros(real.shape, device=real.device).masked_fill(~real, -1e9)[:, None, None]
