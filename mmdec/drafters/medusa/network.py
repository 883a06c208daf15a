"""Medusa heads for an encoder-decoder speech model (Segal-Feldman et al. 2024, arXiv 2409.15869).

They follow Medusa (Cai et al. 2024).

K small heads read the decoder's last hidden state h_t, after the final norm. The model itself predicts token t + 1 from
h_t. Head k = 1 ... K predicts token t + 1 + k, through the model's own output matrix. In Medusa-Linear the heads read
h_t directly. In Medusa-Block they read the output of one more decoder layer over h_0 ... h_t and the encoder's states.

Letters in shapes: B rows, T positions, H hidden size, S encoder states, K heads, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from mmdec.errors import InputError

HeadKind = Literal["linear", "block"]
HEAD_KINDS: tuple[HeadKind, ...] = ("linear", "block")
KeyValues = tuple[Tensor, Tensor]  # keys and values, each (B, heads, positions, H / heads)


@dataclass(frozen=True)
class MedusaConfig:
    """Sizes of Medusa heads, and the model that they were trained for."""

    hidden_size: int
    vocab_size: int
    kind: HeadKind = "linear"
    heads: int = 10
    attention_heads: int = 0  # number of attention heads in the extra decoder layer of Medusa-Block
    ffn: int = 0  # inner channels of that layer's feed-forward
    mels: int = 80  # number of mel bands that the speech model reads
    base: str = ""  # name of the model that the heads were trained for
    tuned_base: bool = False  # whether the model's last layer and output matrix were trained together with the heads

    def __post_init__(self) -> None:
        if self.kind not in HEAD_KINDS:
            raise InputError(f"`kind` must be one of {', '.join(HEAD_KINDS)}, but is {self.kind!r}.")
        if self.heads < 1:
            raise InputError(f"`heads` must be at least 1, but is {self.heads}. The published ones have 10.")
        if self.kind == "block" and (
            self.attention_heads < 1 or self.hidden_size % self.attention_heads or self.ffn < 1
        ):
            raise InputError(
                f"`attention_heads` must divide `hidden_size`, {self.hidden_size}, and `ffn` be at least 1, but they "
                f"are {self.attention_heads} and {self.ffn}. Use the decoder's values."
            )


@final
class ResBlock(nn.Module):
    """A residual block, x + SiLU(W x + b). Initialised so that it returns x."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + silu(self.linear(x))


@final
class HeadAttention(nn.Module):
    """Multi-head attention as in the speech model: the key projection has no bias."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.k_proj = nn.Linear(size, size, bias=False)
        self.v_proj = nn.Linear(size, size)
        self.q_proj = nn.Linear(size, size)
        self.out_proj = nn.Linear(size, size)

    def pair(self, states: Tensor) -> KeyValues:
        """Return attention's keys and values of states (B, S, H), each (B, heads, S, H / heads)."""
        return self._split(self.k_proj(states)), self._split(self.v_proj(states))

    def forward(self, x: Tensor, pair: KeyValues, mask: Tensor | None) -> Tensor:
        """Apply attention from x (B, T, H) to keys and values from `pair`.

        Args:
            mask: (B, 1, T, S), bool (True where x attends) or additive; None: x attends everywhere.

        Returns:
            (B, T, H).
        """
        out = scaled_dot_product_attention(self._split(self.q_proj(x)), *pair, attn_mask=mask)
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


@final
class HeadLayer(nn.Module):
    """One decoder layer of the speech model, with the same weight names."""

    def __init__(self, size: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.self_attn = HeadAttention(size, heads)
        self.self_attn_layer_norm = nn.LayerNorm(size)
        self.encoder_attn = HeadAttention(size, heads)
        self.encoder_attn_layer_norm = nn.LayerNorm(size)
        self.fc1 = nn.Linear(size, ffn)
        self.fc2 = nn.Linear(ffn, size)
        self.final_layer_norm = nn.LayerNorm(size)

    def pair(self, x: Tensor) -> KeyValues:
        """Return self-attention's keys and values of x (B, T, H), each (B, heads, T, H / heads)."""
        return self.self_attn.pair(self.self_attn_layer_norm(x))

    def forward(self, x: Tensor, keys_values: KeyValues, memory: KeyValues, mask: Tensor | None) -> Tensor:
        """Apply the layer to x (B, T, H).

        Args:
            keys_values: Keys and values of the P positions so far, x included.
            memory: Keys and values of the encoder's states.
            mask: (B, 1, T, P), bool (True where x attends) or additive; None: x attends everywhere.

        Returns:
            (B, T, H).
        """
        x = x + self.self_attn(self.self_attn_layer_norm(x), keys_values, mask)
        x = x + self.encoder_attn(self.encoder_attn_layer_norm(x), memory, None)
        return x + self.fc2(gelu(self.fc1(self.final_layer_norm(x))))


@final
class MedusaHeads(nn.Module):
    """Holds K Medusa heads, and for Medusa-Block one more decoder layer.

    The heads share the model's output matrix (V, H), which is not stored here.
    """

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.block = HeadLayer(size, config.attention_heads, config.ffn) if config.kind == "block" else None
        self.heads = nn.ModuleList(ResBlock(size) for _ in range(config.heads))

    def forward(self, hidden: Tensor, states: Tensor | None = None) -> Tensor:
        """Apply all heads at all positions, for training.

        Args:
            hidden: (B, T, H), the decoder's last states, without left padding.
            states: (B, S, H) of the encoder, for Medusa-Block.

        Returns:
            (B, T, K, H), to be multiplied with the output matrix.
        """
        return self.apply_heads(self.head_inputs(hidden, states), len(self.heads))

    def head_inputs(self, hidden: Tensor, states: Tensor | None = None) -> Tensor:
        """Apply Medusa-Block's extra layer.

        Args:
            hidden: (B, T, H), the decoder's last states.
            states: (B, S, H) of the encoder.

        Returns:
            The heads' input (B, T, H); for Medusa-Linear `hidden` itself.
        """
        if self.block is None:
            return hidden
        if states is None:
            raise InputError("`states` must be given for Medusa-Block, but is None. Pass the encoder's states.")
        length = hidden.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=hidden.device).tril()[None, None]
        memory = self.block.encoder_attn.pair(states)
        return self.block(hidden, self.block.pair(hidden), memory, mask)

    def apply_heads(self, hidden: Tensor, count: int) -> Tensor:
        """Apply the first `count` heads.

        Args:
            hidden: (..., H), the heads' input from `head_inputs`.

        Returns:
            (..., count, H), before the output matrix.
        """
        return torch.stack([self.heads[k](hidden) for k in range(count)], -2)
