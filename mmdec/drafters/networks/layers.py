"""Llama's decoder layer, of which draft networks have one or a few.

`DraftLayer` is split into `project` (queries, keys and values) and `attend` (the rest), so that a caller with a cache
puts its keys and values in between.

The layer has several implementations: this one, differentiable, for all devices and shapes; and fast paths for small
networks on a CPU, for one token (`../eagle/cpu_step.py`) and for FLASH's slots (`../flash/cpu_step.py`).

Letters in shapes: B rows, n positions that the layer processes, S positions in a cache, H hidden size, h key-value
heads, d channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from mmdec.drafters.networks.config import DraftConfig

KeyValues = tuple[Tensor, Tensor]  # keys and values, each (B, key-value heads, tokens, channels of a head)
# maximum number of weights in the feed-forward network for which packed copies of weights are made
MAX_PACKED_WEIGHTS = 2**21
MIN_TABLE_LENGTH = 1024  # minimum number of positions whose cosines and sines are computed at once


class PackedWeights(NamedTuple):
    """A layer's weights, concatenated so that one matrix product replaces several.

    A small network's time depends on the number of operations.
    """

    attention: Tensor  # weights of the query, key and value projections, concatenated along the outputs
    bias: Tensor | None  # biases of these three projections
    gate_up: Tensor  # weights of the feed-forward's gate and up projections, concatenated
    norms: Tensor | None = None  # (2, H), weights of the norms of embedding and feature (EAGLE-3 only)


class RotaryEmbedding:
    """Computes cosines and signed sines of positions, for `rotate`, and keeps a table of them.

    Signed means that the first half of the sines is negated. The layers of a network share one object.

    Args:
        dim: d.
        theta: The base of the frequencies.
        scaling: transformers' `rope_parameters`, such as {"rope_type": "yarn", "factor": ...}; None: not scaled.
    """

    def __init__(self, dim: int, theta: float, scaling: Mapping[str, Any] | None = None) -> None:
        self.dim, self.theta, self.scaling = dim, theta, scaling
        self._table: KeyValues | None = None  # cosines and signed sines, each (positions, d)

    def __call__(self, positions: Tensor | int, dtype: torch.dtype, device: torch.device) -> KeyValues:
        """Return cosines and signed sines: (B, 1, n, d) for positions (B, n), (d,) for a single position."""
        if isinstance(positions, int):
            cosines, sines = self.table(positions + 1, dtype, device)
            return cosines[positions], sines[positions]
        if device.type != "cpu":  # reading the largest position would synchronise with the device
            cosines, sines = self._waves(positions, dtype)
            return cosines[:, None], sines[:, None]
        cosines, sines = self.table(int(positions.max()) + 1, dtype, device)
        return cosines[positions][:, None], sines[positions][:, None]

    def table(self, length: int, dtype: torch.dtype, device: torch.device) -> KeyValues:
        """Return cached cosines and signed sines (L, d) of the positions 0 .. L - 1. L is at least `length`."""
        table = self._table
        if table is None or table[0].dtype != dtype or table[0].device != device or len(table[0]) < length:
            with torch.inference_mode(False), torch.no_grad():  # the cached table is used in training, too
                table = self._waves(torch.arange(max(MIN_TABLE_LENGTH, 2 * length), device=device), dtype)
            self._table = table
        return table

    def _waves(self, positions: Tensor, dtype: torch.dtype) -> KeyValues:
        """Compute cosines and signed sines (..., d) as transformers does, in float32."""
        frequencies, factor = self._frequencies(positions.device)
        angles = positions[..., None].float() * frequencies
        cosines, sines = angles.cos() * factor, angles.sin() * factor
        return torch.cat([cosines, cosines], -1).to(dtype), torch.cat([-sines, sines], -1).to(dtype)

    def _frequencies(self, device: torch.device) -> tuple[Tensor, float]:
        """Return the frequencies (d / 2,) in float32, and a factor on cosines and sines."""
        if self.scaling is None:
            half = torch.arange(0, self.dim, 2, device=device).float() / self.dim
            return 1.0 / self.theta**half, 1.0
        from transformers import ROPE_INIT_FUNCTIONS, LlamaConfig

        config = LlamaConfig(
            head_dim=self.dim,
            max_position_embeddings=self.scaling.get("original_max_position_embeddings") or 2048,
            rope_parameters={**self.scaling, "rope_theta": self.theta},
        )
        frequencies, factor = ROPE_INIT_FUNCTIONS[self.scaling["rope_type"]](config, device)
        return frequencies, float(factor)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Apply rotary positions to x (..., d).

    Args:
        cosines: From `RotaryEmbedding`.
        sines: From `RotaryEmbedding`.
    """
    return x * cosines + x.roll(x.shape[-1] // 2, -1) * sines


def positions_from(starts: Sequence[int], size: int, device: torch.device) -> Tensor:
    """Return position ids (B, size): row r has starts[r], starts[r] + 1, ..."""
    if len(starts) == 1:
        return torch.arange(starts[0], starts[0] + size, device=device)[None]
    return torch.tensor(starts, device=device)[:, None] + torch.arange(size, device=device)


class RMSNorm(nn.Module):
    """Root mean square norm, as in Llama."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return apply_rms_norm(x, self.weight, self.eps)


def apply_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply an RMS norm to x (..., H).

    Args:
        weight: (H,), or (k, H) for x (..., k, H).
    """
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and not torch.is_grad_enabled():
        # this takes half the time of torch's `rms_norm`
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        return x * squares.div_(x.shape[-1]).add_(eps).rsqrt_() * weight
    # autocast gives x in half precision
    x = x.to(weight.dtype)
    return (
        rms_norm(x, weight.shape, weight, eps) if weight.dim() == 1 else rms_norm(x, x.shape[-1:], None, eps) * weight
    )


class DraftAttention(nn.Module):
    """The projections of grouped-query attention.

    Args:
        inputs: Number of input channels; default H.
        qk_norm: Whether queries and keys are normalised, as in Qwen3.
    """

    def __init__(self, config: DraftConfig, inputs: int = 0, qk_norm: bool = False) -> None:
        super().__init__()
        size, dim, bias = inputs or config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(size, config.num_attention_heads * dim, bias=bias)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * dim, bias=bias)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps) if qk_norm else None


