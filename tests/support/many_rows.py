"""Runs over many rows without a model, and processes that are killed during such a run."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mmdec import BatchError, InputError
from mmdec.jobs.manifest import Row
from mmdec.jobs.many import ROWS_PER_PART, PartWorker, Work

WRITES = ("open", "replace", "fsync", "unlink", "mkdir")  # functions of `os` after which a process may be killed


class Said:
    """A result that was made without a model: the path's file name is its text."""

    def __init__(self, path: str) -> None:
        self.text = Path(path).name

    def to_dict(self) -> dict[str, Any]:
        return {"text": self.text, "confidence": 1.0}

    def format(self, kind: str) -> str:
        return f"{kind} of {self.text}"


def named(paths: Sequence[str], **options: str) -> list[Said]:
    """Make a result for each path. Raises BatchError, because every path that ends in 7 is refused."""
    results = [None if path.endswith("7") else Said(path) for path in paths]
    errors = {i: InputError(f"{path} is refused.") for i, path in enumerate(paths) if path.endswith("7")}
    if errors:
        raise BatchError(results, errors)
    return [result for result in results if result]


def rows_of(count: int) -> list[Row]:
    return [Row(index, f"in/{index}", f"id {index}") for index in range(count)]


def finish(work: Work, rows: Sequence[Row], shard: tuple[int, int] = (1, 1), call: Any = named) -> None:
    """Process the rows of a shard that have no result yet."""
    work.begin(rows)
    for part in work.unfinished_parts(rows, shard):
        PartWorker(work, call).process(part)


def dies_after(writes: int, function: Callable[[], None]) -> bool:
    """Run a function in a process that is killed after `writes` calls of `WRITES`. Returns whether it was killed."""
    child = os.fork()
    if child == 0:
        left = [writes]

        def counting(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any, **options: Any) -> Any:
                result = original(*given, **options)
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return call

        try:
            for name in WRITES:
                setattr(os, name, counting(getattr(os, name)))
            function()
            os._exit(0)
        except BaseException:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status != 0


def table(folder: Path, name: str) -> list[dict[str, Any]]:
    """Read all rows of a table, "results" or "failed", in the order of its files."""
    lines = [line for file in sorted((folder / name).glob("[0-9]*.jsonl")) for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def check_once(folder: Path, count: int) -> None:
    """Assert that each of `count` rows is in exactly one of the tables, once."""
    seen = Counter(row["row"] for name in ("results", "failed") for row in table(folder, name))
    assert seen == Counter(range(count))
    assert len([*(folder / "results").glob("[0-9]*")]) == -(-count // ROWS_PER_PART)
