"""Checks the argument `model` of a public call, and turns the call's options into a `Speculation`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch
from transformers import ProcessorMixin

from mmdec.checks.arguments import format_value
from mmdec.checks.devices import check_device, check_dtype, check_same_dtype
from mmdec.errors import InputError
from mmdec.generation.drafter_choice import DrafterChoice, resolve_drafter
from mmdec.generation.drafter_source import LoadedTarget
from mmdec.generation.speculation import DecodingOptions, Speculation
from mmdec.targets.hf_target import source_folder
from mmdec.targets.registry import make_target
from mmdec.tasks.options import GenerateOptions

Loaded = TypeVar("Loaded")  # a model of transformers with its processor, such as `LoadedVlm`


@dataclass(frozen=True)
class ArgumentKind:
    """Describes a network or processor that a caller may pass: its class, and words for errors."""

    kind: type  # the class of transformers
    rule: str  # what it is called in errors, such as "a processor"
    loader: str  # name of transformers' class whose `from_pretrained` loads it, for errors


ANY_PROCESSOR = ArgumentKind(ProcessorMixin, "a processor of transformers", "AutoProcessor")


class ModelOptions(Protocol):
    """The options of a call that choose its model."""

    @property
    def model(self) -> Any: ...
    @property
    def processor(self) -> ProcessorMixin | None: ...
    @property
    def device(self) -> str | torch.device | None: ...
    @property
    def dtype(self) -> torch.dtype | str | None: ...


def model_of_call(
    options: ModelOptions,
    loaded_class: type[Loaded],
    load: Callable[[Any, Any, torch.dtype], Loaded],
    network: ArgumentKind,
    processor: ArgumentKind = ANY_PROCESSOR,
    integers: bool = False,
) -> Loaded:
    """Return the model of a call, which is loaded if it is given by name.

    Args:
        options: Those of the call. `model` is a shipped name, a folder, a Hugging Face id, an object of `loaded_class`,
            or a model of transformers, which comes with its `processor`.
        loaded_class: Made from a model, its processor and its folder.
        load: Loads the model of a name, for a device and a dtype.
        network: What a model of transformers must be.
        processor: What its processor must be.
        integers: Whether `dtype` may be "int8".

    Raises:
        InputError: If it cannot be loaded, or does not fit `processor`, `device` or `dtype`.
    """
    dtype, model = check_dtype(options.dtype, integers), options.model
    if isinstance(model, (str, bytes, os.PathLike)):
        if options.processor is not None:
            raise InputError("`processor` must be left out if `model` is a name, because the named model has its own.")
        return load(model, options.device, dtype)
    if not isinstance(model, loaded_class):
        _check_part("model", model, network, f"a name, a folder, a Hugging Face id or {network.rule}")
        _check_part("processor", options.processor, processor, f"{processor.rule} with a loaded `model`")
        model = cast(Any, loaded_class)(model, options.processor, source_folder(model))
    check_placement(cast(Any, model).model, options.device, options.dtype)
    return model


def _check_part(name: str, value: object, kind: ArgumentKind, rule: str) -> None:
    if not isinstance(value, kind.kind):
        raise InputError(
            f"`{name}` must be {rule}, but is {format_value(value)}. Load it with `{kind.loader}.from_pretrained`."
        )


def check_placement(model: Any, device: str | torch.device | None, dtype: Any, remedy: str = "Leave it out.") -> None:
    """Raise InputError if `device` or `dtype` is not None and differs from the loaded model's.

    Args:
        model: The loaded model.
        device: The caller's argument.
        dtype: The caller's argument.
        remedy: Last sentence of the message about `device`.
    """
    if device is not None and check_device(device).type != model.device.type:
        raise InputError(
            f"`device` must be that of the loaded `model`, {model.device}, but is {format_value(str(device))}. {remedy}"
        )
    check_same_dtype(dtype, model.dtype)


def load_speculation(
    options: GenerateOptions,
    drafter: DrafterChoice,
    loaded: LoadedTarget,
    inputs: int = 1,
    sound: bool = False,
    checked: set[str] | None = None,
) -> Speculation:
    """Make the `Speculation` of a call: load the drafter, and check that it fits the model.

    Args:
        options: The options of the call.
        drafter: Its argument `drafter`.
        loaded: Its model.
        inputs: Number of its inputs.
        sound: Whether they are recordings.
        checked: Names of drafters that passed the check for this model before. For these the check is skipped, because
            it takes a large part of the time of a short answer. A new drafter's name is added.

    Raises:
        InputError: If there is no such drafter, or it does not fit.
    """
    source, checked = resolve_drafter(drafter, loaded), set() if checked is None else checked
    source.check_inputs(inputs, sound)
    speculation = Speculation(
        DecodingOptions(
            drafter=source,
            rule=options.rule,
            num_speculative_tokens=options.num_speculative_tokens,
            seed=options.seed,
            statistics=options.statistics,
            on_round=options.on_round,
        )
    )
    model_drafter = speculation.drafter_for(loaded.model)
    name = "" if model_drafter is None else model_drafter.name
    if name not in checked:
        speculation.checked_drafter(make_target(loaded.model))
        checked.add(name)
    return speculation
