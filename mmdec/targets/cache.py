"""A key-value cache that can roll back drafts: transformers' DynamicCache with its tensors in larger pools.

transformers' own layers copy all their columns at every step. Here a step writes only its new columns and exposes a
view; accepting a path moves a few columns of all layers at once. The layers remain compatible with transformers, so a
cache given by a caller works after the run.

`RowLayout` says where the rows of a batch lie in a cache. A row's own columns are contiguous, from its start (after
left padding) to its end. A pass appends the tree's N columns at the shared end S, that of the longest row. Accepted
columns then move to the row's own end, and the others are dropped. So no unused columns accumulate, and at batch 1 the
likeliest path needs no moves. Columns between a row's end and S are masked.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, final

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from mmdec.decode.tree import depths
from mmdec.ops.kv_gather import kv_gather
from mmdec.ops.tree_attention import TreeMask, tree_mask
from mmdec.types import CACHE, InputError

ROOM = 64  # a pool's width is a multiple of this number of columns, so that it rarely grows
STEP = 4096  # a full pool doubles its width, but grows by at most this number of columns at once


@final
class GrowingLayer(DynamicLayer):
    """One layer's keys and values (B, H, S, D): views of pools.

    If other code replaces `keys`, the layer behaves as transformers' `DynamicLayer` from then on.
    """

    def __init__(self, store: KVPool) -> None:
        super().__init__()
        self.store = store
        self.all_keys = self.all_values = torch.empty(0)
        self.shown: Tensor | None = None
        self.first = 0  # the first column that the next pass sees: a window hides earlier ones
        self.is_initialized = True

    def hold(self, states: Tensor, is_keys: bool) -> None:
        """Set this layer's keys (`is_keys`) or values to `states` (B, H, S, D), a view of the pool's first columns."""
        if is_keys:
            self.keys = self.shown = states
        else:
            self.values = states

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a copy of this layer one of transformers' own layers, because pools belong to a run."""
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
        return self.all_keys[:, :, self.first : end], self.all_values[:, :, self.first : end]


@dataclass(frozen=True)
class Kind:
    """Keys or values of several layers with the same shape and dtype, which share one pool."""

    members: tuple[tuple[int, bool], ...]  # for each part of the pool: (layer index, True for keys or False for values)
    heads: int  # number of key heads
    size: int  # numbers in one head's key or value
    dtype: torch.dtype
    device: torch.device

    def pool(self, rows: int, columns: int) -> Tensor:
        """Allocate a pool (members, rows, heads, columns, size) without initial values."""
        shape = len(self.members), rows, self.heads, columns, self.size
        with torch.inference_mode(False):  # else the cache would be read-only after the run
            return torch.empty(shape, dtype=self.dtype, device=self.device)


class Memory(Protocol):
    """Provides the memory of a run's pools: for example the fixed buffers that captured CUDA graphs read and write."""

    def pools(self, kinds: Sequence[Kind], rows: int, length: int) -> list[Tensor]:
        """Return a pool of each kind, shaped as `Kind.pool`, for at least `length` columns: the previous pools if these
        are large enough.

        Columns that were never written hold finite numbers. Previous pools stay valid until the next draft is scored.
        """
        ...


