"""The fast pass: drafts are scored in a few fixed shapes, so that a GPU replays a pass as one CUDA graph.

A small model's pass is bound by its launches, which `ops/replay.py` makes one where shapes are fixed. Nodes and rows
are padded to a power of two, and a run's columns lie in a slot of fixed width whose last columns are the draft's:

    columns   0 .. start   start .. end   end .. C - N   C - N .. C
    hold      padding      a row's text   nothing        the draft's N nodes

What is padding or nothing is masked for everybody else. Accepted nodes then move to the row's end, as they do in a
batch anyway; a rejected draft is rolled back by writing over it. The mask is made within the pass, from a few integers.

Slots and their graphs belong to a model and outlive its runs: `fast_pass(model)` says whether they are used, why not,
and how many bytes they hold. A run has its slot to itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from mmdec.decode.tree import int_rows
from mmdec.ops.kernels import graphs_why_not
from mmdec.ops.replay import Replay
from mmdec.ops.tree_attention import TreeMask, tree_mask
from mmdec.targets.cache import Kind, KVPool, empty_cache, stock_layer
from mmdec.targets.hooks import hooked
from mmdec.targets.row_layout import RowLayout, ancestors_of
from mmdec.types import Draft, Scores

STEP = 256  # columns of the smallest slot
KEPT = 4  # slots of a model that wait for another run
ROOM = 64  # columns that a new slot has left

Pass = Callable[[Tensor, TreeMask, Tensor, Cache], Scores]  # tokens (B, N), tree, positions (axes, B, N), cache


def bucket(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def columns_for(count: int) -> int:
    """The width of a slot that has room for `count` columns: at most a quarter more, but for the smallest ones."""
    step = max(STEP, 1 << max(count.bit_length() - 3, 0))
    return -(-count // step) * step


@final
class SlotLayer(DynamicLayer):
    """One layer's keys and values in a slot, of which a pass writes the last columns."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = dtype, device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values, nodes = cast(Tensor, self.keys), cast(Tensor, self.values), key_states.shape[2]
        keys[:, :, -nodes:] = key_states
        values[:, :, -nodes:] = value_states
        return keys, values


@final
class Slot:
    """Memory for a run, of fixed size, and the passes that were captured over it."""

    def __init__(self, kinds: Sequence[Kind], rows: int, columns: int, encoder: Cache | None) -> None:
        """encoder: a cache with cross-attention's keys and values, whose shapes are taken."""
        self.kinds, self.rows, self.columns = tuple(kinds), rows, columns
        self.state: object = None  # of the model, when this slot was made
        self.pools = [kind.pool(rows, columns) for kind in kinds]
        own, count = empty_cache(), 1 + max(index for kind in kinds for index, _ in kind.members)
        own.layers += [SlotLayer(kinds[0].dtype, kinds[0].device) for _ in range(count)]
        for kind, pool in zip(kinds, self.pools, strict=True):
            for states, (index, is_keys) in zip(pool.unbind(0), kind.members, strict=True):
                setattr(own.layers[index], "keys" if is_keys else "values", states)
        self.memories = [self._like(states) for states in _memories(encoder)]
        self.cache: Cache = own
        if encoder is not None:
            cross = empty_cache()
            cross.layers += [stock_layer(*pair) for pair in zip(self.memories[::2], self.memories[1::2], strict=True)]
            self.cache = EncoderDecoderCache(own, cross)
        self.replays: dict[tuple[int, tuple[int, ...]], Replay] = {}  # by nodes and the layers that are read

    def clear(self) -> None:
        """Set everything to 0. Columns that are not written yet are masked, but a mask does not hide NaN."""
        for pool in self.pools:
            pool.zero_()

    def load(self, encoder: Cache | None) -> None:
        """Take over cross-attention's keys and values of this run's rows."""
        for held, given in zip(self.memories, _memories(encoder), strict=True):
            held[: len(given)] = given

    def holds(self, kinds: Sequence[Kind], rows: int, columns: int, encoder: Cache | None) -> bool:
        """Whether it is a slot for these."""
        alike = [held.shape[1:] for held in self.memories] == [given.shape[1:] for given in _memories(encoder)]
        return alike and (self.kinds, self.rows, self.columns) == (tuple(kinds), rows, columns)

    @property
    def bytes(self) -> int:
        tensors = [*self.pools, *self.memories]
        captured = sum(replay.graph.bytes for replay in self.replays.values() if replay.graph)
        return captured + sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _like(self, states: Tensor) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros(self.rows, *states.shape[1:], dtype=states.dtype, device=states.device)


