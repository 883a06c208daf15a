"""Tests EAGLE-3, P-EAGLE and DFlash: each draft equals one recomputed from scratch, and texts equal plain decoding."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

import mmdec
from mmdec.errors import InputError
from tests.support.draft_networks import (
    FORMS_OF,
    PROMPTS,
    Checked,
    rounds_of,
    scatter_vocabulary,
    texts,
    tree_growing,
)
from tests.support.grid import sample, slow_but
from tests.support.tiny_text import language_model, prompts
from tests.support.toy_target import RandomBudget

MODEL: Any = language_model(num_hidden_layers=5)


EACH_SETTING = {  # forms that have each setting once
    "eagle3": ("plain", "layers", "parallel-part", "two"),
    "dflash": ("part", "anchor", "vanilla", "confident", "rnn", "dflash2", "domino"),
    "heads": ("medusa", "amphista", "hydra++", "cerberus", "redrafter-narrow", "redrafter-sum", "mlp-tied"),
}


@pytest.mark.parametrize(
    ("system", "form"),
    slow_but(
        [(system, form) for system, forms in FORMS_OF.items() for form in forms],
        [(system, form) for system, forms in EACH_SETTING.items() for form in forms],
    ),
)
@pytest.mark.parametrize("rows", sample((1, 4), (4,)))
def test_the_cache_equals_recomputing_everything(system: str, form: str, rows: int) -> None:
    """Through rejections, plain rounds, ragged rows and rows that end: every draft, in float64."""
    model: Any = language_model(num_hidden_layers=5).double()
    drafter = scatter_vocabulary(tree_growing(system, model, width=3, **FORMS_OF[system][form]))
    checked = Checked(drafter, model)
    rounds = rounds_of(model, checked, RandomBudget(Random(rows)), PROMPTS[:rows], 16)
    plain = rounds_of(model, None, RandomBudget(Random(rows), 0), PROMPTS[:rows], 16)
    assert checked.compared > 5
    assert texts(rounds, rows) == texts(plain, rows)


@pytest.mark.parametrize(
    ("batch", "system", "form"),
    slow_but(
        [
            (batch, system, form)
            for batch in (1, 4)
            for system, forms in (
                ("eagle3", ("part", "layers", "parallel")),
                ("dflash", ("plain", "part", "anchor", "confident", "rnn", "dflash2", "domino")),
            )
            for form in forms
        ],
        slice(None, None, 3),
    ),
)
def test_greedy_and_sampled_texts_equal_plain_decoding(batch: int, system: str, form: str) -> None:
    drafter = scatter_vocabulary(tree_growing(system, MODEL, **FORMS_OF[system][form]))
    inputs = prompts(batch)
    expected = MODEL.generate(**inputs, max_new_tokens=16, do_sample=False)
    sampling: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "top_k": 20, "seed": 3}
    drawn = mmdec.generate(MODEL, inputs, None, **sampling).sequences
    for nodes in (3, (9, 3)):
        result = mmdec.generate(
            MODEL, inputs, drafter, num_speculative_tokens=nodes, max_new_tokens=16, do_sample=False
        )
        assert torch.equal(result.sequences, expected)
        result = mmdec.generate(MODEL, inputs, drafter, num_speculative_tokens=nodes, **sampling)
        assert torch.equal(result.sequences, drawn)
    options: dict[str, Any] = {"rule": "residual", "seed": 2, "num_speculative_tokens": 6, "max_new_tokens": 12}
    assert mmdec.generate(MODEL, inputs, drafter, **options).lossless


@pytest.mark.parametrize("system", FORMS_OF)
def test_another_models_drafter_is_refused(system: str) -> None:
    drafter = tree_growing(system, MODEL, **FORMS_OF[system]["plain"])
    with pytest.raises(InputError, match="must fit a model"):
        mmdec.generate(language_model(num_hidden_layers=5, vocab_size=70), prompts(1), drafter, max_new_tokens=4)
