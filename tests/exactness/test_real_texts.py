"""Compares decoding with drafts with transformers' `generate` on real language models, in float32.

MMDEC_MODELS names a folder of models (`make test-all MODELS=FOLDER` sets it); without it the tests are skipped. Prompts
are pages of this project's documentation, from a few tokens to 3,000, which is more than most sliding windows. Two
lengths by default, all of them with MMDEC_ALL=1.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import mmdec
from mmdec.hub.find import model_kind
from tests.support.grid import WHOLE

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "language_models.md"
LENGTHS = (6, 100, 500, 512, 530, 1100, 3000) if WHOLE else (6, 530)
NEW = 40


def models() -> list[Path]:
    named = os.environ.get("MMDEC_MODELS")
    result = sorted(path for path in Path(named).iterdir() if path.is_dir()) if named else []
    return [path for path in result if model_kind(path) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]


MODELS = models()
pytestmark = pytest.mark.skipif(not MODELS, reason="name real language models: MMDEC_MODELS")


@cache
def loaded(path: Path) -> tuple[Any, list[int]]:
    """Load a model in float32 and the tokens of a page."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    return model.eval(), tokenizer(PAGE.read_text("utf-8"))["input_ids"]


@pytest.fixture(params=MODELS, ids=lambda path: path.name)
def model_and_page(request: pytest.FixtureRequest) -> tuple[Any, list[int]]:
    mmdec.default_statistics().clear()
    return loaded(request.param)


def prompts(page: list[int], lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Rows of so many tokens, padded on the left. Each begins as the page does, with the model's first token."""
    width = max(lengths)
    ids = torch.tensor([[page[0]] * (width - length) + (page * 9)[:length] for length in lengths])
    mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
    return {"input_ids": ids, "attention_mask": mask}


def check(model: Any, inputs: dict[str, Tensor], drafter: str, **options: Any) -> None:
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    torch.manual_seed(1)
    expected = model.generate(**inputs, **options)
    torch.manual_seed(1)
    result = mmdec.generate(model, inputs, drafter, num_speculative_tokens=(8, 5), **options)
    assert torch.equal(result.sequences, expected)
    assert any(sum(round_.drafted) for round_ in result.rounds)


@pytest.mark.parametrize("drafter", ["lookup", "recycling"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_text_equals_stock(model_and_page: tuple[Any, list[int]], length: int, drafter: str) -> None:
    model, page = model_and_page
    if length + NEW > model.config.max_position_embeddings:
        pytest.skip(f"the model has {model.config.max_position_embeddings} positions")
    check(model, prompts(page, (length,)), drafter)


@pytest.mark.parametrize("drafter", ["lookup", "recycling"])
def test_ragged_rows_equal_stock(model_and_page: tuple[Any, list[int]], drafter: str) -> None:
    """One row lies within a window, one goes beyond it."""
    model, page = model_and_page
    most = model.config.max_position_embeddings - NEW
    check(model, prompts(page, (min(90, most // 2), min(600, most))), drafter)


def test_a_sampled_text_equals_stock(model_and_page: tuple[Any, list[int]]) -> None:
    model, page = model_and_page
    length = min(540, model.config.max_position_embeddings - NEW)
    check(model, prompts(page, (length,)), "lookup", do_sample=True, temperature=0.7)
