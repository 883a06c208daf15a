"""Assistants for transformers' assisted generation: a smaller Whisper, or some of the model's own decoder layers.

A distilled assistant shares the large model's encoder, as in distil-whisper (Gandhi et al. 2023, section 3.3). Without
one, layers of the model itself need no training. Which layers are fastest is found by trial.
"""

from __future__ import annotations

import os
from typing import Any

from transformers import WhisperForConditionalGeneration

from mmdec.evaluation.quality.harness import Method
from mmdec.hub.whisper import load_whisper
from mmdec.targets.whisper_decoder import decoder_of_layers


def assistants(model: WhisperForConditionalGeneration, directory: str | os.PathLike[str] | None) -> list[Method]:
    """Methods with an assistant: the Whisper in `directory`; for None, several choices of the model's layers."""
    if directory is not None:
        smaller = load_whisper(directory, model.device).model
        return [_method(f"assistant {os.path.basename(os.fspath(directory))}", smaller)]
    last = model.config.decoder_layers - 1
    choices = {(0, last), (*range(0, last, 2), last), tuple(range(last))}
    return [
        _method(f"assistant of decoder layers {', '.join(map(str, layers))}", decoder_of_layers(model, layers))
        for layers in sorted(choices)
        if layers
    ]


def _method(name: str, network: Any) -> Method:
    return Method(name, "transformers", {"assistant_model": network}, networks=[network])
