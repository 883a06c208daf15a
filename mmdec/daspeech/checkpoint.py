"""Reads and writes the folders of translators. Weights are safetensors; a folder is written atomically.

The folder of a DASpeech holds config.json, encoder.safetensors, model.safetensors (the rest of the network),
vocoder.safetensors, all in half precision, units.json, README.md (the model card) and provenance.json. A translator of
word pieces has other files (`piece_checkpoint.py`). `resolve`, `read_parts` and `save_parts` accept both kinds of
translators.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import save_file
from torch import nn

from mmdec.checks.devices import PASSED_ON
from mmdec.checks.weights import (
    PICKLE_SUFFIXES,
    build_with_weights,
    check_layer_counts,
    read_settings,
    read_weights,
    weight_file,
)
from mmdec.daspeech import piece_checkpoint
from mmdec.daspeech.checkpoint_files import (
    VOCODER,
    DecodingSettings,
    check_decoding,
    check_model_vocoder,
    describe_vocoder,
    read_names,
    read_vocoder,
    to_half_precision,
    write_json,
)
from mmdec.daspeech.model import DASpeech, DASpeechConfig
from mmdec.daspeech.options import DASPEECH_KIND
from mmdec.daspeech.piece_checkpoint import PieceTranslatorParts, read_piece_translator, save_piece_translator
from mmdec.daspeech.vocoder import OUR_MELS, HifiGanVocoder, MelKind, Vocoder
from mmdec.errors import InputError
from mmdec.hub.find import HUB_FILES, HUB_ID, download, find_model, model_kind, path_text
from mmdec.hub.provenance import CARD, command_record, portable
from mmdec.hub.publish import PROVENANCE, atomic_folder, check_replaceable, copy_texts, keep_card, same_weights
from mmdec.tasks.confidence import CONFIDENCE_FILE
from mmdec.whisper.checkpoint import WHISPER_KIND, load_whisper_encoder
from mmdec.whisper.unpadded_encoder import UnpaddedEncoder

ENCODER_KINDS = (WHISPER_KIND, DASPEECH_KIND)  # values of `kind` for the models that `load_encoder` accepts
PHONE_LAYOUT = "phones"
VOCODER_RULE = "a folder"
# weights are divided into several files, because code hosts do not accept large files
WEIGHT_FILES = ("encoder.safetensors", "model.safetensors", VOCODER)

REQUIRED_FILES = ("config.json", *WEIGHT_FILES, "units.json")


@final
@dataclass(frozen=True)
class DASpeechParts:
    """The networks and tables of one DASpeech translator, on one device.

    `vocoder`: mel (B, F, 80), lengths (B,) -> samples (B, F * 256), like `Vocoder`.
    """

    model: DASpeech
    vocoder: nn.Module
    units: tuple[str, ...]  # names of the phones, ordered by id
    decoding: DecodingSettings
    name: str  # name of the model's folder
    folder: Path | None = None  # the folder that the parts were loaded from; None: they were not loaded from a folder
    mels: MelKind = OUR_MELS  # the kind of mel spectrogram that the acoustic model gives the vocoder

    @property
    def networks(self) -> tuple[nn.Module, ...]:
        """All modules that have weights."""
        return self.model, self.vocoder


def resolve(model: str | os.PathLike[str]) -> Path:
    """Find the folder of a translator, and check that its files are there.

    Args:
        model: A shipped name, a folder, or a Hugging Face id, which is downloaded.
    """
    return check_complete(find_model(model, DASPEECH_KIND), os.fspath(model))


def save_model(
    directory: str | os.PathLike[str],
    model: DASpeech,
    vocoder: Vocoder | HifiGanVocoder,
    units: Sequence[str],
    *,
    decoding: DecodingSettings = DecodingSettings(),
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Write a translator's folder, with weights in half precision.

    If writing fails, an existing folder is not changed. Its model card is kept.

    Args:
        directory: The folder to write.
        model: The network.
        vocoder: The model's own vocoder.
        units: Names of the phones, ordered by id.
        decoding: Decoding options, which become the model's defaults.
        provenance: Entries of provenance.json in addition to command, versions, commit and date, which are always
            written.

    Raises:
        InputError: If an existing folder has a model card and other weights, for which its figures would be wrong.
    """
    target = Path(directory)
    with atomic_folder(target) as fresh:
        config = {
            "system": DASPEECH_KIND,
            "model_type": "mmdec-daspeech",
            "architecture": model.config.to_dict(),
            "vocoder": describe_vocoder(vocoder),
            "decoding": asdict(decoding),
        }
        write_json(fresh / "config.json", config)
        write_json(fresh / "units.json", list(units))
        write_json(
            fresh / "provenance.json", {**command_record(next(model.parameters()).device), **portable(provenance or {})}
        )
        state = to_half_precision(model.state_dict())
        encoder = {name: state.pop(name) for name in list(state) if name.startswith("encoder.")}
        save_file(encoder, fresh / "encoder.safetensors")
        save_file(state, fresh / "model.safetensors")
        save_file(to_half_precision(vocoder.state_dict()), fresh / VOCODER)
        keep_card(target, fresh)
    return target


