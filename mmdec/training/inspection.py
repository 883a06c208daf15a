"""Checks of a corpus's recordings and pictures before training: each file is read once, and the results are stored.

Later runs read only files whose size or modification time has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from mmdec.audio import sound_seconds
from mmdec.checks.files import write_whole
from mmdec.images import read_image
from mmdec.training.processes import end_with_parent
from mmdec.types import InputError

MANY = 2000  # number of files from which several processes read them

Measure = Callable[[Path], float]


def seconds_of(paths: Sequence[Path], kept: Path | None) -> list[float | str]:
    """Seconds of each recording, or a text: what is wrong. kept: folder that stores results; None: nowhere."""
    return _inspected(paths, kept, "recordings", sound_seconds)


def sizes_of(paths: Sequence[Path], kept: Path | None, side: int | None = None) -> list[float | str]:
    """Number of pixels of each picture, or a text: what is wrong. side: both sides' length; None: any."""
    return _inspected(paths, kept, f"pictures-{side or 'any'}", partial(_pixels, side=side))


def _pixels(path: Path, side: int | None) -> float:
    height, width, _ = read_image(path).shape
    if side not in (None, height) or side not in (None, width):
        raise InputError(f"`image` must be {side} x {side} pixels, but '{path}' is {width} x {height}. Scale it.")
    return float(height * width)


def _inspected(paths: Sequence[Path], kept: Path | None, what: str, measure: Measure) -> list[float | str]:
    if kept is None:
        return list(_measured(paths, measure))
    digest = hashlib.blake2b("\n".join(map(str, paths)).encode(errors="surrogateescape"), digest_size=8).hexdigest()
    file = kept / f".{what}-{digest}.json"
    known = _read(file, len(paths))
    stamps = [_stamp(path) for path in paths]
    old = [index for index, stamp in enumerate(stamps) if known[index][:2] != stamp]
    if old:
        for index, value in zip(old, _measured([paths[index] for index in old], measure), strict=True):
            known[index] = [*stamps[index], value]
        write_whole(file, json.dumps(known).encode())
    return [entry[2] for entry in known]


def _read(file: Path, count: int) -> list[list]:
    """The stored size, modification time and result of each path, in order; empty lists if the file is damaged or does
    not have `count` entries."""
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = []
    whole = isinstance(known, list) and all(isinstance(entry, list) and len(entry) == 3 for entry in known)
    return known if whole and len(known) == count else [[] for _ in range(count)]


def _stamp(path: Path) -> list[int]:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return [-1, -1]
    return [found.st_size, found.st_mtime_ns]


def _measured(paths: Sequence[Path], measure: Measure) -> Iterator[float | str]:
    each = partial(_value, measure=measure)
    if len(paths) < MANY:
        yield from map(each, paths)
        return
    with ProcessPoolExecutor(os.cpu_count(), initializer=end_with_parent, initargs=(os.getpid(),)) as pool:
        yield from pool.map(each, paths, chunksize=64)


def _value(path: Path, measure: Measure) -> float | str:
    """The measured value, or the rule that the file breaks."""
    try:
        return round(measure(path), 3)
    except InputError as error:
        return str(error).partition(", but ")[0].replace(f" '{path}'", "")
