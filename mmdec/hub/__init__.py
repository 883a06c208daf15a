"""Models on disk: found by name, path or hub id, loaded once, written whole or not at all. Safetensors only.

A model's directory holds config.json, encoder.safetensors, model.safetensors (the rest of the network) and
vocoder.safetensors, all in half precision, units.json, what its word decoder needs, README.md (the card) and
provenance.json.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mmdec.checks.arguments import show
from mmdec.checks.weights import PICKLES, check_counts, checked_file, fill, read_settings, read_weights
from mmdec.hub.publish import whole_folder
from mmdec.nn.daspeech import DASpeech, DASpeechConfig
from mmdec.nn.griffin_lim import GriffinLimVocoder
from mmdec.nn.vocoder import Vocoder, VocoderConfig
from mmdec.phonetics.decoder import WordDecoder
from mmdec.pipelines.translation.translator import Decoding, SpeechTranslator
from mmdec.provenance import CARD, keep_card, stamp
from mmdec.runtime import check_device
from mmdec.types import InputError, MmdecError

DEFAULT_MODEL = "daspeech-phrasebook"
GRIFFIN_LIM = "griffin-lim"
PACKAGE = Path(__file__).resolve().parents[1]
PLACES = (PACKAGE / "_models", PACKAGE.parent / "models")  # an installed wheel, then a checkout
WEIGHTS = ("encoder.safetensors", "model.safetensors", "vocoder.safetensors")  # apart: hosts of code refuse large files
NEEDED = ("config.json", *WEIGHTS, "units.json")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")
HUB_FILES = ["*.safetensors", "*.json", "*.tsv", "*.arpa", "*.md"]

_loaded: dict[tuple[object, ...], SpeechTranslator] = {}
_loading = threading.Lock()


def names(system: str = "daspeech") -> list[str]:
    """The models of one system, or of one of transformers' types, that came with this installation."""
    found = {path.parent.name: path for place in reversed(PLACES) for path in place.glob("*/config.json")}
    return sorted(name for name, path in found.items() if kind(path.parent) == system)