@final
class KVPool:
    """Holds a run's key-value cache after the prompt's pass, in pools (members, B, H, C, D): one for each `Kind`."""

    def __init__(self, cache: Cache, memory: Memory | None = None) -> None:
        """Move the cache's keys and values into pools. memory: provides the pools; None: they are allocated. Raises
        InputError for a cache from which drafts cannot be removed."""
        check_cache(cache)
        self.encoder = cache.cross_attention_cache if isinstance(cache, EncoderDecoderCache) else None
        given = cast(DynamicCache, cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache)
        layers: list[Any] = []
        held: dict[tuple[Any, ...], list[tuple[int, bool, Tensor]]] = {}
        for index, old in enumerate(cast(list[Any], given.layers)):
            if isinstance(old, DummyLayer):  # it reads another layer's keys and values
                layers.append(old)
                continue
            layers.append(GrowingLayer(self))
            layers[-1].dtype, layers[-1].device = old.keys.dtype, old.device
            for is_keys, states in ((True, cast(Tensor, old.keys)), (False, cast(Tensor, old.values))):
                held.setdefault((states.shape, states.dtype, states.device), []).append((index, is_keys, states))
        self.length, self._memory, self._pools = given.get_seq_length(), memory, list[Tensor]()
        self._kinds = [
            Kind(tuple((index, is_keys) for index, is_keys, _ in members), shape[1], shape[3], dtype, device)
            for (shape, dtype, device), members in held.items()
        ]
        # layers refer to pools, not the other way round, so that memory is freed with the last reference to the cache
        self._layers = {
            index: weakref.ref(layer) for index, layer in enumerate(layers) if isinstance(layer, GrowingLayer)
        }
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
        """Count the allocated columns, C."""
        return self._pools[0].shape[3]

    def grow(self, length: int) -> None:
        """Make room for at least `length` columns."""
        if self.width < length:
            old = self._pools
            self._pools = self._allocate(old[0].shape[1], length)
            for before, pool in zip(old, self._pools, strict=True):
                # copy all columns: during a pass, some layers have written the new columns and others have not
                pool[:, :, :, : before.shape[3]] = before
            self._hand_out()

    def show(self, firsts: Sequence[int]) -> None:
        """Hide the columns before `firsts[i]`, which lie outside the window of layer i, from this layer's passes, until
        `crop` is called."""
        for index, layer in self._living():
            layer.first = firsts[index]

    def crop(self, length: int) -> None:
        """Drop the columns from `length` on, and show all others to the next pass."""
        self.length = length
        layers = dict(self._living())
        for layer in layers.values():
            layer.first = 0
        for kind, pool in zip(self._kinds, self._pools, strict=True):
            for states, (index, is_keys) in zip(pool[:, :, :, :length].unbind(0), kind.members, strict=True):
                if index in layers:
                    layers[index].hold(states, is_keys)

    def commit(self, columns: Sequence[Sequence[int]], begins: Sequence[int], length: int) -> None:
        """Move row r's accepted columns, `columns[r]`, to the columns from `begins[r]` on, so that they follow its text
        without gaps. Then drop all columns from `length` on."""
        for pool in self._pools:
            kv_gather(pool, columns, begins)
        self.crop(length)

    def select(self, rows: Tensor, length: int) -> None:
        """Keep only the cache's rows with indices `rows` (K,) int64, in that order, and its first `length` columns."""
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
        """Yield the layers that are still referenced, with their indices."""
        for index, reference in self._layers.items():
            if (layer := reference()) is not None:
                yield index, layer


def stock_layer(keys: Tensor, values: Tensor) -> DynamicLayer:
    """Make one of transformers' own cache layers with these keys and values (B, H, S, D)."""
    layer = DynamicLayer()
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return layer


def empty_cache() -> DynamicCache:
    """Make a cache without layers; the caller adds them."""
    cache = DynamicCache()
    cache.layer_class_to_replicate = None
    return cache


def check_cache(cache: Cache) -> None:
    """Raise InputError unless rejected drafts can be removed from a cache: its layers must hold keys and values, or
    states, and none may be offloaded."""
    inner = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    kinds = {type(layer) for layer in inner.layers}
    if inner.layer_class_to_replicate is not None:
        kinds.add(inner.layer_class_to_replicate)
    foreign = sorted(
        kind.__name__
        for kind in kinds - {DynamicLayer, DynamicSlidingWindowLayer, DummyLayer, GrowingLayer}
        if not issubclass(kind, LinearAttentionLayer) or issubclass(kind, DynamicSlidingWindowLayer)
    )
    what = type(inner).__name__ + (f" of {', '.join(foreign)}" if foreign else " that is offloaded")
    if foreign or inner.offloading or not isinstance(inner, DynamicCache):
        raise InputError(
            f"`{CACHE}` must be a DynamicCache of attention layers, but is {what}: drafts cannot be taken "
            f"back from it. Leave `{CACHE}` and `cache_implementation` out."
        )


