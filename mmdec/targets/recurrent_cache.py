"""Models with recurrent or convolutional layers (Mamba and others): removes rejected drafts from the layers' states.

A pass returns the recurrent states only after its last token. If all tokens of a pass are accepted, a batch row takes
the new states. Else the row keeps its old states, and its accepted tokens become its "backlog": the next pass reads
these tokens again before its draft. A long backlog is read in an extra pass. A convolutional state is just the last
inputs of the layer: a model without recurrent states can accept any number of tokens and reads nothing twice.

A pass reads its tokens in order, so a draft must be a chain. In a batch, shorter rows are padded on the right.

transformers reads one token with a recurrence, but several tokens with a scan. `StepwiseModel` is a copy of a model
that shares its weights and reads a draft exactly as the model reads single tokens. It avoids three differences of the
scan:

- The scan pads tokens to chunks of, say, 256. The copy's chunks are as long as the draft.
- The scan may limit time steps; the recurrence does not. The copy has no limit.
- The scan of Mamba 1 begins with an empty state. The copy reads token by token; only the projections, which hold most
  weights, read all tokens at once.

Layers are recognised by their attributes. The model itself is not changed.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from mmdec.compat import CACHE_ARGUMENT
from mmdec.core.tree import chain_drafts, int_list, int_rows
from mmdec.errors import InputError
from mmdec.targets.kv_cache import KVPool, RowLayout, empty_cache, stock_layer
from mmdec.types import Draft, Scores

# a row reads up to this number of accepted tokens again with a draft, and more of them in an extra pass
MAX_BACKLOG = 8
ScorePass = Callable[[Draft], Scores]
# least tokens of a scan's chunk on a GPU, because scan kernels there multiply blocks of at least 16
MIN_SCAN_CHUNK = 16
STATE_CACHE = "cache_params"  # name of the cache argument of a model without attention before transformers 5.24


class RecurrentStates(LinearAttentionLayer):
    """A cache layer with recurrent and convolutional states.

    A pass makes new states. The old states are stored until `keep` chooses between old and new states for each batch
    row.
    """

    def _take(self, layer: LinearAttentionLayer) -> None:
        """Take over the states and settings of a cache layer of transformers."""
        LinearAttentionLayer.__init__(self, layer.number_of_states)
        for name in vars(self).keys() & vars(layer).keys():
            if name not in ("keys", "values"):
                setattr(self, name, vars(layer)[name])
        # (convolutional, recurrent) states before the current pass: {index -> tensor} each
        self.before: tuple[dict[int, Any], dict[int, Any]] = {}, {}

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Set new recurrent states. The old tensor is not overwritten, unlike in transformers' own layer."""
        old = self.recurrent_states[state_idx]
        if old is None:
            return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        self.recurrent_states[state_idx] = recurrent_states.to(old.dtype)
        return recurrent_states

    def begin(self, steps: bool) -> None:
        """Store the states as they are before a pass, because its tokens may be rejected.

        `keep` must be called after the pass.

        Args:
            steps: Whether the pass reads token by token. Some models then change the state tensors in place, so these
                are copied.
        """
        self.before = dict(self.conv_states), self.recurrent_states
        self.record_past = True  # transformers' switch: the convolution's state grows by all inputs of the pass
        self.recurrent_states = {
            index: states.clone() if steps and states is not None else states
            for index, states in self.recurrent_states.items()
        }

    def keep(self, accepted: Sequence[int], columns: int) -> None:
        """End a pass over `columns` tokens: each row takes its new states or returns to its old states.

        Args:
            accepted: How many of these tokens each batch row accepts; in a model with recurrent states all or none.
        """
        convolved, recurrent = self.before
        self.before, self.record_past = ({}, {}), False
        for index, full in self.conv_states.items():
            if full is not None:
                size, old = convolved[index].shape[-1], convolved[index]
                if any(0 < count < columns for count in accepted) or len(set(accepted)) > 1:
                    rows = [
                        full[row, ..., count - columns - size :][..., :size] if count else old[row]
                        for row, count in enumerate(accepted)
                    ]
                    self.conv_states[index] = torch.stack(rows)
                else:
                    self.conv_states[index] = full[..., -size:].clone() if any(accepted) else old
        if not all(accepted):
            for index, new in self.recurrent_states.items():
                if new is not None and any(accepted):
                    has_accepted = torch.tensor([count > 0 for count in accepted], device=new.device)
                    new = torch.where(has_accepted.view(-1, *[1] * (new.ndim - 1)), new, recurrent[index])
                self.recurrent_states[index] = new if any(accepted) else recurrent[index]

    def append(self, other: RecurrentStates) -> None:
        """Append the states of another layer's rows."""
        for states, more in ((self.conv_states, other.conv_states), (self.recurrent_states, other.recurrent_states)):
            states.update(
                {i: torch.cat([state, cast(Tensor, more[i])]) for i, state in states.items() if state is not None}
            )

    def select(self, rows: Tensor) -> None:
        """Keep only the states of the batch rows with the indices `rows` (K,) int64, in that order."""
        for states in (self.conv_states, self.recurrent_states):
            states.update(
                {i: state.index_select(0, rows.to(state.device)) for i, state in states.items() if state is not None}
            )


