"""The registry of targets, and the choice of one for a model of transformers.

A target's class registers itself by the decorator `built_in_target`. `BUILT_IN` lists names and modules: a module is
imported only when its target is asked whether it supports a model.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar, cast

from transformers import PreTrainedModel

from mmdec.errors import InputError
from mmdec.targets.families import (
    ENCODER_DECODER_FAMILIES,
    UNSUPPORTED_CLASSES,
    check_forward,
    lacking_arguments,
    list_families,
    list_media_families,
)
from mmdec.targets.hf_target import HfTarget

Class = TypeVar("Class", bound=HfTarget)
BUILT_IN = {  # name -> module of the class; the first that supports a model scores its drafts
    "whisper": "mmdec.whisper.target",
    "encoder_decoder": "mmdec.targets.encoder_decoder",
    "media": "mmdec.targets.media",
    "text": "mmdec.targets.text",
}
_decorated: dict[str, type[HfTarget]] = {}  # classes of the modules imported so far


def built_in_target(name: str) -> Callable[[type[Class]], type[Class]]:
    """Register the decorated class as a built-in target.

    Args:
        name: The name in `BUILT_IN`.
    """

    def register(kind: type[Class]) -> type[Class]:
        _decorated[name] = kind
        return kind

    return register


def target_of(model: PreTrainedModel) -> HfTarget:
    """Make the target for a model: of the first class in `BUILT_IN` that supports it.

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
    for name, module in BUILT_IN.items():
        import_module(module)
        target = _decorated[name]
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