def kind(directory: Path) -> str:
    """What a model's config.json says it is: one of mmdec's systems or of transformers' types; "" where it does not."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        return str(config.get("system") or config.get("model_type") or "")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""


def resolve(model: str | os.PathLike[str]) -> Path:
    """The directory of a complete translator: see `find`."""
    return _complete(find(model), os.fspath(model))


def find(model: str | os.PathLike[str], system: str = "daspeech", files: Sequence[str] = HUB_FILES) -> Path:
    """A shipped model's name, a directory, or a Hugging Face id ("owner/name", "owner/name@revision") -> directory.

    system: whose names an error lists. files: patterns of what is fetched from the hub. What lies in the directory is
    for the caller to check.
    """
    text = path_text(model, "model", f"a shipped name ({', '.join(names(system)) or 'none is installed'}), a directory")
    path = Path(text)
    if path.suffix in PICKLES:
        raise InputError(f"`model` must hold safetensors, but is the pickle '{text}'. Export it with `hub.save_model`.")
    if path.is_dir():
        return path
    for place in PLACES:
        if re.fullmatch(r"[\w.-]+", text) and (place / text).is_dir():
            return place / text
    if HUB_ID.fullmatch(text) and not text.startswith("models/"):
        return _download(text, files)
    raise InputError(
        f"`model` must be a shipped name ({', '.join(names(system)) or 'none is installed'}), a directory or a hub id, "
        f"but is '{text}'. Check the spelling."
    )


def load(
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    device: str | torch.device | None = None,
    *,
    vocoder: str | os.PathLike[str] | None = None,
) -> SpeechTranslator:
    """A translator, ready to run; loaded once for each model, device and vocoder.

    `device` None takes a GPU where there is one. `vocoder` None is the model's own, "griffin-lim" needs no weights;
    anything else names published HiFi-GAN weights: a directory or a hub id.
    Raises InputError where the model is not found, damaged, outside its folder or no safetensors.
    """
    directory = resolve(model)
    place = check_device(device)
    if vocoder is not None:
        path_text(vocoder, "vocoder", f"{GRIFFIN_LIM}, a directory")
    with _loading:
        key = (version(directory), str(place), None if vocoder is None else version(vocoder))
        if key not in _loaded:
            _loaded[key] = _read(directory, place, vocoder)
        return _loaded[key]


def path_text(source: object, argument: str, rule: str) -> str:
    """A path or a name as text. Raises InputError for what is neither, and for what no file can be called."""
    try:
        text = os.fspath(source)  # type: ignore[call-overload] # a TypeError for what is no path
        if isinstance(text, str) and text:
            Path(text).exists()  # OSError where it is too long
            return text
    except (OSError, TypeError, ValueError):
        pass
    raise InputError(f"`{argument}` must be {rule} or a hub id, but is {show(source)}. Give its name as text.")


def version(source: str | os.PathLike[str]) -> tuple[str, int]:
    """What a directory, a file or a name stands for now: written again, it is another."""
    path = Path(source)
    if not path.exists():
        return os.fspath(source), 0
    files = path.iterdir() if path.is_dir() else [path]
    return str(path.resolve()), max((_changed(file) for file in files), default=0)


def _changed(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:  # a link to nowhere, or to itself
        return file.lstat().st_mtime_ns


def demo_file() -> Path:
    """The Gradio page, from the wheel or the checkout."""
    for path in (PACKAGE / "_demos" / "app.py", PACKAGE.parent / "demos" / "app.py"):
        if path.is_file():
            return path
    raise MmdecError("The demo page is missing from this installation. Install mmdec again.")


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
    """Write a model's directory whole or not at all. Weights become half precision.

    Without `card` the one that is there stays, if the weights do: else InputError, for its numbers would be of others.
    `provenance` adds to what is always written: command, versions, commit and date.
    """
    target = Path(directory)
    with whole_folder(target) as fresh:
        config = {
            "system": "daspeech",
            "architecture": model.config.to_dict(),
            "vocoder": asdict(vocoder.config),
            "decoding": asdict(decoding),
        }
        _write_json(fresh / "config.json", config)
        _write_json(fresh / "units.json", list(units))
        _write_json(fresh / "provenance.json", {**stamp(), **(provenance or {})})
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


def _read(directory: Path, device: torch.device, voice: str | os.PathLike[str] | None) -> SpeechTranslator:
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
    except Exception as error:  # wrong types of any setting: networks raise what they like
        raise InputError(
            f"`model` must be a whole translator, but '{directory}' is damaged or of another version "
            f"({type(error).__name__}: {error!s:.300}). Fetch it again."
        ) from error
    vocoder = own if voice is None else _vocoder(voice)
    return SpeechTranslator(model.to(device), vocoder.to(device), words, units, decoding=decoding, name=directory.name)


def _units(file: Path) -> list[str]:
    """The phones, in the order of their numbers."""
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
    """A vocoder other than the model's own; all are called alike."""
    text = path_text(source, "vocoder", f"{GRIFFIN_LIM}, a directory")
    if text == GRIFFIN_LIM:
        return GriffinLimVocoder()
    if not Path(text).exists() and not HUB_ID.fullmatch(text):
        raise InputError(
            f"`vocoder` must be {GRIFFIN_LIM}, or a directory or hub id of HiFi-GAN weights, "
            f"but is '{text}'. Leave it out for the model's own."
        )
    from mmdec.nn.hifigan import HifiGanVocoder  # takes transformers' models with it: only where it is asked for

    return HifiGanVocoder.load(Path(text) if Path(text).exists() else _download(text, HUB_FILES, "vocoder"))


def _complete(directory: Path, name: str) -> Path:
    if kind(directory) == "whisper":
        raise InputError(f"`model` must translate speech, but '{name}' is a Whisper. Call `mmdec.transcribe` for it.")
    missing = [file for file in NEEDED if not (directory / file).is_file()]
    if not missing:
        return directory
    pickles = [path.name for path in sorted(directory.iterdir()) if path.suffix in PICKLES]
    if pickles:
        raise InputError(
            f"`model` must hold safetensors, but '{name}' holds a pickle, {pickles[0]}. Export with `hub.save_model`."
        )
    raise InputError(f"`model` must hold {', '.join(NEEDED)}, but '{name}' lacks {', '.join(missing)}. Fetch it again.")


def _download(name: str, files: Sequence[str], argument: str = "model") -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(files)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise InputError(
            f"`{argument}` must be found on the hub, but '{name}' was not ({type(error).__name__}). "
            "Check the name and the network, or give a directory."
        ) from error


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
