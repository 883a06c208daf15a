"""Random tests of models with images or sound and of encoder-decoders, from a seed: odd sizes, processors, sampling,
drafters, budgets, calls and malformed inputs. No token may differ, and all errors must be mmdec's.

50 cases; 5,000 with MMDEC_ALL=1 (`make test-all`).
"""

from __future__ import annotations

import pytest

from tests.fuzz.media_adversary import CHUNK, Report, attack
from tests.support.grid import WHOLE

pytestmark = pytest.mark.slow

SIZE, CHUNKS = (CHUNK, 50) if WHOLE else (50, 1)


@pytest.mark.filterwarnings("ignore")  # transformers warns of options and shapes that are tried here
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_prompts_with_media_give_the_tokens_of_transformers(chunk: int) -> None:
    report = Report()
    for seed in range(CHUNK * chunk, CHUNK * chunk + SIZE):
        attack(seed, report)
    assert [report.wrong, report.foreign, report.refused] == [[], [], []]
    assert report.counts["cases"] == SIZE
    assert report.counts["tokens"] > 10 * SIZE
