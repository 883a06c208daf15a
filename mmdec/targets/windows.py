"""Layers that see only a part of the text: sliding windows and chunks, as a model's configuration names them.

A run keeps all columns of these layers, so that a draft can be removed across a window's edge: their memory grows
with the text, as that of other layers does. A pass shows such a layer only the columns that its draft can see, so that
the time of a pass does not grow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, get_layer_types_and_kwargs

from mmdec.ops.tree_attention import TreeMask
from mmdec.targets.cache import RowLayout
from mmdec.types import InputError

# layer type in a configuration -> whether its window is the token's chunk; else it slides along
KINDS = {"sliding_attention": False, "chunked_attention": True}
STATES = ("linear_attention", "conv")  # layer types that have states and attend to nothing


@dataclass(frozen=True)
class Window:
    """How far a layer's tokens see: the last `size` positions, their own included, or their own chunk of `size`."""

    size: int
    chunks: bool = False

    def first(self, rows: RowLayout) -> int:
        """Find the first column that any node of the next draft sees."""
        if self.chunks:
            size = self.size
            return min(start + (end - start) // size * size for start, end in zip(rows.starts, rows.ends, strict=True))
        return max(0, min(rows.ends) - self.size + 1)


@final
@dataclass(frozen=True)
class Windows:
    """The windows of a model's layers."""

    layers: tuple[Window | None, ...]  # window of each layer of the cache; None: it sees all columns
    # layer type -> window, if the model takes one mask for each type; None: it takes one mask, the first layer's
    kinds: Mapping[str, Window | None] | None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Windows | None:
        """Read the windows that a text model's configuration names; None if it names none.

        Raises: InputError if layers of one type have windows of several sizes.
        """
        types, settings = get_layer_types_and_kwargs(config)
        layers = tuple(
            Window(given["sliding_window"], KINDS[kind]) if kind in KINDS and given.get("sliding_window") else None
            for kind, given in zip(types, settings, strict=True)
        )
        if not any(layers):
            return None
        sizes = {(kind, window) for kind, window in zip(types, layers, strict=True) if kind != "dummy"}
        by_type = dict(sizes)
        named: Sequence[str] = getattr(config, "layer_types", None) or ()
        if len(by_type) < len(sizes) or (not named and len(by_type) > 1):
            found = sorted({window.size for window in layers if window})
            raise InputError(
                f"`model` must have one window for all layers of a type, but has {found}. Choose another model."
            )
        return cls(layers, {kind: by_type.get(kind) for kind in named} if named else None)

    def firsts(self, rows: RowLayout) -> dict[Window, int]:
        """Find for each window the first column that the next draft sees in layers with it."""
        return {window: window.first(rows) for window in set(self.layers) if window}

    def masks(
        self, tree: TreeMask, firsts: Mapping[Window, int], counted: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor | dict[str, Tensor | None], tuple[TreeMask, ...]]:
        """Make the argument `attention_mask` of a draft's pass. Returns: that argument, and the tree masks of all kinds
        of layers.

        tree: the mask of layers without a window. firsts: the first column that layers of each window show.
        counted: the columns' places and the rows' padding, from `Gaps.places`; None: no padding lies between tokens.
        """
        trees = {
            window: tree.within(window.size, chunks=window.chunks, first=firsts.get(window, 0), counted=counted)
            for window in set(self.layers)
            if window
        }
        masks = (*trees.values(), tree)
        if self.kinds is None:
            return masks[0].additive, masks
        additive = {kind: (trees[window] if window else tree).additive for kind, window in self.kinds.items()}
        return {kind: None if kind in STATES else mask for kind, mask in additive.items()}, masks


@final
@dataclass(frozen=True)
class Gaps:
    """Padding between the tokens of a prompt's rows, which windows count although a run's cache drops it."""

    padding: Tensor  # (B,) int64, each row's number of padding columns in the prompt
    moved: Tensor  # (B, C) int64: place in the prompt, gaps counted, minus column number and padding

    @classmethod
    def of(cls, mask: Tensor) -> Gaps:
        """Find the gaps in a prompt's mask (B, C) bool, False at padding."""
        moved, padding = torch.zeros_like(mask, dtype=torch.long), list[int]()
        for row, seen in enumerate(mask):
            places = seen.nonzero()[:, 0]
            start, end = int(places[0]), int(places[0]) + len(places)
            padding.append(mask.shape[1] - end)
            moved[row, start:end] = places - torch.arange(start, end, device=mask.device) - padding[-1]
        return cls(torch.tensor(padding, device=mask.device), moved)

    def places(self, columns: int) -> tuple[Tensor, Tensor]:
        """Compute the places (B, S) of the first `columns` columns, gaps counted, and each row's padding (B,)."""
        places = torch.arange(columns, device=self.moved.device) + self.padding[:, None]
        width = min(columns, self.moved.shape[1])
        places[:, :width] += self.moved[:, :width]
        return places, self.padding

    def select(self, live: Tensor) -> Gaps:
        """Return the gaps of the rows with indices `live` (K,) alone."""
        return Gaps(self.padding[live], self.moved[live])


def full_cache(config: PreTrainedConfig) -> DynamicCache:
    """Make an empty cache for a model whose layers all keep every column."""
    cache = DynamicCache(config=config)
    cache.layers[:] = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]
    return cache


def widened(layer: Any) -> Any:
    """Return a caller's cache layer with a column for every token. Columns that a sliding window has dropped become
    zeros, which no later token sees."""
    if type(layer) is not DynamicSlidingWindowLayer:
        return layer
    other = DynamicLayer()
    if length := layer.get_seq_length():
        keys, values = (_front(states, length) for states in (layer.keys, layer.values))
        other.lazy_initialization(keys, values)
        other.keys, other.values = keys, values
    return other


def _front(states: Any, length: int) -> Tensor:
    """Put columns of zeros before keys or values (B, H, S, D): (B, H, length, D)."""
    zeros = states.new_zeros(*states.shape[:2], length - states.shape[2], states.shape[3])
    return torch.cat([zeros, states], 2)
