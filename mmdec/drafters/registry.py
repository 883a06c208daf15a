"""Drafters by name: one entry for each, the only list of them. `mmdec.generation.named_drafters` makes and reads them.

A drafter without weights is made by its class: "package.module:Class". A drafter with weights is read from a folder,
whose config.json has the drafter's name as its "system", by a function (folder, model) -> drafter. The function may
live on a higher floor, as those of `mmdec.hub` do: here it is only a name. The entry also says where a drafter is
offered without being named: `describe` with drafter="auto" and the demo ask here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdec.types import Drafter, InputError

if TYPE_CHECKING:
    from mmdec.nn.draft_network import DraftNetwork

Factory = Callable[[], Drafter]
Loader = Callable[[Path, Any], Drafter]  # folder, model of transformers
Finder = Callable[[object, str], Path | None]  # what a caller gave, as which argument -> a drafter's folder, or None
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
NAME = re.compile(r"[A-Za-z][\w-]*")


@dataclass(frozen=True)
class Entry:
    """How a drafter comes about: by its factory, from a folder, or either way."""

    factory: Factory | str | None = None
    loader: Loader | str | None = None
    network: str | None = None  # the class of its draft network, for those that `mmdec.hub.vlm_drafters` reads
    auto: bool = False  # with weights beside a vision-language model: `describe`'s "auto" and the demo take it
    note: str = ""  # one line on how it drafts, for the demo


TREE_GROWING = "mmdec.hub.vlm_drafters:load_tree_growing"  # whatever the network
BUILT_IN = {  # "auto" prefers the earlier
    "lookup": Entry("mmdec.drafters.lookup:Lookup"),
    "recycling": Entry("mmdec.drafters.recycling:Recycling"),
    "medusa": Entry(loader="mmdec.hub.medusa:load_heads"),
    "eagle": Entry(
        loader=TREE_GROWING,
        network="mmdec.nn.draft_network:DraftNetwork",
        auto=True,
        note="EAGLE-2: one layer that continues the model's own states.",
    ),
    "msd": Entry(
        loader=TREE_GROWING,
        network="mmdec.nn.msd:MsdNetwork",
        auto=True,
        note="MSD: drafts text and picture apart.",
    ),
    "vispec": Entry(
        loader=TREE_GROWING,
        network="mmdec.nn.vispec:ViSpec",
        auto=True,
        note="ViSpec: a few visual tokens stand for the whole picture.",
    ),
    "specvlm": Entry(
        loader=TREE_GROWING,
        network="mmdec.nn.specvlm:SpecVLM",
        auto=True,
        note="SpecVLM: reads a shortened picture; a gate chooses how it is shortened.",
    ),
    "flash": Entry(
        loader="mmdec.hub.vlm_drafters:load_flash",
        network="mmdec.nn.flash:FlashNetwork",
        auto=True,
        note="FLASH: reads a picture shortened by attention, and drafts several tokens at once.",
    ),
}
_registered: dict[str, Entry] = {}
_finders: list[Finder] = []


def add_entry(name: str, entry: Entry) -> None:
    """Give a drafter from outside of the package a name; a second call with the same name replaces the first."""
    _registered[name] = entry


def drafter_entry(name: str) -> Entry | None:
    """The drafter of this name; None where there is none."""
    return _all().get(name)


def drafter_names() -> list[str]:
    """Names that need no folder."""
    return [name for name, entry in _all().items() if entry.factory is not None]


def loader_names() -> list[str]:
    """Names of drafters with weights."""
    return [name for name, entry in _all().items() if entry.loader is not None]


def auto_names() -> list[str]:
    """Names that `describe`'s "auto" looks for beside a model, the preferred first; those from outside come last."""
    return [name for name, entry in _all().items() if entry.auto]


def network_names() -> list[str]:
    """Names of drafters that are a draft network."""
    return [name for name, entry in _all().items() if entry.network is not None]


def network_class(system: str) -> type[DraftNetwork]:
    """The class of a system's draft network, imported here; its `config_class` makes its configuration. Raises
    InputError for a name that is none."""
    networks = {name: entry.network for name, entry in _all().items() if entry.network is not None}
    if system not in networks:
        raise InputError(f"`system` must be one of {', '.join(networks)}, but is {system!r:.60}. Choose one.")
    module, _, name = networks[system].partition(":")
    network: type[DraftNetwork] = getattr(import_module(module), name)
    return network


def _all() -> dict[str, Entry]:
    return {**BUILT_IN, **_registered}


def add_finder(finder: Finder) -> None:
    """Have drafters' folders looked for by this function, too; `mmdec.hub.find` adds its own when it is imported."""
    _finders.append(finder)


def find_folder(given: object, argument: str) -> Path | None:
    """The first folder that a finder has for what a caller gave; None where there is none."""
    return next((folder for finder in _finders if (folder := finder(given, argument)) is not None), None)


def is_dotted(text: str) -> bool:
    """Whether the text is written as "package.module:Class"."""
    return DOTTED.fullmatch(text) is not None
