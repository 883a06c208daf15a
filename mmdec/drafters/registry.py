"""The registry of drafters by name. No other module lists drafters.

An `Entry` says how to make a drafter. Without weights, it is made by its `factory`. With weights, the entry names the
class of the drafter and the class of its network, and `mmdec.pretrained.drafters` loads them. A drafter from outside
the package may bring its own `loader`. A drafter's module is imported when its name is first used.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdec.checks.arguments import check_methods, show
from mmdec.errors import InputError
from mmdec.types import Drafter, Needs

if TYPE_CHECKING:
    from mmdec.drafters.eagle.network import DraftNetwork

Factory = Callable[[], Drafter]
Loader = Callable[[Path, Any], Drafter]  # called with the drafter's folder and the loaded target model
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
NAME = re.compile(r"[A-Za-z][\w-]*")
METHODS = ("check", "start", "propose", "update", "select")  # methods that every drafter must have


@dataclass(frozen=True)
class Entry:
    """How to make one drafter: without arguments (`factory`), from a folder with weights, or from the loaded model.

    A dotted path is written "package.module:Class".
    """

    factory: Factory | str | None = None  # makes the drafter without arguments; a callable or its dotted path
    drafter: str | None = None  # dotted path of the drafter's class, which gets the loaded `network`
    network: str | None = None  # dotted path of the network's class; None: no weights, or `loader` reads them
    loader: Loader | str | None = None  # makes the drafter from a folder; only for drafters from outside the package
    of_model: str | None = None  # dotted path of a class whose `of(model)` makes the drafter from the target model
    auto: bool = False  # whether drafter="auto" and the demo look for a folder with its weights next to a model
    speech: bool = False  # True: it drafts for speech models; False: for language models, with or without images
    note: str = ""  # one line that tells users of the demo how it drafts

    @property
    def has_weights(self) -> bool:
        """Return whether this drafter is loaded from a folder with weights."""
        return self.network is not None or self.loader is not None


AUTO = "auto"  # the name that lets mmdec look for a drafter that was trained for the model
OTHERWISE = "lookup"  # name of the drafter that "auto" chooses if none was trained for the model
MEDUSA, CTC, TREE_GROWING, FLASH = (
    "mmdec.drafters.medusa.drafter:Medusa",
    "mmdec.drafters.ctc.drafter:Ctc",
    "mmdec.drafters.eagle.drafter:NetworkDrafter",
    "mmdec.drafters.flash.drafter:Flash",
)
BUILT_IN = {  # name -> entry; drafter="auto" prefers those that come first
    "lookup": Entry("mmdec.drafters.lookup:Lookup"),
    "recycling": Entry("mmdec.drafters.recycling:Recycling"),
    "mtp": Entry(of_model="mmdec.drafters.mtp:Mtp", note="MTP: the model's own native head."),
    "medusa": Entry(drafter=MEDUSA, network="mmdec.drafters.medusa.network:MedusaHeads", auto=True, speech=True),
    "ctc": Entry(drafter=CTC, network="mmdec.drafters.ctc.network:CtcHead", auto=True, speech=True),
    "eagle3": Entry(
        drafter=TREE_GROWING,
        network="mmdec.drafters.eagle.eagle3:Eagle3",
        auto=True,
        note="EAGLE-3: reads three of the model's layers; P-EAGLE drafts all depths at once.",
    ),
    "eagle": Entry(
        drafter=TREE_GROWING,
        network="mmdec.drafters.eagle.eagle:Eagle",
        auto=True,
        note="EAGLE-2: one layer that continues the model's own states.",
    ),
    "msd": Entry(
        drafter=TREE_GROWING,
        network="mmdec.drafters.eagle.msd:MsdNetwork",
        auto=True,
        note="MSD: drafts text and picture apart.",
    ),
    "vispec": Entry(
        drafter=TREE_GROWING,
        network="mmdec.drafters.eagle.vispec:ViSpec",
        auto=True,
        note="ViSpec: a few visual tokens stand for the whole picture.",
    ),
    "specvlm": Entry(
        drafter=TREE_GROWING,
        network="mmdec.drafters.eagle.specvlm:SpecVLM",
        auto=True,
        note="SpecVLM: reads a shortened picture; a gate chooses how it is shortened.",
    ),
    "flash": Entry(
        drafter=FLASH,
        network="mmdec.drafters.flash.network:FlashNetwork",
        auto=True,
        note="FLASH: reads a picture shortened by attention, and drafts several tokens at once.",
    ),
    "dflash": Entry(
        drafter=TREE_GROWING,
        network="mmdec.drafters.dflash.network:DFlash",
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
    auto: whether drafter="auto" and the demo look for this drafter's folder next to a language model, with or without
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
    """Return whether the value is a string. This is checked because callers may ignore the type hints."""
    return isinstance(value, str)


def drafter_entry(name: str) -> Entry | None:
    """Return the registry entry of a drafter; None if there is no drafter of this name."""
    return _all().get(name)


def drafter_names() -> list[str]:
    """Return the names of the drafters that are made without arguments: no folder with weights, no loaded model."""
    return [name for name, entry in _all().items() if entry.factory is not None]


def loader_names() -> list[str]:
    """Return the names of the drafters that are loaded from a folder with weights."""
    return [name for name, entry in _all().items() if entry.has_weights]


def auto_names(speech: bool = False) -> list[str]:
    """Return the names of the drafters that drafter="auto" looks for next to a model, the preferred first.

    Args:
        speech: True: drafters for speech models. False (default): drafters for language models, with or without images.
    """
    return [name for name, entry in _all().items() if entry.auto and entry.speech == speech]


def network_class(system: str) -> type[DraftNetwork]:
    """Return the network class of a built-in drafter. The attribute `config_class` is the class of its configuration.

    Args:
        system: name of a drafter with weights, such as "eagle"; not "medusa" or "ctc".

    Raises:
        InputError: for any other name.
    """
    built = {
        name: entry.network for name, entry in BUILT_IN.items() if entry.network and entry.drafter not in (MEDUSA, CTC)
    }
    if system not in built:
        raise InputError(f"`system` must be one of {', '.join(built)}, but is {system!r:.60}. Choose one.")
    network: type[DraftNetwork] = import_dotted(built[system])
    return network


def make_drafter(name: str) -> Drafter:
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
    """Raise InputError if an object lacks a method or attribute of the protocol `mmdec.types.Drafter`."""
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
    """Import the object at the dotted path "package.module:Class". Raises InputError if that fails. argument: name of
    the caller's argument, for the error message."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"`{argument}` must be importable, but '{path}' is not ({error}). Check the spelling and PYTHONPATH."
        ) from error


def _all() -> dict[str, Entry]:
    return {**BUILT_IN, **_registered}
