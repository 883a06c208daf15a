"""Models on disk: found by name, path or hub id, loaded once, written whole or not at all. Safetensors only.

A model's directory holds config.json, model.safetensors (half precision, all but the vocoder), vocoder.safetensors,
units.json, what its word decoder needs, README.md (the card) and provenance.json.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmdec.decode.words import WordDecoder
from mmdec.nn.daspeech import DASpeech, DASpeechConfig
from mmdec.nn.vocoder import Vocoder, VocoderConfig
from mmdec.targets.speech import Decoding, SpeechTranslator
from mmdec.types import InputError, MmdecError

DEFAULT_MODEL = "daspeech-phrasebook"
PACKAGE = Path(__file__).resolve().parent
PLACES = (PACKAGE / "_models", PACKAGE.parent / "models")  # an installed wheel, then a checkout
NEEDED = ("config.json", "model.safetensors", "vocoder.safetensors", "units.json")
PICKLES = (".pt", ".pth", ".ckpt", ".bin", ".pkl")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")
HUB_FILES = ["*.safetensors", "*.json", "*.tsv", "*.arpa", "*.md"]

_loaded: dict[tuple[str, str, int], SpeechTranslator] = {}
_loading = threading.Lock()


def names() -> list[str]:
    """The models that came with this installation."""
    return sorted({path.parent.name for place in PLACES for path in place.glob("*/config.json")})


def resolve(model: str | os.PathLike[str]) -> Path:
    """A shipped model's name, a directory, or a Hugging Face id ("owner/name", "owner/name@revision") -> directory."""
    text = os.fspath(model)
    path = Path(text)
    if path.suffix in PICKLES:
        raise InputError(f"`model` must hold safetensors, but is the pickle '{text}'. Export it with `hub.save_model`.")
    if path.is_dir():
        return _complete(path, text)
    for place in PLACES:
        if re.fullmatch(r"[\w.-]+", text) and (place / text).is_dir():
            return _complete(place / text, text)
    if HUB_ID.fullmatch(text) and not text.startswith("models/"):
        return _complete(_download(text), text)
    raise InputError(
        f"`model` must be a shipped name ({', '.join(names()) or 'none is installed'}), a directory or a hub id, "
        f"but is '{text}'. Check the spelling."
    )


def load(model: str | os.PathLike[str] = DEFAULT_MODEL, device: str | torch.device | None = None) -> SpeechTranslator:
    """A translator, ready to run; loaded once for each model and device. `device` None takes a GPU where there is one.

    Raises InputError where the model is not found and MmdecError where its files do not fit together.
    """
    directory = resolve(model)
    place = check_device(device)
    key = (str(directory.resolve()), str(place), (directory / "model.safetensors").stat().st_mtime_ns)
    with _loading:
        if key not in _loaded:
            _loaded[key] = _read(directory, place)
        return _loaded[key]


def check_device(device: str | torch.device | None) -> torch.device:
    """A device that exists here."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"`device` must be 'cpu' or 'cuda', but is {device!r}. Leave it out to have it chosen."
        ) from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"`device` must exist, but is '{device}' and this machine has no GPU. Use device='cpu'.")
    if place.type not in ("cpu", "cuda"):
        raise InputError(f"`device` must be 'cpu' or 'cuda', but is '{device}'. Leave it out to have it chosen.")
    return place


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
    """Write a model's directory whole or not at all. Weights become half precision; a card that is there stays.

    `provenance` adds to what is always written: command, versions, commit and date.
    """
    target = Path(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        config = {
            "system": "daspeech",
            "architecture": model.config.to_dict(),
            "vocoder": asdict(vocoder.config),
            "decoding": asdict(decoding),
        }
        _write_json(fresh / "config.json", config)
        _write_json(fresh / "units.json", list(units))
        _write_json(fresh / "provenance.json", {**stamp(), **(provenance or {})})
        save_file(_half(model.state_dict()), fresh / "model.safetensors")
        save_file(_half(vocoder.state_dict()), fresh / "vocoder.safetensors")
        words.save(fresh)
        if card is not None:
            (fresh / "README.md").write_text(card, encoding="utf-8")
        elif (target / "README.md").is_file():
            shutil.copy(target / "README.md", fresh / "README.md")
        fresh.chmod(0o755)
        if target.exists():
            old = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
            os.replace(target, old)
            os.replace(fresh, target)
            shutil.rmtree(old)
        else:
            os.replace(fresh, target)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return target


def stamp() -> dict[str, Any]:
    """Where weights or numbers come from: command, versions, commit, date, device. Paths are the checkout's."""
    packages = ("mmdec", "torch", "torchaudio", "transformers", "lightning")
    return {
        "argv": [_portable(argument) for argument in sys.argv],
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": ".".join(map(str, sys.version_info[:3])),
        "versions": {package: _version(package) for package in packages},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def _read(directory: Path, device: torch.device) -> SpeechTranslator:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        if config["system"] != "daspeech":
            raise InputError(f"`model` must be of the system daspeech, but '{directory.name}' is {config['system']!r}.")
        units = json.loads((directory / "units.json").read_text(encoding="utf-8"))
        model = DASpeech(DASpeechConfig.from_dict(config["architecture"]), len(units))
        model.load_state_dict(_full(load_file(directory / "model.safetensors")))
        vocoder = Vocoder(VocoderConfig(**config["vocoder"]))
        vocoder.load_state_dict(_full(load_file(directory / "vocoder.safetensors")))
        words = WordDecoder.load(directory)
        decoding = Decoding(**config.get("decoding", {}))
    except InputError:
        raise
    except (SafetensorError, OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise MmdecError(
            f"The model in '{directory}' is damaged or of another version ({error}). Fetch it again."
        ) from error
    return SpeechTranslator(model.to(device), vocoder.to(device), words, units, decoding=decoding, name=directory.name)


def _complete(directory: Path, name: str) -> Path:
    missing = [file for file in NEEDED if not (directory / file).is_file()]
    if not missing:
        return directory
    pickles = [path.name for path in sorted(directory.iterdir()) if path.suffix in PICKLES]
    if pickles:
        raise InputError(
            f"`model` must hold safetensors, but '{name}' holds a pickle, {pickles[0]}. Export with `hub.save_model`."
        )
    raise InputError(f"`model` must hold {', '.join(NEEDED)}, but '{name}' lacks {', '.join(missing)}. Fetch it again.")


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise InputError(
            f"`model` must be found on the hub, but '{name}' was not ({type(error).__name__}). "
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


def _full(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _commit() -> str | None:
    """The checkout's commit. An installed wheel has none, whatever repository its environment lies in."""
    git = shutil.which("git")
    if git is None or not (PACKAGE.parent / ".git").exists():
        return None
    command = [git, "-C", str(PACKAGE.parent), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


def _portable(argument: str) -> str:
    path = Path(argument)
    if not path.is_absolute():
        return argument
    root = PACKAGE.parent
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
