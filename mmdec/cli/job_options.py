"""Options that `translate`, `transcribe` and `describe` share for many inputs: manifests, `--shard` and `--engine`."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, final

import typer

from mmdec import InputError
from mmdec.checks.arguments import format_value
from mmdec.checks.files import json_text
from mmdec.cli.inputs import FileKind, input_files
from mmdec.cli.progress import progress_bar
from mmdec.jobs.manifest import SUFFIXES, Row, is_manifest, read_manifest
from mmdec.jobs.many import ARGUMENT_COLUMNS, Work, run_locally

PANEL = "Many inputs: a list (.tsv, .jsonl, .parquet) as the only input, --shard or --engine"
Shard = Annotated[
    str | None,
    typer.Option("--shard", metavar="I/N", rich_help_panel=PANEL, help="Do the I-th of N shares: 1/4, 2/4, ..."),
]
EngineName = Annotated[
    str | None,
    typer.Option("--engine", rich_help_panel=PANEL, help="local (this process, the default) or ray (mmdec\\[ray])."),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", rich_help_panel=PANEL, help="Workers of Ray. Default: one for each GPU, else CPU."
    ),
]
TableKind = Annotated[
    str | None, typer.Option("--table", rich_help_panel=PANEL, help="Results as jsonl or parquet. Default: jsonl.")
]


@final
@dataclass(frozen=True)
class JobOptions:
    """The options for many inputs.

    They set the share of the rows to process, the engine and its workers, and the results' format.
    """

    shard: Shard = None
    engine: EngineName = None
    workers: Workers = None
    table: TableKind = None

    def has_many_inputs(self, inputs: Sequence[str | Path]) -> bool:
        """Return whether there are many inputs: one is a manifest, or `--shard` or `--engine` is given.

        Raises:
            InputError: For `--workers` or `--table` without many inputs.
        """
        is_job = self.shard is not None or self.engine is not None or any(is_manifest(name) for name in inputs)
        if not is_job and (self.workers, self.table) != (None, None):
            name = "table" if self.workers is None else "workers"
            raise InputError(f"`{name}` must come with a list, `--shard` or `--engine`, but does not. Add one.")
        return is_job

    def run(
        self,
        work: Work,
        inputs: Sequence[str | Path],
        output: Path | None,
        kind: FileKind,
        without: Mapping[str, Any],
    ) -> None:
        """Process all rows of the inputs that have no result yet. Exits with 1 if some failed.

        Args:
            work: The model, and what to do with each row.
            output: The folder of results.
            kind: The files to take from folders.
            without: Option name -> value, for options that are impossible here: a given one raises InputError.
        """
        for name, value in without.items():
            if value:
                raise InputError(f"`{name}` must be left out for a list of inputs, but is given.")
        if output is None or (os.path.lexists(output) and not os.path.isdir(output)):
            raise InputError(f"`output` must be a folder for many inputs, but is {format_value(output)}.")
        shard, run = self._shard(), self._engine()
        rows, base = _rows(work.command, inputs, output, kind)
        work = replace(work, output=Path(os.path.abspath(output)), base=base, table=self.table or "jsonl")
        work.begin(rows)
        todo, began, failed = work.unfinished_parts(rows, shard), time.monotonic(), 0
        left = sum(len(part) for _, part in todo)
        with progress_bar(count=True) as progress:
            task = progress.add_task("rows", total=left)
            for count, _ in run(work, todo):
                progress.advance(task, count)
        failed = sum(1 for _ in work.failures(shard))
        seconds = time.monotonic() - began
        mine = len(rows) if shard == (1, 1) else sum(len(part) for _, part in work.parts(rows, shard))
        summary = {"rows": mine, "failed": failed, "done_now": left, "seconds": round(seconds, 3)}
        print(json_text(summary | {"results": str(output / "results")}))
        if failed:
            print(f"{failed} of {mine} rows failed: {output / 'failed'}", file=sys.stderr)
            raise typer.Exit(1)

    def _shard(self) -> tuple[int, int]:
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", self.shard or "1/1", re.ASCII)
        shard = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= shard[0] <= shard[1]:
            raise InputError(
                f"`shard` must be I/N with I from 1 to N, but is {format_value(self.shard)}. Write 1/4, say."
            )
        return shard

    def _engine(self) -> Callable[..., Any]:
        if self.engine not in (None, "local", "ray"):
            raise InputError(f"`engine` must be local or ray, but is {format_value(self.engine)}.")
        if self.engine != "ray":
            if self.workers is not None:
                raise InputError("`workers` must come with `--engine ray`, but does not. Use `--shard` without Ray.")
            return run_locally
        from functools import partial

        from mmdec.jobs.cluster import run_on_ray

        return partial(run_on_ray, workers=self.workers)


def _rows(command: str, inputs: Sequence[str | Path], output: Path, kind: FileKind) -> tuple[list[Row], str]:
    """List the rows to process: those of a manifest, or one for each file.

    Args:
        kind: The files to take from folders.

    Returns:
        The rows, and the folder that their relative paths start from.
    """
    if not any(is_manifest(name) for name in inputs):
        files = input_files(inputs, kind, output)
        return [Row(index, file.name, refusal=file.refusal) for index, file in enumerate(files)], os.getcwd()
    if len(inputs) > 1:
        raise InputError(
            f"A list ({', '.join(SUFFIXES)}) must be the only input, but is one of {len(inputs)}. Give it alone."
        )
    path = Path(inputs[0])
    return read_manifest(path, ARGUMENT_COLUMNS[command]), os.path.dirname(os.path.abspath(path))
