"""Drafters by name: one entry for each, the only list of them.

A drafter without weights is made by its `factory`. A drafter with weights names its `drafter` class and its `network`
class; `mmdec.hub.drafters` picks the loader by the drafter class. A drafter from outside of the package may bring a
`loader`. The entry also says where a drafter is offered without being named: `describe` with drafter="auto" and the
demo ask here. A drafter's module is imported when its name is first used.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdec.checks.arguments import check_methods, show
from mmdec.types import Drafter, InputError, Needs

if TYPE_CHECKING:
    from mmdec.nn.draft_network import DraftNetwork

Factory = Callable[[], Drafter]
Loader = Callable[[Path, Any], Drafter]  # folder, model of transformers
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
NAME = re.compile(r"[A-Za-z][\w-]*")
METHODS = ("check", "start", "propose", "update", "select")  # of `mmdec.types.Drafter`


@dataclass(frozen=True)
class Entry:
    """How a drafter is made: by its factory, from a folder with weights, or either way."""

    factory: Factory | str | None = None
    drafter: str | None = None  # the class that drafts with the weights of `network`
    network: str | None = None
    loader: Loader | str | None = None  # of a drafter from outside of the package
    auto: bool = False  # with weights beside a vision-language model: `describe`'s "auto" and the demo take it
    note: str = ""  # one line on how it drafts, for the demo

    @property
    def has_weights(self) -> bool:
        """Whether a folder may hold it."""
        return self.network is not None or self.loader is not None


MEDUSA, TREE_GROWING, FLASH = (
    "mmdec.drafters.medusa:Medusa",
    "mmdec.drafters.tree_growing:TreeGrowing",
    "mmdec.drafters.flash:Flash",
)
BUILT_IN = {  # "auto" prefers the earlier
    "lookup": Entry("mmdec.drafters.lookup:Lookup"),
    "recycling": Entry("mmdec.drafters.recycling:Recycling"),
    "medusa": Entry(drafter=MEDUSA, network="mmdec.nn.medusa:MedusaHeads"),
    "eagle": Entry(
        drafter=TREE_GROWING,
        network="mmdec.nn.draft_network:DraftNetwork",
        auto=True,
        note="EAGLE-2: one layer that continues the model's own states.",
    ),
    "msd": Entry(
        drafter=TREE_GROWING,
        network="mmdec.nn.msd:MsdNetwork",
        auto=True,
        note="MSD: drafts text and picture apart.",
    ),
    "vispec": Entry(
        drafter=TREE_GROWING,
        network="mmdec.nn.vispec:ViSpec",
        auto=True,
        note="ViSpec: a few visual tokens stand for the whole picture.",
    ),
    "specvlm": Entry(
        drafter=TREE_GROWING,
        network="mmdec.nn.specvlm:SpecVLM",
        auto=True,
        note="SpecVLM: reads a shortened picture; a gate chooses how it is shortened.",
    ),
    "flash": Entry(
        drafter=FLASH,
        network="mmdec.nn.flash:FlashNetwork",
        auto=True,
        note="FLASH: reads a picture shortened by attention, and drafts several tokens at once.",
    ),
}
_registered: dict[str, Entry] = {}


def register_drafter(
    name: str,
    factory: Factory | str | None = None,
    *,
    loader: Loader | str | None = None,
    auto: bool = False,
    note: str = "",
) -> None:
    """Give a drafter a name that `generate`, `stream`, `speculate`, `transcribe` and `describe` accept.

    factory: a class or function without arguments that makes the drafter, or its dotted path "package.module:Class".
    loader: for a drafter with weights: a function of a folder (a Path) and a model that reads the drafter, or its
    dotted path; the folder's config.json holds {"system": name}. auto: `describe` with drafter="auto" and the demo look
    for the drafter's folder with the model, after those of mmdec's own drafters. note: one line on how it drafts, which
    the demo shows. A second call with the same name replaces the first.
    Raises InputError for a name of mmdec's own, where neither a factory nor a loader is given, and for `auto` without a
    loader.
    """
    if not _is_text(name) or not NAME.fullmatch(name):
        raise InputError(f"`name` must be letters, digits, _ and -, but is {show(name)}. Choose a short name.")
    if name in BUILT_IN:
        raise InputError(f"`name` must be new, but {name!r} is one of mmdec's own drafters. Choose another name.")
    if factory is None and loader is None:
        raise InputError("`factory` must be given where there is no `loader`, but is None. Pass the drafter's class.")
    makers: tuple[tuple[str, object], ...] = (("factory", factory), ("loader", loader))
    for argument, maker in makers:
        if not (maker is None or callable(maker) or (_is_text(maker) and DOTTED.fullmatch(str(maker)))):
            raise InputError(
                f"`{argument}` must be a function or a dotted path, but is {show(maker)}. Pass the drafter's class, or "
                '"package.module:Class".'
            )
    if auto and loader is None:
        raise InputError("`auto` must be left out for a drafter without weights, but is given. Pass a `loader`, too.")
    if not _is_text(note):
        raise InputError(f"`note` must be text, but is {show(note)}. Say in one line how it drafts.")
    _registered[name] = Entry(factory, loader=loader, auto=bool(auto), note=note)


def _is_text(value: object) -> bool:
    """Whether a caller passed text, whatever the annotation says."""
    return isinstance(value, str)


def drafter_entry(name: str) -> Entry | None:
    """The drafter of this name; None where there is none."""
    return _all().get(name)


def drafter_names() -> list[str]:
    """Names that need no folder."""
    return [name for name, entry in _all().items() if entry.factory is not None]


def loader_names() -> list[str]:
    """Names of drafters with weights."""
    return [name for name, entry in _all().items() if entry.has_weights]


def auto_names() -> list[str]:
    """Names that `describe`'s "auto" looks for beside a model, the preferred first; those from outside come last."""
    return [name for name, entry in _all().items() if entry.auto]


