"""Medusa heads for an encoder-decoder (Segal-Feldman et al. 2024, arXiv 2409.15869; after Medusa, Cai et al. 2024).

K small heads read the decoder's last hidden state h_t, after the final norm. The model itself predicts token t + 1 from
h_t; head k = 1 ... K predicts token t + 1 + k, through the model's own output matrix. The heads of Medusa-Linear read
h_t directly. Those of Medusa-Block read the output of one more decoder layer over h_0 ... h_t and the encoder's states.

B rows, T positions, H hidden size, S encoder states, K heads, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention, silu

from mmdec.types import InputError

Kind = Literal["linear", "block"]
KINDS: tuple[Kind, ...] = ("linear", "block")
Pair = tuple[Tensor, Tensor]  # keys and values, each (B, heads, columns, H / heads)


@dataclass(frozen=True)
class MedusaConfig:
    """Sizes of the heads, and the model that they were trained for."""

    hidden_size: int
    vocab_size: int
    kind: Kind = "linear"
    heads: int = 10
    attention_heads: int = 0  # attention heads of Medusa-Block's layer
    ffn: int = 0  # inner size of that layer's feed-forward
    mels: int = 80  # mel bands of the speech model's input
    base: str = ""  # name of the model that the heads were trained for
    tuned_base: bool = False  # whether that model was tuned with them: its last layer and its output matrix
    own_outputs: bool = False  # whether each head has an output matrix of its own, as Medusa-1's for language models

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"`kind` must be one of {', '.join(KINDS)}, but is {self.kind!r}. Choose one.")
        if self.heads < 1:
            raise InputError(f"`heads` must be at least 1, but is {self.heads}. The published ones have 10.")
        if self.kind == "block" and (
            self.attention_heads < 1 or self.hidden_size % self.attention_heads or self.ffn < 1
        ):
            raise InputError(
                f"`attention_heads` must divide `hidden_size`, {self.hidden_size}, and `ffn` be at least 1, but they "
                f"are {self.attention_heads} and {self.ffn}. Take the decoder's own."
            )


@final
class ResBlock(nn.Module):
    """Computes x + SiLU(W x + b); initialised as the identity."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + silu(self.linear(x))


@final
class Attention(nn.Module):
    """Attention as in the speech model: keys have no bias."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.k_proj = nn.Linear(size, size, bias=False)
        self.v_proj = nn.Linear(size, size)
        self.q_proj = nn.Linear(size, size)
        self.out_proj = nn.Linear(size, size)

    def pair(self, states: Tensor) -> Pair:
        """Compute keys and values of states (B, S, H)."""
        return self._split(self.k_proj(states)), self._split(self.v_proj(states))

    def forward(self, x: Tensor, pair: Pair, mask: Tensor | None) -> Tensor:
        """Let x (B, T, H) attend to `pair`. mask: (B, 1, T, S) bool, True where x sees a column. Returns: (B, T, H)."""
        out = scaled_dot_product_attention(self._split(self.q_proj(x)), *pair, attn_mask=mask)
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


@final
class DecoderLayer(nn.Module):
    """One decoder layer of the speech model, with the same weight names."""

    def __init__(self, size: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.self_attn = Attention(size, heads)
        self.self_attn_layer_norm = nn.LayerNorm(size)
        self.encoder_attn = Attention(size, heads)
        self.encoder_attn_layer_norm = nn.LayerNorm(size)
        self.fc1 = nn.Linear(size, ffn)
        self.fc2 = nn.Linear(ffn, size)
        self.final_layer_norm = nn.LayerNorm(size)

    def pair(self, x: Tensor) -> Pair:
        """Compute the keys and values of x (B, T, H), to which later positions attend."""
        return self.self_attn.pair(self.self_attn_layer_norm(x))

    def forward(self, x: Tensor, own: Pair, memory: Pair, mask: Tensor | None) -> Tensor:
        """Run the layer over x (B, T, H). own, memory: keys and values of the positions so far, and of the encoder's
        states. mask: (B, 1, T, S) bool, True where x sees a column of `own`."""
        x = x + self.self_attn(self.self_attn_layer_norm(x), own, mask)
        x = x + self.encoder_attn(self.encoder_attn_layer_norm(x), memory, None)
        return x + self.fc2(gelu(self.fc1(self.final_layer_norm(x))))


@final
class MedusaHeads(nn.Module):
    """The Medusa heads. If they share the model's output matrix (V, H), it is not stored with them."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.block = DecoderLayer(size, config.attention_heads, config.ffn) if config.kind == "block" else None
        self.heads = nn.ModuleList(ResBlock(size) for _ in range(config.heads))
        matrices = config.heads if config.own_outputs else 0
        self.outputs = nn.ModuleList(nn.Linear(size, config.vocab_size, bias=False) for _ in range(matrices))

    def forward(self, hidden: Tensor, states: Tensor | None = None) -> Tensor:
        """Run all heads at all positions, for training. hidden: (B, T, H) without left padding. states: (B, S, H) of
        the encoder, for Medusa-Block. Returns: (B, T, K, H), to be multiplied with the output matrix."""
        return self.read(self.through(hidden, states), len(self.heads))

    def through(self, hidden: Tensor, states: Tensor | None = None) -> Tensor:
        """Run Medusa-Block's layer and return its output, the heads' input (B, T, H); without that layer return hidden.
        hidden: (B, T, H). states: (B, S, H) of the encoder."""
        if self.block is None:
            return hidden
        if states is None:
            raise InputError("`states` must be given for Medusa-Block, but is None. Pass the encoder's states.")
        length = hidden.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=hidden.device).tril()[None, None]
        memory = self.block.encoder_attn.pair(states)
        return self.block(hidden, self.block.pair(hidden), memory, mask)

    def read(self, hidden: Tensor, count: int) -> Tensor:
        """Apply the first `count` heads to hidden (..., H), the output of `through`. Returns: (..., count, H)."""
        return torch.stack([self.heads[k](hidden) for k in range(count)], -2)

    def logits(self, hidden: Tensor, count: int, output: Tensor) -> Tensor:
        """Apply the first `count` heads to hidden (..., H), the output of `through`; then the output matrix (V, H), or
        each head's own matrix. Returns: (..., count, V)."""
        return self.tokens(self.read(hidden, count), output)

    def tokens(self, read: Tensor, output: Tensor) -> Tensor:
        """Turn the heads' states `read` (..., count, H) into logits (..., count, V). output: the model's output matrix
        (V, H), used if the heads have none of their own."""
        if not self.config.own_outputs:
            return linear(read, output)
        return torch.stack([self.outputs[k](read[..., k, :]) for k in range(read.shape[-2])], -2)
