"""Fast paths through a small draft network on a CPU, for one row: small operations in NumPy, matrix products in torch.

The layer of a draft network has three implementations with equal outputs up to rounding, which tests compare:

    DraftLayer (`layers.py`)            whole rows and batches, any device, differentiable: for training, prompts,
                                        and drafting if no fast path applies (`EagleStep.for_network` says when)
    EagleStep, Eagle3Step               one token at a time, to draft chains (`../eagle/cpu_step.py`)
    SlotStep (`../flash/cpu_step.py`)   FLASH: in one pass new accepted tokens, and the slots that draft after them

Drafting one token of a chain takes about forty operations on vectors of a few hundred numbers, and the call overhead
of torch would take most of the time. With 128 and 160 channels, `DraftLayer` takes about twice the time of these
classes, and torch's functions on the same prepared weights 1.2 to 1.8 times. Matrix products stay in torch, which obeys
its thread settings.

The objects share the weights' memory where possible, and have their own buffers: use each object for a single
generate() call, in one thread.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.drafters.networks.layers import PackedWeights

Vector = NDArray[np.float32]


class CpuStep:
    """Base class of the fast paths. Holds the embedding (V, H), the LM head and a buffer for logits."""

    def __init__(self, embedding: Tensor, output: nn.Linear) -> None:
        self.embedding, self.output = embedding.detach().numpy(), output.weight.detach()
        self.output_bias = None if output.bias is None else output.bias.detach()
        self.scores = buffer(len(output.weight))

    def can_read(self, hidden: Tensor) -> bool:
        """Return whether the fast path can process `hidden`: it must be float32, without gradients and autocast."""
        return hidden.dtype == torch.float32 and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))

    def logits(self, hidden: Vector) -> Vector:
        """Compute logits (V,) from hidden (H,). They are valid until the next call, which overwrites them."""
        scores, result = self.scores
        torch.mv(self.output, torch.from_numpy(hidden), out=scores)
        if self.output_bias is not None:
            scores += self.output_bias
        return result

    def token(self, drafted: int) -> int:
        """Convert an index in the draft vocabulary to the target's token id."""
        return drafted


class SingleTokenStep(CpuStep):
    """Base class of the fast paths that run a network on one token of one row at a time."""

    @abstractmethod
    def __call__(self, token: int, feature: Vector, position: int, keys: Tensor, values: Tensor) -> Vector:
        """Run the network on one token.

        Args:
            feature: (H,), feature of the previous token.
            position: The token's position id.
            keys: (1, h, S, d), the cache up to this token, whose own key and value are written to the last entry.
            values: Values, in the same shape as `keys`.

        Returns:
            Hidden (H,), valid until the next call.
        """


