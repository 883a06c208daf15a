"""The fast pass: scores drafts in a few fixed shapes, so that a GPU can replay a pass as one CUDA graph.

In a small model's pass, most time goes to kernel launches. `Replay` replaces them by one graph launch, which needs
fixed shapes. So the numbers of nodes and rows are padded to powers of two, and the key-value cache is a buffer of fixed
length, a "slot". Each row of a slot has C columns, one for each token; the last N belong to the draft:

    columns   0 .. start   start .. end   end .. C - N   C - N .. C
    hold      padding      a row's text   unused         the draft's N nodes

Padding and unused columns are masked. Accepted nodes move to the end of the row's text. The next draft overwrites the
other nodes. The mask is computed within the pass, from a few integers.

Slots and their graphs belong to a model and are reused by later `generate` calls; two calls never use one slot at the
same time. `fast_pass(model)` returns an object that tells whether slots are used, why not, and how many bytes they
take.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from mmdec.decode.tree import int_rows
from mmdec.ops.kernels import graphs_why_not
from mmdec.ops.tree_attention import TreeMask, tree_mask
from mmdec.targets.cache import Kind, KVPool, RowLayout, ancestors_of, empty_cache, stock_layer
from mmdec.targets.hf_target import hooked
from mmdec.types import Draft, Scores

STEP = 256  # a buffer has a multiple of this number of tokens in each batch row, so that few different shapes occur
KEPT = 4  # maximum number of idle buffers (slots) of a model that are stored for later calls
ROOM = 64  # a new buffer has at least this many free tokens in each batch row, so that the next drafts fit

Pass = Callable[[Tensor, TreeMask, Tensor, Cache], Scores]  # tokens (B, N), tree, positions (axes, B, N), cache
_making = threading.Lock()
# number of normal calls before a CUDA graph is captured: kernels are compiled in them, and rare shapes get no graph
WARM_UPS = 2
Run = Callable[..., tuple[Tensor, ...]]


def bucket(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def columns_for(count: int) -> int:
    """Return the length of a buffer, in tokens per batch row, that holds at least `count` tokens. Few lengths occur,
    and a long buffer is at most a quarter longer than needed."""
    step = max(STEP, 1 << max(count.bit_length() - 3, 0))
    return -(-count // step) * step


@final
class SlotLayer(DynamicLayer):
    """The keys and values of one layer in a slot, a buffer of fixed length. A pass writes its new keys and values at
    the end of the buffer."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = dtype, device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new keys and values (B, H, N, D) at the end of the buffer. Returns all keys and values (B, H, C, D)."""
        keys, values, nodes = cast(Tensor, self.keys), cast(Tensor, self.values), key_states.shape[2]
        keys[:, :, -nodes:] = key_states
        values[:, :, -nodes:] = value_states
        return keys, values


@final
class Slot:
    """A key-value buffer of fixed size, and the CUDA graphs that read it. One `generate` call at a time uses it."""

    def __init__(self, kinds: Sequence[Kind], rows: int, columns: int, encoder: Cache | None) -> None:
        """Allocate the buffer.

        kinds: the layers' shapes and dtypes. rows, columns: number of batch rows, and of tokens a row.
        encoder: a cache of cross-attention keys and values, whose shapes are copied; None for decoder-only models.
        """
        self.kinds, self.rows, self.columns = tuple(kinds), rows, columns
        self.state: object = None  # addresses and dtypes of the model's weights when this slot was made
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
        self.replays: dict[tuple[int, tuple[int, ...]], Replay] = {}  # (nodes, layers whose features are read) -> graph

    def clear(self) -> None:
        """Set the buffer to 0. The mask hides unused entries, but it would not hide a NaN."""
        for pool in self.pools:
            pool.zero_()

    def load(self, encoder: Cache | None) -> None:
        """Copy the keys and values of cross-attention (`encoder`) into this buffer."""
        for held, given in zip(self.memories, _memories(encoder), strict=True):
            held[: len(given)] = given

    def holds(self, kinds: Sequence[Kind], rows: int, columns: int, encoder: Cache | None) -> bool:
        """Return whether this buffer has exactly this size, these layers, and cross-attention keys and values of these
        shapes (rows aside). The arguments are those of `__init__`."""
        alike = [held.shape[1:] for held in self.memories] == [given.shape[1:] for given in _memories(encoder)]
        return alike and (self.kinds, self.rows, self.columns) == (tuple(kinds), rows, columns)

    @property
    def bytes(self) -> int:
        """Return the bytes of the buffer and of the captured graphs."""
        tensors = [*self.pools, *self.memories]
        captured = sum(replay.graph.bytes for replay in self.replays.values() if replay.graph)
        return captured + sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _like(self, states: Tensor) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros(self.rows, *states.shape[1:], dtype=states.dtype, device=states.device)


