"""Writes a folder whole: after an error the old folder is unchanged.

The new folder has a temporary name until it is complete. Then the old folder is renamed, and the new one takes its
name.

If a process is killed between the two renames, the next process that writes this folder restores the old one.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mmdec.checks.weights import WEIGHTS_FILE, lies_inside
from mmdec.errors import InputError
from mmdec.hub.provenance import CARD, command_record, portable, weight_hashes

PROVENANCE = "provenance.json"
MAX_TEXT_BYTES = 2**20  # maximum bytes of a text file that is copied to a new version of a folder


def new_folder(directory: str | os.PathLike[str]) -> Path:
    """Check that a folder is new or empty, and return its path.

    Raises:
        InputError: If it holds something.
    """
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"`directory` must be new or empty, but '{target}' is not. Name another folder.")
    return target


@contextmanager
def atomic_folder(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Context manager that yields an empty folder to write in. When the block ends, the folder replaces `target`.

    If the block raises, the folder is removed and `target` stays as it was.

    Raises:
        InputError: If `target` is a file.
    """
    folder = Path(target)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"`directory` must be a folder or new, but '{folder}' is a file. Name another folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.old")
    if aside.is_dir() and not folder.exists():
        aside.rename(folder)
    fresh = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    fresh.mkdir()
    try:
        yield fresh
        make_readable(fresh)
        if folder.is_dir():
            fresh.chmod(stat.S_IMODE(folder.stat().st_mode))
        _put(fresh, folder, aside)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def write_model_folder(
    directory: str | os.PathLike[str],
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    card: str,
    weights_file: str = WEIGHTS_FILE,
) -> Path:
    """Write a new folder: config.json, the tensors and the model card. If writing fails, no folder is left.

    Args:
        directory: The folder, new or empty.
        config: The content of config.json.
        state: The tensors by name.
        card: The model card's text.
        weights_file: Name of the tensors' file.

    Raises:
        InputError: If the folder holds something.
    """
    target = new_folder(directory)
    with atomic_folder(target) as fresh:
        (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file({name: value.detach().cpu().contiguous() for name, value in state.items()}, fresh / weights_file)
        (fresh / CARD).write_text(card, encoding="utf-8")
    return target


def write_provenance(folder: Path, training: Mapping[str, Any], device: torch.device) -> None:
    """Write provenance.json: how the weights were trained, and the running command, versions and commit.

    Args:
        training: Settings and data of the training.
        device: The device of the weights.
    """
    text = json.dumps({"training": portable(training), **command_record(device)}, indent=2, default=str)
    (folder / PROVENANCE).write_text(text + "\n", encoding="utf-8")


def keep_card(old: Path, fresh: Path) -> None:
    """Copy the model card of the folder `old`, if it has one, to `fresh`, which will replace it.

    Raises:
        InputError: If the weights of the two folders differ, because the card's figures would then be wrong.
    """
    if not (old / CARD).is_file():
        return
    if weight_hashes(old) != weight_hashes(fresh):
        raise InputError(
            f"`directory` must hold no card of other weights, but '{old}' does. Write to another folder, or "
            f"delete its {CARD} first."
        )
    shutil.copy(old / CARD, fresh)


def same_weights(old: Path, fresh: Path) -> bool:
    """Return whether both folders hold the same weights, byte for byte."""
    return old.is_dir() and weight_hashes(old) == weight_hashes(fresh)


def copy_texts(old: Path, fresh: Path, names: Sequence[str]) -> None:
    """Copy text files that describe the weights from the folder `old` to `fresh`, if they exist.

    Links that lead out of the folder, and large files, are not copied.

    Args:
        names: Names of the files.
    """
    for name in names:
        path = old / name
        if path.is_file() and lies_inside(path, old) and path.stat().st_size <= MAX_TEXT_BYTES:
            shutil.copyfile(path, fresh / name)


def check_replaceable(target: Path, fresh: Path, also: Sequence[str] = ()) -> None:
    """Raise InputError if the folder `target` holds files that its replacement `fresh` does not have.

    They would be lost.

    Args:
        also: Names of files that may be lost.
    """
    if not target.is_dir():
        return
    replaced = {*(path.name for path in fresh.iterdir()), *also}
    foreign = sorted(path.name for path in target.iterdir() if path.name not in replaced)
    if foreign:
        raise InputError(
            f"`directory` must be new, empty or hold a model of the same kind, but '{target}' holds '{foreign[0]}', "
            "which would be deleted. Choose another folder."
        )


def push_folder(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
) -> str:
    """Upload a folder to the hub in one commit; creates the repository if needed.

    Args:
        folder: The local folder.
        repo_id: "owner/name".
        private: Whether a new repository is private.
        token: Access token.

    Returns:
        The commit's address.

    Raises:
        InputError: If the hub refuses or cannot be reached.
    """
    from huggingface_hub import create_repo, upload_folder
    from huggingface_hub.errors import HfHubHTTPError

    try:
        repository = create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
        commit = upload_folder(
            repo_id=repository, folder_path=folder, token=token, commit_message="Upload a model of mmdec"
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise InputError(
            f"`repo_id` must be a repository that you may write to, but '{repo_id}' could not be written "
            f"({type(error).__name__}: {error!s:.200}). Log in with `hf auth login`, and check name and network."
        ) from error
    return str(commit.commit_url)


def make_readable(folder: Path) -> None:
    """Give all files the permissions of their folder, which follow the user's umask.

    safetensors makes files readable for the owner only.
    """
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o777
    for path in folder.rglob("*"):
        path.chmod(mode if path.is_dir() else mode & 0o666)


def _put(fresh: Path, folder: Path, aside: Path) -> None:
    """Rename the folder `fresh` to `folder`, and remove the old one, which meanwhile is called `aside`."""
    if folder.exists():
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    try:
        fresh.rename(folder)
    except OSError:
        if aside.exists():
            aside.rename(folder)
        raise
    shutil.rmtree(aside, ignore_errors=True)