class MLP(nn.Module):
    """The projections of a SwiGLU feed-forward network."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)


class DraftLayer(nn.Module):
    """One decoder layer, with weights named as in Llama.

    Args:
        rotary: Rotary positions; default: those of `config`, without scaling.
        inputs: Number of input channels of attention; default H.
        qk_norm: Whether queries and keys are normalised, as in Qwen3.
    """

    def __init__(
        self, config: DraftConfig, rotary: RotaryEmbedding | None = None, inputs: int = 0, qk_norm: bool = False
    ) -> None:
        super().__init__()
        self.config, self.rotary = config, rotary or RotaryEmbedding(config.head_dim, config.rope_theta)
        self.self_attn = DraftAttention(config, inputs, qk_norm)
        self.mlp = MLP(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps) if config.input_norm else None

    def project(
        self, states: Tensor, positions: Tensor | int, packed: PackedWeights | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values (B, heads, n, d), with rotary positions applied to queries and keys.

        Args:
            states: (B, n, H), the layer's input.
            positions: (B, n), or one number for all.
            packed: The result of `pack_weights`, or None.
        """
        config, weights = self.config, self.self_attn
        states = self.attention_input(states, packed)
        if packed is None:
            parts = (weights.q_proj, weights.k_proj, weights.v_proj)
            joint = torch.cat([linear(states, part.weight, part.bias) for part in parts], -1)
        else:
            joint = linear(states, packed.attention, packed.bias)
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        joint = joint.view(*states.shape[:2], heads + 2 * groups, config.head_dim).transpose(1, 2)
        turned = joint[:, : heads + groups]
        if weights.q_norm is not None and weights.k_norm is not None:
            turned = torch.cat([weights.q_norm(turned[:, :heads]), weights.k_norm(turned[:, heads:])], 1)
        turned = rotate(turned, *self.rotary(positions, states.dtype, states.device))
        return turned[:, :heads], turned[:, heads:], joint[:, heads + groups :]

    def attend(
        self,
        states: Tensor,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None = None,
        packed: PackedWeights | None = None,
    ) -> Tensor:
        """Compute the layer's output (B, n, H), after `project`.

        Args:
            states: (B, n, H), the layer's input.
            queries: (B, heads, n, d).
            keys: (B, h, S + n, d).
            values: Values, in the same shape as `keys`.
            mask: Additive (B, 1, n, S + n); None: causal.
            packed: The result of `pack_weights`, or None.
        """
        size, width = queries.shape[2], keys.shape[2]
        if mask is None and 1 < size < width:
            causal = torch.ones(size, width, dtype=torch.bool, device=states.device).tril(width - size)
            mask = torch.zeros(size, width, dtype=states.dtype, device=states.device).masked_fill(~causal, -math.inf)
        mixed = scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None and size == width > 1,
            enable_gqa=self.config.num_key_value_heads != self.config.num_attention_heads,
        )
        return self.after_attention(states, mixed, packed)

    def after_attention(self, states: Tensor, mixed: Tensor, packed: PackedWeights | None = None) -> Tensor:
        """Compute the layer's output (B, n, H) from attention's.

        Args:
            states: (B, n, H), the layer's input.
            mixed: (B, heads, n, d), attention's output.
            packed: The result of `pack_weights`, or None.
        """
        o_proj, mlp = self.self_attn.o_proj, self.mlp
        states = self.residual(states) + linear(mixed.transpose(1, 2).flatten(2), o_proj.weight, o_proj.bias)
        normed = self.post_attention_layernorm(states)
        if packed is None:
            gate, up = linear(normed, mlp.gate_proj.weight), linear(normed, mlp.up_proj.weight)
        else:
            gate, up = linear(normed, packed.gate_up).chunk(2, -1)
        return states + linear(silu(gate) * up, mlp.down_proj.weight)

    def attention_input(self, states: Tensor, packed: PackedWeights | None = None) -> Tensor:
        """Compute the input of the query, key and value projections from the layer's input (B, n, H)."""
        return states if self.input_layernorm is None else self.input_layernorm(states)

    def residual(self, states: Tensor) -> Tensor:
        """Return what attention's output is added to; here it is the layer's input (B, n, H)."""
        return states

    def pack_weights(self) -> PackedWeights | None:
        """Return the weights, copied and concatenated; None if the layer is too large to gain by it.

        Later changes of the weights do not change the copy: make a new copy for each generate() call.
        """
        attention, mlp = self.self_attn, self.mlp
        if 3 * mlp.gate_proj.weight.numel() > MAX_PACKED_WEIGHTS:
            return None
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        bias = torch.cat([part.bias for part in parts]) if self.config.attention_bias else None
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        return PackedWeights(torch.cat([part.weight for part in parts]), bias, gate_up)