@dataclass
class RowLayout:
    """Where each row of a run lies in the cache. Plain integers, so that reading them never waits for a GPU."""

    starts: list[int]  # each row's first column that is not padding
    ends: list[int]  # the column after each row's last one
    shifts: list[int]  # for each row, a token's position minus its column
    tree: int = 0  # number of columns of a tree that was scored and is not verified yet; 0: there is none
    first: int = 0  # column of that tree's root

    @classmethod
    def of_prompt(cls, mask: Tensor, positions: Tensor) -> RowLayout:
        """Compute the layout after a prompt's pass, once padding inside a row is removed.

        mask: (B, C) bool, False at padding. positions: (B, C), of the prompt's tokens."""
        starts = mask.long().argmax(1).tolist()
        ends = [start + count for start, count in zip(starts, mask.sum(1).tolist(), strict=True)]
        last = positions[:, -1].tolist()
        return cls(starts, ends, [position + 1 - end for position, end in zip(last, ends, strict=True)])

    @property
    def width(self) -> int:
        """Count the columns before a tree: S."""
        return max(self.ends)

    def see(
        self, parents: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype, plain: bool = True
    ) -> tuple[TreeMask | None, list[list[int]]]:
        """Compute the mask that says which columns of cache and draft each node sees, and the nodes' positions.

        parents: for each row, the parent of each node, -1 for the root. plain: whether the mask may be None where every
            node sees every column.
        """
        width = self.width
        ragged = min(self.ends) < width or any(self.starts)
        if len(parents[0]) == 1 and not ragged and plain:
            return None, self.positions(parents)
        bounds = torch.tensor([self.starts, self.ends], device=device)
        mask = tree_mask(bounds[0], bounds[1], ancestors_of(parents).to(device), width, dtype, ragged=ragged)
        return mask, self.positions(parents)

    def positions(self, parents: Sequence[Sequence[int]]) -> list[list[int]]:
        """Compute the positions of a draft's nodes from each row's parents (-1 for the root)."""
        return [
            [end + shift + depth for depth in depths(links)]
            for links, end, shift in zip(parents, self.ends, self.shifts, strict=True)
        ]

    def wait(self, nodes: int, first: int | None = None) -> None:
        """Record that a tree of `nodes` nodes was scored. first: its root's column; None: the first after all rows."""
        self.tree, self.first = nodes, self.width if first is None else first

    def commit(self, paths: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
        """Extend each row by its accepted path. paths: node indices, padded with -1.

        Returns: for each row, the columns to keep, and the column to which the first of them moves.
        """
        begins = self.ends
        columns = [[self.first + node for node in path if node >= 0] for path in paths]
        self.ends = [end + len(kept) for end, kept in zip(begins, columns, strict=True)]
        self.tree = 0
        return columns, begins

    def select(self, live: Sequence[int]) -> None:
        """Keep only the rows with indices `live` (K,), those whose text has not ended, in that order."""
        self.starts = [self.starts[row] for row in live]
        self.ends = [self.ends[row] for row in live]
        self.shifts = [self.shifts[row] for row in live]


def keep_path(rows: RowLayout, store: KVPool, path: Tensor) -> None:
    """Keep the columns of the accepted paths (B, A) in the cache; drop the draft's other columns. After the prompt's
    pass, which scores no tree, nothing changes."""
    if rows.tree:
        columns, begins = rows.commit(path.tolist())
        store.commit(columns, begins, rows.width)


def ancestors_of(parents: Sequence[Sequence[int]]) -> Tensor:
    """Return (B, N, N) bool on the CPU: [b, i, j] is True if node j is node i or its ancestor. parents: for each row,
    the parent of each node, -1 for the root."""
    size, seen = len(parents[0]), []
    for links in parents:
        above = [bytearray(size)]
        above[0][0] = 1
        for node in range(1, size):
            mine = bytearray(above[links[node]])
            mine[node] = 1
            above.append(mine)
        seen += above
    return torch.frombuffer(bytearray().join(seen), dtype=torch.bool).view(len(parents), size, size)
