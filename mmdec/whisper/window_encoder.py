"""Encodes the windows of a recording, whole or only up to some silence after the sound."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from transformers import WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from mmdec.kernels.onednn import is_usable
from mmdec.targets.hf_target import shallow_copy
from mmdec.whisper.features import FRAMES_PER_SECOND, can_shorten, context_frames, encode


@final
class WindowEncoder:
    """Runs a Whisper's encoder over windows. The model is not changed; its encoder's hooks are called.

    Args:
        model: The Whisper.
        margin: A window is encoded up to this many seconds after its sound; None: to its end.
    """

    def __init__(self, model: WhisperForConditionalGeneration, margin: float | None = None) -> None:
        self._encoder: Any = model.model.encoder
        self._margin = margin if can_shorten(self._encoder) else None
        self._fast_encoder: Any = None  # a copy with its own `forward`, so that the encoder's hooks are called
        if can_shorten(self._encoder):
            self._fast_encoder = shallow_copy(self._encoder)
            vars(self._fast_encoder)["forward"] = self._fast_forward

    def __call__(self, features: Tensor, whole: bool = False) -> Tensor:
        """Return the encoder's states (1, S, H) of a window's features (1, mels, T).

        Args:
            whole: Encode to the window's end, whatever the margin.
        """
        return self._encode(features, None if whole else self._margin)

    def encoded_seconds(self, states: Tensor) -> float | None:
        """Return how many seconds of a window have the states (1, S, H); None for a whole window."""
        if states.shape[1] >= self._encoder.config.max_source_positions:
            return None
        return 2 * states.shape[1] / FRAMES_PER_SECOND

    @torch.no_grad()
    def _encode(self, features: Tensor, margin: float | None) -> Tensor:
        if margin is not None:
            frames = context_frames(features, margin)
            if frames < features.shape[-1]:
                return encode(self._encoder, features, frames)
        whole = features.shape[-1] == 2 * self._encoder.config.max_source_positions
        run = self._fast_encoder if self._fast_encoder is not None and whole and is_usable(features) else self._encoder
        return run(features, return_dict=True).last_hidden_state

    def _fast_forward(self, input_features: Tensor, **_: Any) -> BaseModelOutput:
        states: Any = encode(self._encoder, input_features, input_features.shape[-1])
        return BaseModelOutput(last_hidden_state=states)
