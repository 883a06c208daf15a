"""Loads Whisper's encoder, from a Whisper or from a translator, as a network that does not pad recordings to 30 s."""

from __future__ import annotations

import os
from pathlib import Path

from mmdec.checks.weights import check_counts, fill, read_settings, read_weights, shards
from mmdec.hub.daspeech import heard_parts
from mmdec.hub.find import find, kind
from mmdec.nn.whisper_encoder import WhisperEncoder, WhisperEncoderConfig
from mmdec.types import InputError

KIND = "whisper"
KINDS = (KIND, "daspeech")  # models that have such an encoder
PREFIX = "model.encoder."


def load_encoder(model: str | os.PathLike[str]) -> WhisperEncoder:
    """Load the encoder of a Whisper or of a `HeardTranslator`, by shipped name, folder or hub id; in float32, frozen.

    Raises: InputError if there is no such model, or its files are damaged.
    """
    folder: Path = find(model, KIND, ("config.json", "model.safetensors", "model-*.safetensors", "*.index.json"))
    settings = read_settings(folder / "config.json")
    if kind(folder) == "daspeech":
        return heard_parts(folder).model.encoder.eval().requires_grad_(False)
    if settings.get("model_type") != KIND:
        raise InputError(
            f"`model` must be a Whisper, but '{os.fspath(model)}' is {settings.get('model_type')!r:.60}. Name another."
        )
    try:
        config = WhisperEncoderConfig.of(settings)
    except KeyError as error:
        raise InputError(f"`model` must name its sizes, but '{folder}' lacks {error}. Fetch it again.") from None
    weights = read_weights(shards(folder, prefixes=(PREFIX,)), prefixes=(PREFIX,))
    check_counts(settings, weights)
    state = {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()}
    return fill(lambda: WhisperEncoder(config), state, "model", folder).eval().requires_grad_(False)