def network_class(system: str) -> type[DraftNetwork]:
    """The class of a system's draft network; its `config_class` makes its configuration. Raises InputError for a name
    that is none."""
    built = {name: entry.network for name, entry in BUILT_IN.items() if entry.network and entry.drafter != MEDUSA}
    if system not in built:
        raise InputError(f"`system` must be one of {', '.join(built)}, but is {system!r:.60}. Choose one.")
    network: type[DraftNetwork] = import_dotted(built[system])
    return network


def named_drafter(name: str) -> Drafter:
    """A new drafter, by name or dotted path. Raises InputError where the name needs a folder."""
    entry = drafter_entry(name)
    if entry is not None and entry.factory is None:
        raise InputError(
            f"`drafter` must be a folder for {name}, which has weights, but is {name!r}. Give the folder, or load it "
            "with `mmdec.load_drafter(folder, model)`."
        )
    factory: Any = name if entry is None else entry.factory
    if isinstance(factory, str):
        factory = import_dotted(factory)
    if not callable(factory):
        raise InputError(f"`drafter` must name a class, but '{name}' is {show(factory)}. Name the drafter's class.")
    try:
        drafter: Any = factory()
        return drafter
    except TypeError as error:
        raise InputError(
            f"`drafter` must be made without arguments, but '{name}' is not ({error}). Pass the drafter itself."
        ) from error


def check_drafter(drafter: object) -> None:
    """Raises InputError for an object that lacks a part of `mmdec.types.Drafter`."""
    remedy = f"Choose one of {', '.join(drafter_names())}, a smaller model, or write one after `mmdec.types.Drafter`."
    check_methods("drafter", drafter, METHODS, remedy)
    if not isinstance(getattr(drafter, "name", None), str) or not isinstance(getattr(drafter, "needs", None), Needs):
        raise InputError(
            f"`drafter` must have a `name` and its `needs`, an mmdec.types.Needs, but {show(drafter)} has not. {remedy}"
        )


def is_dotted(text: str) -> bool:
    """Whether the text is written as "package.module:Class"."""
    return DOTTED.fullmatch(text) is not None


def import_dotted(path: str, argument: str = "drafter") -> Any:
    """What "package.module:Class" names. Raises InputError where it cannot be imported."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"`{argument}` must be importable, but '{path}' is not ({error}). Check the spelling and PYTHONPATH."
        ) from error


def _all() -> dict[str, Entry]:
    return {**BUILT_IN, **_registered}
