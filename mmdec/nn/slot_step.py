"""A fast path for FLASH on a CPU: small operations in NumPy, products in torch; see `draft_step.py`.

Slot 1 of a column has the position of the next column, and sees what that column would see: the slots continue the
columns. So accepted columns and the slots of the last one share one product for queries, keys and values; only the
slots continue from there. Some small operations use torch: a draft runs most of them only once or twice, when torch's
code is still in the CPU's caches from the target's pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdec.nn.draft_network import Packed
from mmdec.nn.draft_step import TokenStep, Vector, buffer, plain, rotations
from mmdec.nn.flash import FlashNetwork

MASKED = 512  # columns of a new mask


@final
class SlotStep(TokenStep):
    """FLASH's network and an LM head, for one row."""

    def __init__(self, network: FlashNetwork, packed: Packed, embedding: Tensor, output: nn.Linear) -> None:
        """packed: the network's own."""
        super().__init__(embedding, output)
        config, layer = network.config, cast(Any, network.layers[0])
        self.network, self.config, self.slots = network, config, network.slots
        gate, up = network.fc_gate, network.fc_up
        self.fused = torch.cat([gate.weight, up.weight]).detach().t()  # (2 H, 2 H)
        self.fused_bias = None if gate.bias is None else torch.cat([gate.bias, up.bias]).detach()
        self.attention, self.gate_up = packed.attention.detach().t(), packed.gate_up.detach().t()
        self.bias = None if packed.bias is None else packed.bias.detach()
        self.mixing = layer.self_attn.o_proj.weight.detach().t()
        self.down = layer.mlp.down_proj.weight.detach().t()
        self.post_norm = layer.post_attention_layernorm.weight.detach().numpy()
        self.input_norm = layer.input_layernorm.weight.detach().numpy() if config.input_norm else None
        self.fused_norm = cast(Any, network.fc_norm).weight.detach().numpy() if config.fc_norm else None
        self.embeddings = network.slot_embeddings.detach().numpy()
        self.residual_gate = network.residual_gate.detach().numpy()[:, None]
        self.column = torch.empty(1, config.num_key_value_heads, 1, config.head_dim)  # in the layout of the cache
        self.cosines = self.sines = np.empty((0, 1, 2, config.head_dim // 2), np.float32)  # of positions 0, 1, ...
        # additive: which columns each slot sees, then which of slots 1, 2, ...
        self.mask = np.empty((self.slots, 0), np.float32)
        pairs = [(refiner.down, refiner.up) for refiner in cast(Any, network.refiners)]
        self.refiners = [[(part.weight.detach(), part.bias.detach()) for part in pair] for pair in pairs]
        self.joined = buffer(2 * config.hidden_size)

    @classmethod
    def of(
        cls, network: FlashNetwork, packed: Packed | None, embedding: nn.Module, output: nn.Linear
    ) -> SlotStep | None:
        """Make the fast path; None if it would be slower or differ, see `DraftStep.of`."""
        if packed is None or not plain(embedding, packed.attention, output.weight):
            return None
        return cls(network, packed, cast(nn.Embedding, embedding).weight, output)

    def block(
        self, tokens: Sequence[int], features: Vector, position: int, count: int, keys: Tensor, values: Tensor
    ) -> Vector:
        """Process columns with tokens (n,) and features (n, H), and the first `count` slots of the last one.

        position: of the first column. keys, values: (1, h, S, d); the last n + count - 1 columns are written (the
            columns, then slots 1, 2, ...).
        Returns: the slots (count, H), unrefined.
        """
        config, size = self.config, self.config.hidden_size
        heads, dim = config.num_attention_heads, config.head_dim
        turning = heads + config.num_key_value_heads
        last, width = len(tokens) - 1, keys.shape[2]
        states = np.empty((last + count, size), np.float32)
        states[: last + 1] = self._fuse(tokens, features)
        np.add(states[last], self.embeddings[: count - 1], out=states[last + 1 :])
        normed = states if self.input_norm is None else self._norm(states, self.input_norm)
        own = _product(normed, self.attention, self.bias).reshape(last + count, -1, dim)
        turned = self._rotate(own[:, :turning], position)
        begin = width - len(own)
        keys.numpy()[0, :, begin:] = turned[:, heads:].transpose(1, 0, 2)
        values.numpy()[0, :, begin:] = own[:, turning:].transpose(1, 0, 2)
        mixed = F.scaled_dot_product_attention(
            torch.from_numpy(turned[last:, :heads].transpose(1, 0, 2))[None],
            keys,
            values,
            attn_mask=self._mask(count, width) if count > 1 else None,
            enable_gqa=config.num_key_value_heads != heads,
        )
        x = states[last:]
        hidden = torch.from_numpy(x)
        hidden.addmm_(torch.from_numpy(mixed.numpy()[0].transpose(1, 0, 2).reshape(count, -1)), self.mixing)
        gates = _product(self._norm(x, self.post_norm), self.gate_up)
        hidden.addmm_(torch.from_numpy(_gated(gates)), self.down)
        x += self.residual_gate[:count] * features[last]
        return x

    def refined(self, slot: Vector, preceding: Vector, index: int) -> Vector:
        """As `FlashNetwork.refined`, for slot (H,) and preceding (H,)."""
        if not self.refiners:
            return slot
        (down, down_bias), (up, up_bias) = self.refiners[index - 1]
        joined, both = self.joined
        both[: len(slot)], both[len(slot) :] = preceding, slot
        inner = F.silu(torch.addmv(down_bias, down, joined), inplace=True)
        return slot + torch.addmv(up_bias, up, inner).numpy()

    def _fuse(self, tokens: Sequence[int], features: Vector) -> Vector:
        """As `FlashNetwork.fuse`, of tokens (n,) and features (n, H)."""
        size = self.config.hidden_size
        joined = np.empty((len(tokens), 2 * size), np.float32)
        joined[:, size:] = features
        for row, token in enumerate(tokens):  # a loop is faster than indexing for few tokens
            joined[row, :size] = self.embedding[token]
        if self.fused_norm is not None:
            joined = self._norm(joined, self.fused_norm)
        return _gated(_product(joined, self.fused, self.fused_bias))

    def _norm(self, x: Vector, weight: Vector) -> Vector:
        """x (n, C), weight (C,) -> (n, C)."""
        normed = x * x
        scale = np.add.reduce(normed, 1, keepdims=True)
        scale *= 1.0 / x.shape[1]
        scale += self.config.rms_norm_eps
        np.divide(x, np.sqrt(scale, out=scale), out=normed)
        normed *= weight
        return normed

    def _rotate(self, own: Vector, position: int) -> Vector:
        """Rotate own (n, heads, d), whose first row is at `position`."""
        count, heads, dim = own.shape
        end = position + count
        if end > len(self.cosines):
            self.cosines, self.sines = (part.reshape(-1, 1, 2, dim // 2) for part in rotations(self.network, end))
        halves = own.reshape(count, heads, 2, dim // 2)
        turned = halves * self.cosines[position:end]
        turned += halves[:, :, ::-1] * self.sines[position:end]
        return turned.reshape(own.shape)

    def _mask(self, count: int, width: int) -> Tensor:
        """The additive mask (count, S): all slots see the columns, their own included; slot i also sees slots 1 ..
        i."""
        more = self.slots - 1
        if width + more > self.mask.shape[1]:
            self.mask = np.zeros((self.slots, 2 * width + more + MASKED), np.float32)
            self.mask[:, -more:][np.triu_indices(self.slots, 0, more)] = -math.inf
        end = self.mask.shape[1] - more + count - 1
        return torch.from_numpy(self.mask[:count, end - width : end])


def _product(rows: Vector, weight: Tensor, bias: Tensor | None = None) -> Vector:
    """rows (n, I) by weight (I, O) -> (n, O)."""
    given = torch.from_numpy(rows)
    return (torch.mm(given, weight) if bias is None else torch.addmm(bias, given, weight)).numpy()


def _gated(both: Vector) -> Vector:
    """[gate; up] (n, 2 I) -> SiLU(gate) * up (n, I)."""
    size = both.shape[1] // 2
    gate = F.silu(torch.from_numpy(both[:, :size])).numpy()
    gate *= both[:, size:]
    return gate
