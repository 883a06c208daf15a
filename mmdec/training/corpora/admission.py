"""What of a corpus is taken: names that stay inside it, and how many bad rows a run bears."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mmdec.checks.files import printable
from mmdec.training.corpora.text_files import shown
from mmdec.types import InputError

MAX_BAD_SHARE = 0.1  # of a split's rows; with more of them bad, something is wrong with the corpus


@dataclass
class BadRows:
    """Rows left out: their names by reason."""

    names: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, name: str) -> None:
        self.names.setdefault(reason, []).append(name)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """(reason, name) of each row."""
        return ((reason, name) for reason, names in self.names.items() for name in names)

    @property
    def count(self) -> int:
        return sum(len(names) for names in self.names.values())

    def report(self, shown: int = 5, between: str = "\n") -> str:
        """A line a reason: how many rows, and the first names. between: what parts the reasons."""
        return between.join(
            f"{reason}: {len(names)} ({', '.join(names[:shown])}{', ...' if len(names) > shown else ''})"
            for reason, names in sorted(self.names.items())
        )


@dataclass(frozen=True)
class Admission:
    """allow_absolute_paths: names in a corpus's lists may be absolute, and links may lead out of it. max_bad_share: a
    run ends where a larger share of a split's rows is bad; fewer are left out, named and counted."""

    allow_absolute_paths: bool = False
    max_bad_share: float = MAX_BAD_SHARE

    def __post_init__(self) -> None:
        if not 0 <= self.max_bad_share <= 1:
            raise InputError(f"`max_bad_share` must be from 0 to 1, but is {self.max_bad_share}. 0.1 is usual.")

    def names(self, folder: Path) -> Names:
        """What reads names that are relative to a folder."""
        return Names(folder, self.allow_absolute_paths)

    def check(self, bad: BadRows, total: int, of: str, rule: str = "hold usable rows") -> None:
        """Raise InputError where more of `total` rows are bad than is borne. of: what they are, "rows of 'a.tsv'"."""
        if bad.count > self.max_bad_share * total:
            raise InputError(
                f"`corpus` must {rule}, but {bad.count} of the {total} {of} are bad, more than a share of "
                f"{self.max_bad_share:g}: {bad.report(3, '; ')}. Mend them, or raise `max_bad_share`."
            )


STRICT = Admission()
ANYWHERE = Admission(allow_absolute_paths=True)  # where nothing but texts is read


class Names:
    """Names in a corpus's list as paths inside one folder. A folder that is itself a link is the corpus's own."""

    def __init__(self, folder: Path, allow_absolute_paths: bool = False) -> None:
        self.folder, self.allow = folder, allow_absolute_paths
        self.root = os.path.realpath(folder)
        self.inside: dict[Path, bool] = {}  # whether a folder's real place is inside

    def __call__(self, name: str, place: str) -> Path:
        """place: where the name stands. Raises InputError for one that leads out, or that no file can have."""
        if not name or "\0" in name or os.path.normpath(name) == "." or not _encodable(name):
            raise self._refuse(place, f"has {_cut(name)}", "Write a file's name there.")
        path = self.folder / name
        if self.allow and os.path.isabs(name):
            return path
        if os.path.isabs(name) or Path(name).drive:
            remedy = "Make it relative, or set `allow_absolute_paths`."
            raise self._refuse(place, f"has the absolute path {_cut(name)}", remedy)
        if ".." in name and os.path.normpath(name).split(os.sep)[0] == "..":
            raise self._refuse(place, f"has {_cut(name)}, which leads out", "Move the file into the folder.")
        if not self.allow and self._leads_out(path):
            remedy = "Copy the file there, or set `allow_absolute_paths`."
            raise self._refuse(place, f"has {_cut(name)}, a link that leads out", remedy)
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
            f"{place[0].upper()}{place[1:]} must have a name inside the folder {shown(self.folder)}, but {problem}. "
            f"{remedy}"
        )


def _cut(name: str) -> str:
    return f"'{printable(name)[:80]}'"


def _encodable(name: str) -> bool:
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True


def check_apart(splits: Iterable[Iterable[str]], what: str, remedy: str) -> None:
    """Raise InputError where the two splits, to train on and for development, share something. what: of which kind."""
    train, dev = map(set, splits)
    both = sorted(train & dev)
    if both:
        raise InputError(
            f"`corpus` must have other {what} for development than for training, but {len(both)} are in both, "
            f"{_cut(both[0])} for one. {remedy}"
        )
