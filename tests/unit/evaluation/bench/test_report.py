"""One form for all benchmarks: it survives its JSON, and a bad file is one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmdec import provenance
from mmdec.evaluation.bench.report import VERSION, BenchRun, Quantity, load_run, merged, to_json
from mmdec.evaluation.bench.tables import against, machine
from mmdec.types import InputError
from tests.support import bench_findings as findings


def test_a_run_survives_its_json(tmp_path: Path) -> None:
    run = BenchRun(findings.run().reports, {"peer": "not installed"})
    path = tmp_path / "run.json"
    path.write_text(to_json(run, against={"source": "x"}), encoding="utf-8")
    again = load_run(path)
    assert again.left_out == run.left_out
    for report, other in zip(again.reports, run.reports, strict=True):
        assert replace(report, details={}) == replace(other, details={}, hardware=report.hardware)
        assert report.hardware == json.loads(json.dumps(other.hardware))


def test_json_has_no_number_that_parsers_refuse() -> None:
    report = replace(
        findings.run("core").reports[0], quantities=(Quantity("x", float("nan"), "s", 1, high=float("inf")),)
    )
    said = to_json(BenchRun((report,), {"a\udcffb": "no UTF-8"}))
    assert "NaN" not in said
    assert "Infinity" not in said
    said.encode("utf-8")
    read = json.loads(said)
    assert read["version"] == VERSION
    assert read["reports"][0]["quantities"][0]["value"] is None


def test_names_that_are_no_utf_8_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(to_json(BenchRun((), {"vlm": "a\udcffb"})), encoding="utf-8")
    assert load_run(path) == BenchRun((), {"vlm": "a?b"})


@pytest.mark.parametrize("field", [{"times": "2.5"}, {"kind": "x"}, {"pairs": 2.5}, {"new": 1}, {"subject": None}])
def test_a_wrong_field_is_named(field: dict[str, object], tmp_path: Path) -> None:
    path, content = tmp_path / "run.json", json.loads(to_json(findings.run("core")))
    content["reports"][0]["comparisons"][1] |= field
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InputError, match=rf"damaged: run\.reports\.0\.comparisons\.1\.{next(iter(field))}: "):
        load_run(path)


def test_without_pydantic_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(to_json(findings.run("core")), encoding="utf-8")
    monkeypatch.setitem(sys.modules, "pydantic", None)
    with pytest.raises(InputError, match=r"pip install mmdec\[eval\]"):
        load_run(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
        ("[]", "must be what `mmdec bench --json` wrote"),
        ('{"curve": []}', "must be what `mmdec bench --json` wrote"),
        ('{"format": "mmdec-bench", "version": 99}', "must have version 1"),
        ('{"format": "mmdec-bench", "version": 1}', "damaged"),
        ('{"format": "mmdec-bench", "version": 1, "reports": 3}', "damaged"),
        (
            '{"format": "mmdec-bench", "version": 1, "reports": [{"bench": 3}]}',
            r"run\.reports\.0\.bench: .* it holds 3",
        ),
        (
            '{"format": "mmdec-bench", "version": 1, "reports": [{"new": 3}]}',
            r"run\.reports\.0\.new: Unexpected",
        ),
        ("[" * 100_000, "must be JSON"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        load_run(path)
    with pytest.raises(InputError, match="must be a readable file"):
        load_run(tmp_path / "missing.json")


def test_a_saved_run_is_compared_median_by_median() -> None:
    now, before = findings.run("asr", "core"), findings.run("asr", "vlm")
    asr = before.reports[0]
    halved = [
        replace(row, times=row.times / 2, subject_ms=None if row.subject_ms is None else 2 * row.subject_ms)
        for row in asr.comparisons
    ]
    gone = halved.pop(0)
    machine = {
        **asr.hardware,
        "threads": 8,
        "commit": "other",
        "versions": {**asr.hardware["versions"], "torch": "2.12"},
    }
    before = BenchRun((replace(asr, comparisons=tuple(halved), hardware=machine), before.reports[1]))
    changes = against(now, before, "old.json")
    assert changes.warnings == ("asr: threads 8 then, 2 now", "asr: torch 2.12 then, 2.11.0 now")
    assert {row.ratio for row in changes.rows} == {2.0}
    assert {row.subject_ratio for row in changes.rows} == {0.5, None}  # None: a sweep has no seconds
    assert {row.baseline_ratio for row in changes.rows} == {1.0, None}
    assert changes.only_now == (("asr", *gone.key), ("core",))
    assert changes.only_before == (("vlm",),)


def test_the_same_surroundings_warn_of_nothing() -> None:
    changes = against(findings.run(), findings.run())
    assert changes.warnings == changes.only_now == changes.only_before == ()
    assert {row.ratio for row in changes.rows} == {1.0}


def test_runs_are_put_together() -> None:
    run = merged([findings.run("asr"), BenchRun((), {"vlm": "not done in 1 minutes"}), findings.run("core")])
    assert [report.bench for report in run.reports] == ["asr", "core"]
    assert run.left_out == {"vlm": "not done in 1 minutes"}


def test_a_gpu_is_named_where_it_did_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU {device}")
    names = [provenance.stamp(device)["device"] for device in (torch.device("cpu"), torch.device("cuda:1"), None)]
    assert names == ["cpu", "GPU cuda:1", None]


def test_a_commit_is_no_name_for_changed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    (tmp_path / "mmdec").mkdir()
    (tmp_path / "mmdec" / "a.py").write_text("1")
    monkeypatch.setattr(provenance, "CHECKOUT", tmp_path)
    assert (provenance.stamp(None)["commit"], provenance.stamp(None)["uncommitted"]) == (None, None)
    git("init")
    git("add", ".")
    git("commit", "-m", "a")
    clean = provenance.stamp(None)
    assert (len(clean["commit"]), clean["uncommitted"]) == (40, False)
    (tmp_path / "notes").write_text("not of the package")
    assert provenance.stamp(None)["uncommitted"] is False
    (tmp_path / "mmdec" / "a.py").write_text("2")
    assert provenance.stamp(None) == {**clean, "uncommitted": True}
    assert "commit 0123456789 and changes" in machine({**findings.HARDWARE, "uncommitted": True})
