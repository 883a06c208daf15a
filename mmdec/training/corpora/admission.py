"""Checks of a corpus: its files must be inside its folder, and only a small share of its rows may be bad.

Recordings and pictures are read once as a check before training. Later training runs check only the files whose size or
modification time has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mmdec.checks.files import printable, quote_path, write_atomically
from mmdec.errors import InputError
from mmdec.io.audio import sound_seconds
from mmdec.io.images import read_image
from mmdec.training.processes import end_with_parent

MAX_BAD_SHARE = 0.1  # default for the largest share of bad rows in a split; with more, the corpus is probably wrong


@dataclass
class BadRows:
    """The rows of a corpus that were left out.

    Args:
        names: Maps each reason to the names of its rows.
    """

    names: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, name: str) -> None:
        self.names.setdefault(reason, []).append(name)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield (reason, name) for each row."""
        return ((reason, name) for reason, names in self.names.items() for name in names)

    @property
    def count(self) -> int:
        return sum(len(names) for names in self.names.values())

    def report(self, shown: int = 5, between: str = "\n") -> str:
        """Describe the rows: for each reason one line, with the number of rows and the first `shown` names.

        Args:
            between: Text between two lines.
        """
        return between.join(
            f"{reason}: {len(names)} ({', '.join(names[:shown])}{', ...' if len(names) > shown else ''})"
            for reason, names in sorted(self.names.items())
        )


@dataclass(frozen=True)
class Admission:
    """Rules that decide which rows and files of a corpus are used.

    Args:
        allow_absolute_paths: Allow absolute paths in the corpus's lists, and symbolic links that lead out of the
            corpus.
        max_bad_share: The largest share of a split's rows that may be bad. With more bad rows, training stops with an
            error. With fewer bad rows, these are left out; their names and number are logged.
    """

    allow_absolute_paths: bool = False
    max_bad_share: float = MAX_BAD_SHARE

    def __post_init__(self) -> None:
        if not 0 <= self.max_bad_share <= 1:
            raise InputError(f"`max_bad_share` must be from 0 to 1, but is {self.max_bad_share}. 0.1 is usual.")

    def path_resolver(self, folder: Path) -> PathResolver:
        """Return a function that turns file names in a list, relative to `folder`, into checked paths."""
        return PathResolver(folder, self.allow_absolute_paths)

    def check(self, bad: BadRows, total: int, noun: str, rule: str = "hold usable rows") -> None:
        """Raise InputError if more than `max_bad_share` of the rows are bad.

        Args:
            total: Number of rows, bad ones included.
            noun: What the rows are, for the message, such as "rows of 'a.tsv'".
            rule: What the corpus must do, for the message.
        """
        if bad.count > self.max_bad_share * total:
            raise InputError(
                f"`corpus` must {rule}, but {bad.count} of the {total} {noun} are bad, more than a share of "
                f"{self.max_bad_share:g}: {bad.report(3, '; ')}. Fix them, or raise `max_bad_share`."
            )


STRICT = Admission()


class PathResolver:
    """Turns file names in a corpus's list into paths, and checks that the paths are inside `folder`.

    If `folder` is a symbolic link, they must be inside the link's target. State: `inside`, a cache of folders that were
    checked.
    """

    def __init__(self, folder: Path, allow_absolute_paths: bool = False) -> None:
        self.folder, self.allow = folder, allow_absolute_paths
        self.root = os.path.realpath(folder)
        self.inside: dict[Path, bool] = {}  # folder -> whether it is in `root` after links are resolved

    def __call__(self, name: str, place: str) -> Path:
        """Return the path of a file name.

        Args:
            place: Where the list has the name, for messages.

        Raises:
            InputError: If the path is outside the folder, or no file can have this name.
        """
        if not name or "\0" in name or os.path.normpath(name) == "." or not _encodable(name):
            raise self._refuse(place, f"has {_quote(name)}", "Write a file's name there.")
        path = self.folder / name
        if self.allow and os.path.isabs(name):
            return path
        if os.path.isabs(name) or Path(name).drive:
            remedy = "Make it relative, or set `allow_absolute_paths`."
            raise self._refuse(place, f"has the absolute path {_quote(name)}", remedy)
        if ".." in name and os.path.normpath(name).split(os.sep)[0] == "..":
            raise self._refuse(place, f"has {_quote(name)}, which leads out", "Move the file into the folder.")
        if not self.allow and self._leads_out(path):
            remedy = "Copy the file there, or set `allow_absolute_paths`."
            raise self._refuse(place, f"has {_quote(name)}, a link that leads out", remedy)
        return path

    def _leads_out(self, path: Path) -> bool:
        if path.parent not in self.inside:
            self.inside[path.parent] = self._holds(path.parent)
        return not self.inside[path.parent] or (os.path.islink(path) and not self._holds(path))

    def _holds(self, path: Path) -> bool:
        real = os.path.realpath(path)
        return real == self.root or real.startswith(os.path.join(self.root, ""))

    def _refuse(self, place: str, problem: str, remedy: str) -> InputError:
        return InputError(
            f"{place[0].upper()}{place[1:]} must have a name inside the folder '{quote_path(self.folder)}', but "
            f"{problem}. {remedy}"
        )


