"""The registry of drafters by name. Only `built_in` lists drafters.

A drafter's class, or the class of a draft network, registers itself by a decorator, `built_in_drafter` or
`built_in_network`. `BUILT_IN` lists names, modules and what a drafter is made from: a module is imported only when
somebody asks for its drafter. `register_drafter` is for drafters from outside the package.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mmdec.checks.arguments import check_methods, format_value
from mmdec.drafters.built_in import AUTO, BUILT_IN, built_in_names
from mmdec.errors import InputError
from mmdec.types import Drafter, Needs

if TYPE_CHECKING:
    from mmdec.drafters.networks.weights import DrafterWeights

Class = TypeVar("Class")
Network = TypeVar("Network", bound="DrafterWeights[Any]")
Factory = Callable[[], Drafter]
Loader = Callable[[Path, Any], Drafter]  # called with the drafter's folder and the loaded target model
DOTTED_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
DRAFTER_NAME = re.compile(r"[A-Za-z][\w-]*")
DRAFTER_METHODS = ("check", "start", "propose", "update", "select")  # methods that every drafter must have


@dataclass(frozen=True)
class DrafterEntry:
    """How to make one drafter: without arguments, from the loaded model, or from a folder with weights.

    A dotted path is written "package.module:Class".
    """

    factory: Factory | str | None = None  # makes the drafter without arguments; a callable or its dotted path
    from_model: Callable[[Any], Drafter] | None = None  # makes the drafter from the loaded target model
    loader: Loader | str | None = None  # makes the drafter from a folder with weights
    network: type[DrafterWeights[Any]] | None = None  # weights that `mmdec.pretrained.drafters` loads from a folder
    published: str | None = None  # module that reads published folders; see `mmdec.pretrained.published`
    auto: bool = False  # of a registered drafter: whether drafter="auto" looks for it; it does for those built in
    speech: bool = False  # True: it drafts for speech models; False: for language models, with or without images
    note: str = ""  # one line that tells users of the demo how it drafts

    @property
    def has_weights(self) -> bool:
        """Whether this drafter is loaded from a folder with weights."""
        return self.network is not None or self.loader is not None


_decorated: dict[str, DrafterEntry] = {}  # entries of the modules imported so far
_registered: dict[str, DrafterEntry] = {}


def built_in_drafter(
    name: str, *, loader: str | None = None, published: str | None = None, note: str = ""
) -> Callable[[type[Class]], type[Class]]:
    """Register the decorated class as a built-in drafter.

    Its kind in `BUILT_IN` says how it is made: "ready" calls the class without arguments, "from_model" calls the class
    method `from_model(model)`, and the kinds with weights call the `loader`.

    Args:
        name: The name in `BUILT_IN`.
        loader: For a drafter with weights: dotted path of a function (folder: Path, model) -> drafter.
        published: Module that recognises the drafter's published folders.
        note: One line that tells users of the demo how it drafts.
    """

    def register(kind: type[Class]) -> type[Class]:
        drafter: Any = kind
        made_of = BUILT_IN[name].kind
        _decorated[name] = DrafterEntry(
            factory=drafter if made_of == "ready" else None,
            from_model=drafter.from_model if made_of == "from_model" else None,
            loader=loader,
            published=published,
            speech=made_of == "speech_weights",
            note=note,
        )
        return kind

    return register


def built_in_network(
    name: str, *, published: str | None = None, note: str = ""
) -> Callable[[type[Network]], type[Network]]:
    """Register the decorated class as the network of a built-in drafter for language models.

    `mmdec.pretrained.drafters` reads its folders, the network's `make_drafter` makes the drafter, and drafter="auto"
    and the demo look for its folder next to a model.

    Args:
        name: The name in `BUILT_IN`, which becomes the network's `system`.
        published: Module that reads the network's published folders; see `mmdec.pretrained.published`.
        note: One line that tells users of the demo how it drafts.
    """

    def register(kind: type[Network]) -> type[Network]:
        kind.system = name
        _decorated[name] = DrafterEntry(network=kind, published=published, note=note)
        return kind

    return register


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

    Args:
        name: Letters, digits, "_" and "-"; not the name of a built-in drafter.
        factory: A class or function without arguments that makes the drafter, or its dotted path
            "package.module:Class".
        loader: For a drafter with weights: a function (folder: Path, model) -> drafter, or its dotted path. The
            folder's config.json holds {"system": name}.
        auto: Whether drafter="auto" and the demo look for this drafter's folder next to a language model, with or
            without images, after the built-in drafters. Default False. Needs `loader`.
        note: One line on how it drafts, which the demo shows. Default "".

    Raises:
        InputError: If the name is malformed or built in, if neither `factory` nor `loader` is given, if one of them is
            neither callable nor a dotted path, or if `auto` is given without `loader`.
    """
    if not _is_text(name) or not DRAFTER_NAME.fullmatch(name):
        raise InputError(f"`name` must be letters, digits, _ and -, but is {format_value(name)}. Choose a short name.")
    if name in BUILT_IN or name == AUTO:
        raise InputError(f"`name` must be new, but {name!r} is one of mmdec's own drafters. Choose another name.")
    if factory is None and loader is None:
        raise InputError("`factory` must be given if there is no `loader`, but is None. Pass the drafter's class.")
    makers: tuple[tuple[str, object], ...] = (("factory", factory), ("loader", loader))
    for argument, maker in makers:
        if not (maker is None or callable(maker) or (_is_text(maker) and DOTTED_PATH.fullmatch(str(maker)))):
            raise InputError(
                f"`{argument}` must be a function or a dotted path, but is {format_value(maker)}. Pass the drafter's "
                'class, or "package.module:Class".'
            )
    if auto and loader is None:
        raise InputError(
            "`auto` needs a drafter with weights, but there is no `loader`. Pass one, or leave `auto` out."
        )
    if not _is_text(note):
        raise InputError(f"`note` must be text, but is {format_value(note)}. Say in one line how it drafts.")
    _registered[name] = DrafterEntry(factory, loader=loader, auto=bool(auto), note=note)


