"""Autoregressive decoder over units: the yardstick of the parallel one, and the verifier of its drafts.

A plain post-norm Transformer decoder on the same encoder states (the "AR S2T" of DASpeech's table 5), with a
preallocated key-value cache and a loop that waits for the device only once in 16 tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdec.nn.conformer import lengths_to_mask
from mmdec.nn.dag_decoder import BOS, EOS, PAD, additive
from mmdec.nn.dropout import PooledDropout
from mmdec.nn.transformer import DecoderLayer, sinusoids


@dataclass(frozen=True)
class ArConfig:
    """Sizes of the autoregressive decoder; the defaults are a 6-layer S2T decoder."""

    d_model: int = 256
    ffn: int = 2048
    heads: int = 4
    layers: int = 6
    dropout: float = 0.1


class ArDecoder(nn.Module):
    """forward: tokens (B, M) so far, states (B, S, d_memory) -> logits (B, M, V) of the next tokens."""

    def __init__(self, config: ArConfig, num_units: int, d_memory: int) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(num_units, config.d_model)
        nn.init.normal_(self.embed_tokens.weight, std=config.d_model**-0.5)
        self.layers = nn.ModuleList(
            [
                DecoderLayer(config.d_model, config.ffn, config.heads, config.dropout, d_memory)
                for _ in range(config.layers)
            ]
        )
        self.dropout = PooledDropout(config.dropout)

    def forward(self, tokens: Tensor, states: Tensor, state_lengths: Tensor) -> Tensor:
        size, d = tokens.shape[1], self.config.d_model
        x = self.dropout(math.sqrt(d) * self.embed_tokens(tokens) + sinusoids(size, d, tokens.device))
        causal = torch.full((size, size), -1e9, device=tokens.device).triu(1)
        memory_mask = additive(lengths_to_mask(state_lengths, states.shape[1]))
        for layer in self.layers:
            x = layer(x, causal, states, memory_mask)
        return F.linear(x, self.embed_tokens.weight)

    @torch.inference_mode()
    def generate(self, states: Tensor, state_lengths: Tensor, max_length: int) -> list[list[int]]:
        """Greedy decoding: states (B, S, d_memory) -> for each row the units, without <s> and </s>.

        `max_length` bounds the units of a row; a row that reaches it is returned as it is.
        """
        b, d = states.shape[0], self.config.d_model
        device = states.device
        alone = b == 1
        memory_mask = None if alone else additive(lengths_to_mask(state_lengths, states.shape[1]))
        if alone:
            states = states[:, : int(state_lengths[0])]
        memories = [layer.encoder_attn.keys_values(states) for layer in self.layers]
        memories = [(k.contiguous(), v.contiguous()) for k, v in memories]
        shape = (b, self.config.heads, max_length + 1, d // self.config.heads)
        caches = [(states.new_empty(shape), states.new_empty(shape)) for _ in self.layers]
        places = sinusoids(max_length + 1, d, device).to(states.dtype)
        table = math.sqrt(d) * self.embed_tokens.weight
        tokens = torch.full((b, max_length + 2), PAD, device=device)
        tokens[:, 0] = BOS
        done = torch.zeros(b, dtype=torch.bool, device=device)
        every = 1 if device.type == "cpu" else 16  # on a CPU the look at `done` is free
        for step in range(max_length + 1):
            x = (table[tokens[:, step]] + places[step])[:, None]  # (B, 1, d)
            for layer, (keys, values), (memory_keys, memory_values) in zip(self.layers, caches, memories, strict=True):
                key, value = layer.self_attn.keys_values(x)
                keys[:, :, step] = key[:, :, 0]
                values[:, :, step] = value[:, :, 0]
                seen = keys[:, :, : step + 1], values[:, :, : step + 1]
                x = layer.rest(x, *seen, None, memory_keys, memory_values, memory_mask)
            best = F.linear(x[:, 0], self.embed_tokens.weight).argmax(-1)
            tokens[:, step + 1] = torch.where(done, PAD, best)
            done |= best == EOS
            if step % every == every - 1 and bool(done.all()):
                break
        rows = tokens[:, 1 : max_length + 1].tolist()
        return [row[: next((i for i, unit in enumerate(row) if unit in (EOS, PAD)), len(row))] for row in rows]
