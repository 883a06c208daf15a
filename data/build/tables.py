"""Tab-separated tables of the builders: written whole or not at all; journals that a kill cannot spoil."""

import os
from collections.abc import Sequence
from pathlib import Path


def write_text(path: Path, rows: Sequence[Sequence[str]]) -> None:
    """Write tab-separated rows, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(partial, path)


def read_journal(path: Path) -> dict[str, list[str]]:
    """The rows of a journal by their first column. A line cut short by a kill is dropped."""
    if not path.exists():
        return {}
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    rows = [line.split("\t") for line in whole.split("\n") if line]
    write_text(path, rows)
    return {row[0]: row[1:] for row in rows}
