"""Loads published HiFi-GAN vocoders from safetensors, and converts the generator files of HiFi-GAN's authors.

transformers' `SpeechT5HifiGan` and `FastSpeech2ConformerHifiGan` load from a folder with safetensors. The authors'
generator file (`generator_v1`, `g_02500000`, ... beside its `config.json`) is a pickle. `convert_hifigan` reads only
tensors from it, and writes such a folder.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    FastSpeech2ConformerHifiGan,
    FastSpeech2ConformerHifiGanConfig,
    SpeechT5HifiGan,
    SpeechT5HifiGanConfig,
)

from mmdec.checks.weights import REJECTED_SETTINGS, build_with_weights, load_pretrained, read_settings, report_damage
from mmdec.daspeech.vocoder import ESPNET, SPEECHT5, HifiGanVocoder, MelKind
from mmdec.errors import InputError
from mmdec.hub.publish import atomic_folder, new_folder
from mmdec.io.audio import HOP, MELS, WINDOW

SIZES = (
    "model_in_dim",
    "upsample_rates",
    "upsample_kernel_sizes",
    "upsample_initial_channel",
    "resblock_kernel_sizes",
    "resblock_dilation_sizes",
    "normalize_before",
)
MELS_KEY = "mmdec_mels"  # in the config of a converted generator: the key under which its kind of mels is described


def load_hifigan(vocoder: str | Path) -> HifiGanVocoder:
    """Load the HiFi-GAN vocoder in a folder with safetensors.

    Raises:
        InputError: If there are no such weights, or their kind of mels cannot be computed from mmdec's.
    """
    path = Path(vocoder)
    if path.is_file():
        raise InputError(
            f"`vocoder` must be a folder with safetensors, but is the file '{vocoder}', and pickles are not "
            "read. Convert the authors' generator file with `mmdec convert hifigan IN OUT`."
        )
    with report_damage(f"`vocoder` must hold whole HiFi-GAN weights, but '{vocoder}' does not", "Download them again."):
        return _read(path)


def _read(folder: Path) -> HifiGanVocoder:
    """Read a HiFi-GAN in transformers' format; the mels that it expects follow from its type or config.json."""
    if not (folder / "config.json").is_file():
        raise InputError(f"`vocoder` must hold a config.json, but '{folder}' does not. Check the path.")
    described = read_settings(folder / "config.json", "vocoder")
    kind = str(described.get("model_type", ""))
    if kind == SpeechT5HifiGanConfig.model_type:
        network, settings, usual = SpeechT5HifiGan, SpeechT5HifiGanConfig, SPEECHT5
    elif kind == FastSpeech2ConformerHifiGanConfig.model_type:
        network, settings, usual = FastSpeech2ConformerHifiGan, FastSpeech2ConformerHifiGanConfig, ESPNET
    else:
        raise InputError(
            f"`vocoder` must be a SpeechT5HifiGan or FastSpeech2ConformerHifiGan, but its model_type is {kind!r}. "
            "Name the folder or Hugging Face id of one of these."
        )
    config = settings.from_dict({name: value for name, value in described.items() if name not in REJECTED_SETTINGS})
    if MELS_KEY in described:
        usual = MelKind(**described[MELS_KEY])
    rate = described.get("sampling_rate", usual.sample_rate)  # some published configurations have no sample rate
    if rate != usual.sample_rate:
        raise InputError(
            f"`vocoder` of type {kind} must speak at {usual.sample_rate} Hz, but speaks at {rate}, and its mels are "
            "not known. Convert the authors' file, whose config.json describes them: `mmdec convert hifigan IN OUT`."
        )
    _check_mels(config.model_in_dim, math.prod(config.upsample_rates), usual.hop)
    return HifiGanVocoder(load_pretrained(network, config, folder, "vocoder").eval(), usual)


def convert_hifigan(source: str | os.PathLike[str], directory: str | os.PathLike[str]) -> Path:
    """Convert the authors' generator file, with config.json next to it, to a folder that `load_hifigan` reads.

    From the pickle only tensors and plain values are read; its code is not run.

    Returns:
        `directory`.

    Raises:
        InputError: For a generator with residual blocks of type 2, and for mels that cannot be computed from mmdec's.
    """
    target = new_folder(directory)
    generator, mels = read_official(Path(source))
    setattr(generator.config, MELS_KEY, asdict(mels))
    with atomic_folder(target) as fresh:
        generator.save_pretrained(fresh)
    return target


