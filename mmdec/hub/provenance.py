"""Records how weights and measurements were made: command, versions, commit, date, machine.

Private paths are left out.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mmdec.kernels.cpu_features import cpu_facts

CHECKOUT = Path(__file__).resolve().parents[2]
CARD = "README.md"
PACKAGES = ("mmdec", "torch", "torchaudio", "transformers", "lightning")
OPTIONAL = ("triton", "ctranslate2")
OPTION = re.compile(r"--?[a-zA-Z][\w-]*=")
NAME = r"[^\s\\/'\"<>,]+"
# an absolute path within a text: at least two names deep, after the start, a space, a quote, or an option's letter
PATHS = re.compile(
    rf"(?:(?<![\w./~\\-])|(?<=^-[a-zA-Z]))(?:file:/*|[a-zA-Z]:|~\w*)?(?:/(?!/)|\\+){NAME}(?:[\\/]+{NAME})+"
)


def command_record(device: torch.device | None) -> dict[str, Any]:
    """Describe the running command as JSON data: command line, versions, commit, date, device.

    The commit's entry says, too, whether files differ from it.

    Args:
        device: The device on which the command computed; None if unknown. Paths are relative to the checkout of the
            repository.
    """
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", "mmdec")
    return {
        "argv": portable(sys.argv),
        # None for an installed wheel, even if its folder lies in some repository
        "commit": (_git("rev-parse", "HEAD") or "").strip() or None,
        "uncommitted": None if changes is None else bool(changes.strip()),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": ".".join(map(str, sys.version_info[:3])),
        "versions": {package: _version(package) for package in PACKAGES},
        "device": _device_name(device),
    }


def measurement_conditions(
    *, device: torch.device | None, dtype: torch.dtype | None, batch: int | Sequence[int], threads: int
) -> dict[str, Any]:
    """Describe the conditions of a measurement as JSON data.

    These are the command, versions and commit, the machine, and the arguments.

    Args:
        device, dtype: Those of the model's weights; None if unknown.
        batch: Number of recordings or prompts in a batch, or several such numbers.
        threads: torch's CPU threads.
    """
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": threads,
        "target": None if device is None else str(device),
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "batch": batch if isinstance(batch, int) else sorted(set(batch)),
        **command_record(device),
    }


def describe_machine() -> dict[str, Any]:
    """Describe this machine as JSON data: versions of packages, processor, threads and GPUs."""
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        gpus.append(
            {"name": properties.name, "memory_gib": round(properties.total_memory / 2**30), "capability": capability}
        )
    return {
        "versions": {
            "python": ".".join(map(str, sys.version_info[:3])),
            **{package: _version(package) for package in (*PACKAGES, *OPTIONAL)},
            "cuda": torch.version.cuda,
        },
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
    }


def weight_hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each safetensors file in a model's folder: path relative to the folder -> hash."""
    hashes = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with open(path, "rb") as file:
            hashes[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def portable(value: Any) -> Any:
    """Copy JSON-like data, and remove the names of this machine's folders from all texts and keys.

    Absolute paths and file URLs become relative to the checkout of the repository; of other paths, only the last name
    is kept.
    """
    if isinstance(value, Mapping):
        return {portable(key): portable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [portable(entry) for entry in value]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        return value
    option = OPTION.match(value)  # a command-line option; its value may be a path with spaces
    if option:
        return option[0] + portable(value[option.end() :])
    return _portable(value) if os.path.isabs(value) else PATHS.sub(lambda match: _portable(match[0]), value)


def _device_name(device: torch.device | None) -> str | None:
    """Return a GPU's name; for other devices their type; None for None."""
    if device is None or device.type != "cuda":
        return None if device is None else str(device)
    return torch.cuda.get_device_name(device)


def _cpu() -> str:
    """Return the processor's name."""
    return cpu_facts().get("model name") or platform.processor() or platform.machine()


def _git(*words: str) -> str | None:
    """Run git in this checkout, and return its output; None without git or a checkout, or after an error.

    Args:
        words: git's arguments.
    """
    git = shutil.which("git")
    if git is None or not (CHECKOUT / ".git").exists():
        return None
    done = subprocess.run([git, "-C", str(CHECKOUT), *words], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def _portable(path: str) -> str:
    file = Path(path)
    if file.is_relative_to(CHECKOUT):
        return file.relative_to(CHECKOUT).as_posix()
    return re.split(r"[\\/]+", path.rstrip("\\/"))[-1]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
