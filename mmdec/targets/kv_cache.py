"""A key-value cache that can roll back drafts: transformers' DynamicCache whose tensors are views of larger tensors.

A "column" is an index along the cache's sequence axis: the keys and values of one token in all layers. transformers
copies all columns at every step. Here a pass writes only its new columns. Accepting a path moves a few columns. The
layers remain compatible with transformers, so a cache given by a caller can be used afterwards.

`RowLayout` says which columns belong to which batch row. A row's text is contiguous, from its start (after left
padding) to its end. A pass writes the tree's N nodes after column S, the end of the longest row. Accepted columns then
move to the end of their row's text, and the rejected ones are dropped. At batch 1, the tree's first path needs no move.
Columns between a row's end and S are masked.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, final

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from mmdec.compat import CACHE_ARGUMENT
from mmdec.core.tree import depths, int_list, int_rows
from mmdec.errors import InputError
from mmdec.kernels.kv_gather import kv_gather
from mmdec.kernels.tokenwise import HALF_DTYPES, KEY_MULTIPLE, draft_chains
from mmdec.kernels.tree_attention import TreeMask, tree_mask
from mmdec.types import Draft

# pools, the larger tensors, are allocated in multiples of this number of tokens, so that they rarely grow
POOL_GRANULARITY = KEY_MULTIPLE
MAX_POOL_GROWTH = 4096  # a full pool doubles, but grows by at most this number of tokens at once, to save memory


@final
class GrowingLayer(DynamicLayer):
    """One layer's keys and values (B, H, S, D), as views of larger tensors, the pools, in which new tokens are written.

    If other code replaces `keys`, the layer behaves as transformers' `DynamicLayer` from then on.
    """

    def __init__(self, store: KVPool) -> None:
        super().__init__()
        self.store = store
        self.all_keys = self.all_values = torch.empty(0)
        self.shown: Tensor | None = None
        # index of the first cached token that the next pass attends to; earlier tokens are outside of the attention
        # window
        self.first = 0
        # the next pass gets a multiple of this number of tokens; those after the new ones are to be hidden
        self.multiple = 1
        self.is_initialized = True

    def set_view(self, states: Tensor, is_keys: bool) -> None:
        """Set this layer's keys (if `is_keys`) or values to `states` (B, H, S, D), a view of a larger tensor (pool)."""
        if is_keys:
            self.keys = self.shown = states
        else:
            self.values = states

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle this layer as one of transformers' `DynamicLayer`s, because a copy has no pool."""
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
        self.set_view(self.all_keys[:, :, :end], True)
        self.set_view(self.all_values[:, :, :end], False)
        end = -(-end // self.multiple) * self.multiple
        return self.all_keys[:, :, self.first : end], self.all_values[:, :, self.first : end]


@dataclass(frozen=True)
class PoolSpec:
    """Describes one pool, a tensor that holds keys and values of several layers with the same shape and dtype."""

    members: tuple[tuple[int, bool], ...]  # [i]: what pool[i] holds: (layer index, True: keys, False: values)
    heads: int  # number of key-value heads
    size: int  # head size
    dtype: torch.dtype
    device: torch.device

    def allocate(self, rows: int, columns: int) -> Tensor:
        """Allocate memory for keys or values (members, rows, heads, columns, size).

        It is uninitialised, or 0 in half precision, where a pass may read more tokens than there are (`show_multiple`).

        Args:
            columns: Number of tokens.
        """
        shape = len(self.members), rows, self.heads, columns, self.size
        allocate = torch.zeros if self.dtype in HALF_DTYPES else torch.empty
        # no inference tensor, because a caller could write to it only in inference mode
        with torch.inference_mode(False):
            return allocate(shape, dtype=self.dtype, device=self.device)


@final
class KVPool:
    """Holds the keys and values of one `generate` call, after the pass over the prompt.

    It moves the keys and values of a cache into pools; the cache's layers then read the pools. There is a pool
    (members, B, H, C, D) for each `PoolSpec`: C columns, of which the first `length` are used.

    Raises:
        InputError: For a cache from which drafts cannot be removed.
    """

    def __init__(self, cache: Cache) -> None:
        check_cache(cache)
        self.encoder = cache.cross_attention_cache if isinstance(cache, EncoderDecoderCache) else None
        decoder_cache = cast(
            DynamicCache, cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        )
        layers: list[Any] = []
        groups: dict[tuple[Any, ...], list[tuple[int, bool, Tensor]]] = {}
        for index, old in enumerate(cast(list[Any], decoder_cache.layers)):
            # a layer without keys and values of its own; it reads those of another layer
            if isinstance(old, DummyLayer):
                layers.append(old)
                continue
            layers.append(GrowingLayer(self))
            layers[-1].dtype, layers[-1].device = old.keys.dtype, old.device
            for is_keys, states in ((True, cast(Tensor, old.keys)), (False, cast(Tensor, old.values))):
                groups.setdefault((states.shape, states.dtype, states.device), []).append((index, is_keys, states))
        self.length, self._pools = decoder_cache.get_seq_length(), list[Tensor]()
        self._specs = [
            PoolSpec(tuple((index, is_keys) for index, is_keys, _ in members), shape[1], shape[3], dtype, device)
            for (shape, dtype, device), members in groups.items()
        ]
        # weak references, because a reference cycle with the layers would delay the release of this object's memory
        self._layers = {
            index: weakref.ref(layer) for index, layer in enumerate(layers) if isinstance(layer, GrowingLayer)
        }
        self.rows: int = next(iter(groups))[0][0]  # number of rows in use; the pools may have room for more
        self._pools = self._allocate(self.rows, self.length + POOL_GRANULARITY)
        for pool, members in zip(self._pools, groups.values(), strict=True):
            for member, (_, _, states) in enumerate(members):
                pool[member, :, :, : self.length] = states
        decoder_cache.layers[:] = layers
        self._share_pools()
        self.crop(self.length)

    @property
    def width(self) -> int:
        """C, the number of allocated columns."""
        return self._pools[0].shape[3]

    def grow(self, length: int) -> None:
        """Make room for at least `length` columns (tokens) in each row."""
        if self.width < length:
            old = self._pools
            self._pools = self._allocate(old[0].shape[1], length)
            for before, pool in zip(old, self._pools, strict=True):
                # copy all columns, not only the first `length`: in the middle of a pass, some layers have already
                # written new columns
                pool[:, :, :, : before.shape[3]] = before
            self._share_pools()

    def set_first_visible(self, firsts: Sequence[int]) -> None:
        """Hide cached tokens from layers with an attention window, until `crop` is called.

        Args:
            firsts: [i]: index along the sequence axis of the first token that layer i sees.
        """
        for index, layer in self._live_layers():
            layer.first = firsts[index]

    def show_multiple(self) -> None:
        """Give the next pass a multiple of `KEY_MULTIPLE` tokens, until `crop` is called.

        Its mask must hide those after the new ones.
        """
        for _, layer in self._live_layers():
            layer.multiple = KEY_MULTIPLE

    def crop(self, length: int) -> None:
        """Keep only the first `length` columns (tokens) of each row. The next pass sees all of them."""
        self.length = length
        layers = dict(self._live_layers())
        for layer in layers.values():
            layer.first, layer.multiple = 0, 1
        for spec, pool in zip(self._specs, self._pools, strict=True):
            for states, (index, is_keys) in zip(pool[:, : self.rows, :, :length].unbind(0), spec.members, strict=True):
                if index in layers:
                    layers[index].set_view(states, is_keys)

    def commit(self, columns: Sequence[Sequence[int]], begins: Sequence[int], length: int) -> None:
        """Move the keys and values of each batch row's accepted tokens to the end of its text.

        Then keep only the first `length` columns.

        Args:
            columns: [r]: indices of row r's accepted tokens along the sequence axis.
            begins: [r]: index to which row r's first accepted token moves; its other accepted tokens follow.
        """
        for pool in self._pools:
            kv_gather(pool[:, : self.rows], columns, begins)
        self.crop(length)

    def select(self, rows: Tensor, length: int) -> None:
        """Keep only the rows with the indices `rows` (K,) int64, in that order, and their first `length` columns."""
        if self.encoder is not None:
            cast(DynamicCache, self.encoder).batch_select_indices(rows)
        old, self.rows = self._pools, len(rows)
        self._pools = self._allocate(self.rows, length)
        for before, pool in zip(old, self._pools, strict=True):
            pool[:, :, :, :length] = before[:, :, :, :length].index_select(1, rows.to(pool.device))
        self._share_pools()
        self.crop(length)

    def append(self, other: KVPool) -> None:
        """Append the rows of another pool of the same model.

        The rows that are here already are copied only if the pool has no room left; it then grows by half.
        """
        first, self.rows = self.rows, self.rows + other.rows
        capacity = self._pools[0].shape[1]
        if self.rows > capacity or other.length > self.width:
            old = self._pools
            rows = max(self.rows, capacity + capacity // 2) if self.rows > capacity else capacity
            self._pools = self._allocate(rows, max(other.length, self.length))
            for before, pool in zip(old, self._pools, strict=True):
                pool[:, :first, :, : self.length] = before[:, :first, :, : self.length]
        length = max(self.length, other.length)
        for source, pool in zip(other._pools, self._pools, strict=True):
            pool[:, first : self.rows, :, : other.length] = source[:, : other.rows, :, : other.length]
            # uninitialised memory may hold NaN, which a mask does not hide
            pool[:, :first, :, self.length : length] = 0
            pool[:, first : self.rows, :, other.length : length] = 0
        self._share_pools()
        self.crop(length)

    def remove(self, row: int, length: int) -> None:
        """Remove a row.

        The last row takes its place.

        Args:
            length: Number of columns that the remaining rows use.
        """
        self.rows -= 1
        if row < self.rows:
            for pool in self._pools:
                pool[:, row, :, :length] = pool[:, self.rows, :, :length]
        self._share_pools()
        self.crop(length)

    def _allocate(self, rows: int, length: int) -> list[Tensor]:
        columns = -(-length // POOL_GRANULARITY) * POOL_GRANULARITY
        if self._pools:
            width = self.width
            columns = width if length <= width else max(columns, width + min(width, MAX_POOL_GROWTH))
        return [spec.allocate(rows, columns) for spec in self._specs]

    def _share_pools(self) -> None:
        layers = dict(self._live_layers())
        for spec, pool in zip(self._specs, self._pools, strict=True):
            for states, (index, is_keys) in zip(pool[:, : self.rows].unbind(0), spec.members, strict=True):
                if index in layers:
                    setattr(layers[index], "all_keys" if is_keys else "all_values", states)

    def _live_layers(self) -> Iterator[tuple[int, GrowingLayer]]:
        """Yield (index, layer) for the cache's layers that still exist: only weak references to them are held."""
        for index, reference in self._layers.items():
            if (layer := reference()) is not None:
                yield index, layer


def stock_layer(keys: Tensor, values: Tensor) -> DynamicLayer:
    """Make a `DynamicLayer` of transformers with these keys and values (B, H, S, D)."""
    layer = DynamicLayer()
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return layer


def empty_cache() -> DynamicCache:
    """Make a cache without layers, which the caller adds."""
    cache = DynamicCache()
    cache.layer_class_to_replicate = None
    return cache


def check_cache(cache: Cache) -> None:
    """Raise InputError unless rejected drafts can be removed from a cache.

    The cache's layers must hold keys and values, or recurrent states, and must not be offloaded.
    """
    inner = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    kinds = {type(layer) for layer in inner.layers}
    if inner.layer_class_to_replicate is not None:
        kinds.add(inner.layer_class_to_replicate)
    foreign = sorted(
        kind.__name__
        for kind in kinds - {DynamicLayer, DynamicSlidingWindowLayer, DummyLayer, GrowingLayer}
        if not issubclass(kind, LinearAttentionLayer) or issubclass(kind, DynamicSlidingWindowLayer)
    )
    cache_name = type(inner).__name__ + (f" of {', '.join(foreign)}" if foreign else " that is offloaded")
    if foreign or inner.offloading or not isinstance(inner, DynamicCache):
        raise InputError(
            f"`{CACHE_ARGUMENT}` must be a DynamicCache of attention layers, but is {cache_name}, from which drafts "
            f"cannot be removed. Leave `{CACHE_ARGUMENT}` and `cache_implementation` out."
        )


@dataclass
class RowLayout:
    """Says which cache columns hold which batch row's tokens.

    It holds plain integers, so that reading them never waits for a GPU.
    """

    starts: list[int]  # for each batch row: index of its first token's column, after left padding
    ends: list[int]  # for each batch row: index of its last token's column, plus 1
    shifts: list[int]  # for each batch row: a token's position id minus its column index
    tree: int = 0  # number of columns of the draft that was scored, but not verified yet; 0: no draft
    first: int = 0  # index of the draft's first column, which belongs to its root

    @classmethod
    def of_prompt(cls, mask: Tensor, positions: Tensor) -> RowLayout:
        """Compute the layout after the pass over the prompt, as if padding between a batch row's tokens were removed.

        Args:
            mask: (B, C) bool, False at padding.
            positions: (B, C), the prompt tokens' position ids.
        """
        starts = mask.long().argmax(1).tolist()
        ends = [start + count for start, count in zip(starts, mask.sum(1).tolist(), strict=True)]
        last = positions[:, -1].tolist()
        return cls(starts, ends, [position + 1 - end for position, end in zip(last, ends, strict=True)])

    @property
    def width(self) -> int:
        """S, the index of the first column after the longest row."""
        return max(self.ends)

    def mask_and_positions(
        self, draft: Draft, dtype: torch.dtype, plain: bool = True, tokenwise: bool = False
    ) -> tuple[TreeMask | None, list[list[int]]]:
        """Return the mask of a draft, and the position ids of its nodes.

        Args:
            plain: Whether the mask may be None if the draft is only the root and nothing is hidden.
            tokenwise: Whether attention is to be computed tokenwise, also of a draft that is only the root.

        Returns:
            Which cached tokens and which nodes each node attends to; and one list of position ids for each batch row.
        """
        width, parents, device = self.width, int_rows(draft.parents), draft.tokens.device
        ragged = min(self.ends) < width or any(self.starts)
        if len(parents[0]) == 1 and not ragged and plain and not tokenwise:
            return None, self.positions(draft)
        bounds = torch.tensor([self.starts, self.ends], device=device)
        mask = tree_mask(bounds[0], bounds[1], ancestors_of(parents).to(device), width, dtype, ragged=ragged)
        if tokenwise:
            mask = replace(mask, chains=draft_chains(parents, int_list(draft.size)))
        return mask, self.positions(draft)

    def positions(self, draft: Draft) -> list[list[int]]:
        """Return the position ids of a draft's nodes, as [row][node].

        Padding nodes get the root's position id: a row whose root has the last position of the model's table would
        have padding beyond the table otherwise.
        """
        trees = zip(int_rows(draft.parents), int_list(draft.size), self.ends, self.shifts, strict=True)
        return [
            [end + shift + depth for depth in (*depths(links[:size]), *[0] * (len(links) - size))]
            for links, size, end, shift in trees
        ]

    def record_draft(self, nodes: int, first: int | None = None) -> None:
        """Record that a draft of `nodes` nodes was scored and waits for its verification.

        Args:
            first: Index of the root's column; None: `width`, the first column after the longest row.
        """
        self.tree, self.first = nodes, self.width if first is None else first

    def commit(self, paths: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
        """Extend each batch row by the accepted nodes of the last draft.

        Args:
            paths: For each row, the indices of these nodes, padded with -1.

        Returns:
            For each row, the indices of the columns that hold its accepted nodes, and the index to which the first of
            them moves.
        """
        begins = self.ends
        columns = [[self.first + node for node in path if node >= 0] for path in paths]
        self.ends = [end + len(row_columns) for end, row_columns in zip(begins, columns, strict=True)]
        self.tree = 0
        return columns, begins

    def append(self, other: RowLayout) -> None:
        """Append the rows of another layout."""
        self.starts = self.starts + other.starts
        self.ends = self.ends + other.ends
        self.shifts = self.shifts + other.shifts

    def remove(self, row: int) -> None:
        """Remove a row. The last row takes its place."""
        for values in (self.starts, self.ends, self.shifts):
            values[row] = values[-1]
            values.pop()

    def select(self, live: Sequence[int]) -> None:
        """Keep only the batch rows with the indices `live`, in that order. The other rows have ended."""
        self.starts = [self.starts[row] for row in live]
        self.ends = [self.ends[row] for row in live]
        self.shifts = [self.shifts[row] for row in live]


def keep_path(rows: RowLayout, store: KVPool, path: Tensor) -> None:
    """Keep the accepted nodes of a draft in the cache, and drop the other nodes.

    After the pass over the prompt, which has no draft, nothing changes.

    Args:
        path: (B, A) int64, accepted nodes, padded with -1.
    """
    if rows.tree:
        columns, begins = rows.commit(path.tolist())
        store.commit(columns, begins, rows.width)


def ancestors_of(parents: Sequence[Sequence[int]]) -> Tensor:
    """Return (B, N, N) bool on the CPU: [b, i, j] is True if node j is node i or its ancestor.

    Args:
        parents: [b][i]: index of the parent of node i, -1 at the root.
    """
    size, flags = len(parents[0]), []
    for links in parents:
        above = [bytearray(size)]
        above[0][0] = 1
        for node in range(1, size):
            row = bytearray(above[links[node]])
            row[node] = 1
            above.append(row)
        flags += above
    return torch.frombuffer(bytearray().join(flags), dtype=torch.bool).view(len(parents), size, size)
