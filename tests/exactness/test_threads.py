"""Tests threads with different drafters on one model: each gets the same text in as many rounds as alone."""

from __future__ import annotations

from typing import Any

import pytest

import mmdec
from mmdec.drafters.medusa.drafter import MedusaDrafter
from mmdec.types import Drafter
from tests.exactness.text_models import MODELS as TEXTS
from tests.exactness.text_models import SMALL, Wrong
from tests.exactness.threads import Work, at_once
from tests.support.tiny_text import prompts
from tests.support.tiny_whisper import sound
from tests.support.whisper_calls import MODELS, heads

pytestmark = pytest.mark.usefixtures("switching")


def text(drafter: Any, nodes: Any, batch: int) -> Work:
    def work() -> Any:
        options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False}
        own = mmdec.DecodingStatistics()
        made = mmdec.generate(
            TEXTS["llama"], prompts(batch), drafter, num_speculative_tokens=nodes, statistics=own, **options
        )
        return made.sequences.tolist(), [(round_.tokens, round_.drafted, round_.accepted) for round_ in made.rounds]

    return work


def speech(drafter: Drafter | str, nodes: Any, batch: int) -> Work:
    def work() -> Any:
        rounds: list[Any] = []
        plug = mmdec.speculate(
            drafter, num_speculative_tokens=nodes, on_round=rounds.append, statistics=mmdec.DecodingStatistics()
        )
        tokens = MODELS[80].generate(**sound(batch), language="en", custom_generate=plug)
        return tokens.tolist(), [(round_.tokens, round_.drafted, round_.accepted) for round_ in rounds]  # type: ignore[union-attr]

    return work


@pytest.mark.slow
def test_concurrent_language_model_runs_keep_their_texts() -> None:
    kinds = [("lookup", 5), ("recycling", (14, 4)), (SMALL, (9, 3)), (TEXTS["llama"], 4), (Wrong(), 6), (None, 0)]
    works = [text(drafter, nodes, batch) for drafter, nodes in kinds for batch in (1, 3)]
    single = [work() for work in works]
    for _ in range(2):
        assert at_once(works) == single


@pytest.mark.slow
def test_concurrent_whisper_runs_share_a_drafter() -> None:
    """Medusa's trees follow what a run learns; concurrent runs must not affect it."""
    shared = [MedusaDrafter(heads(kind), MODELS[80].proj_out) for kind in ("linear", "block")]
    drafters: list[Drafter | str] = [*shared, "lookup"]
    works = [speech(drafter, nodes, batch) for drafter in drafters for nodes, batch in ((4, 2), ((12, 3), 1))]
    single = [work() for work in works]
    assert at_once(works) == single


def test_runs_that_share_statistics_keep_their_texts() -> None:
    """Their plans are learned together and depend on the clock; what is said does not."""
    learned = mmdec.DecodingStatistics()
    inputs, options = prompts(3), {"max_new_tokens": 30, "do_sample": False}
    expected = TEXTS["llama"].generate(**inputs, **options).tolist()  # type: ignore[operator]

    def work(drafter: Any) -> Work:
        return lambda: mmdec.generate(TEXTS["llama"], inputs, drafter, statistics=learned, **options).sequences.tolist()

    works = [work(drafter) for drafter in ("lookup", "lookup", "recycling", SMALL, Wrong(), None)]
    assert at_once(works) == [expected] * len(works)
