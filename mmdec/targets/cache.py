"""A key-value cache that takes drafts back: transformers' DynamicCache, its tensors in pools that have room to grow.

Stock layers copy all they hold at every step. Here a step writes its own columns and shows a view; keeping a path and
dropping columns move a few columns for all layers at once, whatever their number. The layers stay transformers' own
kind: a cache handed over by somebody goes on working when the run is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, final

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
    """One layer's keys and values (B, H, S, D): views of pools. If other code replaces `keys`, the layer
    behaves as a stock layer from then on."""

    def __init__(self, store: KVPool) -> None:
        super().__init__()
        self.store = store
        self.all_keys = self.all_values = torch.empty(0)
        self.shown: Tensor | None = None
        self.is_initialized = True

    def hold(self, states: Tensor, is_keys: bool) -> None:
        """Show these keys, or values: the first columns of the pool."""
        if is_keys:
            self.keys = self.shown = states
        else:
            self.values = states

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is a stock layer: pools are a run's own."""
        return stock_layer, (cast(Tensor, self.keys).contiguous(), cast(Tensor, self.values).contiguous())

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
        self.hold(self.all_keys[:, :, :end], True)
        self.hold(self.all_values[:, :, :end], False)
        return cast(Tensor, self.keys), cast(Tensor, self.values)


@dataclass(frozen=True)
class Kind:
    """Keys or values that are alike in all but their layer, and so lie in one pool."""

    members: tuple[tuple[int, bool], ...]  # a layer's index, and whether these are its keys
    heads: int
    size: int
    dtype: torch.dtype
    device: torch.device

    def pool(self, rows: int, columns: int) -> Tensor:
        """(members, rows, heads, columns, size), not written yet."""
        shape = len(self.members), rows, self.heads, columns, self.size
        with torch.inference_mode(False):  # else nobody could write to the cache once the run is over
            return torch.empty(shape, dtype=self.dtype, device=self.device)


class Memory(Protocol):
    """Provides the memory of a run's pools, for example a slot of the fast pass."""

    def pools(self, kinds: Sequence[Kind], rows: int, length: int) -> list[Tensor]:
        """One of each kind, as `Kind.pool` makes it, with room for `length` columns; those of before, if they will do.
        What is not written is finite. The pools of before hold until the next draft is scored."""
        ...


@final
class KVPool:
    """What a run holds of a cache after its prompt: all layers' columns, in pools (2 * layers, B, H, C, D)."""

    def __init__(self, cache: Cache, memory: Memory | None = None) -> None:
        """Moves the cache's keys and values into pooled memory, which the cache reads from then on."""
        check_cache(cache)
        self.encoder = cache.cross_attention_cache if isinstance(cache, EncoderDecoderCache) else None
        given = cast(DynamicCache, cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache)
        layers: list[GrowingLayer] = []
        held: dict[tuple[Any, ...], list[tuple[int, bool, Tensor]]] = {}
        for index, old in enumerate(cast(list[DynamicLayer], given.layers)):
            layers.append(GrowingLayer(self))
            layers[-1].dtype, layers[-1].device = old.dtype, old.device
            for is_keys, states in ((True, cast(Tensor, old.keys)), (False, cast(Tensor, old.values))):
                held.setdefault((states.shape, states.dtype, states.device), []).append((index, is_keys, states))
        self.length, self._memory, self._pools = given.get_seq_length(), memory, list[Tensor]()
        self._kinds = [
            Kind(tuple((index, is_keys) for index, is_keys, _ in members), shape[1], shape[3], dtype, device)
            for (shape, dtype, device), members in held.items()
        ]
        # Layers hold their pools, not the other way round: a run's memory is free as soon as nobody has its cache.
        self._layers = [weakref.ref(layer) for layer in layers]
        rows = next(iter(held))[0][0]
        self._pools = self._allocate(rows, self.length + ROOM)
        for pool, members in zip(self._pools, held.values(), strict=True):
            for member, (_, _, states) in enumerate(members):
                pool[member, :, :, : self.length] = states
        given.layers[:] = layers
        self._hand_out()
        self.crop(self.length)

    @property
    def width(self) -> int:
        """C, the columns that there is room for."""
        return self._pools[0].shape[3]

    def grow(self, length: int) -> None:
        """Make room for `length` columns at least."""
        if self.width < length:
            old = self._pools
            self._pools = self._allocate(old[0].shape[1], length)
            for before, pool in zip(old, self._pools, strict=True):
                pool[:, :, :, : before.shape[3]] = before  # all of it: within a pass some layers hold more than others
            self._hand_out()

    def crop(self, length: int) -> None:
        """Drop the columns from `length` on."""
        self.length = length
        layers = dict(self._living())
        for kind, pool in zip(self._kinds, self._pools, strict=True):
            for states, (index, is_keys) in zip(pool[:, :, :, :length].unbind(0), kind.members, strict=True):
                if index in layers:
                    layers[index].hold(states, is_keys)

    def commit(self, columns: Sequence[Sequence[int]], begins: Sequence[int], length: int) -> None:
        """Row r's `columns[r]` go to `begins[r]`, ...; what lies beyond `length` is dropped."""
        for pool in self._pools:
            kv_gather(pool, columns, begins)
        self.crop(length)

    def select(self, rows: Tensor, length: int) -> None:
        """Keep rows (K,) int64 in that order, and the first `length` columns."""
        if self.encoder is not None:
            cast(DynamicCache, self.encoder).batch_select_indices(rows)
        old = self._pools
        self._pools = self._allocate(len(rows), length)
        for before, pool in zip(old, self._pools, strict=True):
            pool[:, :, :, :length] = before[:, :, :, :length].index_select(1, rows.to(pool.device))
        self._hand_out()
        self.crop(length)

    def _allocate(self, rows: int, length: int) -> list[Tensor]:
        if self._memory is not None:
            return self._memory.pools(self._kinds, rows, length)
        columns = -(-length // ROOM) * ROOM
        if self._pools:
            width = self.width
            columns = width if length <= width else max(columns, width + min(width, STEP))
        return [kind.pool(rows, columns) for kind in self._kinds]

    def _hand_out(self) -> None:
        layers = dict(self._living())
        for kind, pool in zip(self._kinds, self._pools, strict=True):
            for states, (index, is_keys) in zip(pool.unbind(0), kind.members, strict=True):
                if index in layers:
                    setattr(layers[index], "all_keys" if is_keys else "all_values", states)

    def _living(self) -> Iterator[tuple[int, GrowingLayer]]:
        """The layers that somebody has, with their indices."""
        for index, reference in enumerate(self._layers):
            if (layer := reference()) is not None:
                yield index, layer


def stock_layer(keys: Tensor, values: Tensor) -> DynamicLayer:
    """transformers' own, which holds these."""
    layer = DynamicLayer()
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return layer


def empty_cache() -> DynamicCache:
    """Without layers, which are put into it one by one."""
    cache = DynamicCache()
    cache.layer_class_to_replicate = None
    return cache


def shallow_copy(cache: DynamicCache) -> DynamicCache:
    """Another cache with the same contents, which are not copied: the next pass extends the copy alone."""
    other = empty_cache()
    for layer in cast(list[DynamicLayer], cache.layers):
        filled = layer.get_seq_length() > 0
        other.layers.append(
            stock_layer(cast(Tensor, layer.keys), cast(Tensor, layer.values)) if filled else DynamicLayer()
        )
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
