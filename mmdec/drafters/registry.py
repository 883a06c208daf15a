"""Drafters by name: one line for each. `mmdec.generation.named_drafters` makes and reads them.

A drafter without weights is made by its class: "package.module:Class". A drafter with weights is read from a folder,
whose config.json has the drafter's name as its "system", by a function (folder, model) -> drafter. The function may
live on a higher floor, as those of `mmdec.hub` do: here it is only a name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmdec.types import Drafter

Factory = Callable[[], Drafter]
Loader = Callable[[Path, Any], Drafter]  # folder, model of transformers
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
NAME = re.compile(r"[A-Za-z][\w-]*")


@dataclass(frozen=True)
class Entry:
    """How a drafter comes about: by its factory, from a folder, or either way."""

    factory: Factory | str | None = None
    loader: Loader | str | None = None


BUILT_IN = {
    "lookup": Entry("mmdec.drafters.lookup:Lookup"),
    "recycling": Entry("mmdec.drafters.recycling:Recycling"),
    "medusa": Entry(loader="mmdec.hub.medusa:load_heads"),
    "eagle": Entry(loader="mmdec.hub.vlm_drafters:load_tree_growing"),
    "msd": Entry(loader="mmdec.hub.vlm_drafters:load_tree_growing"),
    "specvlm": Entry(loader="mmdec.hub.vlm_drafters:load_tree_growing"),
    "vispec": Entry(loader="mmdec.hub.vlm_drafters:load_tree_growing"),
    "flash": Entry(loader="mmdec.hub.vlm_drafters:load_flash"),
}
FINDER = "mmdec.hub.find:drafter_by_name"  # (text, argument) -> the folder of a drafter of that name, or None
_registered: dict[str, Entry] = {}


def add_entry(name: str, entry: Entry) -> None:
    """Give a drafter from outside of the package a name; a second call with the same name replaces the first."""
    _registered[name] = entry


def drafter_entry(name: str) -> Entry | None:
    """The drafter of this name; None where there is none."""
    return BUILT_IN.get(name) or _registered.get(name)


def drafter_names() -> list[str]:
    """Names that need no folder."""
    return [name for name, entry in {**BUILT_IN, **_registered}.items() if entry.factory is not None]


def loader_names() -> list[str]:
    """Names of drafters with weights."""
    return [name for name, entry in {**BUILT_IN, **_registered}.items() if entry.loader is not None]


def is_dotted(text: str) -> bool:
    """Whether the text is written as "package.module:Class"."""
    return DOTTED.fullmatch(text) is not None
