"""ALiBi models: positions enter attention as a bias that is added to the attention scores.

transformers' models compute the bias from a token's index in the cache: they assume that this index is the token's
position. In a draft, index and position differ: sibling nodes share a position, and the rows of a batch have different
lengths. So a draft's pass gets no mask, and the model makes bias and mask as for plain text. Before each layer, a hook
replaces bias and mask: each cache entry gets the bias of its true position, and the mask hides the entries that a node
must not see.
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

BIASES = ("alibi", "position_bias")  # names of the layers' argument for the bias, in transformers' models
_drafted: ContextVar[TreeMask | None] = ContextVar("drafted", default=None)  # mask of the draft that this thread scores
_installing = threading.Lock()


def has_alibi(model: PreTrainedModel) -> bool:
    """Return whether a model's layers add ALiBi's bias. The configuration's field `alibi` decides; if there is none,
    models whose layers have an argument for the bias count."""
    switched = getattr(model.config, "alibi", None)
    return any(_layers(model)) if switched is None else bool(switched)


@contextmanager
def drafting(model: PreTrainedModel, tree: TreeMask) -> Generator[None]:
    """Context manager: while it is open, a pass that is called without a mask scores the draft whose mask is `tree`.
    The pass uses this mask and the positions of the draft's nodes.

    Hooks do this. They stay on the model, but do nothing outside of this context or in other threads.
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
    """A hook on a layer that replaces its arguments for ALiBi's bias and the mask while a draft is scored.
    name: the argument for the bias. heads: number of attention heads."""

    def __init__(self, name: str, heads: int) -> None:
        self.name, self.heads = name, heads

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tree = _drafted.get()
        if tree is None:
            return None
        # the bias: (H, 1, P), (B * H, 1, P) or (B, H, 1, P) for H heads; P is the number of keys, or the model's
        # maximum length
        bias: Tensor = kwargs[self.name]
        # the mask (B or 1, H or 1, N, S + N), to which the model may have added the bias
        mask: Tensor = kwargs["attention_mask"]
        places = _places(tree)
        rows, columns = places.shape
        shown = _by_place(mask[:, :, -1:].expand(rows, -1, -1, -1), places)  # the last query sees all keys
        hidden = True if shown.dtype == torch.bool else torch.finfo(shown.dtype).min
        shown = torch.where(tree.additive < 0, hidden, shown)
        # such a bias is made for the model's maximum length; its last entries belong to the last keys
        if bias.shape[-1] != columns:
            places = places + bias.shape[-1] - 1 - places.amax(1, keepdim=True)
        each = bias.reshape(-1, self.heads, 1, bias.shape[-1])
        made = _by_place(each.expand(rows, -1, -1, -1), places)
        whole = RowBias(made) if len(each) < rows else made.reshape(*bias.shape[:-1], columns)
        return args, {**kwargs, "attention_mask": shown, self.name: whole}


@final
class RowBias:
    """A bias (B, H, 1, S) that differs by row, for layers that expect one bias (H, 1, S) for all rows. It offers the
    tensor operations that such layers use."""

    def __init__(self, bias: Tensor) -> None:
        self.bias, self.shape = bias, bias.shape[1:]

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def __getitem__(self, part: object) -> RowBias:
        return self

    def __radd__(self, scores: Tensor) -> Tensor:
        return scores + self.bias


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield (module, name of its argument) for the outermost modules whose `forward` takes ALiBi's bias."""
    for child in model.children():
        arguments = inspect.signature(child.forward).parameters
        name = next((name for name in BIASES if name in arguments), None)
        if name is None:
            yield from _layers(child)
        else:
            yield child, name


def _places(tree: TreeMask) -> Tensor:
    """Return the position (B, S + N) of each cached token and each node in its batch row; 0 for left padding."""
    columns = tree.additive.shape[3] - tree.ancestors.shape[1]
    starts, ends = tree.starts[:, None], tree.ends[:, None]
    held = (torch.arange(columns, device=starts.device) - starts).clamp(min=0)
    # cache entries between a shorter batch row's end and the draft get any position, because the mask hides them
    return torch.cat([torch.minimum(held, ends - starts), ends - starts - 1 + tree.ancestors.sum(2)], 1)


def _by_place(numbers: Tensor, places: Tensor) -> Tensor:
    """Return the entries (B, H, 1, S) of `numbers` (B, H, 1, P) at the indices `places` (B, S), which are below P."""
    return numbers.gather(3, places[:, None, None].expand(-1, numbers.shape[1], -1, -1))