def _quote(name: str) -> str:
    return f"'{printable(name)[:80]}'"


def _encodable(name: str) -> bool:
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True


def check_apart(splits: Iterable[Iterable[str]], noun: str, remedy: str) -> None:
    """Raise InputError if the training split and the development split share an item.

    Args:
        splits: The items' names in the training split, and in the development split.
        noun: What the items are, for the message.
        remedy: The message's last sentence.
    """
    train, dev = map(set, splits)
    both = sorted(train & dev)
    if both:
        raise InputError(
            f"`corpus` must have other {noun} for development than for training, but {len(both)} are in both, "
            f"{_quote(both[0])} for one. {remedy}"
        )


MIN_PARALLEL_FILES = 2000  # with at least this many files, several processes read them, to save time

Measure = Callable[[Path], float]


def seconds_of(paths: Sequence[Path], cache: Path | None) -> list[float | str]:
    """Return the duration of each recording in seconds; for a bad recording, a text that says what is wrong.

    Args:
        cache: Folder that caches the results; None: no cache.
    """
    return _inspect(paths, cache, "recordings", sound_seconds)


def sizes_of(paths: Sequence[Path], cache: Path | None) -> list[float | str]:
    """Return the number of pixels of each picture; for a bad picture, a text that says what is wrong.

    Args:
        cache: Folder that caches the results; None: no cache.
    """
    return _inspect(paths, cache, "pictures", _pixels)


def _pixels(path: Path) -> float:
    height, width, _ = read_image(path).shape
    return float(height * width)


def _inspect(paths: Sequence[Path], cache: Path | None, noun: str, measure: Measure) -> list[float | str]:
    if cache is None:
        return list(_measure(paths, measure))
    digest = hashlib.blake2b("\n".join(map(str, paths)).encode(errors="surrogateescape"), digest_size=8).hexdigest()
    file = cache / f".{noun}-{digest}.json"
    measurements = _read(file, len(paths))
    stamps = [_stamp(path) for path in paths]
    old = [index for index, stamp in enumerate(stamps) if measurements[index][:2] != stamp]
    if old:
        for index, value in zip(old, _measure([paths[index] for index in old], measure), strict=True):
            measurements[index] = [*stamps[index], value]
        write_atomically(file, json.dumps(measurements).encode())
    return [entry[2] for entry in measurements]


def _read(file: Path, count: int) -> list[list]:
    """Read the cached [size in bytes, modification time in ns, result] of each path, in order.

    Return empty lists if the file is damaged or does not have `count` entries.
    """
    try:
        measurements = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        measurements = []
    whole = isinstance(measurements, list) and all(
        isinstance(entry, list) and len(entry) == 3 for entry in measurements
    )
    return measurements if whole and len(measurements) == count else [[] for _ in range(count)]


def _stamp(path: Path) -> list[int]:
    try:
        status = path.stat()
    except (OSError, ValueError):
        return [-1, -1]
    return [status.st_size, status.st_mtime_ns]


def _measure(paths: Sequence[Path], measure: Measure) -> Iterator[float | str]:
    each = partial(_value, measure=measure)
    if len(paths) < MIN_PARALLEL_FILES:
        yield from map(each, paths)
        return
    with ProcessPoolExecutor(os.cpu_count(), initializer=end_with_parent, initargs=(os.getpid(),)) as pool:
        yield from pool.map(each, paths, chunksize=64)


def _value(path: Path, measure: Measure) -> float | str:
    """Return the measured value of a file.

    For a bad file, return the first part of the error message: the rule that the file breaks.
    """
    try:
        return round(measure(path), 3)
    except InputError as error:
        return str(error).partition(", but ")[0].replace(f" '{path}'", "")
