"""Applies one call to the many rows of a list, in parts, so that a killed run can be continued.

A list is divided by position into parts of `ROWS_PER_PART` rows. The results of a part are one file, which is written
last and in one step; so a part is done if and only if this file exists. A continued run processes the parts without
this file. A part that was interrupted is processed again from its beginning, with the same file names. Shards of a job
scheduler, Ray's workers and a single process use the same code and write the same folder:

    run.json                    what is computed: list, model, options
    results/000012.jsonl        results of part 12, or .parquet
    failed/000012.jsonl         rows of part 12 that failed, with the reason; only if there are any
    files/000012/00000391.wav   audio or subtitles of row 391
"""

from __future__ import annotations

import io
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, final

from mmdec.checks.files import failure_message, json_text, quote_path, read_json_object, write_atomically
from mmdec.errors import BatchError, InputError, MmdecError
from mmdec.jobs.manifest import Row, digest, pyarrow_parquet

ROWS_PER_PART = 32  # rows in a part: few, so that a killed run loses little; but enough to limit the number of files
TABLE_FORMATS = ("jsonl", "parquet")
ARGUMENT_COLUMNS: Mapping[str, tuple[str, ...]] = {  # command -> columns of a list that are arguments of its call
    "translate": (),
    "transcribe": ("language", "prompt"),
    "describe": ("prompt",),
}
# options that may change when a run is continued, because they do not change results
CHANGEABLE_OPTIONS = ("threads", "batch_size")
TRANSLATIONS_PER_CALL = 8  # recordings that are translated together: on a GPU as one padded batch
# Bytes of files that are transcribed in one call, here and by `mmdec transcribe`. A call holds the samples of all its
# recordings: these take twice as much memory as a file of 16-bit samples, and about twenty times as much as compressed
# speech, so at most about 640 MB. As FLAC it is half an hour of sound, enough to keep a batch full.
MAX_BYTES_PER_CALL = 32_000_000
Input = TypeVar("Input")
Part = tuple[int, Sequence[Row]]  # index of a part, and its rows
Call = Callable[..., Sequence[Any]]  # function: (list of paths, keyword options) -> results


