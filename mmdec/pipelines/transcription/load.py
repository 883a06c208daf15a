"""The model and the drafter that `transcribe` is given: names and folders are loaded, loaded ones are checked."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import PreTrainedModel, WhisperForConditionalGeneration, WhisperProcessor

from mmdec.checks.arguments import show
from mmdec.generation.drafter_choice import DRAFTERS
from mmdec.hub.whisper import HEADS, LoadedWhisper, load_whisper
from mmdec.runtime import check_device
from mmdec.types import Drafter, InputError

Model = str | os.PathLike[str] | WhisperForConditionalGeneration | LoadedWhisper
DraftedBy = Drafter | PreTrainedModel | str | os.PathLike[str] | None


def as_whisper(model: Model, processor: WhisperProcessor | None, device: str | torch.device | None) -> LoadedWhisper:
    """`model` as `transcribe` takes it -> a model with its processor. Raises InputError where they do not fit."""
    if isinstance(model, (str, bytes, os.PathLike)):
        if processor is not None:
            raise InputError("`processor` must be left out for a `model` that is named, which has one, but is given.")
        return load_whisper(model, device)
    if not isinstance(model, LoadedWhisper):
        if not isinstance(model, WhisperForConditionalGeneration):
            raise InputError(
                "`model` must be a name, a directory, a hub id or a WhisperForConditionalGeneration, but is "
                f"{show(model)}. Load it with `WhisperForConditionalGeneration.from_pretrained`."
            )
        if not isinstance(processor, WhisperProcessor):
            raise InputError(
                f"`processor` must be a WhisperProcessor with a loaded `model`, but is {show(processor)}. Load it with "
                "`WhisperProcessor.from_pretrained`."
            )
        name = model.config._name_or_path
        model = LoadedWhisper(model, processor, Path(name) if name and Path(name).is_dir() else None)
    if device is not None and check_device(device).type != model.model.device.type:
        raise InputError(
            f"`device` must be that of the loaded `model`, {model.model.device}, but is {show(str(device))}. Leave "
            "it out."
        )
    return model


def as_drafter(whisper: LoadedWhisper, drafter: DraftedBy) -> Drafter | PreTrainedModel | str | None:
    """`drafter` as `transcribe` takes it -> as `speculate` takes it: folders of heads are read."""
    if isinstance(drafter, str) and drafter in DRAFTERS:
        return drafter
    if isinstance(drafter, (str, bytes, os.PathLike)):
        return whisper.heads(None if drafter == HEADS else drafter)
    return drafter
