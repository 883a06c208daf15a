"""Which target takes a model of transformers: one line for each target, asked in order."""

from __future__ import annotations

from typing import Any, cast

from transformers import PreTrainedModel

from mmdec.targets.families import known_families
from mmdec.targets.hf_target import HfTarget
from mmdec.targets.text import TextTarget
from mmdec.targets.vlm import VlmTarget
from mmdec.targets.whisper import WhisperTarget
from mmdec.types import InputError

TARGETS: tuple[type[WhisperTarget] | type[VlmTarget] | type[TextTarget], ...] = (WhisperTarget, VlmTarget, TextTarget)


def target_of(model: PreTrainedModel) -> HfTarget:
    """The target for this model. Raises InputError for a model that no target takes, or whose drafts could not be
    scored or taken back."""
    for target in TARGETS:
        if target.takes(model):
            return target(cast(Any, model))  # `takes` has seen its type
    raise InputError(
        "`model` must be a Whisper, a LLaVA, LLaVA-NeXT, Qwen2-VL, Qwen2.5-VL or Qwen3-VL, or a decoder-only language "
        "model with a key-value cache, but is "
        f"{type(model).__name__}. {known_families()}"
    )
