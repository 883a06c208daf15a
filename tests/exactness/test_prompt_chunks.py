"""Prompts that are read in chunks, with and without a cache."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import mmdec
from tests.exactness.text_models import MODELS

OPTIONS: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.mark.parametrize("options", [{"use_cache": False, "prefill_chunk_size": 4}, {"prefill_chunk_size": 4}])
def test_a_prompt_in_chunks_needs_no_cache(options: dict[str, Any]) -> None:
    """With a caller's processor in a batch, transformers' loop decodes; it refuses chunks without a cache."""

    def unchanged(ids: Tensor, scores: Tensor) -> Tensor:
        return scores

    model, inputs = MODELS["llama"], {"input_ids": torch.randint(3, 20, (2, 12))}
    expected = model.generate(**inputs, **OPTIONS, max_new_tokens=6)
    for processors in ([], [unchanged]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nothing is drafted
            loop: Any = mmdec.speculate("lookup")
            result = model.generate(
                **inputs, **OPTIONS, **options, max_new_tokens=6, logits_processor=processors, custom_generate=loop
            )
        assert torch.equal(result, expected)