def save_parts(directory: str | os.PathLike[str], parts: DASpeechParts | PieceTranslatorParts) -> Path:
    """Write a translator to a folder: its networks, tables and settings.

    Args:
        directory: The folder to write.
        parts: From `read_parts`. The model card, the calibration of the confidence and provenance.json are copied only
            if the weights are still those of the source folder, because their figures hold only for these weights.

    Raises:
        InputError: For a vocoder that is not the model's own, or if the folder holds files that do not belong to a
            model.
    """
    vocoder = check_model_vocoder(parts.vocoder, parts.mels)
    target = Path(directory)
    with tempfile.TemporaryDirectory(prefix="mmdec-save-") as temporary:
        plain = Path(temporary) / "model"
        if isinstance(parts, PieceTranslatorParts):
            save_piece_translator(plain, parts)
        else:
            save_model(plain, parts.model, vocoder, parts.units, decoding=parts.decoding)
        if parts.folder is not None and same_weights(parts.folder, plain):
            copy_texts(parts.folder, plain, (CARD, CONFIDENCE_FILE, PROVENANCE))
        check_replaceable(target, plain, (CARD, CONFIDENCE_FILE))
        with atomic_folder(target) as fresh:
            shutil.copytree(plain, fresh, dirs_exist_ok=True)
    return target


def read_parts(
    directory: Path, device: torch.device, vocoder: str | os.PathLike[str] | None = None
) -> DASpeechParts | PieceTranslatorParts:
    """Load the translator in a folder (from `resolve`) to a device.

    Args:
        directory: The translator's folder.
        device: The device to which it is moved.
        vocoder: None for the model's own; or a folder or Hugging Face id of published HiFi-GAN weights.

    Raises:
        InputError: If files are damaged, outside the folder or not safetensors.
    """
    try:
        config = read_settings(directory / "config.json")
        if config["system"] != DASPEECH_KIND:
            raise InputError(
                f"`model` must be of the system daspeech, but '{directory.name}' is {config['system']!r}. Name a "
                "translator's folder."
            )
        read = {PHONE_LAYOUT: _read_daspeech, piece_checkpoint.LAYOUT: read_piece_translator}.get(_layout_name(config))
        if read is None:
            raise ValueError(f"its layout is {config['layout']!r:.60}")
        parts = read(directory, config)
    except PASSED_ON:
        raise
    except Exception as error:  # all exceptions, because a setting of a wrong type may raise any exception
        raise InputError(
            f"`model` must be a whole translator, but '{directory}' is damaged or of another version "
            f"({type(error).__name__}: {error!s:.300}). Download it again."
        ) from error
    if vocoder is not None:
        if parts.mels != OUR_MELS:
            raise InputError(
                f"`vocoder` must be left out for '{directory.name}', whose mels only its own vocoder reads, but is "
                f"'{os.fspath(vocoder)}'. Leave it out."
            )
        parts = replace(parts, vocoder=_vocoder(vocoder))
    for network in parts.networks:
        network.to(device)
    return parts


def load_piece_translator(model: str | os.PathLike[str]) -> PieceTranslatorParts:
    """Load a translator of word pieces by shipped name, folder or Hugging Face id.

    Raises:
        InputError: For a DASpeech.
    """
    parts = read_parts(resolve(model), torch.device("cpu"))
    if not isinstance(parts, PieceTranslatorParts):
        raise InputError(
            f"`model` must be a translator of word pieces, but '{os.fspath(model)}' is one of phones. Name another."
        )
    return parts


