"""A fast path for one token through a small draft network on a CPU: small operations in NumPy, products in torch.

Each level of a chain is about forty operations over vectors of a few hundred numbers, for which torch's call overhead
dominates: with 160 channels NumPy takes a third of the time. Products stay in torch, which obeys its thread settings.

The objects share the weights' memory where possible and own the buffers of a run: use one for each run and thread.
"""

from __future__ import annotations

import math
from typing import Any, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mmdec.nn.draft_network import DraftNetwork, Packed

Vector = NDArray[np.float32]


class TokenStep:
    """The embedding (V, H) and the LM head, shared by all fast paths."""

    def __init__(self, embedding: Tensor, output: nn.Linear) -> None:
        self.embedding, self.output = embedding.detach().numpy(), output.weight.detach()
        self.output_bias = None if output.bias is None else output.bias.detach()
        self.scores = buffer(len(output.weight))

    def reads(self, hidden: Tensor) -> bool:
        """Whether the fast path can take over: hidden is float32, with neither gradients nor autocast."""
        return hidden.dtype == torch.float32 and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))

    def logits(self, hidden: Vector) -> Vector:
        """Apply the LM head: hidden (H,) -> logits (V,), valid until the next call."""
        scores, result = self.scores
        torch.mv(self.output, torch.from_numpy(hidden), out=scores)
        if self.output_bias is not None:
            scores += self.output_bias
        return result


@final
class DraftStep(TokenStep):
    """Runs a draft network and an LM head on one column of one row at a time."""

    def __init__(
        self, network: DraftNetwork, packed: Packed, fused: tuple[Tensor, Tensor], embedding: Tensor, output: nn.Linear
    ) -> None:
        """packed, fused: the network's `packed()` and `fused_weights()`."""
        super().__init__(embedding, output)
        config, layer = network.config, cast(Any, network.layers[0])
        self.network, self.config = network, config
        self.fused, self.attention, self.bias = fused, packed.attention, packed.bias
        self.mixing, self.gate_up = layer.self_attn.o_proj.weight.detach(), packed.gate_up
        self.down = layer.mlp.down_proj.weight.detach()
        self.norms = [layer.post_attention_layernorm.weight.detach().numpy()]
        if config.input_norm:
            self.norms.insert(0, layer.input_layernorm.weight.detach().numpy())
        size, width = config.hidden_size, self.gate_up.shape[0] // 2
        self.joined, self.states, self.added = buffer(2 * size), buffer(size), buffer(size)
        self.normed, self.inner = buffer(size), buffer(width)
        self.gates = buffer(2 * width)
        self.projected = buffer(len(packed.attention))
        self.cosines = self.sines = np.empty((0, config.head_dim), np.float32)  # of positions 0, 1, ...
        groups = config.num_attention_heads + config.num_key_value_heads
        self.turned = np.empty((groups, config.head_dim), np.float32)
        self.queries = torch.from_numpy(self.turned)[None, : config.num_attention_heads, None]

    @classmethod
    def of(
        cls, network: DraftNetwork, packed: Packed | None, carry: Any, embedding: nn.Module, output: nn.Linear
    ) -> DraftStep | None:
        """Make the fast path; None if it would be slower or differ.

        It is unavailable for a large network, a GPU, another precision, a norm in `fuse`, an overridden `layer`, or an
        embedding that does more than look up.
        """
        if packed is None or not plain(embedding, packed.attention, output.weight):
            return None
        own = any(owner(network, name) is not DraftNetwork for name in ("feature", "project", "attend"))
        if own or owner(network, "fuse") is not owner(network, "fused_weights"):
            return None
        fused = network.fused_weights(carry)
        return None if fused is None else cls(network, packed, fused, cast(nn.Embedding, embedding).weight, output)

    def __call__(self, token: int, feature: Vector, position: int, keys: Tensor, values: Tensor) -> Vector:
        """Process a token, given the feature (H,) of the token before it.

        keys, values: (1, h, S, d); the last column is written. Returns: hidden (H,), valid until the next call.
        """
        config = self.config
        size, dim, heads = config.hidden_size, config.head_dim, config.num_attention_heads
        (joined, both), (states, x), (added, more) = self.joined, self.states, self.added
        both[:size], both[size:] = self.embedding[token], feature
        torch.addmv(self.fused[1], self.fused[0], joined, out=states)
        normed = self._norm(x, self.norms[0]) if config.input_norm else states
        projected, own = self.projected
        torch.mv(self.attention, normed, out=projected)
        if self.bias is not None:
            projected += self.bias
        own = own.reshape(-1, dim)
        self._rotate(own, position)
        column = keys.shape[2] - 1
        keys.numpy()[0, :, column] = self.turned[heads:]
        values.numpy()[0, :, column] = own[len(self.turned) :]
        grouped = config.num_key_value_heads != heads
        mixed = scaled_dot_product_attention(self.queries, keys, values, enable_gqa=grouped)
        torch.mv(self.mixing, mixed.reshape(-1), out=added)
        x += more
        (gates, gate), (inner, product) = self.gates, self.inner
        torch.mv(self.gate_up, self._norm(x, self.norms[-1]), out=gates)
        width = len(product)
        silu(gate[:width], product)
        product *= gate[width:]
        torch.mv(self.down, inner, out=added)
        more += x
        return more

    def _norm(self, x: Vector, weight: Vector) -> Tensor:
        normed, result = self.normed
        np.multiply(x, weight, out=result)
        result *= 1.0 / math.sqrt(float(x.dot(x)) / len(x) + self.config.rms_norm_eps)
        return normed

    def _rotate(self, own: Vector, position: int) -> None:
        """Rotate queries and keys (heads + 2 h, d) into the buffer `turned`."""
        if position >= len(self.cosines):
            self.cosines, self.sines = rotations(self.network, position + 1)
        turned, half, sine = self.turned, self.config.head_dim // 2, self.sines[position]
        plain = own[: len(turned)]
        np.multiply(plain[:, half:], sine[:half], out=turned[:, :half])
        np.multiply(plain[:, :half], sine[half:], out=turned[:, half:])
        turned += plain * self.cosines[position]


def quiet() -> np.errstate:
    """Silence NumPy's overflow warnings, as torch has none: a diverging network only drafts badly."""
    return np.errstate(over="ignore", invalid="ignore")


def rotations(network: DraftNetwork, length: int) -> tuple[Vector, Vector]:
    """The network's cosines and signed sines (L, d) of positions 0 .. L - 1, with L at least `length`."""
    cosines, sines = network.rope_table(length, torch.float32, torch.device("cpu"))
    return cosines.numpy(), sines.numpy()


def plain(embedding: nn.Module, *weights: Tensor) -> bool:
    """Whether all weights are float32 on a CPU and the embedding only looks up."""
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
        return False
    return all(part.dtype == torch.float32 and part.device.type == "cpu" for part in (embedding.weight, *weights))


def owner(network: DraftNetwork, name: str) -> type:
    """The class that defines the network's method."""
    return next(kind for kind in type(network).__mro__ if name in vars(kind))


def silu(x: Vector, result: Vector) -> None:
    """Write silu(x) = x / (1 + exp(-x)) into `result`, computed as x / 2 * (1 + tanh(x / 2)), which cannot overflow."""
    np.tanh(x * 0.5, out=result)
    result += 1.0
    result *= x
    result *= 0.5


def buffer(size: int) -> tuple[Tensor, Vector]:
    """One buffer, as a tensor and as an array."""
    array = np.zeros(size, np.float32)
    return torch.from_numpy(array), array