@final
class FastPass:
    """Scores drafts of one model with CUDA graphs. It holds fixed key-value buffers (slots) with their graphs, and the
    switch `enabled`.

    `enabled`: None (default): on a GPU only. False: never. True: also on a CPU, but without graphs, for tests.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.enabled: bool | None = None
        self._model = weakref.ref(model)
        # reentrant: garbage collection of a `FastRun` may call `give_back` while this thread holds the lock
        self._lock = threading.RLock()
        self._idle: list[Slot] = []
        self._known: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._state: object = None
        self._failed: str | None = None

    @property
    def bytes(self) -> int:
        """Return the bytes of all slots and graphs, also of those in use."""
        return sum(slot.bytes for slot in list(self._known))

    @property
    def captured(self) -> int:
        """Return the number of captured graphs."""
        return sum(replay.graph is not None for slot in list(self._known) for replay in slot.replays.values())

    def why_not(self) -> str | None:
        """Return the reason why the fast pass is not used; None if it is used."""
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
        """Free the memory of slots that are not in use."""
        with self._lock:
            self._idle = []

    def begin(self, cache: Cache) -> FastRun | None:
        """Return an object that scores the drafts of one `generate` call, whose prompt is in this cache; None if the
        fast pass cannot be used."""
        model = self._model()
        if model is None or self.why_not() is not None:
            return None
        state = _state(model)
        with self._lock:
            if state != self._state:  # weights have moved: graphs captured before would read the old addresses
                self._state, self._idle = state, []
        return FastRun(self, cache.cross_attention_cache if isinstance(cache, EncoderDecoderCache) else None)

    def take(self, kinds: Sequence[Kind], rows: int, columns: int, encoder: Cache | None) -> Slot:
        """Reserve an idle slot of this size, or make a new one.

        kinds: the layers' shapes and dtypes. rows, columns: number of batch rows, and of tokens a row. encoder:
            cross-attention keys and values; None for decoder-only models.
        """
        with self._lock:
            for index, slot in enumerate(self._idle):
                if slot.holds(kinds, rows, columns, encoder):
                    return self._idle.pop(index)
            slot = Slot(kinds, rows, columns, encoder)
            slot.state = self._state
            self._known.add(slot)
            return slot

    def give_back(self, slots: list[Slot]) -> None:
        """Take back the slots of a `generate` call that has ended. The list is emptied."""
        with self._lock:
            while slots:
                slot = slots.pop()
                self._failed = next((why for one in slot.replays.values() if (why := one.why_not)), self._failed)
                if slot.state == self._state:
                    self._idle.append(slot)
            del self._idle[:-KEPT]


@final
class FastRun:
    """Scores the drafts of one `generate` call. It holds the slots that the call has taken; the newest slot holds the
    key-value cache."""

    def __init__(self, passes: FastPass, encoder: Cache | None) -> None:
        """passes: the `FastPass` of the model, which owns the buffers. encoder: cross-attention keys and values; None
        for a decoder-only model."""
        self._passes, self._encoder = passes, encoder
        # the slots that this call has taken; the last slot is in use, the earlier slots became too small
        self._slots: list[Slot] = []
        weakref.finalize(self, passes.give_back, self._slots)

    def pools(self, kinds: Sequence[Kind], rows: int, length: int) -> list[Tensor]:
        """Return key-value tensors (members, rows, heads, C, head size) for at least `length` tokens a row, one for
        each `Kind`: views of a slot. A larger slot is taken if the current one is too small."""
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
        """Run the model over a draft, padded to a fixed shape.

        draft: B trees of N nodes. store: the key-value cache, which lies in the current slot. rows: which cache columns
            hold which row's tokens; the index of the draft's first column is recorded in it.
        layers: indices of the layers whose hidden states are returned. offsets: (axes, B) int64, added to position ids.
        run: the model's pass. A graph replays it: all tensors that it reads besides its arguments must keep their
            memory addresses.
        Returns: logits (B, N, V), and hidden states (B, N, H) by layer.
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
        positions[0, :batch, :size] = torch.tensor(rows.positions(draft))
        # padding nodes get the root's position id, because higher ones may exceed the model's maximum
        positions[0, :batch, size:] = positions[0, :batch, :1]
        positions = positions.to(device)
        if offsets is not None:
            positions = positions.repeat(len(offsets), 1, 1)
            positions[:, :batch] += offsets[:, :, None]
        bounds = torch.zeros(2, slot.rows, dtype=torch.long)
        bounds[:, :batch] = torch.tensor([rows.starts, rows.ends])
        # padding nodes attend to themselves, because a softmax over nothing is NaN
        seen = torch.eye(nodes, dtype=torch.bool).repeat(slot.rows, 1, 1)
        seen[:batch, :size, :size] = ancestors_of(parents)

        def pass_(tokens: Tensor, positions: Tensor, bounds: Tensor, seen: Tensor) -> tuple[Tensor, ...]:
            tree = tree_mask(bounds[0], bounds[1], seen, slot.columns - nodes, slot.kinds[0].dtype)
            scores = run(tokens, tree, positions, slot.cache)
            return scores.logits, *(scores.features[layer] for layer in layers)

        if (nodes, layers) not in slot.replays:
            slot.replays[nodes, layers] = Replay()
        inputs = tokens, positions, bounds.to(device), seen.to(device)
        outputs = slot.replays[nodes, layers](pass_, inputs)
        # copies, because the next replay overwrites the graph's output tensors
        logits, *features = (part[:batch, :size].clone() for part in outputs)
        rows.wait(size, slot.columns - nodes)
        return Scores(logits, dict(zip(layers, features, strict=True)))


