"""Texts that end at the last position of a model's table, in batches whose rows stand at different places.

The last token that a model can write is never read, so a table of P positions allows a text of P + 1 tokens.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import mmdec
from mmdec.targets.probe import WEIGHT_DEVIATION, tiny_config
from tests.support.encoder_decoders import encoder_decoder, sources
from tests.support.families import attention_of, config_of
from tests.support.grid import sample, slow_but
from tests.support.random_drafter import RandomDrafter

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # the guard's warning: a drafter failed
TABLE = 24
FAMILIES = ("GPT2LMHeadModel", "OPTForCausalLM", "BioGptForCausalLM", "XGLMForCausalLM", "GPTJForCausalLM")
SEQUENCES = (
    "BartForConditionalGeneration",
    "PegasusForConditionalGeneration",
    "M2M100ForConditionalGeneration",
    "MarianMTModel",
)
SIZES = (1, 3, 8, (9, 4))
OPTIONS: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@lru_cache(16)
def language_model(family: str, positions: int = TABLE, seed: int = 0) -> Any:
    """Build a small random model with a table of `positions` positions."""
    shape = tiny_config(config_of(family), max_position_embeddings=positions)
    shape._attn_implementation = attention_of(family)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = getattr(transformers, family)(shape).eval()
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, WEIGHT_DEVIATION)
    return model


def prompts(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Make prompts of these lengths, padded on the left."""
    generator, width = torch.Generator().manual_seed(0), max(lengths)
    mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
    return {"input_ids": torch.randint(3, 12, mask.shape, generator=generator) * mask, "attention_mask": mask}


LENGTHS = ((1, 1, 1, 1), (18, 15, 13))
TABLES = [(family, lengths, size) for family in FAMILIES for lengths in LENGTHS for size in SIZES]


@pytest.mark.parametrize(("family", "lengths", "size"), sample(TABLES, slice(None, None, 3)))
def test_a_batch_writes_its_last_token(family: str, lengths: tuple[int, ...], size: Any) -> None:
    model, inputs = language_model(family), prompts(lengths)
    options = {**OPTIONS, "max_length": TABLE + 1}
    expected = model.generate(**inputs, **options)
    for drafter in ("lookup", "recycling", *(RandomDrafter(seed, expected.tolist(), 0.8) for seed in range(4))):
        result = mmdec.generate(model, inputs, drafter, num_speculative_tokens=size, **options)
        assert torch.equal(result.sequences, expected)


@pytest.mark.parametrize("size", SIZES)
def test_a_sampled_batch_writes_its_last_token(size: Any) -> None:
    model, inputs = language_model("GPT2LMHeadModel"), prompts((1, 1, 1, 1))
    options = {**OPTIONS, "do_sample": True, "temperature": 0.5, "max_length": TABLE + 1, "seed": 5}
    expected = mmdec.generate(model, inputs, None, **options).sequences
    assert expected.shape[1] == TABLE + 1
    for seed in range(4):
        drafter = RandomDrafter(seed, expected.tolist(), 0.8)
        result = mmdec.generate(model, inputs, drafter, num_speculative_tokens=size, **options)
        assert torch.equal(result.sequences, expected)


@pytest.mark.parametrize(("name", "size"), slow_but(itertools.product(SEQUENCES, SIZES), slice(None, None, 5)))
def test_a_decoder_writes_its_last_token(name: str, size: Any) -> None:
    model = encoder_decoder(name, max_position_embeddings=TABLE)
    inputs = sources(model, 3)
    # the decoder's own limit; the encoder reads 15 tokens
    options = {**OPTIONS, "max_new_tokens": TABLE, "pad_token_id": model.config.pad_token_id}
    expected = model.generate(**inputs, **options)
    assert expected.shape[1] == TABLE + 1
    for seed in range(4):
        drafter = RandomDrafter(seed, expected.tolist(), 0.8)
        result = model.generate(
            **inputs, **options, custom_generate=mmdec.speculate(drafter, num_speculative_tokens=size)
        )
        assert torch.equal(result, expected)


REACHES = [(family, reach, size) for family in FAMILIES[:2] for reach in (8, 17, 24, 40) for size in SIZES]


@pytest.mark.parametrize(
    ("family", "positions", "size"), slow_but(sample(REACHES, slice(None, None, 3)), slice(None, None, 2))
)
def test_a_drafter_with_a_shorter_table_drafts_as_far_as_it_reaches(family: str, positions: int, size: Any) -> None:
    model, small = language_model(family, 32), language_model(family, positions, 1)
    for lengths in ((1, 1, 1), (18, 15, 13)):
        inputs, options = prompts(lengths), {**OPTIONS, "max_length": 33}
        expected = model.generate(**inputs, **options)
        # the target itself has its own texts; another model is right seldom
        for drafter in (small, language_model(family, positions)):
            result = mmdec.generate(model, inputs, drafter, num_speculative_tokens=size, **options)
            assert torch.equal(result.sequences, expected)


def test_a_text_beyond_the_table_fails_as_without_drafts() -> None:
    model, inputs = language_model("GPT2LMHeadModel"), prompts((18, 15, 13))
    options = {**OPTIONS, "max_length": TABLE + 2}
    with pytest.raises(IndexError):
        model.generate(**inputs, **options)
    with pytest.raises(IndexError):
        mmdec.generate(model, inputs, "lookup", num_speculative_tokens=3, **options)
