"""Tests `mmdec promote` of a Whisper with heads: it is compared by counts, which do not depend on time."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from mmdec.evaluation.release.promotion import promote
from mmdec.hub.provenance import weights
from mmdec.types import InputError
from tests.support.tiny_english import write_english
from tests.support.tiny_whisper import write

RUN, PLACE = Path("runs/tiny"), Path("models/tiny")


def test_a_whisper_is_promoted_whole_and_equal_ones_measure_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    corpus = write_english(tmp_path / "english")
    write(RUN, seed=4)
    (RUN / "README.md").write_text("# an old card\n", encoding="utf-8")
    assert promote(RUN, corpus=corpus, limit=2, threads=1) == PLACE
    assert weights(PLACE) == weights(RUN)
    card = (PLACE / "README.md").read_text(encoding="utf-8")
    assert "| `dev`: unseen sentences, which chose the weights | 2 |" in card
    assert "tokens per round, 16 drafts, bonus included" in card
    assert "Real voices were not measured." in card
    assert "an old card" not in card
    known = (PLACE / "provenance.json").read_text(encoding="utf-8")
    assert json.loads(known)["weights"] == weights(PLACE)
    assert str(tmp_path) not in known + card
    shutil.copytree(PLACE, "runs/tiny-not-better")
    with pytest.raises(InputError, match="must be better") as refused:
        promote(Path("runs/tiny-not-better"), corpus=corpus, limit=2, threads=1)
    new, old = re.findall(r"([\d.]+ % word errors, \d\.\d{3}) tokens per round", str(refused.value))
    assert new == old
