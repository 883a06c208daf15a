"""Copies of a model that read drafts as the model reads single tokens. They share its weights.

transformers reads one token with a recurrence, and several with a scan. The scan may differ in three ways, which the
copy avoids. The scan pads tokens to whole chunks, of 256 say: the copy's chunks are as long as the draft. The scan may
limit time steps where the recurrence does not: the copy has no limit. The scan of Mamba 1, which has no chunks, begins
with an empty state: the copy reads token by token; only the projections, which hold most weights, read all at once.

Layers are recognised by their attributes. The model itself is not changed, so that others may use it meanwhile.
"""

from __future__ import annotations

import copy
import math
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

LEAST = 16  # minimum tokens of a chunk on a GPU: the kernels there multiply blocks of at least 16


@final
class Projected(nn.Module):
    """Replaces a projection that has run already, and returns its states (B, N, D) column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.states = torch.empty(0)
        self.column = 0

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.column += 1
        return self.states[:, self.column - 1 : self.column]


@final
class Stepwise(nn.Module):
    """Reads tokens one by one with a layer whose scan cannot continue from a state."""

    def __init__(self, mixer: Any) -> None:
        """mixer: a copy of the layer; its two projections are taken out."""
        super().__init__()
        self.first, self.last, self.projected = mixer.in_proj, mixer.out_proj, Projected()
        mixer.in_proj, mixer.out_proj = self.projected, nn.Identity()
        self.mixer = mixer

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **named: Any) -> Tensor:
        seen = hidden_states if attention_mask is None else hidden_states * attention_mask[:, :, None]
        self.projected.states, self.projected.column = self.first(seen), 0
        steps: list[Tensor] = []
        for column, step in enumerate(seen.split(1, 1)):
            mask = None if attention_mask is None else attention_mask[:, column : column + 1]
            steps.append(self.mixer(step, attention_mask=mask, **named))
        return self.last(torch.cat(steps, 1))


@final
class DraftReader:
    """A copy of a model that reads a run's drafts."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._own = model
        self._chunked: list[tuple[Any, int]] = []
        self.steps = False  # whether some layers of the copy read token by token
        self.model = cast(PreTrainedModel, self._copied(model, {}) or model)

    def continued(self, cache: DynamicCache) -> PreTrainedModel:
        """Choose the model that reads tokens behind a cache: the copy, if the model's own scans cannot continue from
        the cache's states."""
        states = any(isinstance(layer, LinearAttentionLayer) and layer.has_previous_state[0] for layer in cache.layers)
        return self.model if self.steps and states else self._own

    def fit(self, columns: int) -> None:
        """Set the length of the scans' chunks for a pass over this number of columns."""
        size = columns if self.model.device.type == "cpu" else max(LEAST, 1 << (columns - 1).bit_length())
        for scan, most in self._chunked:
            scan.chunk_size = min(size, most)

    def _copied(self, part: nn.Module, done: dict[int, nn.Module | None]) -> nn.Module | None:
        """Copy a module that has a scan inside; None if it has none. done: id of a part -> its copy, so far."""
        if id(part) in done:
            return done[id(part)]
        below = {name: self._copied(child, done) for name, child in part._modules.items() if child is not None}
        chunk: object = vars(part).get("chunk_size")
        chunked, stepped = type(chunk) is int, "ssm_state_size" in vars(part) and chunk is None
        found: Any = None
        if chunked or stepped or any(below.values()):
            found = copy.copy(part)
            found._modules = {name: below.get(name) or child for name, child in part._modules.items()}
        if chunked:
            self._chunked.append((found, cast(int, chunk)))
            if "time_step_limit" in vars(found):
                found.time_step_limit = (0.0, math.inf)
        if stepped:
            found, self.steps = Stepwise(found), True
        done[id(part)] = found
        return found
