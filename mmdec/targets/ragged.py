"""Passes over ragged drafts: linear layers skip the padding.

Rows that share a pass draft different numbers of tokens, and the batch is padded to the longest draft. On a CPU a
linear layer takes time for each node, so a single long draft would cost as much as a long draft of every row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from mmdec.core.tree import int_list
from mmdec.types import Draft

# Packing copies the nodes of each layer's input and output, so it must save this many of them, and this share of all.
MIN_PADDING = 8
MIN_PADDING_SHARE = 0.25


@final
class PackedLinear(TorchFunctionMode):
    """In this context, linear layers compute only the nodes of a batch of drafts. Their output at padding is 0.

    An input is taken for that of the nodes if it has three axes, the first two of the batch's sizes.

    Args:
        sizes: Number of nodes of each row.
        columns: Number of nodes to which all rows are padded.
    """

    def __init__(self, sizes: Sequence[int], columns: int) -> None:
        super().__init__()
        self.nodes = sum(sizes)
        self.mean_nodes_per_row = -(-self.nodes // len(sizes))  # rounded up
        self._shape = len(sizes), columns
        self._indices = torch.tensor([row * columns + node for row, size in enumerate(sizes) for node in range(size)])

    def __enter__(self) -> PackedLinear:
        self._token = _packing.set(self)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _packing.reset(self._token)

    def takes(self, states: Tensor) -> bool:
        """Return whether an input is that of the draft's nodes."""
        return states.shape[:-1] == self._shape and states.device.type == "cpu"

    def apply(self, layer: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
        """Apply a linear layer to the nodes of states (B, N, I).

        Returns:
            (B, N, O), 0 at padding.
        """
        packed = layer(states.flatten(0, 1)[self._indices])
        out = packed.new_zeros(self._shape[0] * self._shape[1], packed.shape[-1])
        return out.index_copy_(0, self._indices, packed).unflatten(0, self._shape)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        states = args[0] if func is linear and args else None
        if isinstance(states, Tensor) and self.takes(states):
            return self.apply(lambda packed: func(packed, *args[1:], **(kwargs or {})), states)
        return func(*args, **(kwargs or {}))


# the packing of the current pass
_packing: ContextVar[PackedLinear | None] = ContextVar("packing", default=None)


def current_packing(states: Tensor) -> PackedLinear | None:
    """Return the packing of the current pass if it takes these states. Linear layers other than torch's use it."""
    packing = _packing.get()
    return packing if packing is not None and packing.takes(states) else None


def is_compiled(model: nn.Module) -> bool:
    """Return whether torch has compiled the model, which it would do again for each new set of draft sizes."""
    functions = (model._compiled_call_impl, getattr(model.forward, "_torchdynamo_orig_callable", None))
    return any(function is not None for function in functions)


def packed_linear(draft: Draft) -> PackedLinear | None:
    """Return a context in which the model's linear layers skip the padding of a draft; None if that does not pay."""
    rows, columns = draft.tokens.shape
    if rows == 1 or draft.tokens.device.type != "cpu":
        return None
    sizes = int_list(draft.size)
    padding = rows * columns - sum(sizes)
    pays = padding >= max(MIN_PADDING, MIN_PADDING_SHARE * rows * columns)
    return PackedLinear(sizes, columns) if pays else None
