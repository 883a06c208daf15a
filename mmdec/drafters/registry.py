"""The registry of drafters by name. No other module lists them.

A drafter without weights is made by its `factory`. A drafter with weights names its `drafter` class and its `network`
class; `mmdec.hub.drafters` picks the loader by the drafter class. A drafter from outside the package may bring a
`loader`. The entry also says whether drafter="auto" looks for the drafter by itself. A drafter's module is imported
when its name is first used.
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
Loader = Callable[[Path, Any], Drafter]  # makes a drafter from its folder and the loaded target model
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
NAME = re.compile(r"[A-Za-z][\w-]*")
METHODS = ("check", "start", "propose", "update", "select")  # methods of the protocol `mmdec.types.Drafter`


@dataclass(frozen=True)
class Entry:
    """How to make a drafter: by its factory, from a folder with weights, or by both."""

    factory: Factory | str | None = None  # makes the drafter without arguments; or its dotted path
    drafter: str | None = None  # dotted path of the class that drafts with the weights of `network`
    network: str | None = None  # dotted path of the network's class; None: no weights, or `loader` reads them
    loader: Loader | str | None = None  # for drafters from outside the package: reads the folder
    of_model: str | None = None  # dotted path of a class whose `of(model)` makes the drafter from the loaded target
    auto: bool = False  # whether "auto" and the demo look for its weights beside a model
    speech: bool = (
        False  # whether it drafts for speech models; others draft for language models, with or without images
    )
    note: str = ""  # one line on how it drafts, shown by the demo

    @property
    def has_weights(self) -> bool:
        """Return whether a folder may hold weights of this drafter."""
        return self.network is not None or self.loader is not None


AUTO = "auto"  # stands for a drafter of the model's own, see `mmdec.generation.auto_drafter`
OTHERWISE = "lookup"  # what "auto" stands for if the model has no drafter with weights
MEDUSA, CTC, TREE_GROWING, FLASH = (
    "mmdec.drafters.medusa:Medusa",
    "mmdec.drafters.ctc:Ctc",
    "mmdec.drafters.tree_growing:TreeGrowing",
    "mmdec.drafters.flash:Flash",
)
BUILT_IN = {  # in the order in which "auto" prefers them
    "lookup": Entry("mmdec.drafters.lookup:Lookup"),
    "recycling": Entry("mmdec.drafters.recycling:Recycling"),
    "mtp": Entry(of_model="mmdec.drafters.mtp:Mtp", note="MTP: the model's own native head."),
    "medusa": Entry(drafter=MEDUSA, network="mmdec.nn.medusa:MedusaHeads", auto=True, speech=True),
    "ctc": Entry(drafter=CTC, network="mmdec.nn.ctc_head:CtcHead", auto=True, speech=True),
    "eagle3": Entry(
        drafter=TREE_GROWING,
        network="mmdec.nn.eagle3:Eagle3",
        auto=True,
        note="EAGLE-3: reads three of the model's layers; P-EAGLE drafts all depths at once.",
    ),
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
    "dflash": Entry(
        drafter=TREE_GROWING,
        network="mmdec.nn.dflash:DFlash",
        auto=True,
        note="DFlash: reads several of the model's layers, and drafts a block of tokens at once.",
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
    """Register a drafter under a name that `generate`, `stream`, `speculate`, `transcribe` and `describe` accept.

    A second call with the same name replaces the first.

    name: letters, digits, "_" and "-"; not the name of a built-in drafter.
    factory: a class or function without arguments that makes the drafter, or its dotted path "package.module:Class".
    loader: for a drafter with weights: a function (folder: Path, model) -> drafter, or its dotted path. The folder's
        config.json holds {"system": name}.
    auto: whether drafter="auto" and the demo look for this drafter's folder beside a language model, with or without
        images, after the built-in drafters. Default False. Needs `loader`.
    note: one line on how it drafts, which the demo shows. Default "".
    Raises: InputError if the name is malformed or built in, if neither `factory` nor `loader` is given, if one of them
        is neither callable nor a dotted path, or if `auto` is given without `loader`.
    """
    if not _is_text(name) or not NAME.fullmatch(name):
        raise InputError(f"`name` must be letters, digits, _ and -, but is {show(name)}. Choose a short name.")
    if name in BUILT_IN or name == AUTO:
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
    """Return whether the value is a string: callers without a type checker may pass anything."""
    return isinstance(value, str)


def drafter_entry(name: str) -> Entry | None:
    """Return the registry entry of a drafter; None if there is no drafter of this name."""
    return _all().get(name)


def drafter_names() -> list[str]:
    """Return the names of the drafters that need neither a folder nor a native head of the model."""
    return [name for name, entry in _all().items() if entry.factory is not None]


def loader_names() -> list[str]:
    """Return the names of the drafters with weights."""
    return [name for name, entry in _all().items() if entry.has_weights]


def auto_names(speech: bool = False) -> list[str]:
    """Return the names of the drafters that "auto" looks for beside a model: built-in ones first, in order of
    preference.

    speech: True: drafters for speech models. False (default): drafters for language models, with or without images.
    """
    return [name for name, entry in _all().items() if entry.auto and entry.speech == speech]


def network_class(system: str) -> type[DraftNetwork]:
    """Return the network class of a built-in drafter with weights, Medusa and CTC excepted; its `config_class` makes
    the configuration.

    system: the drafter's name, such as "eagle".
    Raises: InputError for any other name.
    """
    built = {
        name: entry.network for name, entry in BUILT_IN.items() if entry.network and entry.drafter not in (MEDUSA, CTC)
    }
    if system not in built:
        raise InputError(f"`system` must be one of {', '.join(built)}, but is {system!r:.60}. Choose one.")
    network: type[DraftNetwork] = import_dotted(built[system])
    return network


def named_drafter(name: str) -> Drafter:
    """Make a drafter from a registered name or a dotted path.

    name: a registered name, or "package.module:Class" of a class that needs no arguments.
    Raises: InputError if a drafter of this name needs a folder or a loaded model, if there is no such drafter, or if
        its class needs arguments.
    """
    entry = drafter_entry(name)
    if entry is not None and entry.of_model is not None:
        raise InputError(
            f"`drafter` must be one that this call can make, but {name!r} is made of a loaded model. Give it to "
            "`mmdec.generate`, `stream` or `speculate`."
        )
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
    """Check that an object implements `mmdec.types.Drafter`. Raises InputError if a part is missing."""
    remedy = f"Choose one of {', '.join(drafter_names())}, a smaller model, or write one after `mmdec.types.Drafter`."
    check_methods("drafter", drafter, METHODS, remedy)
    if not isinstance(getattr(drafter, "name", None), str) or not isinstance(getattr(drafter, "needs", None), Needs):
        raise InputError(
            f"`drafter` must have a `name` and its `needs`, an mmdec.types.Needs, but {show(drafter)} has not. {remedy}"
        )


def is_dotted(text: str) -> bool:
    """Return whether the text is written as "package.module:Class"."""
    return DOTTED.fullmatch(text) is not None


def import_dotted(path: str, argument: str = "drafter") -> Any:
    """Import the object at the dotted path "package.module:Class". Raises InputError about `argument` if that fails."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"`{argument}` must be importable, but '{path}' is not ({error}). Check the spelling and PYTHONPATH."
        ) from error


def _all() -> dict[str, Entry]:
    return {**BUILT_IN, **_registered}