@final
class StateLayer(RecurrentStates):
    """A cache layer with recurrent or convolutional states, and without keys and values."""

    def __init__(self, layer: LinearAttentionLayer) -> None:
        self._take(layer)


@final
class HybridLayer(RecurrentStates, LinearAttentionAndFullAttentionLayer):
    """A cache layer with recurrent or convolutional states, and also keys and values, which `attention` holds."""

    def __init__(self, layer: LinearAttentionLayer, attention: Any) -> None:
        self._take(layer)
        self.attention, self.is_initialized = attention, True

    @property
    def keys(self) -> Any:
        return self.attention.keys

    @keys.setter
    def keys(self, states: Any) -> None:
        self.attention.keys = states

    @property
    def values(self) -> Any:
        return self.attention.values

    @values.setter
    def values(self, states: Any) -> None:
        self.attention.values = states

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.attention.update(key_states, value_states, *args, **kwargs)


def attention_layers(cache: DynamicCache) -> list[Any]:
    """Return the layers of a cache that hold keys and values."""
    return [layer for layer in cast(list[Any], cache.layers) if isinstance(layer, DynamicLayer)]


def copy_inference_states(cache: DynamicCache) -> None:
    """Replace the states in a cache by copies that other code may change in place.

    Decoding made them in torch's inference mode, which forbids such changes, but some models make them.
    """
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            for states in (layer.conv_states, layer.recurrent_states):
                with torch.inference_mode(False):
                    states.update(
                        {i: state.clone() for i, state in states.items() if state is not None and state.is_inference()}
                    )


