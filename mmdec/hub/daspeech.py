"""DASpeech on disk: a folder of safetensors, loaded as parts and written atomically.

A model's folder holds config.json, encoder.safetensors, model.safetensors (the rest of the network) and
vocoder.safetensors, all in half precision, units.json, the word decoder's files, README.md (the card) and
provenance.json.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mmdec.checks.weights import PICKLES, check_counts, checked_file, fill, read_settings, read_weights
from mmdec.hub.find import HUB_FILES, HUB_ID, download, find, kind, path_text
from mmdec.hub.publish import PROVENANCE, check_replaceable, keep_card, keep_texts, same_weights, whole_folder
from mmdec.nn.daspeech import DASpeech, DASpeechConfig
from mmdec.nn.vocoder import GriffinLimVocoder, Vocoder, VocoderConfig
from mmdec.phonetics.decoder import WordDecoder
from mmdec.provenance import CARD, portable, stamp
from mmdec.types import InputError, MmdecError

DEFAULT_MODEL = "daspeech-phrasebook"
GRIFFIN_LIM = "griffin-lim"
VOCODER_RULE = f"{GRIFFIN_LIM}, a directory"
# separate files, because code hosts refuse large ones
WEIGHTS = ("encoder.safetensors", "model.safetensors", "vocoder.safetensors")
CONFIDENCE = "confidence.json"
NEEDED = ("config.json", *WEIGHTS, "units.json")


@final
@dataclass(frozen=True)
class Decoding:
    """How a path through the graph is chosen. Tuned on the dev split and stored with the model."""

    lookahead_weight: float = 1.0
    length_penalty: float = 1.0
    collapse: bool = False  # merge equal neighbours, as the paper's released code does


@final
@dataclass(frozen=True)
class DASpeechParts:
    """The networks and tables of one model, on one device.

    `vocoder` has the interface of `Vocoder`: mel (B, F, 80), lengths (B,) -> samples (B, F * 256).
    """

    model: DASpeech
    vocoder: nn.Module
    words: WordDecoder
    units: tuple[str, ...]  # the phones, in the order of their numbers
    decoding: Decoding
    name: str  # name of the folder
    folder: Path | None = None  # the folder they were loaded from


def resolve(model: str | os.PathLike[str]) -> Path:
    """The directory of a complete translator, given a name, directory or hub id; see `find`."""
    return complete(find(model), os.fspath(model))


def save_model(
    directory: str | os.PathLike[str],
    model: DASpeech,
    vocoder: Vocoder,
    units: Sequence[str],
    words: WordDecoder,
    *,
    decoding: Decoding = Decoding(),
    card: str | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model's directory, with weights in half precision. If writing fails, the old one stays as it was.

    card: None keeps the existing card if the weights are the same, else raises InputError, because its figures would be
        those of other weights.
    provenance: added to the command, versions, commit and date, which are always written.
    """
    target = Path(directory)
    with whole_folder(target) as fresh:
        config = {
            "system": "daspeech",
            "model_type": "mmdec-daspeech",  # read by transformers' AutoConfig
            "architecture": model.config.to_dict(),
            "vocoder": asdict(vocoder.config),
            "decoding": asdict(decoding),
        }
        _write_json(fresh / "config.json", config)
        _write_json(fresh / "units.json", list(units))
        _write_json(fresh / "provenance.json", {**stamp(next(model.parameters()).device), **portable(provenance or {})})
        state = _half(model.state_dict())
        encoder = {name: state.pop(name) for name in list(state) if name.startswith("encoder.")}
        save_file(encoder, fresh / "encoder.safetensors")
        save_file(state, fresh / "model.safetensors")
        save_file(_half(vocoder.state_dict()), fresh / "vocoder.safetensors")
        words.save(fresh)
        if card is not None:
            (fresh / CARD).write_text(card, encoding="utf-8")
        else:
            keep_card(target, fresh)
    return target


def save_parts(directory: str | os.PathLike[str], parts: DASpeechParts) -> Path:
    """Write what `read_parts` returned.

    Card, confidence and provenance are copied only if the weights are still those of the source folder: their figures
    would not hold for others. Raises: InputError for another vocoder than the model's own, or if the target folder
    holds foreign files.
    """
    if not isinstance(parts.vocoder, Vocoder):
        raise InputError(
            f"`vocoder` must be the model's own to be saved, but is a {type(parts.vocoder).__name__}. Load the model "
            "without `vocoder`."
        )
    target = Path(directory)
    with tempfile.TemporaryDirectory(prefix="mmdec-save-") as temporary:
        plain = Path(temporary) / "model"
        save_model(plain, parts.model, parts.vocoder, parts.units, parts.words, decoding=parts.decoding)
        if parts.folder is not None and same_weights(parts.folder, plain):
            keep_texts(parts.folder, plain, (CARD, CONFIDENCE, PROVENANCE))
        check_replaceable(target, plain, (CARD, CONFIDENCE))
        with whole_folder(target) as fresh:
            shutil.copytree(plain, fresh, dirs_exist_ok=True)
    return target


