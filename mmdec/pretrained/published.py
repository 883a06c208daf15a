"""Recognises drafters in published formats, and reads draft networks in them without conversion.

Each format is read in its drafter's folder, by a module that the registry names (`published`).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from mmdec.checks.weights import read_settings
from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.drafters.registry import DrafterEntry, published_entries
from mmdec.errors import InputError
from mmdec.hub.checkpoint import Checkpoint, tensor_names

# drafters of speculators and z-lab that mmdec does not support: name in config.json -> name in error messages
UNSUPPORTED_DRAFTERS = {
    "xpress": "XPress",
    "mtp": "MTP",
}


class PublishedFormat(Protocol):
    """What the registry's modules for published formats have."""

    def recognises(self, described: Mapping[str, Any], names: frozenset[str]) -> bool:
        """Return whether a folder is in this format.

        Args:
            described: The content of config.json.
            names: The tensors' names.
        """
        ...

    def read_published(
        self, checkpoint: Checkpoint, system: str | None, vocab_size: int | None, target_tokens: int | None
    ) -> DraftNetwork:
        """Make the network of a folder on the CPU, in the file's precision, without a target.

        Only formats of draft networks have this function.

        Args:
            checkpoint: The folder's content.
            system: The drafter's name, if the caller gives it.
            vocab_size: The target's vocabulary size, if the target's embedding was enlarged after the training.
            target_tokens: The target's vocabulary size, for a folder that does not contain it.

        Raises:
            InputError: For a variant that is not supported, and for a tensor that the format does not have.
        """
        ...


def find_format(folder: Path, argument: str) -> DrafterEntry | None:
    """Return the registry's entry of a published drafter's folder; None if no format is recognised.

    Networks that are read by the same module have one entry in common.

    Args:
        folder: A folder with config.json.
        argument: Name of the caller's argument, for errors.

    Raises:
        InputError: For a known drafter that is not supported.
    """
    return _recognise(read_settings(folder / "config.json", argument), tensor_names(folder, argument), folder, argument)


def read_published(
    folder: Path,
    argument: str,
    system: str | None = None,
    vocab_size: int | None = None,
    target_tokens: int | None = None,
) -> DraftNetwork:
    """Read a published draft network. Further arguments and errors: `PublishedFormat.read_published`.

    Args:
        folder: A folder with config.json, and safetensors or pytorch_model.bin. From a pickle only tensors are read;
            its code is not run.
        argument: Name of the caller's argument, for errors.
    """
    checkpoint = Checkpoint.read(folder, argument)
    entry = _recognise(checkpoint.config, frozenset(checkpoint.state), folder, argument)
    if entry is None or entry.network is None:
        raise checkpoint.error(
            "hold a draft network in a published format", "does not", "Name a draft network's folder."
        )
    return _module(entry).read_published(checkpoint, system, vocab_size, target_tokens)


def _recognise(described: Mapping[str, Any], names: frozenset[str], folder: Path, argument: str) -> DrafterEntry | None:
    kind = str(described.get("speculators_model_type") or "")
    if kind in UNSUPPORTED_DRAFTERS:
        raise InputError(
            f"`{argument}` must hold an EAGLE-1, -2 or -3, P-EAGLE, DFlash, DSpark, MSD, ViSpec, Hydra, "
            f"ReDrafter, MLPSpeculator or Medusa drafter, but "
            f"'{folder}' holds {UNSUPPORTED_DRAFTERS[kind]}, which mmdec does not draft with. Use another drafter."
        )
    match = next((entry for entry in published_entries() if _module(entry).recognises(described, names)), None)
    if match is None and kind:
        raise InputError(
            f"`{argument}` must hold EAGLE-3, P-EAGLE, DFlash or DSpark where it is speculators', but '{folder}' holds "
            f"{kind!r:.60}. Use another drafter."
        )
    return match


def _module(entry: DrafterEntry) -> PublishedFormat:
    return cast(PublishedFormat, import_module(cast(str, entry.published)))