@final
class RecurrentCache:
    """Holds the cache of one `generate` call for a model with recurrent or convolutional layers.

    It consists of states, keys, values, and each batch row's backlog: the accepted tokens that its states do not
    include yet.

    Args:
        cache: Filled by the pass over the prompt; its layers are replaced.
        rows: Number of batch rows.
        steps: Whether passes read token by token, and so may write into the state tensors.

    Raises:
        InputError: If the pass over the prompt left no states in the cache.
    """

    def __init__(self, cache: DynamicCache, rows: int, steps: bool = False) -> None:
        layers = cast(list[Any], cache.layers)
        states = [layer for layer in layers if isinstance(layer, LinearAttentionLayer)]
        if any(not any(layer.is_conv_states_initialized.values()) for layer in states):
            raise InputError(
                f"`model` must keep its states in `{CACHE_ARGUMENT}`, but keeps them elsewhere, so drafts cannot be "
                "removed. Choose another model."
            )
        self.accepts_any_prefix = not any(any(layer.is_recurrent_states_initialized.values()) for layer in states)
        attention = empty_cache()
        attention.layers += [_attention(layer) for layer in layers]
        self.pool = KVPool(attention) if attention_layers(attention) else None
        for index, (layer, pooled) in enumerate(zip(layers, attention.layers, strict=True)):
            if not isinstance(layer, LinearAttentionLayer):
                layers[index] = pooled
            elif isinstance(layer, DynamicLayer):
                layers[index] = HybridLayer(layer, pooled)
            else:
                layers[index] = StateLayer(layer)
        self._steps = steps
        self.states = [layer for layer in layers if isinstance(layer, RecurrentStates)]
        self.backlogs: list[list[int]] = [[] for _ in range(rows)]
        self._read: list[list[int]] = []  # for each batch row, the tokens that the last pass read
        self.passes = 0  # number of passes that only read backlogs, without a draft

    def score(self, draft: Draft, rows: RowLayout, run: ScorePass) -> Scores:
        """Return the logits and features after each node of a draft, whose trees must be chains.

        Args:
            rows: Which cache columns hold which row's tokens.
            run: Runs the model over chains of W tokens.
        """
        sizes, parents = int_list(draft.size), int_rows(draft.parents)
        if any(links[1:size] != list(range(size - 1)) for links, size in zip(parents, sizes, strict=True)):
            raise InputError("`draft` must be a chain for a model with recurrent layers, but is a tree. Draft chains.")
        while not self.accepts_any_prefix and max(map(len, self.backlogs)) > MAX_BACKLOG:
            self._catch_up(rows, run)
        tokens = [row[:size] for row, size in zip(int_rows(draft.tokens), sizes, strict=True)]
        scores = self._pass([old + new for old, new in zip(self.backlogs, tokens, strict=True)], draft.tokens, run)
        before, width = list(map(len, self.backlogs)), scores.logits.shape[1]
        if not any(before) and width == draft.tokens.shape[1]:
            return scores
        last = width - 1
        nodes = [[min(first + node, last) for node in range(draft.tokens.shape[1])] for first in before]
        index = torch.tensor(nodes, device=draft.tokens.device)[..., None]
        return Scores(
            scores.logits.gather(1, index.expand(-1, -1, scores.logits.shape[2])),
            {layer: part.gather(1, index.expand(-1, -1, part.shape[2])) for layer, part in scores.features.items()},
        )

    def accept(self, rows: RowLayout, path: Tensor) -> None:
        """Keep the cached states of the accepted nodes, and drop those of the other nodes.

        After the pass over the prompt, which has no draft, nothing changes.

        Recurrent states are known only after the last token of a pass. So in a model with recurrent states, a batch row
        that does not accept all tokens of the pass returns to its states before the pass, and its accepted tokens
        become its backlog.

        Args:
            path: (B, A), accepted nodes, padded with -1.
        """
        if not rows.tree:
            return
        accepted = [sum(node >= 0 for node in nodes) for nodes in int_rows(path)]
        read = [tokens[: len(old) + new] for tokens, old, new in zip(self._read, self.backlogs, accepted, strict=True)]
        self._keep(rows, read)

    def commit(self, columns: Sequence[Sequence[int]], begins: Sequence[int], length: int) -> None:
        """Move the keys and values, if any, of each batch row's accepted tokens to the end of its text.

        Then keep only the first `length` cached tokens.

        Args:
            columns: [r]: indices of row r's accepted tokens along the cache's sequence axis.
            begins: [r]: index to which row r's first accepted token moves; its other accepted tokens follow.
        """
        if self.pool is not None:
            self.pool.commit(columns, begins, length)

    def set_first_visible(self, firsts: Sequence[int]) -> None:
        """In the next pass, hide cached tokens from layers with an attention window.

        Args:
            firsts: [i]: index along the sequence axis of the first token that layer i sees.
        """
        if self.pool is not None:
            self.pool.set_first_visible(firsts)

    def select(self, rows: Tensor, length: int) -> None:
        """Keep only the batch rows with the indices `rows` (K,) int64, in that order.

        Their states, their backlogs, and the keys and values of the first `length` columns stay.
        """
        self.backlogs = [self.backlogs[row] for row in int_list(rows)]
        for layer in self.states:
            layer.select(rows)
        if self.pool is not None:
            self.pool.select(rows, length)

    def append(self, other: RecurrentCache) -> None:
        """Append the rows of another cache of the same model."""
        self.backlogs = self.backlogs + other.backlogs
        for layer, more in zip(self.states, other.states, strict=True):
            layer.append(more)
        if self.pool is not None and other.pool is not None:
            self.pool.append(other.pool)

    def remove(self, row: int, length: int) -> None:
        """Remove a row.

        The last row takes its place.

        Args:
            length: Number of columns that the remaining rows use.
        """
        order = list(range(len(self.backlogs) - 1))
        if row < len(order):
            order[row] = len(order)
        self.backlogs = [self.backlogs[row] for row in order]
        for layer in self.states:
            layer.select(torch.tensor(order))
        if self.pool is not None:
            self.pool.remove(row, length)

    def _catch_up(self, rows: RowLayout, run: ScorePass) -> None:
        """Read the beginnings of long backlogs in a pass without a draft.

        All rows read the same number of tokens; rows with shorter backlogs keep their backlogs. The number is chosen so
        that the pass reads the most tokens in all.
        """
        lengths = [len(backlog) for backlog in self.backlogs]
        width = max(lengths, key=lambda length: length * sum(other >= length for other in lengths))
        tokens, rest = [backlog[:width] for backlog in self.backlogs], [backlog[width:] for backlog in self.backlogs]
        like = torch.zeros(len(rows.ends), 1, dtype=torch.long, device=self._device)
        self._pass([row or [0] for row in tokens], like, run)
        self._keep(rows, tokens)
        self.backlogs = [row_backlog + more for row_backlog, more in zip(self.backlogs, rest, strict=True)]
        self.passes += 1

    @property
    def _device(self) -> torch.device:
        return cast(torch.device, self.states[0].device)

    def _pass(self, tokens: list[list[int]], like: Tensor, run: ScorePass) -> Scores:
        """Run the model over each batch row's tokens, padded on the right.

        Args:
            like: A tensor with the dtype and device of ids.
        """
        width = max(map(len, tokens))
        self._read = tokens
        for layer in self.states:
            layer.begin(self._steps or width == 1)
        firsts = like.new_tensor([row[0] for row in tokens])
        return run(chain_drafts(firsts, [[*row[1:], *row[-1:] * (width - len(row))] for row in tokens]))

    def _keep(self, rows: RowLayout, accepted: list[list[int]]) -> None:
        """End a pass: update the states of each batch row.

        A row whose tokens were all accepted takes the new states. Another row keeps its old states, and its accepted
        tokens become its backlog, which the next pass reads again.

        Args:
            accepted: Each row's accepted tokens, the old backlog included.
        """
        width = rows.tree
        counts = [len(tokens) if self.accepts_any_prefix or len(tokens) == width else 0 for tokens in accepted]
        self.backlogs = [[] if count else tokens for count, tokens in zip(counts, accepted, strict=True)]
        for layer in self.states:
            layer.keep(counts, width)
        columns, begins = rows.commit([range(count) for count in counts])
        self.commit(columns, begins, rows.width)


