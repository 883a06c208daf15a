"""Loads a translator by name, once per process; used by `mmdec.load`."""

from __future__ import annotations

import os

import torch

from mmdec.checks.arguments import show
from mmdec.checks.devices import check_device, check_dtype
from mmdec.hub.daspeech import DEFAULT_MODEL, VOCODER_RULE, read_parts, resolve
from mmdec.hub.find import LoadedModels, path_text, version
from mmdec.pipelines.call import check_placed
from mmdec.pipelines.confidence import read_calibrations
from mmdec.pipelines.translation.translator import SpeechTranslator
from mmdec.types import InputError

_translators = LoadedModels[SpeechTranslator]()


def load(
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    device: str | torch.device | None = None,
    *,
    vocoder: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
) -> SpeechTranslator:
    """Load a translator, once for each model, device, dtype and vocoder; again if the folder's files have changed.

    model: a shipped name, a directory or a hub id.
    device: None: a GPU if there is one.
    vocoder: None: the model's own; "griffin-lim", which needs no weights; or a directory or hub id of HiFi-GAN weights.
    dtype: None: float32. bfloat16 and float16 apply to matrix products only; features, weights, the graph's
        probabilities and the vocoder stay in float32.
    Raises: InputError if model or vocoder is not found (the message says how to get it), is damaged, lies outside its
        folder or has no safetensors, and for a device that this machine does not have.
    """
    directory = resolve(model)
    checked, products = check_device(device), _products(dtype)
    if vocoder is not None:
        path_text(vocoder, "vocoder", VOCODER_RULE)
    key = (version(directory), str(checked), str(products), None if vocoder is None else version(vocoder))
    return _translators.get(
        key, lambda: SpeechTranslator(read_parts(directory, checked, vocoder), read_calibrations(directory), products)
    )


def as_translator(
    model: str | os.PathLike[str] | SpeechTranslator,
    device: str | torch.device | None,
    vocoder: str | os.PathLike[str] | None,
    dtype: torch.dtype | str | None = None,
) -> SpeechTranslator:
    """Resolve `translate_speech`'s argument `model` to a translator.

    model: a name, directory or hub id for `load`, or a loaded translator. With a loaded translator, `vocoder` must be
        None, and `device` and `dtype` must be None or those of the translator.
    Raises: InputError if these arguments do not fit, or if `load` raises it.
    """
    if not isinstance(model, SpeechTranslator):
        return load(model, device, vocoder=vocoder, dtype=dtype)
    if vocoder is not None:
        raise InputError(
            f"`vocoder` must be left out with a loaded `model`, which has one, but is {show(vocoder)}. Give it to "
            "`load`."
        )
    check_placed(model, device, dtype, "Leave it out, or load the model there.")
    return model


def _products(dtype: torch.dtype | str | None) -> torch.dtype:
    found = check_dtype(dtype)
    if found == torch.float64:
        raise InputError(f"`dtype` must be float32, bfloat16 or float16 for a translator, but is {found}. Choose one.")
    return found
