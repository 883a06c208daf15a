"""`mmdec.load`: loads any model folder of mmdec, by shipped name, folder or Hugging Face id."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from mmdec.checks.devices import check_dtype
from mmdec.daspeech.options import DASPEECH_KIND, DEFAULT_TRANSLATOR
from mmdec.drafters.registry import loader_names
from mmdec.errors import InputError
from mmdec.hub.find import find_model, model_kind

if TYPE_CHECKING:
    from mmdec.daspeech.translator import SpeechTranslator
    from mmdec.pretrained.language_model import LoadedLanguageModel
    from mmdec.pretrained.vlm import LoadedVlm
    from mmdec.whisper.transcribe import LoadedTranscriber

    Loaded = SpeechTranslator | LoadedTranscriber | LoadedVlm | LoadedLanguageModel


def load(
    model: str | os.PathLike[str] = DEFAULT_TRANSLATOR,
    device: str | torch.device | None = None,
    *,
    vocoder: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
) -> Loaded:
    """Load a model for `translate_speech`, `transcribe`, `describe` or `generate`.

    The first three also accept a model's name. A model is loaded once for each folder, device and dtype; later calls
    return the same object.

    Args:
        model: A shipped name, a folder or a Hugging Face id.
        device: Where the model runs. Default None: a GPU if there is one, else the CPU.
        vocoder: Only for a translator: a folder or Hugging Face id of HiFi-GAN weights. Default None: the model's own.
        dtype: Precision of the weights. Default None: float32.

    Returns:
        A `SpeechTranslator` (for `translate_speech`), a `LoadedTranscriber`, model and processor (for `transcribe`), a
        `LoadedVlm`, model and processor (for `describe`), or a `LoadedLanguageModel`, model and tokenizer (for
        `generate`). The folder's config.json decides which.

    Raises:
        InputError: If the model is not found (the message says how to get it); if a file is damaged, lies outside the
            folder or is not safetensors; if `vocoder` is given for a model that is not a translator; or for a drafter's
            folder (use `load_drafter`).
    """
    directory = find_model(model, system=None, files=["config.json"])
    system = model_kind(directory)
    if system in loader_names():
        raise InputError(
            f"`model` must be a model by itself, but '{os.fspath(model)}' is a drafter, {system}. Call "
            "`mmdec.load_drafter(folder, model)` with the model that it drafts for."
        )
    if system in ("", DASPEECH_KIND):
        from mmdec.daspeech.translate import load_translator

        return load_translator(model, device, vocoder=vocoder, dtype=dtype)
    if vocoder is not None:
        raise InputError(
            f"`vocoder` must be left out, because '{os.fspath(model)}' is {system!r}, which does not speak."
        )
    from mmdec.pretrained.audio_lm import audio_family
    from mmdec.whisper.checkpoint import WHISPER_KIND
    from mmdec.whisper.transcribe import load_transcriber

    if system == WHISPER_KIND or audio_family(directory):
        return load_transcriber(model, device, dtype)
    from mmdec.pretrained.language_model import is_language_model, load_language_model_once
    from mmdec.pretrained.vlm import is_vision_language_model, load_vlm

    if is_language_model(directory) and not is_vision_language_model(directory):
        return load_language_model_once(model, device, check_dtype(dtype))
    return load_vlm(model, device, check_dtype(dtype))