def _is_text(value: object) -> bool:
    """Return whether the value is a string. This is checked because callers may ignore the type hints."""
    return isinstance(value, str)


def drafter_entry(name: str) -> DrafterEntry | None:
    """Return the registry entry of a drafter; None if there is no drafter of this name."""
    return _registered.get(name) if name not in BUILT_IN else _built_in(name)


def drafter_names() -> list[str]:
    """Return the names of the drafters that are made without arguments: no folder with weights, no loaded model."""
    return [*built_in_names("ready"), *(name for name, entry in _registered.items() if entry.factory is not None)]


def loader_names() -> list[str]:
    """Return the names of the drafters that are loaded from a folder with weights."""
    built_in = built_in_names("language_weights", "speech_weights")
    return [*built_in, *(name for name, entry in _registered.items() if entry.has_weights)]


def auto_names(speech: bool = False) -> list[str]:
    """Return the names of the drafters that drafter="auto" looks for next to a model, the preferred first.

    Args:
        speech: True: drafters for speech models. False (default): drafters for language models, with or without images.
    """
    if speech:
        return built_in_names("speech_weights")
    return [*built_in_names("language_weights"), *(name for name, entry in _registered.items() if entry.auto)]


def published_entries() -> list[DrafterEntry]:
    """Return entries whose modules read published folders, one for each module.

    The last in `BUILT_IN` comes first: of two formats that a folder may be in, EAGLE's says less about the tensors.
    """
    entries = [_built_in(name) for name in reversed(BUILT_IN)]
    return list({entry.published: entry for entry in entries if entry.published is not None}.values())


def network_class(system: str) -> type[DrafterWeights[Any]]:
    """Return the class of a built-in drafter's weights. The attribute `config_class` is the class of its configuration.

    Args:
        system: Name of a drafter with weights, such as "eagle"; not "medusa" or "ctc".

    Raises:
        InputError: For any other name.
    """
    entry = _built_in(system) if system in BUILT_IN else None
    if entry is None or entry.network is None:
        names = ", ".join(built_in_names("language_weights"))
        raise InputError(f"`system` must be one of {names}, but is {system!r:.60}.")
    return entry.network


def make_drafter(name: str) -> Drafter:
    """Make a drafter from a registered name or a dotted path.

    Args:
        name: A registered name, or "package.module:Class" of a class that needs no arguments.

    Raises:
        InputError: If a drafter of this name needs a folder or a loaded model, if there is no such drafter, or if its
            class needs arguments.
    """
    entry = drafter_entry(name)
    if entry is not None and entry.from_model is not None:
        raise InputError(
            f"`drafter` must be one that this call can create, but {name!r} needs a loaded model. Pass it to "
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
        raise InputError(
            f"`drafter` must name a class, but '{name}' is {format_value(factory)}. Name the drafter's class."
        )
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
    check_methods("drafter", drafter, DRAFTER_METHODS, remedy)
    if not isinstance(getattr(drafter, "name", None), str) or not isinstance(getattr(drafter, "needs", None), Needs):
        raise InputError(
            f"`drafter` must have a `name` and its `needs`, an mmdec.types.Needs, but {format_value(drafter)} does "
            f"not. {remedy}"
        )


def is_dotted(text: str) -> bool:
    """Return whether the text is written as "package.module:Class"."""
    return DOTTED_PATH.fullmatch(text) is not None


def import_dotted(path: str, argument: str = "drafter") -> Any:
    """Import the object at the dotted path "package.module:Class".

    Args:
        argument: Name of the caller's argument, for the error message.

    Raises:
        InputError: If that fails.
    """
    module, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"`{argument}` must be importable, but '{path}' is not ({error}). Check the spelling and PYTHONPATH."
        ) from error


def _built_in(name: str) -> DrafterEntry:
    import_module(BUILT_IN[name].module)
    return _decorated[name]
