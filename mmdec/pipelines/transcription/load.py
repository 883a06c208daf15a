"""Loads the model and the drafter of a `transcribe` call; checks those that are already loaded."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from mmdec.checks.arguments import show
from mmdec.checks.devices import check_device, check_dtype, check_same_dtype
from mmdec.drafters.registry import drafter_entry, is_dotted
from mmdec.generation.drafter_choice import DraftedBy
from mmdec.hub.find import drafter_by_name, kind
from mmdec.hub.whisper import HEADS, KIND, LoadedWhisper, load_whisper
from mmdec.targets.hf_target import source_folder
from mmdec.types import InputError

__all__ = ["KIND", "LoadedTranscriber", "as_drafter", "as_whisper", "load_transcriber"]
LoadedTranscriber = LoadedWhisper  # the name that `mmdec.load` uses
load_transcriber = load_whisper
Model = str | os.PathLike[str] | WhisperForConditionalGeneration | LoadedWhisper


def as_whisper(
    model: Model,
    processor: WhisperProcessor | None,
    device: str | torch.device | None,
    dtype: torch.dtype | str | None = None,
) -> LoadedWhisper:
    """A Whisper with its processor.

    model: a shipped name, a directory or a hub id (loaded once for each device and dtype), or a loaded model.
    processor: of a loaded model; else None.
    device: None for a GPU if there is one. dtype: None for float32. For a loaded model, None or its own.
    Raises: InputError if there is no such model, files are damaged, the processor is missing or superfluous, or a
        loaded model has another device or dtype.
    """
    wanted = check_dtype(dtype)
    if isinstance(model, (str, bytes, os.PathLike)):
        if processor is not None:
            raise InputError("`processor` must be left out for a `model` that is named, which has one, but is given.")
        return load_whisper(model, device, wanted)
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
        model = LoadedWhisper(model, processor, source_folder(model))
    if device is not None and check_device(device).type != model.model.device.type:
        raise InputError(
            f"`device` must be that of the loaded `model`, {model.model.device}, but is {show(str(device))}. Leave "
            "it out."
        )
    check_same_dtype(dtype, model.model.dtype)
    return model


def as_drafter(whisper: LoadedWhisper, drafter: DraftedBy) -> DraftedBy:
    """Resolve `transcribe`'s argument `drafter` to one that `speculate` takes.

    "medusa" becomes the heads in the model's folder; a folder or hub id of heads becomes those heads, loaded once in
    the model's device and precision. Anything else stays as it is. Raises: InputError if there are no heads for this
    model.
    """
    if isinstance(drafter, str) and drafter != HEADS and (drafter_entry(drafter) is not None or is_dotted(drafter)):
        return drafter
    drafter = drafter_by_name(drafter, "drafter") or drafter
    if isinstance(drafter, (str, os.PathLike)) and drafter != HEADS and kind(Path(drafter)) not in ("", HEADS):
        return drafter  # another system's folder: `speculate` reads it
    if isinstance(drafter, (str, bytes, os.PathLike)):
        return whisper.heads(None if drafter == HEADS else drafter)
    return drafter
