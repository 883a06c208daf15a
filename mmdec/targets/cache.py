"""A key-value cache that takes drafts back: transformers' DynamicCache, its tensors in pools that have room to grow.

Stock layers copy all they hold at every step. Here a step writes its own columns and shows a view; keeping a path and
dropping columns move a few columns for all layers at once, whatever their number. The layers stay transformers' own
kind: a cache handed over by somebody goes on working when the run is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, final

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from mmdec.ops.kv_gather import kv_gather
from mmdec.types import InputError

ROOM = 64  # columns that a new pool has left, and the unit of its width
STEP = 4096  # a pool is doubled when full, but never grows by more columns


@final
class GrowingLayer(DynamicLayer):
    """One layer's keys and values (B, H, S, D): views of pools. Replaced from outside, it is a stock layer again."""

    def __init__(self, store: KVPool) -> None:
        super().__init__()
        self.store = store
        self.all_keys = self.all_values = torch.empty(0)
        self.shown: Tensor | None = None
        self.is_initialized = True

    def show(self, length: int) -> None:
        """Hold the first `length` columns."""
        self.keys = self.shown = self.all_keys[:, :, :length]
        self.values = self.all_values[:, :, :length]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.shown is None or self.keys is not self.shown:
            self.shown = None
            return super().update(key_states, value_states)
        start = self.shown.shape[2]
        end = start + key_states.shape[2]
        if end > self.all_keys.shape[2]:
            self.store.grow(end)
        self.all_keys[:, :, start:end] = key_states
        self.all_values[:, :, start:end] = value_states
        self.show(end)
        return cast(Tensor, self.keys), cast(Tensor, self.values)


@final
class KVPool:
    """What a run holds of a cache after its prompt: all layers' columns, in pools (2 * layers, B, H, C, D)."""

    def __init__(self, cache: Cache) -> None:
        """Moves the cache's keys and values into pooled memory, which the cache reads from then on."""
        check_cache(cache)
        self.encoder = cache.cross_attention_cache if isinstance(cache, EncoderDecoderCache) else None
        given = cast(DynamicCache, cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache)
        self._pools: list[Tensor] = []
        self._members: list[list[tuple[GrowingLayer, bool]]] = []  # of each pool: whose, and whether the keys
        layers: list[GrowingLayer] = []
        held: dict[tuple[Any, ...], list[tuple[GrowingLayer, bool, Tensor]]] = {}
        for old in cast(list[DynamicLayer], given.layers):
            layers.append(GrowingLayer(self))
            layers[-1].dtype, layers[-1].device = old.dtype, old.device
            for is_keys, states in ((True, cast(Tensor, old.keys)), (False, cast(Tensor, old.values))):
                held.setdefault((states.shape, states.dtype, states.device), []).append((layers[-1], is_keys, states))
        self.length = given.get_seq_length()
        for members in held.values():
            self._members.append([(layer, is_keys) for layer, is_keys, _ in members])
            self._pools.append(torch.empty(0))
            pool = self._empty(members[0][2], len(members), -(-(self.length + ROOM) // ROOM) * ROOM)
            for member, (_, _, states) in enumerate(members):
                pool[member, :, :, : self.length] = states
            self._hand_out(len(self._pools) - 1, pool)
        given.layers[:] = layers
        self._layers, self.cache = layers, cache
        self.crop(self.length)

    def grow(self, length: int) -> None:
        """Make room for `length` columns at least."""
        for index, pool in enumerate(self._pools):
            width = pool.shape[3]
            if width < length:
                wider = self._empty(pool[0], len(pool), max(-(-length // ROOM) * ROOM, width + min(width, STEP)))
                wider[:, :, :, :width] = pool
                self._hand_out(index, wider)

    def crop(self, length: int) -> None:
        """Drop the columns from `length` on."""
        self.length = length
        for layer in self._layers:
            layer.show(length)

    def commit(self, columns: Sequence[Sequence[int]], begins: Sequence[int], length: int) -> None:
        """Row r's `columns[r]` go to `begins[r]`, ...; what lies beyond `length` is dropped."""
        for pool in self._pools:
            kv_gather(pool, columns, begins)
        self.crop(length)

    def select(self, rows: Tensor, length: int) -> None:
        """Keep rows (K,) int64 in that order, and the first `length` columns."""
        for index, pool in enumerate(self._pools):
            kept = self._empty(pool[0, : len(rows)], len(pool), pool.shape[3])
            kept[:, :, :, :length] = pool[:, :, :, :length].index_select(1, rows.to(pool.device))
            self._hand_out(index, kept)
        if self.encoder is not None:
            cast(DynamicCache, self.encoder).batch_select_indices(rows)
        self.crop(length)

    def _empty(self, like: Tensor, count: int, width: int) -> Tensor:
        """(count, B, H, width, D) for states like (B, H, S, D)."""
        batch, heads, _, size = like.shape
        with torch.inference_mode(False):  # else nobody could write to the cache once the run is over
            return torch.empty(count, batch, heads, width, size, dtype=like.dtype, device=like.device)

    def _hand_out(self, index: int, pool: Tensor) -> None:
        self._pools[index] = pool
        for member, (layer, is_keys) in enumerate(self._members[index]):
            if is_keys:
                layer.all_keys = pool[member]
            else:
                layer.all_values = pool[member]


def shallow_copy(cache: DynamicCache) -> DynamicCache:
    """Another cache with the same contents, which are not copied: the next pass extends the twin alone."""
    other = DynamicCache()
    other.layer_class_to_replicate = None
    for layer in cast(list[DynamicLayer], cache.layers):
        same = DynamicLayer()
        if layer.get_seq_length():
            same.lazy_initialization(cast(Tensor, layer.keys), cast(Tensor, layer.values))
            same.keys, same.values = layer.keys, layer.values
        other.layers.append(same)
    return other


def check_cache(cache: Cache) -> None:
    """Raise InputError unless drafts can be taken back from the cache: its layers keep every column, on the device."""
    inner = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    kinds = {type(layer) for layer in inner.layers}
    if inner.layer_class_to_replicate is not None:
        kinds.add(inner.layer_class_to_replicate)
    foreign = sorted(kind.__name__ for kind in kinds - {DynamicLayer, GrowingLayer})
    what = type(inner).__name__ + (f" of {', '.join(foreign)}" if foreign else " that is offloaded")
    if foreign or inner.offloading or not isinstance(inner, DynamicCache):
        raise InputError(
            f"`past_key_values` must be a DynamicCache of full attention layers, but is {what}: drafts cannot be taken "
            "back from it. Leave `past_key_values` and `cache_implementation` out."
        )
