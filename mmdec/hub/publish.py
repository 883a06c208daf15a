"""A folder that appears whole or not at all: written beside its place, then put there in one step.

Where the system can exchange two names at once (Linux), a reader meets the old folder or the new one and never neither.
Elsewhere there is a moment between two renames; a process that was killed in it left the old folder aside, from where
the next one brings it back.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmdec.types import InputError

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


@contextmanager
def whole_folder(target: str | os.PathLike[str]) -> Iterator[Path]:
    """An empty folder to write in. Where the block ends it takes `target`'s place, and what was there is removed; where
    the block raises, it is removed and `target` stays as it is. Raises InputError for a `target` that is a file."""
    place = Path(target)
    if place.exists() and not place.is_dir():
        raise InputError(f"`directory` must be a folder or new, but '{place}' is a file. Choose another.")
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = place.with_name(f".{place.name}.old")
    if aside.is_dir() and not place.exists():
        aside.rename(place)
    fresh = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}."))
    try:
        yield fresh
        readable(fresh)
        put(fresh, place, aside)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def readable(folder: Path) -> None:
    """Temporary folders, and weights, are written for their owner alone; a model is for everybody."""
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def put(fresh: Path, place: Path, aside: Path) -> None:
    """`fresh` takes the place of `place`, if there is one, which then is gone."""
    if not place.exists():
        os.replace(fresh, place)
        return
    if _exchange(fresh, place):
        shutil.rmtree(fresh)
        return
    shutil.rmtree(aside, ignore_errors=True)
    place.rename(aside)
    try:
        fresh.rename(place)
    except OSError:
        aside.rename(place)
        raise
    shutil.rmtree(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Whether the two names were exchanged at once: Linux's renameat2, where the file system knows it."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0
