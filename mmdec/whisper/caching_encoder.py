"""Copies of a Whisper model for one `generate` call: the encoder encodes each window once, and the decoder can return
attention maps for word timestamps.

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

from mmdec.core.timing import Stopwatch
from mmdec.kernels.onednn import is_usable
from mmdec.targets.hf_target import HOOK_TABLES, shallow_copy
from mmdec.whisper.batcher import PassBatcher
from mmdec.whisper.features import FRAMES_PER_SECOND, can_shorten, context_frames, encode

SOUND = "sound"  # attribute of the encoder's output that holds the features that the encoder has read


def can_use_eager_copy(model: WhisperForConditionalGeneration) -> bool:
    """Return whether a copy of this model's decoder may use another attention implementation than the model itself.

    The copy may not if a module's `forward` was replaced, because the new function reads the settings of the original
    module.
    """
    return not any("forward" in vars(module) for module in model.model.decoder.modules())


def eager_copy(decoder: nn.Module) -> nn.Module:
    """Return a copy of a decoder that shares its weights and hooks, but computes attention by transformers' "eager"
    code, which returns attention maps."""
    config: Any = copy.copy(decoder.config)
    config._attn_implementation = "eager"

    def twin(module: nn.Module) -> nn.Module:
        same = shallow_copy(module)
        if "config" in vars(same):
            same.config = config
        same._modules = {name: child and twin(child) for name, child in module._modules.items()}
        return same

    return twin(decoder)


def with_caching_encoder(
    model: WhisperForConditionalGeneration,
    on_pass: Callable[[float], None],
    own_config: bool = True,
    margin: float | None = None,
    pass_batcher: PassBatcher | None = None,
) -> tuple[WhisperForConditionalGeneration, CachingEncoder]:
    """Make a copy of the model for one `generate` call, whose encoder stores the states of the last windows.

    `generate` encodes each window several times: for its text, to detect the language, to recognise silence, and at
    each fallback temperature. With the copy, the encoder runs once. The model itself is not changed, so other threads
    may use it at the same time. The encoder's attention maps are not returned.

    Args:
        on_pass: Called with the seconds of each pass of the encoder.
        own_config: Whether the copy gets a copy of the configuration, so that `generate` may set it to "eager"
            attention for word timestamps.
        margin: A single window is encoded only up to this many seconds after its sound; None: to its end.
        pass_batcher: Computes the encoder's passes in another thread; None: they are computed in this thread.

    Returns:
        The copy, and the object that replaces its encoder's `forward`.
    """
    outer, inner, encoder = shallow_copy(model), shallow_copy(model.model), shallow_copy(model.model.encoder)
    for name in HOOK_TABLES:
        vars(encoder)[name] = OrderedDict()  # the copy gets no hooks: it calls the original encoder, which has them
    remembering = CachingEncoder(model.model.encoder, on_pass, margin, pass_batcher)
    vars(encoder)["forward"] = remembering
    inner._modules["encoder"] = encoder
    outer._modules["model"] = inner
    if own_config:
        inner.config = copy.copy(model.config)
    return outer, remembering


@final
class CachingEncoder:
    """Replaces the `forward` of an encoder, and stores the features and states of the last windows.

    If all rows equal stored windows, it returns their states without running the encoder.

    Args:
        encoder: The model's encoder, which is not changed.
        on_pass: Called with the seconds of each pass of the encoder.
        margin: A single window is encoded up to this many seconds after its sound; None: to its end.
        pass_batcher: Computes passes in another thread; None: not used.
    """

    def __init__(
        self,
        encoder: nn.Module,
        on_pass: Callable[[float], None],
        margin: float | None,
        pass_batcher: PassBatcher | None = None,
    ) -> None:
        self._on_pass, self._pass_batcher = on_pass, pass_batcher
        replaceable = can_shorten(encoder)
        self._margin = margin if replaceable else None
        self._encoder = encoder
        self._fast_encoder = shallow_copy(encoder) if replaceable else None  # the copy keeps the hooks
        if self._fast_encoder is not None:
            vars(self._fast_encoder)["forward"] = self._fast_forward
        self._last: Tensor | None = None  # features (B, mels, T) of the last windows
        self._states = torch.empty(0)  # (B, S, H), the encoder's states for `_last`
        self.sound = torch.empty(0)  # (b, mels, T), features of the last call

    def __call__(self, input_features: Tensor, attention_mask: Any = None, **options: Any) -> BaseModelOutput:
        rows, self.sound = self._rows(input_features), input_features
        if rows is None:
            stopwatch = Stopwatch(input_features.device)
            options |= {"output_attentions": False, "return_dict": True}
            encode = partial(self._encode, input_features, attention_mask, options)
            apart = input_features.device.type == "cpu"
            encoded = encode() if self._pass_batcher is None else self._pass_batcher.run_alone(encode, apart)
            self._last, self._states = input_features, cast(Tensor, encoded.last_hidden_state)
            self._on_pass(stopwatch.lap())
        else:
            whole = rows == list(range(len(self._states)))
            encoded = BaseModelOutput(last_hidden_state=self._states if whole else self._states[rows])
        setattr(encoded, SOUND, input_features)
        return encoded

    @property
    def seconds(self) -> float | None:
        """How many seconds of the last window were encoded; None if the whole window was."""
        if self._margin is None or self._last is None or 2 * self._states.shape[1] >= self._last.shape[-1]:
            return None
        return 2 * self._states.shape[1] / FRAMES_PER_SECOND

    def whole(self) -> BaseModelOutput:
        """Encode the last window to its end, and return its states, which replace the stored ones."""
        features, margin = self._last, self._margin
        assert features is not None
        self._last = self._margin = None
        try:
            return self(features)
        finally:
            self._margin = margin

    def _encode(self, features: Tensor, attention_mask: Any, options: dict[str, Any]) -> BaseModelOutput:
        if self._margin is not None and len(features) == 1:
            frames = context_frames(features, self._margin)
            if frames < features.shape[-1]:
                return BaseModelOutput(last_hidden_state=encode(self._encoder, features, frames))
        config: Any = self._encoder.config
        whole = features.shape[-1] == 2 * config.max_source_positions
        if self._fast_encoder is not None and whole and is_usable(features) and not options.get("output_hidden_states"):
            return self._fast_encoder(features, attention_mask=attention_mask, **options)
        return self._encoder(features, attention_mask=attention_mask, **options)

    def _fast_forward(self, input_features: Tensor, **_: Any) -> BaseModelOutput:
        states = encode(self._encoder, input_features, input_features.shape[-1])
        return BaseModelOutput(last_hidden_state=states)

    def _rows(self, features: Tensor) -> list[int] | None:
        """Return the index of the equal stored row for each row of features (B, mels, T); None if any row is new."""
        if self._last is None or self._last.shape[1:] != features.shape[1:]:
            return None
        rows = list[int]()
        for index, row in enumerate(features):
            # compare a window with the stored one of the same index first, because it is most likely the same
            order = sorted(range(len(self._last)), key=lambda other: other != index)
            same = next((other for other in order if torch.equal(self._last[other], row)), None)
            if same is None:
                return None
            rows.append(same)
        return rows
