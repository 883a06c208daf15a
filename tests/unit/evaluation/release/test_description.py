"""Tests `mmdec promote` of a vision-language model: it must come with drafters for its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mmdec import cli
from mmdec.evaluation.release.description import COLUMNS, score, table
from mmdec.evaluation.release.promotion import promote
from mmdec.hub.provenance import weights
from mmdec.pipelines.confidence import FILE, FORMAT
from mmdec.types import InputError
from tests.support import promotions
from tests.support.tiny_squares import add_drafter, files, write_scenes, write_target
from tests.support.tiny_vlm_folder import settings

RUN, PLACE = Path("runs/tiny"), Path("models/tiny")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("scenes"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run, and a model of other weights."""
    monkeypatch.chdir(tmp_path)
    for seed, folder in enumerate((RUN, PLACE)):
        write_target(folder, seed)
        settings(folder, "generation_config.json", max_new_tokens=12)
    (PLACE / "README.md").write_text("# the card of before: 99.9 %\n", encoding="utf-8")
    training = {"training": {"step": 5, "hyperparameters": {"start": str(tmp_path / "models" / "old")}}}
    (RUN / "provenance.json").write_text(json.dumps(training), encoding="utf-8")
    return tmp_path


def scored(monkeypatch: pytest.MonkeyPatch, new: float, old: float) -> None:
    def write(report: Any, value: float) -> None:
        for row in report["by_task"].values():
            row["right"]["value"] = value

    promotions.scored(monkeypatch, "llava", {RUN: new, PLACE: old}, write)


def test_a_better_model_comes_with_its_drafters_and_a_table_of_its_tasks(
    place: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored(monkeypatch, 0.75, 0.5)
    add_drafter(PLACE, "eagle", seed=1)
    add_drafter(RUN, "eagle", seed=2)
    called = ["promote", str(RUN), f"--corpus={corpus}", "--threads", "1", "--limit", "2"]
    done = CliRunner().invoke(cli.app, called)
    assert done.exit_code == 0, done.output
    assert weights(PLACE) == weights(RUN)
    card = (PLACE / "README.md").read_text(encoding="utf-8")
    assert "75.00 % right, the mean of 2 tasks on dev, n = 4, where the one in models had 50.00 % right" in card
    assert "| colour | 75.0 % [" in card
    assert "| mean of the tasks | 75.0 % | 75.0 % | 75.0 % |" in card  # dev, test, swapped
    assert "99.9" not in card
    assert "## Its drafters" in card
    assert "| `eagle` |" in card
    provenance = (PLACE / "provenance.json").read_text(encoding="utf-8")
    known = json.loads(provenance)
    assert known["weights"] == weights(PLACE)
    assert [report["split"] for report in known["measured"]] == ["dev", "test", "swapped"]
    assert known["training"]["hyperparameters"]["start"] == "old"
    for folder in (place, corpus):
        assert str(folder) not in card + provenance
    assert [path.name for path in Path("models").iterdir()] == [PLACE.name]


def test_a_model_that_is_not_better_is_refused_with_both_numbers(
    place: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored(monkeypatch, 0.5, 0.5)
    before = files(PLACE)
    with pytest.raises(InputError, match=r"50.00 % right.* on dev.*had 50.00 % right.*--force"):
        promote(RUN, corpus=corpus, threads=1)
    assert files(PLACE) == before


def test_drafters_for_the_old_weights_do_not_stay_under_a_new_model(
    place: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored(monkeypatch, 0.75, 0.5)
    add_drafter(PLACE, "eagle")
    add_drafter(PLACE, "msd")
    shutil.copytree(PLACE / "eagle", RUN / "eagle")  # not trained for the run
    before = files(PLACE)
    with pytest.raises(InputError, match=r"lacks msd; has for other weights eagle.*Train each anew.*--force"):
        promote(RUN, corpus=corpus, threads=1)
    assert files(PLACE) == before
    (PLACE / FILE).write_text(json.dumps({"format": FORMAT, "calibrations": {}}), encoding="utf-8")
    said: list[str] = []
    promote(RUN, corpus=corpus, threads=1, force=True, log=said.append)
    assert any("lacks msd; has for other weights eagle" in line and "are removed" in line for line in said)
    assert any("calibrate it anew" in line for line in said)
    here = {name for name in files(RUN) if not name.startswith("eagle/")}  # the stale one does not come
    assert set(files(PLACE)) == {*here, "README.md"}
    assert "Its drafters" not in (PLACE / "README.md").read_text(encoding="utf-8")


def test_of_a_run_with_the_same_model_its_one_new_drafter_is_promoted(
    place: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(RUN)
    add_drafter(PLACE, "eagle", seed=1)
    shutil.copytree(PLACE, RUN)
    with pytest.raises(InputError, match=r"its model is the same\. Train on"):
        promote(RUN, corpus=corpus, threads=1)
    add_drafter(RUN, "msd", seed=2)
    assert promote(RUN, corpus=corpus, threads=1, limit=1) == PLACE / "msd"
    assert weights(PLACE) == weights(RUN)
    shutil.rmtree(PLACE / "msd")
    shutil.rmtree(PLACE / "eagle")
    with pytest.raises(InputError, match=r"`mmdec promote runs/tiny/eagle`, `mmdec promote runs/tiny/msd`"):
        promote(RUN, corpus=corpus, threads=1)


def test_rare_tasks_count_as_others_do() -> None:
    def report(**rights: tuple[float | None, int]) -> dict[str, Any]:
        tasks = {name: {"right": {"value": value, "n": n}} for name, (value, n) in rights.items()}
        return {"split": "dev", "by_task": tasks}

    assert score(report(a=(1.0, 1), b=(0.5, 999))) == (0.25,)
    assert score(report(a=(1.0, 1), b=(None, 0))) == (0.0,)
    with pytest.raises(InputError, match="must say what is right"):
        score(report(a=(None, 0)))
    lines = table([report(a=(1.0, 1)), {**report(a=(0.5, 2), b=(0.5, 4)), "split": "test"}])
    assert lines[-3:] == [
        "| a | 100.0 %, 1 | 50.0 %, 2 |",
        "| b | - | 50.0 %, 4 |",
        "| mean of the tasks | 100.0 % | 50.0 % |",
    ]
    assert f"`test`: {COLUMNS['test']}" in "\n".join(lines)
