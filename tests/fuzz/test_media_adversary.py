"""A seeded adversary against models that see, hear or read a source: families, pictures and sounds of odd sizes,
processors, sampling, drafters, budgets, doors, malformed inputs. Not one token may differ, and no error be foreign.

50 cases; 5,000 with MMDEC_ALL=1 (`make test-all`).
"""

from __future__ import annotations

import os

import pytest

from tests.support.media_adversary import CHUNK, Report, attack

SIZE, CHUNKS = (CHUNK, 50) if os.environ.get("MMDEC_ALL") else (50, 1)


@pytest.mark.filterwarnings("ignore")  # transformers warns of options and shapes that are tried here
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_token_differs(chunk: int) -> None:
    report = Report()
    for seed in range(CHUNK * chunk, CHUNK * chunk + SIZE):
        attack(seed, report)
    assert [report.wrong, report.foreign, report.refused] == [[], [], []]
    assert report.counts["cases"] == SIZE
    assert report.counts["tokens"] > 10 * SIZE
