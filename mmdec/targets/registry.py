"""Chooses the `Target` class for a model of transformers: the first class in a list that accepts the model."""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

from transformers import PreTrainedModel

from mmdec.errors import InputError
from mmdec.targets.encoder_decoder import EncoderDecoderTarget, encoder_decoders
from mmdec.targets.families import VISION_MODEL_NAMES, check_forward, lacking_arguments, list_families
from mmdec.targets.hf_target import HfTarget
from mmdec.targets.media import UNSUPPORTED_CLASSES, MediaTarget, media_families
from mmdec.targets.text import TextTarget

WHISPER = "mmdec.whisper.target"  # a system above this floor, hence by name


def target_classes() -> tuple[type[Any], ...]:
    """List the `Target` classes in the order in which they are asked."""
    return import_module(WHISPER).WhisperTarget, EncoderDecoderTarget, MediaTarget, TextTarget


def target_of(model: PreTrainedModel) -> HfTarget:
    """Make the target for this model. Raises InputError if no target supports the model."""
    if model.training and any(getattr(part, "gradient_checkpointing", False) for part in model.modules()):
        raise InputError(
            "`model` must keep a cache, but is being trained with gradient checkpointing, which allows none. Call "
            "`model.eval()` before, and `model.train()` after."
        )
    if why := UNSUPPORTED_CLASSES.get(type(model).__name__):
        raise InputError(
            f"`model` must be one whose drafts can be taken back, but is {type(model).__name__}: {why}. Use another."
        )
    for target in target_classes():
        if target.supports(model):
            return target(cast(Any, model))  # `supports` has checked its type
    if model.config.is_encoder_decoder:
        raise InputError(
            f"`model` must be an encoder-decoder of a tested family, but is {type(model).__name__}. These work: "
            f"Whisper, {encoder_decoders()}."
        )
    check_forward(model)
    lacking = lacking_arguments(model)
    why = f", whose `forward` does not name {', '.join(lacking)}" if lacking else ""
    raise InputError(
        f"`model` must be a Whisper, a {VISION_MODEL_NAMES.replace(' and', ' or')}, or a decoder-only language "
        "model with a "
        f"key-value cache, but is {type(model).__name__}{why}. {list_families()} Of models that see or hear, also "
        f"{media_families()}."
    )