def _attention(layer: Any) -> Any:
    """Return a cache layer for the keys and values of `layer`; a `DummyLayer` if it has none."""
    if isinstance(layer, HybridLayer):
        return layer.attention
    if isinstance(layer, LinearAttentionAndFullAttentionLayer):
        return stock_layer(cast(Tensor, layer.keys), cast(Tensor, layer.values))
    return DummyLayer() if isinstance(layer, LinearAttentionLayer) else layer


def has_states(config: PreTrainedConfig) -> bool:
    """Return whether the model has layers with recurrent or convolutional states. If so, drafts must be chains."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=config).layers)


def has_only_states(config: PreTrainedConfig) -> bool:
    """Return whether all layers are recurrent or convolutional, without attention."""
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    return kinds == {LinearAttentionLayer}


def cache_arguments(model: PreTrainedModel, cache: Any, positions: Tensor) -> dict[str, Any]:
    """Return the cache and the position ids (B, N) under the names that the model's `forward` gives them.

    Position ids are left out if `forward` has no such argument.
    """
    names = inspect.signature(model.forward).parameters
    arguments = {STATE_CACHE if STATE_CACHE in names else CACHE_ARGUMENT: cache}
    return {**arguments, **({"position_ids": positions} if "position_ids" in names else {})}


def cached_length(cache: DynamicCache) -> int:
    """Return the number of tokens per batch row in a cache, padding included.

    Raises:
        InputError: If the cache holds only recurrent states, from which the number cannot be known.
    """
    if attention_layers(cache) or not cache.layers:
        return cache.get_seq_length()
    if any(
        isinstance(layer, LinearAttentionLayer) and any(layer.has_previous_state.values()) for layer in cache.layers
    ):
        raise InputError(
            "the cache must be empty, but holds recurrent states, which do not show how many tokens they come from. "
            "Leave it out, and pass the whole text."
        )
    return 0


@final
class PrecomputedProjection(nn.Module):
    """Replaces a linear projection whose output for all tokens, `states` (B, N, D), is already computed.

    Each call returns the output for the next token, (B, 1, D).
    """

    def __init__(self) -> None:
        super().__init__()
        self.states = torch.empty(0)
        self.column = 0

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.column += 1
        return self.states[:, self.column - 1 : self.column]


@final
class StepwiseMixer(nn.Module):
    """Replaces a recurrent layer whose scan cannot continue from a state.

    This module reads tokens one by one. The layer's input and output projections are applied to all tokens at once.

    Args:
        mixer: A copy of the layer. Its two projections are replaced, so it must not be used otherwise.
    """

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.first, self.last, self.projected = mixer.in_proj, mixer.out_proj, PrecomputedProjection()
        mixer.in_proj, mixer.out_proj = self.projected, nn.Identity()
        self.mixer = mixer

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **named: Any) -> Tensor:
        visible = hidden_states if attention_mask is None else hidden_states * attention_mask[:, :, None]
        self.projected.states, self.projected.column = self.first(visible), 0
        steps: list[Tensor] = []
        for column, step in enumerate(visible.split(1, 1)):
            mask = None if attention_mask is None else attention_mask[:, column : column + 1]
            steps.append(self.mixer(step, attention_mask=mask, **named))
        return self.last(torch.cat(steps, 1))


@final
class StepwiseModel:
    """A copy of a model, which shares its weights and reads drafts as the model reads single tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._own = model
        self._chunked: list[tuple[Any, int]] = []
        self.steps = False  # whether some layers of the copy read token by token
        self.model = cast(PreTrainedModel, self._copy_scans(model, {}) or model)

    def model_after(self, cache: DynamicCache) -> PreTrainedModel:
        """Return the model that can read several tokens after a cache.

        It is the copy if the model's scans cannot continue from the cache's states, else the model.
        """
        states = any(isinstance(layer, LinearAttentionLayer) and layer.has_previous_state[0] for layer in cache.layers)
        return self.model if self.steps and states else self._own

    def set_chunk_size(self, columns: int) -> None:
        """Prepare the model's copy for a pass over `columns` tokens: its scans get chunks of this length."""
        size = columns if self.model.device.type == "cpu" else max(MIN_SCAN_CHUNK, 1 << (columns - 1).bit_length())
        for scan, max_chunk in self._chunked:
            scan.chunk_size = min(size, max_chunk)

    def _copy_scans(self, part: nn.Module, done: dict[int, nn.Module | None]) -> nn.Module | None:
        """Return a copy of a module that contains a scan; None if the module contains no scan.

        Args:
            done: Id of an original module -> its copy, for the modules seen so far.
        """
        if id(part) in done:
            return done[id(part)]
        children = {name: self._copy_scans(child, done) for name, child in part._modules.items() if child is not None}
        chunk: object = vars(part).get("chunk_size")
        chunked, stepped = type(chunk) is int, "ssm_state_size" in vars(part) and chunk is None
        copied: Any = None
        if chunked or stepped or any(children.values()):
            copied = copy.copy(part)
            copied._modules = {name: children.get(name) or child for name, child in part._modules.items()}
        if chunked:
            self._chunked.append((copied, cast(int, chunk)))
            if "time_step_limit" in vars(copied):
                copied.time_step_limit = (0.0, math.inf)
        if stepped:
            copied, self.steps = StepwiseMixer(copied), True
        done[id(part)] = copied
        return copied
