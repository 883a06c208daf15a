"""The fast path through FLASH's network on a CPU, for one row: small operations in NumPy, matrix products in torch.

`SlotStep` processes several tokens at once, and allocates new arrays. Some of its small operations use torch: a draft
runs most of them only once or twice, when torch's code is still in the CPU's caches from the target's pass. For the
rest see `mmdec.drafters.networks.cpu_step`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdec.drafters.flash.network import FlashNetwork
from mmdec.drafters.networks.cpu_step import CpuStep, Vector, buffer, is_plain_lookup, rotations
from mmdec.drafters.networks.layers import PackedWeights

SPARE_MASK_ENTRIES = 512  # number of further entries that a new mask gets, so that it is not made again for each token


@final
class SlotStep(CpuStep):
    """Runs FLASH's network and an LM head for one row.

    Each token has slots 0, 1, ...; slot i drafts the (i + 1)-th token after it. Holds weights and buffers.

    Slot 1 of a token has the position of the next token and attends to the same tokens as the next token would, so
    slots are treated as further tokens. New accepted tokens and the slots of the last token share one product for
    queries, keys and values. The rest of the layer is computed for the slots only.

    Args:
        packed: The network's concatenated weights, from `DraftNetwork.pack_weights`.
    """

    def __init__(self, network: FlashNetwork, packed: PackedWeights, embedding: Tensor, output: nn.Linear) -> None:
        super().__init__(embedding, output)
        config, layer = network.config, network.layer(0)
        self.network, self.config, self.slots = network, config, network.slots
        gate, up = network.fc_gate, network.fc_up
        self.fused = torch.cat([gate.weight, up.weight]).detach().t()  # shape (2 H, 2 H)
        self.fused_bias = None if gate.bias is None else torch.cat([gate.bias, up.bias]).detach()
        self.attention, self.gate_up = packed.attention.detach().t(), packed.gate_up.detach().t()
        self.bias = None if packed.bias is None else packed.bias.detach()
        self.mixing = layer.self_attn.o_proj.weight.detach().t()
        self.down = layer.mlp.down_proj.weight.detach().t()
        self.post_norm = layer.post_attention_layernorm.weight.detach().numpy()
        self.input_norm = None if layer.input_layernorm is None else layer.input_layernorm.weight.detach().numpy()
        self.fused_norm = cast(Any, network.fc_norm).weight.detach().numpy() if config.fc_norm else None
        self.embeddings = network.slot_embeddings.detach().numpy()
        self.residual_gate = network.residual_gate.detach().numpy()[:, None]
        # memory for one token's key or value, in the shape that the cache has
        self.column = torch.empty(1, config.num_key_value_heads, 1, config.head_dim)
        # cosines and sines of the rotary positions 0, 1, ..., one position in each row
        self.cosines = self.sines = np.empty((0, 1, 2, config.head_dim // 2), np.float32)
        # additive mask (slots, accepted tokens + slots) that says which accepted tokens and which earlier slots each
        # slot sees
        self.mask = np.empty((self.slots, 0), np.float32)
        pairs = [(refiner.down, refiner.up) for refiner in cast(Any, network.refiners)]
        self.refiners = [[(part.weight.detach(), part.bias.detach()) for part in pair] for pair in pairs]
        self.joined = buffer(2 * config.hidden_size)

    @classmethod
    def for_network(
        cls, network: FlashNetwork, packed: PackedWeights | None, embedding: nn.Module, output: nn.Linear
    ) -> SlotStep | None:
        """Make the fast path for a network.

        Returns:
            None if it would be slower or give other results: for a large network, a GPU, another precision than
            float32, or an embedding that does more than look up rows.
        """
        if packed is None or not is_plain_lookup(embedding, packed.attention, output.weight):
            return None
        return cls(network, packed, cast(nn.Embedding, embedding).weight, output)

    def block(
        self, tokens: Sequence[int], features: Vector, position: int, count: int, keys: Tensor, values: Tensor
    ) -> Vector:
        """Process n new accepted tokens and the first `count` slots of the last token.

        Args:
            tokens: Token ids.
            features: (n, H).
            position: Position id of the first token.
            keys: (1, h, S, d), the cache; the last n + count - 1 entries are written: those of the n tokens, then of
                the slots 1, 2, ...
            values: Values, in the same shape as `keys`.

        Returns:
            The slots' states (count, H), before `refine_slot`.
        """
        config, size = self.config, self.config.hidden_size
        heads, dim = config.num_attention_heads, config.head_dim
        turning = heads + config.num_key_value_heads
        last, width = len(tokens) - 1, keys.shape[2]
        states = np.empty((last + count, size), np.float32)
        states[: last + 1] = self._fuse(tokens, features)
        np.add(states[last], self.embeddings[: count - 1], out=states[last + 1 :])
        normed = states if self.input_norm is None else self._norm(states, self.input_norm)
        projected = _product(normed, self.attention, self.bias).reshape(last + count, -1, dim)
        turned = self._rotate(projected[:, :turning], position)
        begin = width - len(projected)
        keys.numpy()[0, :, begin:] = turned[:, heads:].transpose(1, 0, 2)
        values.numpy()[0, :, begin:] = projected[:, turning:].transpose(1, 0, 2)
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

    def refine_slot(self, slot: Vector, preceding: Vector, index: int) -> Vector:
        """Correct the state `slot` (H,) of slot number `index` (from 1) by the tokens that the slots before it drafted.

        Args:
            preceding: (H,), the sum of these tokens' embeddings.
        """
        if not self.refiners:
            return slot
        (down, down_bias), (up, up_bias) = self.refiners[index - 1]
        inputs, both = self.joined
        both[: len(slot)], both[len(slot) :] = preceding, slot
        inner = F.silu(torch.addmv(down_bias, down, inputs), inplace=True)
        return slot + torch.addmv(up_bias, up, inner).numpy()

    def _fuse(self, tokens: Sequence[int], features: Vector) -> Vector:
        """Compute the layer's input (n, H), as `FlashNetwork.fuse` does.

        Args:
            tokens: n token ids.
            features: (n, H), of the tokens before them.
        """
        size = self.config.hidden_size
        inputs = np.empty((len(tokens), 2 * size), np.float32)
        inputs[:, size:] = features
        for row, token in enumerate(tokens):  # a loop over the few tokens is faster than indexing
            inputs[row, :size] = self.embedding[token]
        if self.fused_norm is not None:
            inputs = self._norm(inputs, self.fused_norm)
        return _gated(_product(inputs, self.fused, self.fused_bias))

    def _norm(self, x: Vector, weight: Vector) -> Vector:
        """Apply an RMS norm to x (n, C).

        Args:
            weight: (C,), the norm's.
        """
        normed = x * x
        scale = np.add.reduce(normed, 1, keepdims=True)
        scale *= 1.0 / x.shape[1]
        scale += self.config.rms_norm_eps
        np.divide(x, np.sqrt(scale, out=scale), out=normed)
        normed *= weight
        return normed

    def _rotate(self, vector: Vector, position: int) -> Vector:
        """Apply rotary positions to queries or keys (n, heads, channels of a head) of n consecutive tokens.

        Args:
            position: Position id of the first token.
        """
        count, heads, dim = vector.shape
        end = position + count
        if end > len(self.cosines):
            self.cosines, self.sines = (part.reshape(-1, 1, 2, dim // 2) for part in rotations(self.network, end))
        halves = vector.reshape(count, heads, 2, dim // 2)
        turned = halves * self.cosines[position:end]
        turned += halves[:, :, ::-1] * self.sines[position:end]
        return turned.reshape(vector.shape)

    def _mask(self, count: int, width: int) -> Tensor:
        """Make the additive mask (count, width) for `count` slots.

        Each slot sees all earlier tokens, and slot i also sees the slots 1 .. i.
        """
        more = self.slots - 1
        if width + more > self.mask.shape[1]:
            self.mask = np.zeros((self.slots, 2 * width + more + SPARE_MASK_ENTRIES), np.float32)
            self.mask[:, -more:][np.triu_indices(self.slots, 0, more)] = -math.inf
        end = self.mask.shape[1] - more + count - 1
        return torch.from_numpy(self.mask[:count, end - width : end])


def _product(rows: Vector, weight: Tensor, bias: Tensor | None = None) -> Vector:
    """Multiply rows (n, I) by weight (I, O), and add the bias (O,) if there is one.

    Returns:
        (n, O).
    """
    tensor = torch.from_numpy(rows)
    return (torch.mm(tensor, weight) if bias is None else torch.addmm(bias, tensor, weight)).numpy()


def _gated(both: Vector) -> Vector:
    """Compute SiLU(gate) * up, (n, I).

    Args:
        both: (n, 2 I), gate and up concatenated.
    """
    size = both.shape[1] // 2
    gate = F.silu(torch.from_numpy(both[:, :size])).numpy()
    gate *= both[:, size:]
    return gate