def read_official(path: Path) -> tuple[FastSpeech2ConformerHifiGan, MelKind]:
    """Read the authors' generator file, with config.json next to it.

    Returns:
        The generator, and its kind of mels.

    Raises:
        InputError: For a generator with residual blocks of type 2, and for mels that cannot be computed from mmdec's.
    """
    if not path.is_file() or not path.with_name("config.json").is_file():
        raise InputError(
            f"`source` must be a generator file with its config.json beside it, but '{path}' is not. Download both."
        )
    described = read_settings(path.with_name("config.json"), "source")
    with report_damage(f"`source` must hold a whole HiFi-GAN generator, but '{path}' does not"):
        return _official(path, described)


def vocoder_config(vocoder: HifiGanVocoder) -> dict[str, Any]:
    """Describe a generator's sizes and its kind of mels as an entry of config.json, which `build_vocoder` reads."""
    sizes = {name: getattr(vocoder.generator.config, name) for name in SIZES}
    return {"model_type": FastSpeech2ConformerHifiGanConfig.model_type, **sizes, MELS_KEY: asdict(vocoder.expects)}


def build_vocoder(described: Mapping[str, Any], state: Mapping[str, Tensor], folder: Path) -> HifiGanVocoder:
    """Make the HiFi-GAN that a translator's folder contains.

    Args:
        described: The entry `vocoder` of config.json, from `vocoder_config`.
        state: Tensors by name.
        folder: For messages.

    Raises:
        InputError: If the weights do not fit.
        ValueError: For a vocoder of another class.
    """
    if described["model_type"] != FastSpeech2ConformerHifiGanConfig.model_type:
        raise ValueError(f"its vocoder is a {described['model_type']!r:.60}")
    config = FastSpeech2ConformerHifiGanConfig(**{name: described[name] for name in SIZES})
    kind = MelKind(**described[MELS_KEY])
    _check_mels(config.model_in_dim, math.prod(config.upsample_rates), kind.hop, "model")
    return build_with_weights(
        lambda: HifiGanVocoder(FastSpeech2ConformerHifiGan(config), kind, kind), state, "model", folder
    ).eval()


def _official(path: Path, described: dict[str, Any]) -> tuple[FastSpeech2ConformerHifiGan, MelKind]:
    """Read the authors' generator file.

    Args:
        described: The content of config.json next to it.

    Returns:
        The generator, and its kind of mels.
    """
    if str(described.get("resblock", "1")) != "1":
        raise InputError("`source` must have residual blocks of type 1 (V1, V2), but has type 2. Use V1 or V2.")
    windows = (described.get("n_fft", WINDOW), described.get("win_size", WINDOW))
    if windows != (WINDOW, WINDOW):
        raise InputError(f"`source` must use mel windows of {WINDOW} samples, but uses {windows}. Convert another one.")
    bands, hop = described.get("num_mels", MELS), described.get("hop_size", HOP)
    _check_mels(bands, math.prod(described["upsample_rates"]), hop, "source")
    sizes = ("upsample_rates", "upsample_kernel_sizes", "upsample_initial_channel", "resblock_kernel_sizes")
    config = FastSpeech2ConformerHifiGanConfig(
        model_in_dim=bands,
        resblock_dilation_sizes=described["resblock_dilation_sizes"],
        normalize_before=False,
        **{name: described[name] for name in sizes},
    )
    stored = torch.load(path, map_location="cpu", weights_only=True)
    state = official_names(stored.get("generator", stored))
    state |= {"mean": torch.zeros(bands), "scale": torch.ones(bands)}
    kind = MelKind(
        sample_rate=described.get("sampling_rate", 22_050),
        hop=hop,
        f_min=float(described.get("fmin", 0)),
        f_max=float(described.get("fmax") or 8000),
    )
    return build_with_weights(lambda: FastSpeech2ConformerHifiGan(config), state, "source", path).eval(), kind


def official_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the authors' state dict to transformers' tensor names, and weight normalisation to plain weights."""
    result: dict[str, Tensor] = {}
    for name, value in state.items():
        mapped = re.sub(r"^ups\.", "upsampler.", name)
        if mapped.endswith(".weight_g"):
            continue
        if mapped.endswith(".weight_v"):
            gain = state[name[:-1] + "g"]
            norm = value.flatten(1).norm(dim=1).view(-1, *[1] * (value.dim() - 1))
            mapped, value = mapped[: -len("_v")], gain * value / norm
        result[mapped] = value
    return result


def _check_mels(bands: int, factor: int, hop: int, argument: str = "vocoder") -> None:
    """Raise InputError unless a generator fits its mels.

    Args:
        bands: Number of mel bands that it reads.
        factor: Number of samples that it makes per frame.
        hop: Number of samples between frames of the mels.
        argument: Name of the caller's argument.
    """
    if bands != MELS:
        raise InputError(f"`{argument}` must take {MELS} mel bands, but takes {bands}. Use another vocoder.")
    if factor != hop:
        raise InputError(
            f"`{argument}` must give {hop} samples a frame, as its mels have, but gives {factor}. Use another vocoder."
        )
