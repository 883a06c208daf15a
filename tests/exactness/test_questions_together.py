"""Questions about pictures that share the model's passes have the answers that they have alone."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

import mmdec
from mmdec.targets.decoder import DecoderTarget
from mmdec.types import Round
from tests.support.grid import slow_but
from tests.support.pictures import pixels
from tests.support.tiny_vlm_folder import llava, qwen
from tests.support.vision_drafters import network_drafter

DRAWS = 60 if os.environ.get("MMDEC_ALL") else 8
PROMPTS = ["Where is the red star?", "It is 09:30.", "A menu?", "What is in the picture?"]
COUNT = 9  # questions


@pytest.fixture(scope="module", params=["llava", "qwen"])
def loaded(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return llava() if request.param == "llava" else qwen()


def call_options(rng: random.Random, model: Any) -> dict[str, Any]:
    """Draw the options of a call."""
    drafter: Any = rng.choice([None, "lookup", "recycling", "eagle3", "heads"])
    networks: dict[str, dict[str, Any]] = {"eagle3": {"pictures": "dropped"}, "heads": {"prefix_layer": True}}
    options: dict[str, Any] = {
        "drafter": network_drafter(drafter, model, **networks[drafter]) if drafter in networks else drafter,
        "max_new_tokens": rng.choice([5, 24]),
        "repetition_penalty": rng.choice([None, 1.4]),
    }
    if drafter is not None:
        options["num_speculative_tokens"] = rng.choice([None, 3, (6, 2)])
    if rng.random() < 0.5:
        options |= {"do_sample": True, "temperature": rng.choice([0.6, 1.5])}
    return options


@pytest.mark.parametrize("number", slow_but(range(DRAWS), slice(2)))
def test_a_list_has_the_answers_of_its_questions(
    loaded: tuple[Any, Any], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, shared, rounds = random.Random(number), list[int](), list[Round]()
    score_together = DecoderTarget.score_together

    def observed(target: DecoderTarget, parts: Any) -> Any:
        shared.append(len(parts))
        return score_together(target, parts)

    monkeypatch.setattr(DecoderTarget, "score_together", observed)
    model, processor = loaded
    options: dict[str, Any] = {"model": model, "processor": processor, **call_options(rng, model)}
    pictures: Any = [
        tuple(pixels(rng.randrange(99), rng.choice([24, 40, 60]), rng.choice([24, 52])) for _ in range(count))
        for count in (rng.choice([0, 1, 1, 2]) for _ in range(COUNT))
    ]
    prompts = [rng.choice(PROMPTS) for _ in pictures]
    prompts[3] = ""  # is refused
    expected = [
        mmdec.describe(shown, prompt, seed=7 + index, **options) if prompt else None
        for index, (shown, prompt) in enumerate(zip(pictures, prompts, strict=True))
    ]
    assert not shared
    batch_size = rng.choice([2, 3, 5])
    with pytest.raises(mmdec.BatchError) as refused:
        mmdec.describe(pictures, prompts, batch_size=batch_size, seed=7, on_round=rounds.append, **options)
    assert list(refused.value.errors) == [3]
    result = refused.value.results
    assert [answer and answer.tokens for answer in result] == [answer and answer.tokens for answer in expected]
    for index, answer in enumerate(expected):
        told = [new for round_ in rounds for row, new in zip(round_.rows, round_.tokens, strict=True) if row == index]
        assert [token for tokens in told for token in tokens] == (answer.tokens if answer else [])
    assert bool(shared) == bool(options.get("do_sample"))  # only then a question is a decoding of its own
    assert max(shared, default=2) > 1
    assert max(len(round_.rows) for round_ in rounds) <= batch_size