@final
@dataclass(frozen=True)
class Work:
    """What to compute for every row of a list, and where the results are written. Can be sent to other processes."""

    command: str  # "translate", "transcribe" or "describe"
    model: str
    output: Path = Path()
    base: str = ""  # folder to which relative paths in the list refer
    options: Mapping[str, Any] = field(default_factory=lambda: {})  # keyword options of the public call
    table: str = "jsonl"
    files: str = ""  # suffix of the file that is written for each row, such as .wav or .srt; "": none
    device: str | None = None
    dtype: str | None = None
    vocoder: str | None = None

    def begin(self, rows: Sequence[Row]) -> None:
        """Write run.json, or if it exists, check that it describes the same computation.

        Args:
            rows: The whole list.

        Raises:
            InputError: If run.json describes another computation.
            OSError: If the folder cannot be written.
        """
        if self.table not in TABLE_FORMATS:
            raise InputError(f"`table` must be {' or '.join(TABLE_FORMATS)}, but is {self.table!r}.")
        if self.table == "parquet":
            pyarrow_parquet()
        settings: dict[str, Any] = {
            "command": self.command,
            "manifest": digest(rows),
            "rows": len(rows),
            "part": ROWS_PER_PART,
        }
        settings |= {name: getattr(self, name) for name in ("model", "table", "files", "dtype", "vocoder")}
        settings = json.loads(
            json_text(settings | {"options": {k: v for k, v in self.options.items() if k not in CHANGEABLE_OPTIONS}})
        )
        file = self.output / "run.json"
        earlier = read_json_object(file)
        other = next((name for name in settings if earlier and earlier.get(name) != settings[name]), None)
        if other is not None:
            raise InputError(
                f"`output` must be a new folder or that of the same run, but '{quote_path(file)}' has another {other}. "
                "Name another folder."
            )
        if not earlier:
            write_atomically(file, (json_text(settings, 2) + "\n").encode())

    def unfinished_parts(self, rows: Sequence[Row], shard: tuple[int, int] = (1, 1)) -> list[Part]:
        """Return the parts of a shard that have no results yet.

        Args:
            rows: The whole list.
            shard: (number of the shard from 1, number of shards).
        """
        folder = self.output / "results"
        done = set(os.listdir(folder)) if folder.is_dir() else set[str]()
        mine = self.parts(rows, shard)
        return [(number, part) for number, part in mine if f"{number:06d}.{self.table}" not in done]

    @staticmethod
    def parts(rows: Sequence[Row], shard: tuple[int, int] = (1, 1)) -> list[Part]:
        """Return all parts of a shard.

        Args:
            rows: The whole list.
            shard: (number of the shard from 1, number of shards).
        """
        numbers = range(shard[0] - 1, -(-len(rows) // ROWS_PER_PART), shard[1])
        return [(number, rows[number * ROWS_PER_PART : (number + 1) * ROWS_PER_PART]) for number in numbers]

    def failures(self, shard: tuple[int, int] = (1, 1)) -> Iterator[dict[str, Any]]:
        """Yield the failed rows of a shard's parts, as they are recorded in `failed/`.

        Args:
            shard: (number of the shard from 1, number of shards).
        """
        for file in sorted((self.output / "failed").glob("[0-9]*.jsonl")):
            if int(file.stem) % shard[1] == shard[0] - 1:
                yield from map(json.loads, file.read_text(encoding="utf-8").splitlines())


@final
class PartWorker:
    """Processes parts of a list. Holds the model, which is loaded once.

    Args:
        work: What to compute.
        call: Function that decodes a list of paths with given options; None: the public call of `work.command`.

    Raises:
        InputError: If there is no such model, or an option is wrong.
    """

    def __init__(self, work: Work, call: Call | None = None) -> None:
        self._work = work
        self._call = _public_call(work) if call is None else call

    def process(self, part: Part) -> tuple[int, int]:
        """Process a part and write its files.

        Returns:
            The number of its rows, and the number of rows that failed.

        Raises:
            OSError: If a file cannot be written.
        """
        number, rows = part
        results, good, bad = self._results(rows), list[dict[str, Any]](), list[dict[str, Any]]()
        for row in rows:
            result = results[row.index]
            named: dict[str, Any] = {"row": row.index, "id": row.id, "input": row.path}
            try:
                if isinstance(result, str):
                    raise InputError(result)
                good.append(named | self._save_result(number, row, result))
            except InputError as error:
                bad.append(named | dict(row.options) | {"error": str(error)})
        failed = self._work.output / "failed" / f"{number:06d}.jsonl"
        if bad:
            write_atomically(failed, _json_lines(bad))
        else:
            failed.unlink(missing_ok=True)  # an interrupted attempt may have left this file
        content = _json_lines(good) if self._work.table == "jsonl" else _parquet(good)
        # written last, because this file marks the part as done
        write_atomically(self._work.output / "results" / f"{number:06d}.{self._work.table}", content)
        return len(rows), len(bad)

    def _results(self, rows: Sequence[Row]) -> dict[int, Any]:
        """Decode rows.

        Returns:
            Row index -> result, or the reason why there is none (a text).
        """
        results: dict[int, Any] = {row.index: row.refusal for row in rows if row.refusal}
        alike: dict[tuple[tuple[str, str], ...], list[Row]] = defaultdict(list)
        for row in rows:
            if not row.refusal:
                alike[row.options].append(row)
        for options, group in alike.items():
            for batch in self._calls(group):
                paths = [self._path(row) for row in batch]
                try:
                    batch_results = decode_each(paths, partial(self._call, **dict(options)))
                except InputError as error:
                    if not options:  # the error is not caused by options of the rows, so every batch would fail
                        raise
                    batch_results = [str(error)] * len(batch)
                results |= zip((row.index for row in batch), batch_results, strict=True)
        return results

    def _calls(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Divide rows into those of one call each.

        Calls for transcripts and descriptions decode `batch_size` of their rows at a time, and the next ones as soon as
        there is room. Pictures are read then, too.
        """
        if self._work.command == "transcribe":
            return divide_by_bytes(rows, self._path, MAX_BYTES_PER_CALL)
        size = TRANSLATIONS_PER_CALL if self._work.command == "translate" else len(rows)
        return (list(rows[start : start + size]) for start in range(0, len(rows), size))

    def _path(self, row: Row) -> str:
        return os.path.join(self._work.base, row.path)

    def _save_result(self, number: int, row: Row, result: Any) -> dict[str, Any]:
        """Write a result's file, if files are wanted.

        Args:
            number: Index of the part.

        Returns:
            The result's columns in the table.

        Raises:
            InputError: If the file format cannot hold the result.
        """
        work, columns = self._work, dict[str, Any](output=None)
        if work.files:
            columns["output"] = f"files/{number:06d}/{row.index:08d}{work.files}"
            path = work.output / columns["output"]
            if work.command == "translate":
                result.save(path)
            else:
                write_atomically(path, result.format(work.files[1:]).encode())
        return columns | result.to_dict()


def run_locally(work: Work, parts: Sequence[Part]) -> Iterator[tuple[int, int]]:
    """Process parts one after another in this process.

    Yields for each part the number of its rows, and the number of rows that failed.
    """
    if parts:
        yield from map(PartWorker(work).process, parts)


def decode_each(batch: Sequence[Any], call: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
    """Decode a batch.

    Returns:
        For each input its result, or an error message. If the batch fails, such as for lack of memory, each half is
        decoded by itself.
    """
    try:
        return [*call(list(batch))]
    except BatchError as error:
        return [result or str(error.errors[index]) for index, result in enumerate(error.results)]
    except MmdecError:
        raise  # the call's arguments are wrong, not an input
    except Exception as error:
        if len(batch) == 1:
            return [failure_message(error)]
    # not in the handler, because the error's traceback holds the memory of the call
    half = len(batch) // 2
    return [result for part in (batch[:half], batch[half:]) for result in decode_each(part, call)]


def divide_by_bytes(
    inputs: Iterable[Input], path_of: Callable[[Input], str | os.PathLike[str]], limit: int, min_inputs: int = 1
) -> Iterator[list[Input]]:
    """Divide inputs among calls, each of which has all of its inputs in memory.

    Args:
        inputs: The inputs.
        path_of: Returns an input's file. One whose size cannot be read counts as empty; the call will name the reason.
        limit: Maximum number of bytes of the files of one call.
        min_inputs: Number of inputs that a call may have whatever their sizes.
    """
    batch, total = list[Input](), 0
    for item in inputs:
        try:
            size = os.path.getsize(path_of(item))
        except (OSError, ValueError):
            size = 0
        if len(batch) >= min_inputs and total + size > limit:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch


def _public_call(work: Work) -> Call:
    """Load the model for `work.command`, and return the public call with this model."""
    from mmdec.checks.devices import check_dtype, fastest_dtype

    integers = work.command == "transcribe"
    dtype = fastest_dtype(work.device) if work.dtype is None else check_dtype(work.dtype, integers)
    if work.command == "translate":
        from mmdec.daspeech.translate import load_translator, translate_speech

        model = load_translator(work.model, work.device, vocoder=work.vocoder, dtype=dtype)
        return lambda paths: translate_speech(paths, model=model, **work.options)
    if work.command == "transcribe":
        from mmdec.whisper.transcribe import load_transcriber, transcribe

        model = load_transcriber(work.model, work.device, dtype)
        return lambda paths, **per_batch: transcribe(paths, model=model, **{**work.options, **per_batch})
    from mmdec.pretrained.vlm import load_vlm
    from mmdec.vision.describe import describe

    vlm = load_vlm(work.model, work.device, dtype)
    return lambda paths, **per_batch: describe(paths, model=vlm, **{**work.options, **per_batch})


def _json_lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(f"{json_text(row)}\n" for row in rows).encode()


def _parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Write rows as a Parquet table.

    All files have the same columns; values without a column of their own are JSON in the column `more`.
    """
    pyarrow: Any = import_module("pyarrow")
    parquet, kinds = pyarrow_parquet(), {"row": pyarrow.int64(), "confidence": pyarrow.float64()}
    names = ("row", "id", "input", "output", "text", "confidence")
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.string())) for name in (*names, "more")])
    table = [
        {name: row[name] for name in names}
        | {"more": json_text({name: value for name, value in row.items() if name not in names})}
        for row in rows
    ]
    content = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(table, schema), content)
    return content.getvalue()
