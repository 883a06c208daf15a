"""Finds the local folder of a model by its shipped name, folder or Hugging Face id.

Pickles are rejected, except those of published drafters, from which `mmdec.hub.checkpoint` reads only tensors.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmdec.checks.arguments import format_value
from mmdec.checks.weights import PICKLE_SUFFIXES, read_settings
from mmdec.errors import InputError

PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
# the folders of shipped models: in an installed wheel, and in a checkout of the repository
MODEL_FOLDERS = (PACKAGE_FOLDER / "_models", PACKAGE_FOLDER.parent / "models")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")
HUB_FILES = ["*.safetensors", "*.json", "*.tsv", "*.arpa", "*.md"]
TOKENIZER_FILES = ("*.txt", "*.model", "*.jinja")  # tokenizer files of a smaller model that drafts
# names by which a published Whisper is known without its owner -> the owner
SHORT_NAMES = {
    re.compile(r"whisper-(tiny|base|small|medium)(\.en)?|whisper-large(-v2|-v3|-v3-turbo)?"): "openai",
    re.compile(r"distil-(small\.en|medium\.en|large-v2|large-v3|large-v3\.5)"): "distil-whisper",
}
DRAFTER_PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")

log = logging.getLogger(__name__)


def model_folders() -> tuple[Path, ...]:
    """Return the folders that hold the shipped models."""
    return MODEL_FOLDERS


def shipped_names(system: str | None) -> list[str]:
    """Return the names of shipped models.

    Args:
        system: Return only models of this kind (see `model_kind`); None: all models.
    """
    configs = {
        path.parent.name: path for folder in reversed(MODEL_FOLDERS) for path in folder.glob("[!.]*/config.json")
    }
    return sorted(name for name, path in configs.items() if system is None or model_kind(path.parent) == system)


def model_kind(directory: Path) -> str:
    """Return the kind of a model or drafter; "" if it has none.

    It is the value of "system", else of "model_type", in config.json.
    """
    try:
        config = read_settings(directory / "config.json")
    except InputError:
        return ""
    return str(config.get("system") or config.get("model_type") or "")


def find_model(
    model: str | os.PathLike[str],
    system: str | None,
    files: Sequence[str] = HUB_FILES,
    fetching: Mapping[str, Any] | None = None,
) -> Path:
    """Find the folder of a model.

    Args:
        model: A shipped name, a folder, or a Hugging Face id ("owner/name", "owner/name@revision"), whose files are
            downloaded. The short name of a known model, such as "whisper-base", stands for its Hugging Face id, unless
            the model itself is shipped.
        system: Error messages list the shipped models of this kind (see `model_kind`); None: all.
        files: Name patterns of the files to download.
        fetching: Options of huggingface_hub's `snapshot_download`.

    Returns:
        The folder. The caller must check its content.

    Raises:
        InputError: If there is no such model, or a download fails.
    """
    text = path_text(
        model, "model", f"a shipped name ({', '.join(shipped_names(system)) or 'none is installed'}), a folder"
    )
    path = Path(text)
    if path.suffix in PICKLE_SUFFIXES:
        raise InputError(f"`model` must hold safetensors, but is the pickle '{text}'. Save it as safetensors.")
    if path.is_dir():
        return path
    owner = next((owner for pattern, owner in SHORT_NAMES.items() if pattern.fullmatch(text)), None)
    for folder in MODEL_FOLDERS:
        shipped = folder / text
        # a folder that holds only drafters may have the name of the model that they draft for
        if re.fullmatch(r"[\w.-]+", text) and shipped.is_dir() and (not owner or (shipped / "config.json").is_file()):
            return shipped
    if owner is not None:
        return download(f"{owner}/{text}", files, fetching=fetching)
    if HUB_ID.fullmatch(text) and not text.startswith("models/"):
        return download(text, files, fetching=fetching)
    raise InputError(
        f"`model` must be a shipped name ({', '.join(shipped_names(system)) or 'none is installed'}), a folder "
        f"or a Hugging Face id, but is '{text}'. Check the spelling; mmdec's own models are in models/ of a checkout "
        "and in the wheel."
    )


def drafter_by_name(
    drafter: object, argument: str = "folder", fetching: Mapping[str, Any] | None = None
) -> Path | None:
    """Find the folder of a drafter by a name that is not a local path.

    The name is "<model>/<drafter>" for a shipped one, or a Hugging Face id. Every call that accepts a drafter's folder
    uses this.

    Args:
        argument: Name of the caller's argument, for errors.
        fetching: Options of `snapshot_download`.

    Returns:
        The folder; None if `drafter` is not such a name.

    Raises:
        InputError: If there is no drafter of this name.
    """
    if isinstance(drafter, str) and "/" in drafter and not os.path.exists(drafter):
        return drafter_path(drafter, fetching, argument)
    return None


def folder_by_name(name: str | os.PathLike[str], argument: str) -> Path | None:
    """Return the folder of a model or drafter: a folder, "<model>/<drafter>" for a shipped one, or a Hugging Face id.

    Args:
        argument: Name of the caller's argument, for errors.

    Returns:
        None if there is no such folder, and the name is not of the other kinds.

    Raises:
        InputError: If there is nothing of a name of the other kinds.
    """
    if (folder := drafter_by_name(name, argument)) is not None:
        return folder
    try:
        path = Path(name)
        return path if path.is_dir() else None
    except (TypeError, ValueError, OSError):  # raised for bytes, a null character, or a name that is too long
        return None


def drafter_path(
    source: str | os.PathLike[str], fetching: Mapping[str, Any] | None = None, argument: str = "folder"
) -> Path:
    """Find the folder of a drafter by its path, Hugging Face id or shipped name ("vlm-scenes/eagle").

    Args:
        fetching: Options of `snapshot_download`.
        argument: Name of the caller's argument, for errors.

    Raises:
        InputError: If there is no such folder.
    """
    text = path_text(
        source, argument, "a drafter's folder, a shipped model's name and the drafter's (vlm-scenes/eagle)"
    )
    if Path(text).is_dir():
        return Path(text)
    model, _, name = text.partition("/")
    if re.fullmatch(r"[\w-]+", name):
        for folder in MODEL_FOLDERS:
            path = drafter_folder(folder / model, name) if re.fullmatch(r"[\w-][\w.-]*", model) else None
            if path is not None:
                return path
    if HUB_ID.fullmatch(text):
        path = download(text, [*HUB_FILES, *TOKENIZER_FILES], argument, fetching)
        if any(path.glob("*.safetensors")):
            return path
        # some older drafters were published only as pickles, from which only tensors are read
        return download(text, [*HUB_FILES, *DRAFTER_PICKLES], argument, fetching)
    raise InputError(
        f"`{argument}` must be a drafter's folder, a shipped model's name and the drafter's (vlm-scenes/eagle), or a "
        f"Hugging Face id, but is '{text}'. Check the spelling."
    )


def drafter_folder(model: Path, name: str) -> Path | None:
    """Return the folder of a model's drafter; None if there is none.

    It is `name` inside the model's folder, or <model>-<name> next to the model's folder.
    """
    parent = model.resolve()
    folders = (parent / name, parent.with_name(f"{parent.name}-{name}"))
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def path_text(source: object, argument: str, rule: str) -> str:
    """Convert a path or name to text.

    Args:
        argument: Name of the caller's argument, for the error.
        rule: What the argument must be, in words.

    Raises:
        InputError: For other types, and for text that cannot be a file name.
    """
    try:
        text = os.fspath(source)  # type: ignore[call-overload] # TypeError if it is not a path
        if isinstance(text, str) and text:
            Path(text).exists()  # only to raise OSError for a name that is too long
            return text
    except (OSError, TypeError, ValueError):
        pass
    raise InputError(
        f"`{argument}` must be {rule} or a Hugging Face id, but is {format_value(source)}. Give its name as text."
    )


def download(
    name: str, files: Sequence[str], argument: str = "model", fetching: Mapping[str, Any] | None = None
) -> Path:
    """Download a repository of the hub, "owner/name" or "owner/name@revision", to the local cache.

    Args:
        files: Name patterns of the files to download.
        argument: Name of the caller's argument, for errors.
        fetching: Further options of `snapshot_download`.

    Returns:
        The downloaded folder.

    Raises:
        InputError: If the download fails; the message explains how to get the model, also without a network.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError

    log.info("fetching %s from the hub, or from this machine's cache", name)
    repository, _, revision = name.partition("@")
    options: dict[str, Any] = {"revision": revision or None, **(fetching or {})}
    try:
        return Path(snapshot_download(repository, allow_patterns=list(files), **options))
    except GatedRepoError as error:
        raise InputError(
            f"`{argument}` must be accessible, but '{name}' requires you to accept its terms. Accept them on "
            f"https://huggingface.co/{repository}, and log in: `hf auth login`."
        ) from error
    except (LocalEntryNotFoundError, ConnectionError) as error:  # no network, and not in the cache
        raise InputError(
            f"`{argument}` must be on this machine if the hub cannot be reached, but '{name}' is not "
            f"({type(error).__name__}). On a machine with a network run `hf download {repository} --local-dir DIR`; "
            "copy DIR here, and pass its path."
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise InputError(
            f"`{argument}` must be found on the hub, but '{name}' was not ({type(error).__name__}). "
            "Check the name and the network, or give a folder."
        ) from error
