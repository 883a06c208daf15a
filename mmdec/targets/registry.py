"""The choice of a target for a model of transformers.

`register_target` adds targets from outside the package.
"""

from __future__ import annotations

import inspect
from pkgutil import resolve_name
from typing import Any, cast

from transformers import PreTrainedModel

from mmdec.checks.arguments import format_value
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

# Targets that lie with the rest of their system, in a layer above this one. They may not be imported from here, so they
# are named, and imported when a model's target is chosen.
LAZY_TARGETS = ("mmdec.whisper.target:WhisperTarget",)
_registered: list[type[HfTarget]] = []  # by `register_target`, the latest first


def target_classes() -> tuple[type[HfTarget], ...]:
    """Return the classes of targets. The first that supports a model scores its drafts."""
    return *map(resolve_name, LAZY_TARGETS), EncoderDecoderTarget, MediaTarget, TextTarget


def register_target(target: type[HfTarget]) -> None:
    """Register a class of targets, which `generate`, `stream` and `speculate` use for the models that it supports.

    It is asked before mmdec's own targets and those registered earlier.

    Args:
        target: A class derived from `mmdec.targets.hf_target.HfTarget`, whose constructor takes the model.

    Raises:
        InputError: If it is another class, or lacks methods.
    """
    if not (inspect.isclass(target) and issubclass(target, HfTarget)):
        raise InputError(
            f"`target` must be a class derived from `HfTarget`, but is {format_value(target)}. Derive it from "
            "`mmdec.targets.hf_target.HfTarget`."
        )
    if inspect.isabstract(target):
        missing = ", ".join(sorted(target.__abstractmethods__))
        raise InputError(f"`target` must define all abstract methods, but {target.__name__} lacks {missing}. Add them.")
    _registered.insert(0, target)


def make_target(model: PreTrainedModel) -> HfTarget:
    """Make the target for a model: of the first registered or built-in class that supports it.

    Raises:
        InputError: If no target supports the model.
    """
    if model.training and any(getattr(part, "gradient_checkpointing", False) for part in model.modules()):
        raise InputError(
            "`model` must keep a cache, but gradient checkpointing, which is on in training, allows none. Call "
            "`model.eval()` before, and `model.train()` afterwards."
        )
    for registered in _registered:
        if registered.supports(model):
            return cast(Any, registered)(model)
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
