"""What the compressor benchmark counts; its seconds are not tested."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from mmdec.cli.bench import app
from mmdec.evaluation.bench.compressor import AFTER, BEFORE, ROUNDS, Run, bench_compressor, random_drafter
from mmdec.types import InputError
from tests.support.bench_findings import check_form


def test_caches_are_counted() -> None:
    found = bench_compressor("small", (40,), ("pool", "text-only", "conv"), repeats=1, threads=1)
    check_form(found)
    report = found.details
    text = BEFORE + AFTER
    assert [row["columns"] for row in report["rows"]] == [[text + 40, text + left] for left in (2, 0, 14)]
    for row in report["rows"]:
        assert row["cache"] == row["columns"][1] / row["columns"][0]
        assert row["prompt"]["n"] == row["round"]["n"] == 1
    assert found.comparisons[0].times == 1 / report["rows"][0]["prompt"]["ratio"]  # of SpecVLM, which is b there
    assert [entry.value for entry in found.quantities] == [100 * row["cache"] for row in report["rows"]]


@pytest.mark.parametrize("accepted", [0, 3])
def test_the_oracle_accepts_what_it_is_told(accepted: int) -> None:
    run = Run(random_drafter("small", "pool", torch.device("cpu"), torch.float32), 20, accepted)
    memory = run.begun()
    before = memory.columns[0]
    run.decode(memory)
    assert memory.columns[0] - before == ROUNDS * (accepted + 1)


def test_wrong_arguments() -> None:
    for wrong in (["--visual", "64,many"], ["--visual", "0"], ["--size", "huge"]):
        assert isinstance(CliRunner().invoke(app, ["compressor", *wrong]).exception, InputError)
