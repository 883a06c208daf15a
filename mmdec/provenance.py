"""Where weights and numbers come from: command, versions, commit, date, machine. Nothing in it names a private path."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mmdec.types import InputError

CHECKOUT = Path(__file__).resolve().parents[1]
CARD = "README.md"
PACKAGES = ("mmdec", "torch", "torchaudio", "transformers", "lightning")


def stamp() -> dict[str, Any]:
    """Command, versions, commit, date, device. Paths are the checkout's."""
    return {
        "argv": [_portable(argument) for argument in sys.argv],
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": ".".join(map(str, sys.version_info[:3])),
        "versions": {package: _version(package) for package in PACKAGES},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def hardware(
    *, device: torch.device | None, dtype: torch.dtype | None, batch: int | Sequence[int], threads: int
) -> dict[str, Any]:
    """Where and how a number was taken: the machine, `stamp`, and what the caller says it ran.

    device, dtype: of the model's weights; None where they are not known. batch: recordings or prompts decoded together,
    several sizes where a report has numbers of each. threads: torch's on the CPU.
    """
    name = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.is_file():
        lines = information.read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    versions = stamp()
    if device is not None:  # a number from the CPU of a machine with a GPU is no GPU's
        versions["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "threads": threads,
        "target": None if device is None else str(device),
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "batch": batch if isinstance(batch, int) else sorted(set(batch)),
        **versions,
    }


def weights(folder: Path) -> dict[str, str]:
    """The SHA-256 of every safetensors file in a model's folder, by its path there."""
    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with open(path, "rb") as file:
            found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def keep_card(old: Path, fresh: Path) -> None:
    """Copy a folder's card to the one that is to take its place. Raises InputError where their weights differ: a card's
    numbers are those of its weights."""
    if not (old / CARD).is_file():
        return
    if weights(old) != weights(fresh):
        raise InputError(
            f"`directory` must hold no card of other weights, but '{old}' does. Write to runs/, and put a better model "
            "there with `mmdec promote`, which measures it."
        )
    shutil.copy(old / CARD, fresh)


def _commit() -> str | None:
    """The checkout's commit. An installed wheel has none, whatever repository its environment lies in."""
    git = shutil.which("git")
    if git is None or not (CHECKOUT / ".git").exists():
        return None
    command = [git, "-C", str(CHECKOUT), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


def _portable(argument: str) -> str:
    path = Path(argument)
    if not path.is_absolute():
        return argument
    return path.relative_to(CHECKOUT).as_posix() if path.is_relative_to(CHECKOUT) else path.name


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
