"""Handles layers in which a token attends only to the last tokens (sliding window) or to its own chunk of the text.

The cache keeps all tokens of these layers, so that rejected drafts can be removed. So its memory grows with the text,
as the memory of other layers does. In a pass, such a layer gets only the part of the cache that its draft can see, so
that the time of a pass does not grow. A "column" is one token's index along the cache's sequence axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, get_layer_types_and_kwargs

from mmdec.errors import InputError
from mmdec.kernels.tree_attention import TreeMask
from mmdec.targets.kv_cache import RowLayout

# layer type in a configuration -> False: sliding window of the last tokens; True: chunks of the text
IS_CHUNKED = {"sliding_attention": False, "chunked_attention": True}
# layer types with recurrent or convolutional states, without attention
RECURRENT_LAYER_TYPES = ("linear_attention", "conv")


@dataclass(frozen=True)
class AttentionWindow:
    """What a token attends to in a layer: the last `size` tokens, itself included.

    With `chunks`, it attends to the earlier tokens of its own chunk of `size` tokens.
    """

    size: int
    chunks: bool = False

    def first_column(self, rows: RowLayout) -> int:
        """Return the index, along the cache's sequence axis, of the first token to which the next draft attends.

        Args:
            rows: Which cache columns hold which row's tokens.
        """
        if self.chunks:
            size = self.size
            return min(start + (end - start) // size * size for start, end in zip(rows.starts, rows.ends, strict=True))
        return max(0, min(rows.ends) - self.size + 1)


@final
@dataclass(frozen=True)
class Windows:
    """The attention windows of a model's layers."""

    layers: tuple[AttentionWindow | None, ...]  # window of each layer, or None if it attends to all tokens
    # layer type -> window, if the model takes one mask for each type; None if one mask serves all layers
    kinds: Mapping[str, AttentionWindow | None] | None

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> Windows | None:
        """Read the windows from a language model's configuration; None if no layer has a window.

        Raises:
            InputError: If layers of one type have windows of several sizes.
        """
        types, settings = get_layer_types_and_kwargs(config)
        layers = tuple(
            AttentionWindow(setting["sliding_window"], IS_CHUNKED[kind])
            if kind in IS_CHUNKED and setting.get("sliding_window")
            else None
            for kind, setting in zip(types, settings, strict=True)
        )
        if not any(layers):
            return None
        sizes = {(kind, window) for kind, window in zip(types, layers, strict=True) if kind != "dummy"}
        by_type = dict(sizes)
        named: Sequence[str] = getattr(config, "layer_types", None) or ()
        if len(by_type) < len(sizes) or (not named and len(by_type) > 1):
            window_sizes = sorted({window.size for window in layers if window})
            raise InputError(
                f"`model` must have one window for all layers of a type, but has {window_sizes}. Choose another model."
            )
        return cls(layers, {kind: by_type.get(kind) for kind in named} if named else None)

    def first_columns(self, rows: RowLayout) -> dict[AttentionWindow, int]:
        """Return for each window what `AttentionWindow.first_column` returns for it."""
        return {window: window.first_column(rows) for window in set(self.layers) if window}

    def masks(
        self, tree: TreeMask, firsts: Mapping[AttentionWindow, int], positions: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor | dict[str, Tensor | None], tuple[TreeMask, ...]]:
        """Make the masks of a draft's pass.

        Args:
            tree: The mask of layers without a window.
            firsts: AttentionWindow -> index of the first cached token that its mask covers.
            positions: Positions (B, S) of the cached tokens, padding between them counted, and number of padding tokens
                (B,); None: there is no padding between tokens.

        Returns:
            The model's argument `attention_mask`, and the tree masks of all types of layers.
        """
        trees = {
            window: tree.within_window(
                window.size, chunks=window.chunks, first=firsts.get(window, 0), positions=positions
            )
            for window in set(self.layers)
            if window
        }
        masks = (*trees.values(), tree)
        if self.kinds is None:
            return masks[0].additive, masks
        additive = {kind: (trees[window] if window else tree).additive for kind, window in self.kinds.items()}
        return {kind: None if kind in RECURRENT_LAYER_TYPES else mask for kind, mask in additive.items()}, masks


@final
@dataclass(frozen=True)
class Gaps:
    """Describes padding between the tokens of prompts.

    A window counts this padding, but the cache drops it. So a token's index for the window differs from its cache
    column.
    """

    padding: Tensor  # (B,) int64, each batch row's number of padding tokens after its first token
    moved: Tensor  # (B, C) int64: index of a cached token in the padded prompt, minus its cache column and `padding`

    @classmethod
    def from_mask(cls, mask: Tensor) -> Gaps:
        """Find the padding in a prompt's mask (B, C) bool, False at padding."""
        moved, padding = torch.zeros_like(mask, dtype=torch.long), list[int]()
        for row, row_mask in enumerate(mask):
            places = row_mask.nonzero()[:, 0]
            start, end = int(places[0]), int(places[0]) + len(places)
            padding.append(mask.shape[1] - end)
            moved[row, start:end] = places - torch.arange(start, end, device=mask.device) - padding[-1]
        return cls(torch.tensor(padding, device=mask.device), moved)

    def positions(self, columns: int) -> tuple[Tensor, Tensor]:
        """Return the positions of the first S = `columns` cached tokens, padding between tokens counted.

        Returns:
            Positions (B, S), and each row's number of padding tokens (B,).
        """
        places = torch.arange(columns, device=self.moved.device) + self.padding[:, None]
        width = min(columns, self.moved.shape[1])
        places[:, :width] += self.moved[:, :width]
        return places, self.padding

    def select(self, live: Tensor) -> Gaps:
        """Return only the `Gaps` of the batch rows with the indices `live` (K,)."""
        return Gaps(self.padding[live], self.moved[live])


def full_cache(config: PreTrainedConfig) -> DynamicCache:
    """Make an empty cache for a model, in which layers with sliding windows keep all tokens, too."""
    cache = DynamicCache(config=config)
    cache.layers[:] = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]
    return cache


def full_length_layer(layer: Any) -> Any:
    """Return a caller's cache layer as one that holds all tokens.

    Tokens that a sliding window has dropped become zeros, to which no later token attends.
    """
    if type(layer) is not DynamicSlidingWindowLayer:
        return layer
    other = DynamicLayer()
    if length := layer.get_seq_length():
        keys, values = (_pad_front(states, length) for states in (layer.keys, layer.values))
        other.lazy_initialization(keys, values)
        other.keys, other.values = keys, values
    return other


def _pad_front(states: Any, length: int) -> Tensor:
    """Pad keys or values (B, H, S, D) with zeros at the beginning.

    Returns:
        (B, H, length, D).
    """
    zeros = states.new_zeros(*states.shape[:2], length - states.shape[2], states.shape[3])
    return torch.cat([zeros, states], 2)
