"""Tests processing of many rows in parts: each row is processed once, with any engine, also if a process is killed."""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmdec import InputError
from mmdec.jobs.many import ROWS_PER_PART, PartWorker, Work
from tests.support.many_rows import check_once, dies_after, finish, named, rows_of, table

COUNT = 2 * ROWS_PER_PART + 5


def work_in(folder: Path, **options: Any) -> Work:
    return Work("transcribe", "a model", folder / "out", str(folder), **options)


def test_results_and_bad_rows_stand_in_two_tables(tmp_path: Path) -> None:
    work = work_in(tmp_path, files=".srt")
    finish(work, rows_of(COUNT))
    check_once(work.output, COUNT)
    failed = table(work.output, "failed")
    assert [row["row"] for row in failed] == [index for index in range(COUNT) if index % 10 == 7]
    assert failed[0] == {"row": 7, "id": "id 7", "input": "in/7", "error": f"{tmp_path}/in/7 is refused."}
    assert failed == [*work.failures()]
    for row in table(work.output, "results"):
        assert (row["text"], row["id"]) == (str(row["row"]), f"id {row['row']}")
        assert (work.output / row["output"]).read_text() == f"srt of {row['row']}"


@pytest.mark.slow
def test_a_run_killed_anywhere_is_finished_by_the_next(tmp_path: Path) -> None:
    """Killed after its first write, its second, ..., by SIGKILL; the rows are then done by shards of another number."""
    rows, writes, killed = rows_of(ROWS_PER_PART + 9), 0, True
    whole = work_in(tmp_path / "whole", files=".srt")
    finish(whole, rows)
    while killed:
        writes += 7 if writes > 20 else 1
        work = work_in(tmp_path / str(writes), files=".srt")
        killed = dies_after(writes, lambda work=work: finish(work, rows))
        for shard in ((2, 2), (1, 2)):
            finish(work, rows, shard)
        check_once(work.output, len(rows))
        for name in ("results", "failed"):
            assert [{**row, "error": ""} for row in table(work.output, name)] == [
                {**row, "error": ""} for row in table(whole.output, name)
            ]
    assert writes > 80  # each row and each table was written by several


def test_finished_rows_are_not_repeated(tmp_path: Path) -> None:
    work, rows, calls = work_in(tmp_path), rows_of(COUNT), list[str]()

    def record_call(paths: list[str]) -> Any:
        calls.extend(paths)
        return named(paths)

    finish(work, rows, (2, 3), record_call)
    assert len(calls) == ROWS_PER_PART
    finish(work, rows, (1, 1), record_call)
    assert sorted(calls) == sorted(f"{tmp_path}/in/{index}" for index in range(COUNT))
    assert work.unfinished_parts(rows) == []
    check_once(work.output, COUNT)


def test_recordings_of_a_call_are_bounded_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmdec.jobs.many.MAX_BYTES_PER_CALL", 100)
    (tmp_path / "in").mkdir()
    for index, size in enumerate((60, 40, 1, 300, 99, 0)):  # there is no file 6
        (tmp_path / "in" / f"{index}").write_bytes(bytes(size))
    calls = list[list[int]]()

    def record_call(paths: list[str]) -> Any:
        calls.append([int(Path(path).name) for path in paths])
        return named(paths)

    finish(work_in(tmp_path), rows_of(7), call=record_call)
    assert calls == [[0, 1], [2], [3], [4, 5, 6]]
    finish(replace(work_in(tmp_path / "b"), command="translate", base=str(tmp_path)), rows_of(20), call=record_call)
    assert [len(paths) for paths in calls[4:]] == [8, 8, 4]


