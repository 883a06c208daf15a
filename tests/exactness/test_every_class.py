"""Tests causal classes of transformers, with sliding windows, against `generate`: each is exact, refused or excluded,
as in docs/reference/classes.md. A share of the classes; all with MMDEC_ALL=1 (`make test-all`)."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

import mmdec
from tests.support.every_class import CLASSES, outcome_of, recorded
from tests.support.grid import WHOLE

TRIED = CLASSES if WHOLE else sorted({"Gemma2ForCausalLM", *random.Random(2).sample(CLASSES, 2)})


def test_the_page_names_every_class() -> None:
    outcomes = recorded()
    lacking = {*CLASSES} - {*outcomes}
    assert not lacking  # an older transformers knows fewer
    assert list(outcomes.values()).count("exact") >= 120


@pytest.mark.parametrize("room", ["decode", "drafters", "generation", "ops"])
def test_no_model_class_is_named_in_the_core(room: str) -> None:
    """Its proof, its configuration and the probe decide what a target accepts: `mmdec/targets/families.py`."""
    named = re.compile(rf"\b({'|'.join(CLASSES)})\b")
    for path in (Path(mmdec.__file__).parent / room).rglob("*.py"):
        assert not named.findall(path.read_text("utf-8")), path


@pytest.mark.parametrize("name", TRIED)
def test_a_classs_texts_equal_stock(name: str) -> None:
    result, known = outcome_of(name), recorded()[name]
    allowed = {known} if known == "exact" else {"exact", "refused", "excluded"}
    assert result.outcome in allowed, result
