"""ALiBi: positions as a bias that layers add to their attention scores.

Models of transformers make it by column, one number for a head and a column: softmax does not change where all scores
of a query shift. In a draft a column is not a position, as siblings share one and rows end at different columns. So a
draft's pass gets no mask, and the model makes bias and mask as for plain text; before each layer each column's bias
becomes that of its own position, and the draft's mask hides what its nodes do not see.
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

BIASES = ("alibi", "position_bias")  # names of the bias among a layer's arguments
_drafted: ContextVar[TreeMask | None] = ContextVar("drafted", default=None)  # the draft of the current pass
_installing = threading.Lock()


def has_alibi(model: PreTrainedModel) -> bool:
    """Whether a model's layers add ALiBi's bias. Some configurations have a switch for it, which decides."""
    switched = getattr(model.config, "alibi", None)
    return any(_layers(model)) if switched is None else bool(switched)


@contextmanager
def drafting(model: PreTrainedModel, tree: TreeMask) -> Generator[None]:
    """Let a model's next pass, over a draft and without a mask, attend by this tree and its positions.

    The hooks stay on the model and do nothing at other times, nor in other threads.
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
        bias: Tensor = kwargs[self.name]  # (H, B * H or B, H, 1, columns of the pass, or of the longest text)
        mask: Tensor = kwargs["attention_mask"]  # (B or 1, H or 1, N, S + N), which may hold the bias, too
        places = _places(tree)
        rows, columns = places.shape
        shown = _by_place(mask[:, :, -1:].expand(rows, -1, -1, -1), places)  # the last node saw all columns
        hidden = True if shown.dtype == torch.bool else torch.finfo(shown.dtype).min
        shown = torch.where(tree.additive < 0, hidden, shown)
        if bias.shape[-1] != columns:  # it ends at 0, the text's last position
            places = places + bias.shape[-1] - 1 - places.amax(1, keepdim=True)
        each = bias.reshape(-1, self.heads, 1, bias.shape[-1])
        made = _by_place(each.expand(rows, -1, -1, -1), places)
        whole = RowBias(made) if len(each) < rows else made.reshape(*bias.shape[:-1], columns)
        return args, {**kwargs, "attention_mask": shown, self.name: whole}


@final
class RowBias:
    """A bias (B, H, 1, S) for a layer whose own is (H, 1, S) for all rows, and which cuts it to S and adds it."""

    def __init__(self, bias: Tensor) -> None:
        self.bias, self.shape = bias, bias.shape[1:]

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def __getitem__(self, part: object) -> RowBias:
        return self

    def __radd__(self, scores: Tensor) -> Tensor:
        return scores + self.bias


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The outermost modules whose `forward` takes a bias, and its name there."""
    for child in model.children():
        arguments = inspect.signature(child.forward).parameters
        name = next((name for name in BIASES if name in arguments), None)
        if name is None:
            yield from _layers(child)
        else:
            yield child, name


def _places(tree: TreeMask) -> Tensor:
    """The position (B, S + N) of each column's token in its row; 0 for columns that hold none before it."""
    columns = tree.additive.shape[3] - tree.ancestors.shape[1]
    starts, ends = tree.starts[:, None], tree.ends[:, None]
    held = (torch.arange(columns, device=starts.device) - starts).clamp(min=0)
    # columns between a row's end and the draft are hidden
    return torch.cat([torch.minimum(held, ends - starts), ends - starts - 1 + tree.ancestors.sum(2)], 1)


def _by_place(numbers: Tensor, places: Tensor) -> Tensor:
    """Take from numbers (B, H, 1, P) those at places (B, S): (B, H, 1, S)."""
    return numbers.gather(3, places[:, None, None].expand(-1, numbers.shape[1], -1, -1))
