"""The choice of a target for a model of transformers."""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

from transformers import PreTrainedModel

from mmdec.errors import InputError
from mmdec.targets.encoder_decoder import EncoderDecoderTarget
from mmdec.targets.families import (
    ENCODER_DECODER_FAMILIES,
    UNSUPPORTED_CLASSES,
    check_forward,
    lacking_arguments,
    list_families,
    list_media_families,
)
from mmdec.targets.hf_target import HfTarget
from mmdec.targets.media import MediaTarget
from mmdec.targets.text import TextTarget


def target_classes() -> tuple[type[HfTarget], ...]:
    """Return the classes of targets. The first that supports a model scores its drafts."""
    # Whisper's target lies with the rest of Whisper, in a layer above this one, which may not be imported from here.
    whisper: type[HfTarget] = import_module("mmdec.whisper.target").WhisperTarget
    return whisper, EncoderDecoderTarget, MediaTarget, TextTarget


def target_of(model: PreTrainedModel) -> HfTarget:
    """Make the target for a model: of the first of `target_classes` that supports it.

    Raises:
        InputError: If no target supports the model.
    """
    if model.training and any(getattr(part, "gradient_checkpointing", False) for part in model.modules()):
        raise InputError(
            "`model` must keep a cache, but gradient checkpointing, which is on in training, allows none. Call "
            "`model.eval()` before, and `model.train()` afterwards."
        )
    if why := UNSUPPORTED_CLASSES.get(type(model).__name__):
        raise InputError(f"`model` must be of a supported class, but is {type(model).__name__}: {why}.")
    for target in target_classes():
        if target.supports(model):
            return cast(Any, target)(model)
    if model.config.is_encoder_decoder:
        raise InputError(
            f"`model` must be an encoder-decoder of a tested family, but is {type(model).__name__}. These work: "
            f"Whisper, {', '.join(ENCODER_DECODER_FAMILIES.split())}."
        )
    check_forward(model)
    lacking = lacking_arguments(model)
    why = f", whose `forward` does not name {', '.join(lacking)}" if lacking else ""
    raise InputError(
        "`model` must be a Whisper or a decoder-only language model with a key-value cache, but is "
        f"{type(model).__name__}{why}. {list_families()} {list_media_families()}"
    )
