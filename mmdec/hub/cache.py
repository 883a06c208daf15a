"""Keeps loaded models in memory, and loads one again when its files have changed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar, final

Loaded = TypeVar("Loaded")


@final
class PathVersion(NamedTuple):
    """A cache key for the content of a path. The key changes if a file at the path is written again."""

    path: str
    modified_ns: int  # modification time of the newest file in nanoseconds; 0: there is no file


def path_version(source: str | os.PathLike[str]) -> PathVersion:
    """Return a cache key for the current content of a folder or file.

    Args:
        source: A path, or another name of a model, such as a Hugging Face id, whose key never changes.
    """
    path = Path(source)
    if not path.exists():
        return PathVersion(os.fspath(source), 0)
    files = path.iterdir() if path.is_dir() else [path]
    return PathVersion(str(path.resolve()), max((_modified_ns(file) for file in files), default=0))


def _modified_ns(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:  # the link is circular, or its target is missing
        return file.lstat().st_mtime_ns


@final
class LoadedModels(Generic[Loaded]):
    """A thread-safe cache of loaded models, which holds only one version of each model's files.

    Threads that ask for the same model wait until it is loaded.
    """

    def __init__(self) -> None:
        # key without file times -> (key with file times, model)
        self._models: dict[Hashable, tuple[Hashable, Loaded]] = {}
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type[LoadedModels[Loaded]], tuple[()]]:
        """Copy or pickle the cache as an empty one.

        A lock cannot be copied, and the models would be in memory twice.
        """
        return LoadedModels, ()

    def get(self, key: Hashable, read: Callable[[], Loaded]) -> Loaded:
        """Return the model with this key; call `read` to load it if it is missing.

        A model that was loaded from an earlier version of the same files is dropped first.
        """
        place = _without_versions(key)
        with self._lock:
            if place in self._models and self._models[place][0] != key:
                del self._models[place]
            if place not in self._models:
                self._models[place] = key, read()
            return self._models[place][1]


def _without_versions(key: Hashable) -> Hashable:
    """Replace each `PathVersion` in a key by its path, so that all versions of a model have the same key."""
    if isinstance(key, PathVersion):
        return key.path
    return tuple(map(_without_versions, key)) if isinstance(key, tuple) else key
