"""Files of the builders: written whole or not at all; tab-separated tables; journals that a kill cannot spoil."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to; it becomes `path` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    yield partial
    os.replace(partial, path)


def write_text(path: Path, rows: Sequence[Sequence[str]]) -> None:
    """Write tab-separated rows, whole or not at all."""
    with whole(path) as partial:
        partial.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")


def read_journal(path: Path) -> dict[str, list[str]]:
    """The rows of a journal by their first column. A line cut short by a kill is dropped."""
    if not path.exists():
        return {}
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    rows = [line.split("\t") for line in whole.split("\n") if line]
    write_text(path, rows)
    return {row[0]: row[1:] for row in rows}


@contextmanager
def journal(path: Path, header: Sequence[str] = ()) -> Iterator[tuple[dict[str, list[str]], Callable[..., None]]]:
    """The rows so far, as `read_journal` gives them, and a function that adds a row of these columns at once."""
    done = read_journal(path)
    if header and not done:
        write_text(path, [header])
    with path.open("a", encoding="utf-8") as file:

        def add(*row: str) -> None:
            file.write("\t".join(row) + "\n")
            file.flush()

        yield done, add
