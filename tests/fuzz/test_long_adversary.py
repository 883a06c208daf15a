"""Random tests as in `test_adversary.py` for sliding windows and states: prompts of up to five windows, every class
with windows, and every family with recurrent or convolutional states.

200 rounds of each kind; 10,000 with MMDEC_ALL=1 (`make test-all`).
"""

from __future__ import annotations

import random

import pytest

import mmdec
from mmdec.targets.families import RECURRENT_FAMILIES
from tests.fuzz.adversary import Report, attack, attacks
from tests.support.every_class import windowed
from tests.support.grid import WHOLE

pytestmark = pytest.mark.slow

KINDS = {"windows": windowed(), "states": [f"{name}ForCausalLM" for name in RECURRENT_FAMILIES.split()]}
CHUNK = 200
CHUNKS = 50 if WHOLE else 1
STEP = 7  # families from one chunk's first to the next one's
LONGEST = 5  # windows of a prompt


@pytest.mark.parametrize("seed", range(CHUNKS))
@pytest.mark.parametrize("kind", KINDS)
def test_long_texts_equal_those_of_transformers(kind: str, seed: int) -> None:
    mmdec.default_statistics().clear()
    report, families = Report(), random.Random(0).sample(KINDS[kind], len(KINDS[kind]))
    for place, rng in enumerate(attacks(seed), STEP * seed):
        attack(rng, families[place % len(families)], report, LONGEST)
        if report.rounds >= CHUNK:
            break
    assert report.wrong == []
