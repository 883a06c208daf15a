"""The post-norm Transformer decoder layer of the graph and the autoregressive decoder, and a fast dropout.

On a CPU, drawing random numbers for `nn.Dropout` took a quarter of a training step of the small model. `PooledDropout`
draws a pool of masks once, and uses a random section of it in each call. On other devices `PooledDropout` is ordinary
dropout.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdec.errors import InputError
from mmdec.kernels import onednn

# minimum number of rows for which oneDNN's matrix product is used; with fewer it is slower than torch's own
MIN_ONEDNN_ROWS = 16
_POOL_SIZE = 1 << 23
_pools: dict[float, Tensor] = {}


def _pool(p: float) -> Tensor:
    """Return dropout masks for probability p, already scaled by 1 / (1 - p).

    They are drawn once, with a random generator of their own.
    """
    if p not in _pools:
        generator = torch.Generator().manual_seed(0x5EED)
        keep = torch.rand(_POOL_SIZE, generator=generator) >= p
        _pools[p] = (keep.to(torch.float32) / (1.0 - p)).to(torch.bfloat16)
    return _pools[p]


class PooledDropout(nn.Module):
    """Dropout for training on a CPU: the mask is a random section of a pool of masks.

    torch's global seed decides which section.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise InputError(f"`p` must be in [0, 1), but is {p}. It is the share of numbers set to zero.")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        size = x.numel()
        if x.device.type != "cpu" or size >= _POOL_SIZE:
            return F.dropout(x, self.p, True)
        start = int(torch.randint(_POOL_SIZE - size, ()))
        return x * _pool(self.p)[start : start + size].view(x.shape).to(x.dtype)


def sinusoids(size: int, d_model: int, device: torch.device, fairseq: bool = False) -> Tensor:
    """Return sinusoidal embeddings (size, d_model) of the positions 0 ... size - 1; first all sines, then all cosines.

    Args:
        fairseq: True: positions are numbered from 2, and frequencies decrease slightly faster, as in fairseq.
    """
    return _sinusoid_table(1 << max(size - 1, 255).bit_length(), d_model, device, fairseq)[:size]


@lru_cache(maxsize=16)
def _sinusoid_table(rows: int, d_model: int, device: torch.device, fairseq: bool) -> Tensor:
    """Return a cached table of the embeddings of `rows` positions.

    At batch size 1, computing the sines would take as long as a layer.
    """
    with torch.inference_mode(False):  # no inference tensor, because the cached table is used in training, too
        position = torch.arange(rows, dtype=torch.float32, device=device)[:, None] + (2 if fairseq else 0)
        steps = max(1, d_model // 2 - 1) if fairseq else d_model // 2
        rate = torch.exp(torch.arange(d_model // 2, dtype=torch.float32, device=device) * (-math.log(1e4) / steps))
        return torch.cat([(position * rate).sin(), (position * rate).cos()], dim=-1)


class RowsLinear(nn.Linear):
    """A linear layer. For inputs of many rows (tokens) it uses oneDNN's matrix product, where that is possible."""

    def forward(self, input: Tensor) -> Tensor:
        is_large = input.numel() >= MIN_ONEDNN_ROWS * self.in_features
        return (onednn.linear if is_large else F.linear)(input, self.weight, self.bias)


class Attention(nn.Module):
    """Multi-head attention.

    Training uses plain matrix products, because torch's fused attention is slower with a mask on a CPU.
    """

    def __init__(self, d_model: int, heads: int, dropout: float, d_memory: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.q = RowsLinear(d_model, d_model)
        self.kv = RowsLinear(d_memory or d_model, 2 * d_model)
        self.out = RowsLinear(d_model, d_model)
        self.dropout = PooledDropout(dropout)

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Project memory (B, S, d_memory) to keys and values (B, H, S, D) of H heads."""
        b, s, _ = memory.shape
        k, v = self.kv(memory).view(b, s, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        return k, v

    def attend(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Apply attention from x (B, M, d) to keys and values (B, H, S, D) of H heads.

        Args:
            mask: Additive, broadcastable to (B, H, M, S); None: no mask.

        Returns:
            (B, M, d).
        """
        b, m, d = x.shape
        q = self.q(x).view(b, m, self.heads, -1).transpose(1, 2)
        if not self.training:
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask if mask is None else mask.to(q.dtype))
        else:
            scores = (q @ keys.transpose(2, 3)).float() * (d // self.heads) ** -0.5
            if mask is not None:
                scores = scores + mask
            y = self.dropout(scores.softmax(-1).to(values.dtype)) @ values
        return self.out(y.transpose(1, 2).reshape(b, m, d))


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention to the encoder's states, feed-forward; each followed by a norm (post-norm)."""

    def __init__(self, d_model: int, ffn: int, heads: int, dropout: float, d_memory: int) -> None:
        super().__init__()
        self.self_attn = Attention(d_model, heads, dropout)
        self.self_attn_layer_norm = nn.LayerNorm(d_model)
        self.encoder_attn = Attention(d_model, heads, dropout, d_memory)
        self.encoder_attn_layer_norm = nn.LayerNorm(d_model)
        self.fc1 = RowsLinear(d_model, ffn)
        self.fc2 = RowsLinear(ffn, d_model)
        self.final_layer_norm = nn.LayerNorm(d_model)
        self.dropout = PooledDropout(dropout)

    def forward(self, x: Tensor, self_mask: Tensor | None, memory: Tensor, memory_mask: Tensor | None) -> Tensor:
        """Apply the layer to x (B, M, d).

        Args:
            memory: (B, S, d_memory), the encoder's states.
            self_mask, memory_mask: Additive masks of self-attention and cross-attention; None: no mask.
        """
        keys, values = self.self_attn.keys_values(x)
        return self.rest(x, keys, values, self_mask, *self.encoder_attn.keys_values(memory), memory_mask)

    def rest(
        self,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        self_mask: Tensor | None,
        memory_keys: Tensor,
        memory_values: Tensor,
        memory_mask: Tensor | None,
    ) -> Tensor:
        """Apply the layer to x (B, M, d), with given keys and values (B, H, S, D) of H heads.

        Args:
            keys, values: Self-attention's, of all tokens up to and including x.
            memory_keys, memory_values: Cross-attention's, of the encoder's states.
            self_mask, memory_mask: Additive; None: no mask.

        Returns:
            (B, M, d).
        """
        x = self.self_attn_layer_norm(x + self.dropout(self.self_attn.attend(x, keys, values, self_mask)))
        y = self.encoder_attn.attend(x, memory_keys, memory_values, memory_mask)
        x = self.encoder_attn_layer_norm(x + self.dropout(y))
        y = self.fc2(self.dropout(F.gelu(self.fc1(x))))
        return self.final_layer_norm(x + self.dropout(y))
