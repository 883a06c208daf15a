"""A key-value cache that can roll back drafts: transformers' DynamicCache with its tensors in larger pools.

Stock layers copy all their columns at every step. Here a step writes its own columns and exposes a view; keeping a path
or dropping columns moves a few columns of all layers at once. The layers remain compatible with transformers, so a
cache given by a caller works after the run.
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

ROOM = 64  # free columns of a new pool, and the granularity of its width
STEP = 4096  # a full pool doubles, but grows by at most so many columns


@final
class GrowingLayer(DynamicLayer):
    """One layer's keys and values (B, H, S, D): views of pools.

    If other code replaces `keys`, the layer behaves as a stock layer from then on.
    """

    def __init__(self, store: KVPool) -> None:
        super().__init__()
        self.store = store
        self.all_keys = self.all_values = torch.empty(0)
        self.shown: Tensor | None = None
        self.is_initialized = True

    def hold(self, states: Tensor, is_keys: bool) -> None:
        """Expose these keys (or values): the first columns of the pool."""
        if is_keys:
            self.keys = self.shown = states
        else:
            self.values = states

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is a stock layer, because pools belong to a run."""
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
    """Keys or values of several layers with the same shape and dtype, which share one pool."""

    members: tuple[tuple[int, bool], ...]  # (layer index, whether keys) of each
    heads: int
    size: int
    dtype: torch.dtype
    device: torch.device

    def pool(self, rows: int, columns: int) -> Tensor:
        """An uninitialised pool (members, rows, heads, columns, size)."""
        shape = len(self.members), rows, self.heads, columns, self.size
        with torch.inference_mode(False):  # else the cache would be read-only after the run
            return torch.empty(shape, dtype=self.dtype, device=self.device)


class Memory(Protocol):
    """Provides the memory of a run's pools, for example a slot of the fast pass."""

    def pools(self, kinds: Sequence[Kind], rows: int, length: int) -> list[Tensor]:
        """One pool of each kind, shaped as `Kind.pool`, for at least `length` columns; the previous ones if large
        enough.

        Unwritten columns are finite. Previous pools stay valid until the next draft is scored.
        """
        ...


@final
class KVPool:
    """A run's cache after its prompt: all layers' columns in pools (2 * layers, B, H, C, D)."""

    def __init__(self, cache: Cache, memory: Memory | None = None) -> None:
        """Move the cache's keys and values into pools, which the cache then reads. memory: provides the pools; None:
        allocate."""
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
        # layers refer to pools, not the other way round, so that memory is freed with the last reference to the cache
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
        """C, the number of allocated columns."""
        return self._pools[0].shape[3]

    def grow(self, length: int) -> None:
        """Make room for at least `length` columns."""
        if self.width < length:
            old = self._pools
            self._pools = self._allocate(old[0].shape[1], length)
            for before, pool in zip(old, self._pools, strict=True):
                # all columns: within a pass some layers hold more than others
                pool[:, :, :, : before.shape[3]] = before
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
        """Move row r's `columns[r]` to `begins[r]`, ..., and drop columns from `length` on."""
        for pool in self._pools:
            kv_gather(pool, columns, begins)
        self.crop(length)

    def select(self, rows: Tensor, length: int) -> None:
        """Keep only rows (K,) int64, in that order, and the first `length` columns."""
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
        """The layers that are still referenced, with their indices."""
        for index, reference in enumerate(self._layers):
            if (layer := reference()) is not None:
                yield index, layer


def stock_layer(keys: Tensor, values: Tensor) -> DynamicLayer:
    """A stock layer of transformers with these keys and values."""
    layer = DynamicLayer()
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return layer


def empty_cache() -> DynamicCache:
    """A cache without layers; the caller adds them."""
    cache = DynamicCache()
    cache.layer_class_to_replicate = None
    return cache


def shallow_copy(cache: DynamicCache) -> DynamicCache:
    """A second cache that shares the tensors: the next pass extends only the copy."""
    other = empty_cache()
    for layer in cast(list[DynamicLayer], cache.layers):
        filled = layer.get_seq_length() > 0
        other.layers.append(
            stock_layer(cast(Tensor, layer.keys), cast(Tensor, layer.values)) if filled else DynamicLayer()
        )
    return other


def check_cache(cache: Cache) -> None:
    """Raise InputError unless drafts can be rolled back: all layers must keep every column, on the device."""
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
