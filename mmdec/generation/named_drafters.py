"""Drafters by name, dotted path or folder. A drafter's module is imported when its name is first used."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from mmdec.checks.arguments import show
from mmdec.checks.weights import read_settings
from mmdec.drafters.registry import (
    BUILT_IN,
    DOTTED,
    NAME,
    Entry,
    Factory,
    Loader,
    add_entry,
    drafter_entry,
    loader_names,
)
from mmdec.types import Drafter, InputError

CONFIG = "config.json"


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
    add_entry(name, Entry(factory, loader, auto=bool(auto), note=note))


def _is_text(value: object) -> bool:
    """Whether a caller passed text, whatever the annotation says."""
    return isinstance(value, str)


def import_dotted(path: str, argument: str = "drafter") -> Any:
    """What "package.module:Class" names. Raises InputError where it cannot be imported."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"`{argument}` must be importable, but '{path}' is not ({error}). Check the spelling and PYTHONPATH."
        ) from error


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


def folder_drafter(folder: Path, model: Any, argument: str = "drafter") -> Drafter:
    """The drafter with weights in this folder, for this model of transformers.

    Raises InputError where the folder's config.json names no drafter with weights, and whatever its loader raises.
    """
    name = folder_system(folder, argument)
    entry = drafter_entry(name)
    if not name:  # most likely a smaller model
        raise InputError(
            f"`{argument}` must hold a drafter of {', '.join(loader_names())}, but the config.json of '{folder}' names "
            "none. A smaller model drafts, too: load it with transformers, and pass the loaded model."
        )
    if entry is None or entry.loader is None:
        raise InputError(
            f"`{argument}` must hold a drafter of {', '.join(loader_names())}, but '{folder}' holds "
            f"{name!r}. Name another folder."
        )
    loader = import_dotted(entry.loader, argument) if isinstance(entry.loader, str) else entry.loader
    return loader(folder, model)


def folder_system(folder: Path, argument: str = "drafter") -> str:
    """What a folder's config.json says that it holds. Raises InputError for a folder without config.json."""
    if not (folder / CONFIG).is_file():
        raise InputError(
            f"`{argument}` must be a folder with a drafter's {CONFIG} and weights, but '{folder}' has no {CONFIG}. "
            "Name the drafter's folder."
        )
    return str(read_settings(folder / CONFIG, argument).get("system") or "")