def read_parts(directory: Path, device: torch.device, vocoder: str | os.PathLike[str] | None = None) -> DASpeechParts:
    """Load the model in `directory` (from `resolve`) to `device`.

    vocoder: None for the model's own, "griffin-lim" (no weights), or a directory or hub id of published HiFi-GAN
        weights.
    Raises: InputError if files are damaged, outside the folder or not safetensors.
    """
    try:
        config = read_settings(directory / "config.json")
        if config["system"] != "daspeech":
            raise InputError(
                f"`model` must be of the system daspeech, but '{directory.name}' is {config['system']!r}. Name another."
            )
        units = _units(directory / "units.json")
        encoder, rest, spoken = (checked_file(directory, name) for name in WEIGHTS)
        state, voiced = read_weights([encoder, rest]), read_weights([spoken])
        check_counts(config["architecture"], state)
        check_counts(config["vocoder"], voiced)
        shape, sizes = DASpeechConfig.from_dict(config["architecture"]), VocoderConfig(**config["vocoder"])
        model = fill(lambda: DASpeech(shape, len(units)), state, "model", directory)
        own = fill(lambda: Vocoder(sizes), voiced, "model", directory)
        words = WordDecoder.load(directory)
        decoding = Decoding(**config.get("decoding", {}))
    except (InputError, MemoryError):
        raise
    except Exception as error:  # networks raise various errors for settings of wrong types
        raise InputError(
            f"`model` must be a whole translator, but '{directory}' is damaged or of another version "
            f"({type(error).__name__}: {error!s:.300}). Fetch it again."
        ) from error
    speaking = own if vocoder is None else _vocoder(vocoder)
    model, speaking = model.to(device), speaking.to(device)
    return DASpeechParts(model, speaking, words, tuple(units), decoding, directory.name, directory)


def _units(file: Path) -> list[str]:
    """The phones, in the order of their ids."""
    try:
        units = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"`model` must hold units.json as a JSON list, but '{file}' is damaged or of another version ({error}). "
            "Fetch it again."
        ) from error
    if not isinstance(units, list) or not all(isinstance(unit, str) for unit in units):
        raise InputError(f"`model` must hold units.json as a list of names, but '{file}' is none. Fetch it again.")
    return units


def _vocoder(source: str | os.PathLike[str]) -> nn.Module:
    """Load another vocoder than the model's own; all have the same interface."""
    text = path_text(source, "vocoder", VOCODER_RULE)
    if text == GRIFFIN_LIM:
        return GriffinLimVocoder()
    if not Path(text).exists() and not HUB_ID.fullmatch(text):
        raise InputError(
            f"`vocoder` must be {GRIFFIN_LIM}, or a directory or hub id of HiFi-GAN weights, "
            f"but is '{text}'. Leave it out for the model's own."
        )
    from mmdec.hub.hifigan import load_hifigan  # imported here because it imports transformers' models

    return load_hifigan(Path(text) if Path(text).exists() else download(text, HUB_FILES, "vocoder"))


def complete(directory: Path, name: str) -> Path:
    """Return the directory if it holds a complete translator, else raise InputError. name: what the caller gave."""
    system = kind(directory)
    if system not in ("", "daspeech"):
        raise InputError(
            f"`model` must translate speech, but '{name}' is {system!r}. Call `mmdec.transcribe` for a model that "
            "writes speech down."
        )
    missing = [file for file in NEEDED if not (directory / file).is_file()]
    if not missing:
        return directory
    pickles = [path.name for path in sorted(directory.iterdir()) if path.suffix in PICKLES]
    if pickles:
        raise InputError(
            f"`model` must hold safetensors, but '{name}' holds a pickle, {pickles[0]}. Export with `hub.save_model`."
        )
    raise InputError(f"`model` must hold {', '.join(NEEDED)}, but '{name}' lacks {', '.join(missing)}. Fetch it again.")


def _half(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    half = {name: (t.half() if t.is_floating_point() else t).detach().cpu().clone() for name, t in state.items()}
    broken = [name for name, tensor in half.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        raise MmdecError(
            f"`model` must fit half precision, but {broken[0]} overflows or is not finite. Train it again."
        )
    return half


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