def fast_pass(model: PreTrainedModel) -> FastPass:
    """Return a model's fast pass, which replays passes as captured CUDA graphs. All calls for one model return the same
    object.

    model: a loaded model of transformers.
    Returns: a `FastPass`. Set `enabled` to turn it on or off; read its state by `why_not()`, `bytes` and `captured`.
    """
    with _making:
        if model not in _passes:
            _passes[model] = FastPass(model)
        return _passes[model]


_passes: weakref.WeakKeyDictionary[PreTrainedModel, FastPass] = weakref.WeakKeyDictionary()


def _state(model: PreTrainedModel) -> tuple[object, ...]:
    """Return what a captured graph depends on: the attention implementation, and address and dtype of each weight."""
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    tensors = (*model.parameters(), *model.buffers())
    return attention, *((tensor.data_ptr(), tensor.dtype) for tensor in tensors)


def _memories(encoder: Cache | None) -> list[Tensor]:
    """Return the cross-attention keys and values, layer by layer: k0, v0, k1, v1, ...; [] if `encoder` is None."""
    layers = () if encoder is None else cast(list[DynamicLayer], encoder.layers)
    return [cast(Tensor, states) for layer in layers for states in (layer.keys, layer.values)]


@dataclass(frozen=True)
class Graph:
    """A call captured as a CUDA graph. Write new values into `inputs`, call `replay`, then read `outputs`; the next
    replay overwrites them."""

    replay: Callable[[], None]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    bytes: int  # bytes of GPU memory that the graph holds


@final
class Replay:
    """Calls `run(*inputs)`. On a GPU it captures a CUDA graph after a few calls, and then replays it.

    Inputs must have the same shapes each time. Other tensors that `run` reads must keep their address. Outputs are
    valid until the next call, because a graph always writes to the same memory.
    """

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self.why_not: str | None = None  # the reason why no graph could be captured
        self._calls = 0

    def __call__(self, run: Run, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self._calls += 1
        if self.graph is None and self.why_not is None and self._calls > WARM_UPS and captures(inputs[0].device):
            try:
                self.graph = capture(run, inputs)
            except RuntimeError as error:  # a graph cannot record some operations, such as synchronisation
                self.why_not = f"its pass cannot be captured: {str(error).partition(chr(10))[0]}"
        if self.graph is None:
            return run(*inputs)
        for held, given in zip(self.graph.inputs, inputs, strict=True):
            held.copy_(given)
        self.graph.replay()
        return self.graph.outputs


def captures(device: torch.device) -> bool:
    """Return whether calls on this device can be captured as graphs."""
    return device.type == "cuda"


def capture(run: Run, inputs: Sequence[Tensor]) -> Graph:
    """Capture one call as a CUDA graph, without running it. Raises RuntimeError if the call cannot be captured."""
    device = inputs[0].device
    before, graph = torch.cuda.memory_reserved(device), torch.cuda.CUDAGraph()
    # no inference tensors, because a replay may happen outside of inference mode
    with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
        held = tuple(given.clone() for given in inputs)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = run(*held)
    return Graph(graph.replay, held, outputs, max(torch.cuda.memory_reserved(device) - before, 0))