@final
class FastPass:
    """A model's slots, and whether they are used.

    `enabled`: None, the default, uses them on a GPU only; False never; True on a CPU, too. A CPU captures no graphs:
    True is for tests, which compare the tokens.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.enabled: bool | None = None
        self._model = weakref.ref(model)
        self._lock = threading.RLock()  # reentrant: a run may be collected, and give its slot back, inside of it
        self._idle: list[Slot] = []
        self._known: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._state: object = None
        self._failed: str | None = None

    @property
    def bytes(self) -> int:
        """Memory in bytes held by slots and graphs, those in use included."""
        return sum(slot.bytes for slot in list(self._known))

    @property
    def captured(self) -> int:
        """Number of captured graphs."""
        return sum(replay.graph is not None for slot in list(self._known) for replay in slot.replays.values())

    def why_not(self) -> str | None:
        """The reason that the fast pass is not used; None: it is used."""
        model = self._model()
        if self.enabled is False:
            return "it is switched off"
        if model is None:
            return "the model is gone"
        if model.training:
            return "the model is being trained"
        if self.enabled is None and (reason := graphs_why_not(model.device)):
            return reason
        if len({parameter.device for parameter in model.parameters()}) > 1:
            return "the model lies on several devices"
        if any(hooked(module) for module in model.modules()):
            return "hooks hang on the model"
        return self._failed

    def clear(self) -> None:
        """Give back the memory of slots that are not in use."""
        with self._lock:
            self._idle = []

    def begin(self, cache: Cache) -> FastRun | None:
        """For a run whose prompt is in this cache; None where the fast pass is not used."""
        model = self._model()
        if model is None or self.why_not() is not None:
            return None
        state = _state(model)
        with self._lock:
            if state != self._state:  # graphs read weights where they lay
                self._state, self._idle = state, []
        return FastRun(self, cache.cross_attention_cache if isinstance(cache, EncoderDecoderCache) else None)

    def take(self, kinds: Sequence[Kind], rows: int, columns: int, encoder: Cache | None) -> Slot:
        """A free slot for these, or a new one."""
        with self._lock:
            for index, slot in enumerate(self._idle):
                if slot.holds(kinds, rows, columns, encoder):
                    return self._idle.pop(index)
            slot = Slot(kinds, rows, columns, encoder)
            slot.state = self._state
            self._known.add(slot)
            return slot

    def give_back(self, slots: list[Slot]) -> None:
        """Return the slots of a run that has ended."""
        with self._lock:
            while slots:
                slot = slots.pop()
                self._failed = next((why for one in slot.replays.values() if (why := one.why_not)), self._failed)
                if slot.state == self._state:
                    self._idle.append(slot)
            del self._idle[:-KEPT]


@final
class FastRun:
    """One run's slot, in which its key-value pools lie."""

    def __init__(self, passes: FastPass, encoder: Cache | None) -> None:
        """encoder: cross-attention's keys and values, always of the run's rows."""
        self._passes, self._encoder = passes, encoder
        self._slots: list[Slot] = []  # the current one is the last; before it those that its columns came from
        weakref.finalize(self, passes.give_back, self._slots)

    def pools(self, kinds: Sequence[Kind], rows: int, length: int) -> list[Tensor]:
        """See `targets.cache.Memory`."""
        slot = self._slots[-1] if self._slots else None
        if slot is None or slot.rows != bucket(rows) or slot.columns < length:
            slot = self._passes.take(kinds, bucket(rows), columns_for(length + ROOM), self._encoder)
            slot.clear()
            self._slots.append(slot)
        slot.load(self._encoder)
        return [pool[:, :rows] for pool in slot.pools]

    def score(
        self, draft: Draft, store: KVPool, rows: RowLayout, layers: tuple[int, ...], offsets: Tensor | None, run: Pass
    ) -> Scores:
        """One pass over the draft (B, N), padded to its bucket; `rows` know where its columns wait.

        store: the run's, whose memory this is. layers: of the features wanted. offsets (axes, B): added to positions.
        run: the model's own pass; from call to call nothing that it reads may change its place but its arguments.
        """
        (batch, size), device = draft.tokens.shape, draft.tokens.device
        nodes = bucket(size)
        store.grow(rows.width + nodes)
        left = self._slots[:-1]
        del self._slots[:-1]
        self._passes.give_back(left)
        slot = self._slots[-1]

        parents = int_rows(draft.parents)
        tokens = draft.tokens.new_zeros(slot.rows, nodes)
        tokens[:batch, :size] = draft.tokens
        positions = torch.zeros(1, slot.rows, nodes, dtype=torch.long)
        positions[0, :batch, :size] = torch.tensor(rows.positions(parents))
        positions[0, :batch, size:] = positions[0, :batch, :1]  # the root's: a model may have none for more
        positions = positions.to(device)
        if offsets is not None:
            positions = positions.repeat(len(offsets), 1, 1)
            positions[:, :batch] += offsets[:, :, None]
        bounds = torch.zeros(2, slot.rows, dtype=torch.long)
        bounds[:, :batch] = torch.tensor([rows.starts, rows.ends])
        seen = torch.eye(nodes, dtype=torch.bool).repeat(slot.rows, 1, 1)  # padding sees itself: something must be seen
        seen[:batch, :size, :size] = ancestors_of(parents)

        def pass_(tokens: Tensor, positions: Tensor, bounds: Tensor, seen: Tensor) -> tuple[Tensor, ...]:
            tree = tree_mask(bounds[0], bounds[1], seen, slot.columns - nodes, slot.kinds[0].dtype)
            scores = run(tokens, tree, positions, slot.cache)
            return scores.logits, *(scores.features[layer] for layer in layers)

        if (nodes, layers) not in slot.replays:
            slot.replays[nodes, layers] = Replay()
        inputs = tokens, positions, bounds.to(device), seen.to(device)
        outputs = slot.replays[nodes, layers](pass_, inputs)
        logits, *features = (part[:batch, :size].clone() for part in outputs)  # a graph's own change with its next call
        rows.wait(size, slot.columns - nodes)
        return Scores(logits, dict(zip(layers, features, strict=True)))


def fast_pass(model: PreTrainedModel) -> FastPass:
    """The model's fast pass. Every call returns the same object, as long as the model exists."""
    with _making:
        if model not in _passes:
            _passes[model] = FastPass(model)
        return _passes[model]


_passes: weakref.WeakKeyDictionary[PreTrainedModel, FastPass] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def _state(model: PreTrainedModel) -> tuple[object, ...]:
    """What a captured pass depends on: where weights lie, and how the model attends."""
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    tensors = (*model.parameters(), *model.buffers())
    return attention, *((tensor.data_ptr(), tensor.dtype) for tensor in tensors)


def _memories(encoder: Cache | None) -> list[Tensor]:
    """Keys and values of every layer, in turn."""
    layers = () if encoder is None else cast(list[DynamicLayer], encoder.layers)
    return [cast(Tensor, states) for layer in layers for states in (layer.keys, layer.values)]
