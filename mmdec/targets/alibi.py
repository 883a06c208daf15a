"""ALiBi: positions enter attention as a bias that layers add to their scores.

transformers' models compute one bias for each head and cache column: they assume that a token's column is its position.
In a draft the two differ: sibling nodes share a position, and rows end at different columns. So a draft's pass gets no
mask, and the model makes bias and mask as for plain text. Before each layer, a hook replaces both: each column gets the
bias of its own position, and the mask hides the columns that a node must not see.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmdec.ops.tree_attention import TreeMask

BIASES = ("alibi", "position_bias")  # names that models give the bias among a layer's arguments
_drafted: ContextVar[TreeMask | None] = ContextVar("drafted", default=None)  # mask of the draft in this thread's pass
_installing = threading.Lock()


def has_alibi(model: PreTrainedModel) -> bool:
    """Return whether a model's layers add ALiBi's bias. If the configuration has a switch `alibi`, it decides."""
    switched = getattr(model.config, "alibi", None)
    return any(_layers(model)) if switched is None else bool(switched)


@contextmanager
def drafting(model: PreTrainedModel, tree: TreeMask) -> Generator[None]:
    """In this context, passes that are called without a mask use the tree's mask and its nodes' positions.

    Hooks do this. They stay on the model, but do nothing outside the context and in other threads.
    """
    with _installing:
        for layer, name in list(_layers(model)):
            if not any(isinstance(hook, TreeBias) for hook in layer._forward_pre_hooks.values()):
                layer.register_forward_pre_hook(TreeBias(name, model.config.num_attention_heads), with_kwargs=True)
    token = _drafted.set(tree)
    try:
        yield
    finally:
        _drafted.reset(token)


@final
class TreeBias:
    """A hook that replaces a layer's bias and mask during `drafting`."""

    def __init__(self, name: str, heads: int) -> None:
        self.name, self.heads = name, heads

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tree = _drafted.get()
        if tree is None:
            return None
        # (H, 1, P), (B * H, 1, P) or (B, H, 1, P), with P the columns of the pass or of the longest text
        bias: Tensor = kwargs[self.name]
        mask: Tensor = kwargs["attention_mask"]  # (B or 1, H or 1, N, S + N), which may hold the bias, too
        places = _places(tree)
        rows, columns = places.shape
        shown = _by_place(mask[:, :, -1:].expand(rows, -1, -1, -1), places)  # the last node's mask: it sees all columns
        hidden = True if shown.dtype == torch.bool else torch.finfo(shown.dtype).min
        shown = torch.where(tree.additive < 0, hidden, shown)
        if bias.shape[-1] != columns:  # the bias is for the longest text: its last entry is for the last position
            places = places + bias.shape[-1] - 1 - places.amax(1, keepdim=True)
        each = bias.reshape(-1, self.heads, 1, bias.shape[-1])
        made = _by_place(each.expand(rows, -1, -1, -1), places)
        whole = RowBias(made) if len(each) < rows else made.reshape(*bias.shape[:-1], columns)
        return args, {**kwargs, "attention_mask": shown, self.name: whole}


@final
class RowBias:
    """Gives each row its own bias (B, H, 1, S) in a layer that expects one bias (H, 1, S) for all rows."""

    def __init__(self, bias: Tensor) -> None:
        self.bias, self.shape = bias, bias.shape[1:]

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def __getitem__(self, part: object) -> RowBias:
        return self

    def __radd__(self, scores: Tensor) -> Tensor:
        return scores + self.bias


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the outermost modules whose `forward` takes a bias, and the name of that argument."""
    for child in model.children():
        arguments = inspect.signature(child.forward).parameters
        name = next((name for name in BIASES if name in arguments), None)
        if name is None:
            yield from _layers(child)
        else:
            yield child, name


def _places(tree: TreeMask) -> Tensor:
    """Compute the position (B, S + N) of each column's token in its row; 0 for padding before a row's first token."""
    columns = tree.additive.shape[3] - tree.ancestors.shape[1]
    starts, ends = tree.starts[:, None], tree.ends[:, None]
    held = (torch.arange(columns, device=starts.device) - starts).clamp(min=0)
    # columns between a row's end and the draft are hidden, so that their positions do not matter
    return torch.cat([torch.minimum(held, ends - starts), ends - starts - 1 + tree.ancestors.sum(2)], 1)


def _by_place(numbers: Tensor, places: Tensor) -> Tensor:
    """Pick from numbers (B, H, 1, P) those at the indices places (B, S). Returns: (B, H, 1, S)."""
    return numbers.gather(3, places[:, None, None].expand(-1, numbers.shape[1], -1, -1))