@final
class LayerStep:
    """Runs the single layer of a draft network, without its input norm, on one token of one row.

    Holds weights and buffers.

    Args:
        packed: The network's concatenated weights, from `DraftNetwork.pack_weights`.
    """

    def __init__(self, network: DraftNetwork, packed: PackedWeights) -> None:
        config, layer = network.config, network.layer(0)
        self.network, self.config = network, config
        self.attention, self.bias = packed.attention, packed.bias
        self.mixing, self.gate_up = layer.self_attn.o_proj.weight.detach(), packed.gate_up
        self.down = layer.mlp.down_proj.weight.detach()
        self.post_norm = layer.post_attention_layernorm.weight.detach().numpy()
        size, width = config.hidden_size, self.gate_up.shape[0] // 2
        self.states, self.added = buffer(size), buffer(size)
        self.normed, self.inner = buffer(size), buffer(width)
        self.gates = buffer(2 * width)
        self.projected = buffer(len(packed.attention))
        self.cosines = self.sines = np.empty((0, config.head_dim), np.float32)  # one row for each position 0, 1, ...
        groups = config.num_attention_heads + config.num_key_value_heads
        self.turned = np.empty((groups, config.head_dim), np.float32)
        self.queries = torch.from_numpy(self.turned)[None, : config.num_attention_heads, None]

    def __call__(self, read: Tensor, position: int, keys: Tensor, values: Tensor) -> Vector:
        """Run the layer on one token.

        The caller writes the residual into the buffer `states` before the call, which overwrites it.

        Args:
            read: Input of the query, key and value projections: (H,), or (2 H,) in EAGLE-3.
            position: The token's position id.
            keys: (1, h, S, d), the cache up to this token, whose own key and value are written to the last entry.
            values: Values, in the same shape as `keys`.

        Returns:
            Hidden (H,), valid until the next call.
        """
        config = self.config
        dim, heads = config.head_dim, config.num_attention_heads
        x, (added, more) = self.states[1], self.added
        projected, queries = self.projected
        torch.mv(self.attention, read, out=projected)
        if self.bias is not None:
            projected += self.bias
        queries = queries.reshape(-1, dim)
        self._rotate(queries, position)
        column = keys.shape[2] - 1
        keys.numpy()[0, :, column] = self.turned[heads:]
        values.numpy()[0, :, column] = queries[len(self.turned) :]
        grouped = config.num_key_value_heads != heads
        mixed = scaled_dot_product_attention(self.queries, keys, values, enable_gqa=grouped)
        torch.mv(self.mixing, mixed.reshape(-1), out=added)
        x += more
        (gates, gate), (inner, product) = self.gates, self.inner
        torch.mv(self.gate_up, self.norm(x, self.post_norm), out=gates)
        width = len(product)
        silu(gate[:width], product)
        product *= gate[width:]
        torch.mv(self.down, inner, out=added)
        more += x
        return more

    def norm(self, x: Vector, weight: Vector) -> Tensor:
        """Return the RMS norm of x (H,), valid until the next call.

        Args:
            weight: (H,), the norm's.
        """
        normed, result = self.normed
        self.norm_into(x, weight, result)
        return normed

    def norm_into(self, x: Vector, weight: Vector, result: Vector) -> None:
        """Write the RMS norm of x (H,) into `result` (H,).

        Args:
            weight: (H,), the norm's.
        """
        np.multiply(x, weight, out=result)
        result *= 1.0 / math.sqrt(float(x.dot(x)) / len(x) + self.config.rms_norm_eps)

    def _rotate(self, vector: Vector, position: int) -> None:
        """Apply rotary positions to the queries and keys of one token, and write them to the buffer `turned`.

        Args:
            vector: The token's queries, keys and values, (heads + 2 * key-value heads, channels of a head).
        """
        if position >= len(self.cosines):
            self.cosines, self.sines = rotations(self.network, position + 1)
        turned, half, sine = self.turned, self.config.head_dim // 2, self.sines[position]
        plain = vector[: len(turned)]
        np.multiply(plain[:, half:], sine[:half], out=turned[:, :half])
        np.multiply(plain[:, :half], sine[half:], out=turned[:, half:])
        turned += plain * self.cosines[position]


def ignore_overflow() -> np.errstate:
    """Return a context manager that silences NumPy's overflow warnings.

    torch gives none either, and a diverging draft network does no harm beyond bad drafts.
    """
    return np.errstate(over="ignore", invalid="ignore")


def rotations(network: DraftNetwork, length: int) -> tuple[Vector, Vector]:
    """Return the network's cosines and signed sines (L, d) of the positions 0 .. L - 1. L is at least `length`."""
    cosines, sines = network.layer(0).rotary.table(length, torch.float32, torch.device("cpu"))
    return cosines.numpy(), sines.numpy()


def is_plain_lookup(embedding: nn.Module, *weights: Tensor) -> bool:
    """Return whether all weights are float32 on a CPU, and the embedding module does nothing but look up rows."""
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
        return False
    return all(part.dtype == torch.float32 and part.device.type == "cpu" for part in (embedding.weight, *weights))


def owner(network: DraftNetwork, name: str) -> type:
    """Return the class that defines the network's method `name`."""
    return next(kind for kind in type(network).__mro__ if name in vars(kind))


def silu(x: Vector, result: Vector) -> None:
    """Write silu(x) = x / (1 + exp(-x)) into `result`, computed as x / 2 * (1 + tanh(x / 2)), which cannot overflow."""
    np.tanh(x * 0.5, out=result)
    result += 1.0
    result *= x
    result *= 0.5


def buffer(size: int) -> tuple[Tensor, Vector]:
    """Allocate `size` float32 numbers.

    Returns:
        A tensor and a NumPy array that share the memory.
    """
    array = np.zeros(size, np.float32)
    return torch.from_numpy(array), array