def test_a_call_without_enough_memory_is_halved(tmp_path: Path) -> None:
    """The memory of the failed call is free by then."""
    calls, alive = list[int](), list[weakref.ref[Any]]()

    def decode(paths: list[str]) -> Any:
        assert not any(each() for each in alive)
        held = torch.zeros(4)
        alive.append(weakref.ref(held))
        calls.append(len(paths))
        if len(paths) > 4 or any(path.endswith("/9") for path in paths):
            raise torch.OutOfMemoryError("no memory is left")
        return named(paths)

    finish(work_in(tmp_path), rows_of(16), call=decode)
    assert calls == [16, 8, 4, 4, 8, 4, 2, 1, 1, 2, 4]
    check_once(tmp_path / "out", 16)
    errors = {row["row"]: row["error"] for row in table(tmp_path / "out", "failed")}
    assert errors[9] == "OutOfMemoryError: no memory is left"
    assert errors.keys() == {7, 9}


def test_two_processes_write_a_shared_part_once(tmp_path: Path) -> None:
    work, rows = work_in(tmp_path), rows_of(COUNT)
    work.begin(rows)
    for part in [*work.unfinished_parts(rows), *work.unfinished_parts(rows)]:
        PartWorker(work, named).process(part)
    check_once(work.output, COUNT)


def test_bad_rows_of_a_killed_attempt_are_discarded(tmp_path: Path) -> None:
    work, rows = work_in(tmp_path), rows_of(COUNT)
    finish(work, rows)
    (work.output / "results" / "000001.jsonl").unlink()  # as if it had died just before
    finish(work, rows, call=lambda paths: [row for path in paths for row in named([path.replace("7", "8")])])
    assert len(table(work.output, "results")) == COUNT - len([*work.failures()])
    assert {row["row"] // ROWS_PER_PART for row in work.failures()} == {0, 2}
    check_once(work.output, COUNT)


@pytest.mark.parametrize("changed", [{"model": "another"}, {"options": {"language": "fr"}}, {"files": ".vtt"}])
def test_a_folder_of_another_run_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    work, rows = work_in(tmp_path), rows_of(COUNT)
    work.begin(rows)
    work.begin(rows)
    with pytest.raises(InputError, match=f"has another {next(iter(changed))}"):
        replace(work, **changed).begin(rows)
    with pytest.raises(InputError, match="has another manifest"):
        work.begin(rows[:-1])


def test_a_row_with_a_wrong_option_of_its_own_fails_alone(tmp_path: Path) -> None:
    def call(paths: list[str], language: str = "en") -> Any:
        if language != "en":
            raise InputError("`language` must be known, but is xx.")
        return named(paths)

    rows = rows_of(3)
    rows[1] = replace(rows[1], options=(("language", "xx"),))
    finish(work_in(tmp_path), rows, call=call)
    assert table(tmp_path / "out", "failed") == [
        {"row": 1, "id": "id 1", "input": "in/1", "language": "xx", "error": "`language` must be known, but is xx."}
    ]
    with pytest.raises(InputError, match="must be known"):  # a wrong option of the call ends it
        finish(work_in(tmp_path / "b"), rows_of(3), call=lambda paths: call(paths, "xx"))


def test_a_full_disk_ends_the_run_and_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, rows = work_in(tmp_path), rows_of(COUNT)
    work.begin(rows)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            finish(work, rows)
    assert len(work.unfinished_parts(rows)) == len(work.parts(rows))
    finish(work, rows)
    check_once(work.output, COUNT)


def full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def test_parquet_has_the_same_columns_in_every_part(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    work = work_in(tmp_path, table="parquet")
    rows = [
        *rows_of(ROWS_PER_PART),
        *(replace(row, refusal="is bad.") for row in rows_of(2 * ROWS_PER_PART)[ROWS_PER_PART:]),
    ]
    finish(work, rows)
    read = parquet.read_table(work.output / "results")
    assert read.column("row").to_pylist() == [index for index in range(ROWS_PER_PART) if index % 10 != 7]
    assert read.column("text").to_pylist() == [str(index) for index in range(ROWS_PER_PART) if index % 10 != 7]
    assert len([*work.failures()]) == ROWS_PER_PART + 3
