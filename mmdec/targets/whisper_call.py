"""Copies of a Whisper for one call of `generate`: an encoder that encodes each window once, a decoder for word times.

The copies share the model's weights. A call changes nothing that other threads see.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from transformers import WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from mmdec.decode.watch import Stopwatch
from mmdec.ops.onednn import takes
from mmdec.targets.hf_target import HOOK_TABLES, shallow
from mmdec.targets.whisper_context import FRAMES, can_shorten, context_frames, encode
from mmdec.targets.whisper_together import Together

SOUND = "sound"  # attribute of an encoder's output that holds the features which the encoder read


def can_twin(model: WhisperForConditionalGeneration) -> bool:
    """Return whether a copy of the decoder may use another attention implementation than the model.

    A `forward` that was replaced on a module belongs to that module, and reads its settings.
    """
    return not any("forward" in vars(module) for module in model.model.decoder.modules())


def eager_twin(decoder: nn.Module) -> nn.Module:
    """Copy a decoder, with the same weights and hooks, but "eager" attention, which returns attention maps."""
    config: Any = copy.copy(decoder.config)
    config._attn_implementation = "eager"

    def twin(module: nn.Module) -> nn.Module:
        same = shallow(module)
        if "config" in vars(same):
            same.config = config
        same._modules = {name: child and twin(child) for name, child in module._modules.items()}
        return same

    return twin(decoder)


def encoding_once(
    model: WhisperForConditionalGeneration,
    on_pass: Callable[[Tensor, float], None],
    own_config: bool = True,
    margin: float | None = None,
    together: Together | None = None,
) -> tuple[WhisperForConditionalGeneration, RememberingEncoder]:
    """Make a copy of the model for one call of `generate`, whose encoder remembers the states of the last windows.

    `generate` encodes a window for its text, and again to detect the language, to recognise silence, and at each
    temperature of a fallback. The model itself is not changed, so that other threads may use it meanwhile. Attentions
    of the encoder are not returned.

    on_pass: called each time with the features (B, mels, T) and the seconds of the encoder's pass; 0 if remembered.
    own_config: whether `generate` may set the attention of this object (to "eager", for words) apart from the model's.
    margin: of a single window the encoder reads the sound and this many seconds after it; None: all of the window.
    together: runs the encoder's passes; None: they run in this thread.
    Returns: the model, and its encoder's forward.
    """
    outer, inner, encoder = shallow(model), shallow(model.model), shallow(model.model.encoder)
    for name in HOOK_TABLES:
        vars(encoder)[name] = OrderedDict()  # the encoder itself is called, with its hooks
    remembering = RememberingEncoder(model.model.encoder, on_pass, margin, together)
    vars(encoder)["forward"] = remembering
    inner._modules["encoder"] = encoder
    outer._modules["model"] = inner
    if own_config:
        inner.config = copy.copy(model.config)
    return outer, remembering


@final
class RememberingEncoder:
    """Runs an encoder. If all rows equal rows of the last windows, it returns their stored states instead."""

    def __init__(
        self,
        encoder: nn.Module,
        on_pass: Callable[[Tensor, float], None],
        margin: float | None,
        together: Together | None = None,
    ) -> None:
        """on_pass: called with each call's features and seconds. margin, together: as for `encoding_once`."""
        self._on_pass, self._together = on_pass, together
        own = not can_shorten(encoder)
        self._margin = None if own else margin
        self._encoder, self._quick = encoder, None if own else shallow(encoder)  # with the encoder's hooks
        if self._quick is not None:
            vars(self._quick)["forward"] = self._read
        self._last: Tensor | None = None  # features (B, mels, T) of the last windows
        self._states = torch.empty(0)  # (B, S, H), the encoder's states for `_last`
        self.sound = torch.empty(0)  # (b, mels, T) the rows of the last call

    def __call__(self, input_features: Tensor, attention_mask: Any = None, **options: Any) -> BaseModelOutput:
        rows, self.sound = self._rows(input_features), input_features
        if rows is None:
            stopwatch = Stopwatch(input_features.device)
            options |= {"output_attentions": False, "return_dict": True}
            encode = partial(self._encoded, input_features, attention_mask, options)
            apart = input_features.device.type == "cpu"
            encoded = encode() if self._together is None else self._together.alone(encode, apart)
            self._last, self._states = input_features, cast(Tensor, encoded.last_hidden_state)
            self._on_pass(input_features, stopwatch.lap())
        else:
            self._on_pass(input_features, 0.0)
            whole = rows == list(range(len(self._states)))
            encoded = BaseModelOutput(last_hidden_state=self._states if whole else self._states[rows])
        setattr(encoded, SOUND, input_features)
        return encoded

    @property
    def seconds(self) -> float | None:
        """Return how many seconds of the last window the encoder has read; None if it has read all of it."""
        if self._margin is None or self._last is None or 2 * self._states.shape[1] >= self._last.shape[-1]:
            return None
        return 2 * self._states.shape[1] / FRAMES

    def whole(self) -> BaseModelOutput:
        """Encode all of the last window. These states replace the stored ones."""
        features, margin = self._last, self._margin
        assert features is not None
        self._last = self._margin = None
        try:
            return self(features)
        finally:
            self._margin = margin

    def _encoded(self, features: Tensor, attention_mask: Any, options: dict[str, Any]) -> BaseModelOutput:
        if self._margin is not None and len(features) == 1:
            frames = context_frames(features, self._margin)
            if frames < features.shape[-1]:
                return BaseModelOutput(last_hidden_state=encode(self._encoder, features, frames))
        config: Any = self._encoder.config
        whole = features.shape[-1] == 2 * config.max_source_positions
        if self._quick is not None and whole and takes(features) and not options.get("output_hidden_states"):
            return self._quick(features, attention_mask=attention_mask, **options)
        return self._encoder(features, attention_mask=attention_mask, **options)

    def _read(self, input_features: Tensor, **_: Any) -> BaseModelOutput:
        states = encode(self._encoder, input_features, input_features.shape[-1])
        return BaseModelOutput(last_hidden_state=states)

    def _rows(self, features: Tensor) -> list[int] | None:
        """Find for each row of features (B, mels, T) the equal row of the last features; None if a row is new."""
        if self._last is None or self._last.shape[1:] != features.shape[1:]:
            return None
        rows = list[int]()
        for index, row in enumerate(features):
            order = sorted(range(len(self._last)), key=lambda other: other != index)  # try the same index first
            same = next((other for other in order if torch.equal(self._last[other], row)), None)
            if same is None:
                return None
            rows.append(same)
        return rows
