"""Tests lists of many inputs: valid rows, and errors for bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmdec import InputError
from mmdec.jobs.manifest import MAX_LINE, Row, digest, is_manifest, read_manifest


def write_manifest(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_columns_of_a_table_are_read_by_name(tmp_path: Path) -> None:
    path = write_manifest(
        tmp_path, "a.tsv", "\ufeffid\ttext\taudio\tlanguage\r\n1\tx\ta b.wav\tfr\r\n\r\n2\ty\tc.wav\t\r\n"
    )
    assert is_manifest(path)
    assert read_manifest(path, ["language"]) == [
        Row(0, "a b.wav", "1", (("language", "fr"),)),
        Row(1, "c.wav", "2"),
    ]


def test_json_lines_become_rows(tmp_path: Path) -> None:
    lines = [{"path": "é.wav", "id": 7, "other": [1]}, {"image": "b.png", "prompt": "What?", "id": None}]
    path = write_manifest(tmp_path, "a.JSONL", "".join(json.dumps(line) + "\n" for line in lines))
    assert read_manifest(path, ["prompt"]) == [Row(0, "é.wav", "7"), Row(1, "b.png", "", (("prompt", "What?"),))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"nothing", "must be JSON"),
        (b"[1]", "must be a JSON object, but is list"),
        (b'{"id": "x"}', "must have a path"),
        (b'{"path": ["a"]}', "must have text as path, but has list"),
        (b'{"path": "a", "id": {"b": 1}}', "must have text as id"),
        (b'{"path": "\xff"}', "must be UTF-8, but has the byte 0xff"),
        (b'{"path": "' + b"a" * 2 * MAX_LINE + b'"}', "must have at most"),
        (b"[" * 100_000, "must be JSON"),
    ],
)
def test_a_bad_row_keeps_its_place_and_costs_no_other(tmp_path: Path, line: bytes, message: str) -> None:
    path = write_manifest(tmp_path, "a.jsonl", b'{"path": "a"}\n' + line + b'\n{"path": "c"}\n')
    first, bad, last = read_manifest(path)
    assert (first, last) == (Row(0, "a"), Row(2, "c"))
    assert bad.index == 1
    assert message in bad.refusal


def test_a_table_row_with_too_few_columns_is_refused_alone(tmp_path: Path) -> None:
    rows = read_manifest(write_manifest(tmp_path, "a.tsv", "path\tid\na\nb\t2\n"))
    assert "must have 2 columns, but has 1" in rows[0].refusal
    assert rows[1] == Row(1, "b", "2")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "x.wav\tHello\n", "must name its columns"),
        ("a.tsv", "path\n", "must have a row"),
        ("a.jsonl", "\n\n", "must have a row"),
    ],
)
def test_broken_manifests_are_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_manifest(write_manifest(tmp_path, name, content))


def test_different_lists_have_different_digests() -> None:
    rows = [Row(0, "a"), Row(1, "b")]
    different = [rows, rows[:1], [Row(0, "a"), Row(1, "b", "x")], [Row(0, "a"), Row(1, "b", "", (("prompt", "x"),))]]
    assert len({digest(each) for each in different}) == 4


def test_parquet_becomes_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    table = pyarrow.table({"path": ["a.wav", None, "c.wav"], "id": [1, 2, 3], "more": [[1], [2], [3]]})
    parquet.write_table(table, tmp_path / "a.parquet")
    rows = read_manifest(tmp_path / "a.parquet")
    assert (rows[0], rows[2]) == (Row(0, "a.wav", "1"), Row(2, "c.wav", "3"))
    assert "must have a path" in rows[1].refusal
    parquet.write_table(table.drop_columns("path"), tmp_path / "b.parquet")
    with pytest.raises(InputError, match="must have a column"):
        read_manifest(tmp_path / "b.parquet")
    with pytest.raises(InputError, match="must be Parquet"):
        read_manifest(write_manifest(tmp_path, "c.parquet", b"PAR1"))