def load_encoder(model: str | os.PathLike[str]) -> UnpaddedEncoder:
    """Load the speech encoder of a Whisper, or of a translator of word pieces, in float32 and frozen.

    Args:
        model: A shipped name, a folder or a Hugging Face id.

    Raises:
        InputError: If there is no such model, or its files are damaged.
    """
    folder = find_model(
        model, WHISPER_KIND, ("config.json", "model.safetensors", "model-*.safetensors", "*.index.json")
    )
    if model_kind(folder) == DASPEECH_KIND:
        return load_piece_translator(folder).model.encoder.eval().requires_grad_(False)
    return load_whisper_encoder(folder)


def _read_daspeech(directory: Path, config: Mapping[str, Any]) -> DASpeechParts:
    units = read_names(directory / "units.json")
    state = read_weights([weight_file(directory, name) for name in WEIGHT_FILES if name != VOCODER])
    check_layer_counts(config["architecture"], state)
    shape = DASpeechConfig.from_dict(config["architecture"])
    model = build_with_weights(lambda: DASpeech(shape, len(units)), state, "model", directory)
    vocoder = read_vocoder(directory, config)
    decoding = check_decoding(DecodingSettings(**config.get("decoding", {})))
    mels = vocoder.received if isinstance(vocoder, HifiGanVocoder) else OUR_MELS
    return DASpeechParts(model, vocoder, tuple(units), decoding, directory.name, directory, mels)


def read_layout(directory: Path) -> str:
    """Return the kind of translator in a folder: "phones" (a DASpeech) or "pieces" (`daspeech/piece_checkpoint.py`)."""
    return _layout_name(read_settings(directory / "config.json"))


def _layout_name(config: Mapping[str, Any]) -> str:
    return str(config.get("layout", PHONE_LAYOUT))


def _vocoder(source: str | os.PathLike[str]) -> nn.Module:
    """Load a vocoder that is not the model's own.

    Args:
        source: A folder or Hugging Face id of HiFi-GAN weights.
    """
    text = path_text(source, "vocoder", VOCODER_RULE)
    if not Path(text).exists() and not HUB_ID.fullmatch(text):
        raise InputError(
            f"`vocoder` must be a folder or Hugging Face id of HiFi-GAN weights, but is '{text}'. Leave it out for the "
            "model's own."
        )
    from mmdec.daspeech.hifigan import load_hifigan  # imported here because it imports transformers' models

    return load_hifigan(Path(text) if Path(text).exists() else download(text, HUB_FILES, "vocoder"))


def check_complete(directory: Path, name: str) -> Path:
    """Check that the folder has all files of a translator, and return it.

    Args:
        directory: The translator's folder.
        name: The value of the caller's argument, for the error.

    Raises:
        InputError: If a file is missing or the model is not a translator.
    """
    system = model_kind(directory)
    if system not in ("", DASPEECH_KIND):
        raise InputError(
            f"`model` must translate speech, but '{name}' is {system!r}. Call `mmdec.transcribe` for a model that "
            "transcribes speech."
        )
    needed = _required_files(directory)
    missing = [file for file in needed if not (directory / file).is_file()]
    if not missing:
        return directory
    pickles = [path.name for path in sorted(directory.iterdir()) if path.suffix in PICKLE_SUFFIXES]
    if pickles:
        raise InputError(
            f"`model` must hold safetensors, but '{name}' holds a pickle, {pickles[0]}. Save it as safetensors."
        )
    raise InputError(
        f"`model` must hold {', '.join(needed)}, but '{name}' lacks {', '.join(missing)}. Download it again."
    )


def _required_files(directory: Path) -> tuple[str, ...]:
    """Return the names of the files that a translator's folder must have, which depend on the translator's layout.

    Raises:
        InputError: For a damaged config.json.
    """
    if not (directory / "config.json").is_file():
        return REQUIRED_FILES
    return {PHONE_LAYOUT: REQUIRED_FILES, piece_checkpoint.LAYOUT: piece_checkpoint.REQUIRED_FILES}.get(
        read_layout(directory), ("config.json",)
    )
