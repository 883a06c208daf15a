"""Tests `mmdec promote` of a drafter: it goes into its model's folder, whose card and provenance are updated."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mmdec.drafters.registry import auto_names
from mmdec.evaluation.release import promotion
from mmdec.evaluation.release.promotion import SYSTEMS, promote
from mmdec.hub.provenance import weights
from mmdec.hub.vlm import load_vlm
from mmdec.training.processes import only_one
from mmdec.types import InputError, MmdecError
from tests.support import promotions
from tests.support.tiny_squares import add_drafter, files, write_scenes, write_target
from tests.support.tiny_vlm_folder import settings

HOME, PLACE, RUN = Path("models/tiny"), Path("models/tiny/eagle"), Path("runs/vlm_drafters/eagle/drafter")
CARD = "# tiny\n\n## Results\n\n97 % right\n\n## Its drafters\n\nof before: 9.9\n\n## Licences\n\nApache-2.0\n"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("scenes"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with two drafters, and another one in a run."""
    monkeypatch.chdir(tmp_path)
    write_target(HOME)
    settings(HOME, "generation_config.json", max_new_tokens=12)
    add_drafter(HOME, "msd")
    add_drafter(HOME, "eagle", seed=2)
    RUN.parent.mkdir(parents=True)
    PLACE.rename(RUN)
    add_drafter(HOME, "eagle", seed=1)
    (HOME / "README.md").write_text(CARD, encoding="utf-8")
    (HOME / "provenance.json").write_text(json.dumps({"weights": weights(HOME), "date": "then"}), encoding="utf-8")
    training = {"training": {"step": 7, "dev": {"chain": 3.25}, "hyperparameters": {"start": str(tmp_path / "e")}}}
    (RUN / "provenance.json").write_text(json.dumps(training), encoding="utf-8")
    return tmp_path


def scored(monkeypatch: pytest.MonkeyPatch, new: float, old: float) -> None:
    def write(report: Any, value: float) -> None:
        report["tokens_per_round"] |= {"value": value}

    promotions.scored(monkeypatch, "eagle", {RUN: new, PLACE: old}, write)


def test_drafters_of_every_system_can_be_promoted() -> None:
    assert set(auto_names()) <= set(SYSTEMS)


def test_a_better_drafter_changes_its_folder_and_what_its_model_says_of_it(
    place: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored(monkeypatch, 2.5, 1.5)
    before = files(HOME)
    assert promote(RUN, corpus=corpus, threads=1) == PLACE
    after = files(HOME)
    changed = {name for name in after if after[name] != before.get(name)}
    assert {name for name in changed if not name.startswith("eagle/")} == {"README.md", "provenance.json"}
    assert set(before) <= set(after)
    assert weights(PLACE) == weights(RUN)
    card = (PLACE / "README.md").read_text(encoding="utf-8")
    assert "# tiny/eagle" in card
    assert "2.500 tokens a round on dev, n = 4, where the one in models/tiny had 1.500 tokens a round" in card
    assert "`test`: unseen scenes | 4 | 2.50 [" in card
    home = (HOME / "README.md").read_text(encoding="utf-8")
    assert home.startswith("# tiny\n\n## Results\n\n97 % right\n\n## Its drafters\n\n")
    assert home.endswith("\n\n## Licences\n\nApache-2.0\n")
    assert re.search(r"\| `eagle` \| 0\.\d\d M \| 2\.50 \[.*\], n = 4 \| 3\.25 \| [0-9a-f]{12} \|", home)
    assert re.search(r"\| `msd` \| 0\.\d\d M \| not measured \| - \| [0-9a-f]{12} \|", home)
    assert "9.9" not in home
    known = json.loads((HOME / "provenance.json").read_text(encoding="utf-8"))
    assert known == {"weights": weights(HOME), "date": "then"}
    own = (PLACE / "provenance.json").read_text(encoding="utf-8")
    assert json.loads(own)["weights"] == weights(PLACE)
    assert str(place) not in own
    assert load_vlm(HOME, "cpu")
    assert [path.name for path in Path("models").iterdir()] == [HOME.name]


def test_nothing_changes_for_a_drafter_that_is_not_better_or_changes_meanwhile(
    place: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored(monkeypatch, 1.5, 1.5)
    before = files(HOME)
    with pytest.raises(InputError, match=r"1.500 tokens a round on dev.*had 1.500 tokens a round.*--force"):
        promote(RUN, corpus=corpus, threads=1)
    assert files(HOME) == before
    told = iter((weights(RUN), {"model.safetensors": "another"}))
    monkeypatch.setattr(promotion, "weights", lambda folder: next(told))
    with pytest.raises(MmdecError, match="changed while they were measured"):
        promote(RUN, corpus=corpus, threads=1, force=True)
    assert files(HOME) == before
    assert [path.name for path in Path("models").iterdir()] == [HOME.name]


def test_equal_drafters_measure_equal(place: Path, corpus: Path) -> None:
    """By counts alone: the plan follows no clock, and nothing is kept from one measurement for the next."""
    (RUN / "model.safetensors").write_bytes((PLACE / "model.safetensors").read_bytes())
    with pytest.raises(InputError, match="must be better") as refused:
        promote(RUN, corpus=corpus, threads=1)
    new, old = re.findall(r"(\d\.\d{3}) tokens a round", str(refused.value))
    assert new == old


def test_what_cannot_be_promoted_is_named(place: Path, corpus: Path, tmp_path: Path) -> None:
    with only_one(Path("runs"), "make train"), pytest.raises(InputError, match=r"make train .* works there"):
        promote(RUN, corpus=corpus)
    said: list[str] = []
    settings(RUN, "config.json", base="0123456789ab")
    promote(RUN, corpus=corpus, threads=1, limit=1, force=True, log=said.append)
    assert any("trained for other weights (0123456789ab)" in line for line in said)
    settings(RUN, "config.json", target="elsewhere")
    with pytest.raises(InputError, match=r"for a model in models, but is for 'models/elsewhere'"):
        promote(RUN, corpus=corpus)
    for name in ("", "..", "../tiny", "a/b"):
        settings(RUN, "config.json", target=name)
        with pytest.raises(InputError, match="names its model as `target`"):
            promote(RUN, corpus=corpus)
