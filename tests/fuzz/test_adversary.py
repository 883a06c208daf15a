"""Random tests of decoding with drafts, from a seed: families, prompts, padding, chats with a cache, processors,
sampling, drafters, budgets and calls. All tokens must equal those of plain decoding.

1,000 rounds; 100,000 with MMDEC_ALL=1 (`make test-all`).
"""

from __future__ import annotations

import random

import pytest

import mmdec
from mmdec.targets.families import FAMILIES
from tests.fuzz.adversary import Report, attack, attacks
from tests.support.grid import WHOLE

pytestmark = pytest.mark.slow

CHUNK = 1_000
STEP = 7  # families from one chunk's first to the next one's
CHUNKS = 100 if WHOLE else 1


def battle(seed: int, rounds: int) -> Report:
    """Attacks until so many rounds have passed, family after family."""
    report, families = Report(), random.Random(0).sample(sorted(FAMILIES), len(FAMILIES))
    for place, rng in enumerate(attacks(seed), STEP * seed):
        attack(rng, families[place % len(families)], report)
        if report.rounds >= rounds:
            return report
    raise AssertionError


@pytest.mark.parametrize("seed", range(CHUNKS))
def test_random_calls_give_the_tokens_of_transformers(seed: int) -> None:
    mmdec.default_statistics().clear()
    report = battle(seed, CHUNK)
    assert report.wrong == []
    assert report.rounds >= CHUNK
    assert report.turns > 0  # on given caches
    assert len(report.families) >= STEP
