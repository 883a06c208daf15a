"""`diffusion_generate`: hundreds of small random models, whose text depends on policy and layout alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmdec import CanvasOptions, diffusion_generate
from mmdec.core.canvas import EntropyBound, Policy, Predictions, ProgressSchedule, Threshold, TopK
from mmdec.errors import InputError
from tests.support.grid import slow_but
from tests.support.tiny_text import VOCABULARY, language_model

MASK = VOCABULARY - 1
TINY: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}


def small_model(seed: int) -> PreTrainedModel:
    layers = 1 + seed % 2
    model = language_model(("llama", "qwen2")[seed % 2], seed, num_hidden_layers=layers, **TINY)
    return model.double().eval()


def some_policy(seed: int) -> Policy:
    policies = [Threshold(0.6), TopK(2), EntropyBound(0.5), ProgressSchedule(3.0, 1.0, "cosine"), Threshold(0.9)]
    return policies[seed % len(policies)]


def some_prompt(seed: int, length: int) -> Tensor:
    return torch.randint(3, MASK, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def naive_text(
    model: PreTrainedModel, prompt: list[int], policy: Policy, visible: str, width: int, new: int, **more: Any
) -> list[int]:
    """Decode with one pass over the whole text for each step of the policy."""
    offset = 0 if more.get("aligned") == "start" else -len(prompt) % width
    text = [*prompt]
    end = len(prompt) + new + (-(len(prompt) + new + offset)) % width
    text += [MASK] * (end - len(text))
    for stop in range(width - offset, end + 1, width):
        if stop <= len(prompt):
            continue
        while MASK in text[:stop]:
            seen = text[:stop] if visible == "block" else text
            blocks = (torch.arange(len(seen)) + offset) // width
            hidden = blocks[None, :] > blocks[:, None] if visible == "block" else torch.zeros(1, len(seen)).bool()
            mask = torch.zeros(len(seen), len(seen), dtype=model.dtype)
            mask = mask.masked_fill(hidden, torch.finfo(model.dtype).min)
            logits = model(input_ids=torch.tensor([seen]), attention_mask=mask[None, None]).logits
            if more.get("shifted"):
                logits = torch.cat([logits[:, :1], logits[:, :-1]], 1)
            logits[..., MASK] = -math.inf
            block = slice(max(stop - width, 0), stop)
            masked = torch.tensor([[token == MASK for token in text[block]]])
            positions = policy.reveal(Predictions(logits[:, block]), masked)[0]
            for place in positions.nonzero()[:, 0].tolist():
                text[block.start + place] = int(logits[0, block.start + place].argmax())
        if 2 in text[len(prompt) : stop]:
            break
    answer = text[len(prompt) : len(prompt) + new]
    return answer[: answer.index(2) + 1] if 2 in answer else answer


@pytest.mark.parametrize("seed", slow_but(range(200), range(40)))
def test_drafts_and_cache_keep_the_text(seed: int) -> None:
    model, policy, prompt = small_model(seed), some_policy(seed), some_prompt(seed, 3 + seed % 7)
    visible, width = ("block", "full")[seed % 3 == 0], 4 + seed % 4
    layout: dict[str, Any] = {"shifted": seed % 5 == 0, "aligned": ("prompt", "start")[seed % 4 == 1]}
    options: dict[str, Any] = {"visible": visible, "block_length": width, "mask_token_id": MASK, **layout}
    expected = naive_text(model, prompt[0].tolist(), policy, visible, width, 10, **layout)
    variants: list[dict[str, Any]] = [{"cache": False}, {}, {"drafts": 3}, {"drafts": 6, "cache": False}]
    for more in variants:
        out = diffusion_generate(model, prompt, canvas=CanvasOptions(policy, **options, **more), max_new_tokens=10)
        assert out.sequences[0, prompt.shape[1] :].tolist() == expected
        assert out.new_tokens == [len(expected)]


@pytest.mark.parametrize("seed", range(20))
def test_drafts_and_cache_keep_the_text_in_float32(seed: int) -> None:
    model, prompt = small_model(seed).float(), some_prompt(seed, 5)
    texts = [
        diffusion_generate(
            model,
            prompt,
            canvas=CanvasOptions(some_policy(seed), drafts=drafts, block_length=6, mask_token_id=MASK, cache=cache),
            max_new_tokens=18,
        ).sequences.tolist()
        for drafts, cache in ((1, False), (1, True), (4, True))
    ]
    assert texts[0] == texts[1] == texts[2]


def test_drafts_save_passes_of_a_model_that_is_sure() -> None:
    model, prompt = small_model(4), some_prompt(4, 5)
    options: dict[str, Any] = {"policy": "top_k", "block_length": 8, "mask_token_id": MASK}
    plain = diffusion_generate(model, prompt, canvas=CanvasOptions(**options), max_new_tokens=16, eos_token_id=None)
    drafted = diffusion_generate(
        model, prompt, canvas=CanvasOptions(**options, drafts=6), max_new_tokens=16, eos_token_id=None
    )
    assert len(plain.passes[0]) == 16 == sum(pass_.steps for pass_ in drafted.passes[0])
    assert len(drafted.passes[0]) < 16
    assert plain.tokens_per_pass == 1.0
    assert drafted.tokens_per_pass == 16 / len(drafted.passes[0])
    assert str(plain) == "16 new tokens, 16 passes, 1.00 tokens per pass"


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    model = small_model(7)
    rows = [some_prompt(seed, length) for seed, length in ((1, 7), (2, 4), (3, 5))]
    ids = torch.cat([torch.nn.functional.pad(row, (7 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(row), (7 - row.shape[1], 0)) for row in rows])
    canvas = CanvasOptions(block_length=4, mask_token_id=MASK, drafts=2)
    inputs = {"input_ids": ids, "attention_mask": mask}
    together = diffusion_generate(model, inputs, canvas, max_new_tokens=9)
    for index, row in enumerate(rows):
        alone = diffusion_generate(model, row, canvas, max_new_tokens=9)
        new = alone.new_tokens[0]
        assert together.new_tokens[index] == new
        assert together.sequences[index, 7 : 7 + new].tolist() == alone.sequences[0, row.shape[1] :].tolist()
        assert set(together.sequences[index, 7 + new :].tolist()) <= {0}
    assert together.sequences[:, :7].tolist() == ids.tolist()


def test_a_shorter_text_is_the_beginning_of_a_longer_one() -> None:
    model, prompt = small_model(8), some_prompt(8, 6)
    canvas = CanvasOptions(block_length=4, mask_token_id=MASK)
    texts = [
        diffusion_generate(model, prompt, canvas, max_new_tokens=most, eos_token_id=None).sequences[0].tolist()
        for most in (5, 12)
    ]
    assert texts[1][: len(texts[0])] == texts[0]


def test_text_ends_with_the_end_token() -> None:
    model, prompt = small_model(9), some_prompt(9, 6)
    canvas = CanvasOptions(block_length=4, mask_token_id=MASK)
    whole = diffusion_generate(model, prompt, canvas, max_new_tokens=12, eos_token_id=None)
    answer = whole.sequences[0, 6:].tolist()
    end = answer[5]
    cut = diffusion_generate(model, prompt, canvas, max_new_tokens=12, eos_token_id=[end])
    assert cut.sequences[0, 6:].tolist() == answer[: answer.index(end) + 1]
    assert (cut.finish_reasons, whole.finish_reasons) == (["stop"], ["length"])


def test_layout_is_read_from_the_configuration() -> None:
    model, prompt = small_model(3), some_prompt(3, 5)
    model.config.mask_token_id, model.config.bd_size = MASK, 4
    named = diffusion_generate(model, prompt, canvas="threshold", max_new_tokens=9)
    options = CanvasOptions(Threshold(), block_length=4, mask_token_id=MASK)
    assert (
        named.sequences.tolist()
        == diffusion_generate(model, prompt, canvas=options, max_new_tokens=9).sequences.tolist()
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"canvas": "thresh"}, "`policy` must be one of threshold"),
        ({"canvas": 3}, "`canvas` must be one of threshold.*but is 3"),
        ({"canvas": "top_k", "drafter": "lookup"}, "`drafter` must be left out, but is 'lookup'"),
        ({"canvas": "top_k", "do_sample": True}, "`do_sample` must be left out, but is True"),
        ({"canvas": "top_k"}, "`mask_token_id` must be given"),
        (
            {"canvas": CanvasOptions(mask_token_id=VOCABULARY)},
            f"`mask_token_id` must be a whole number from 0 to {MASK}",
        ),
        ({"canvas": CanvasOptions(mask_token_id=MASK), "max_new_tokens": 0}, "`max_new_tokens` must be a whole number"),
        ({"canvas": CanvasOptions(mask_token_id=MASK), "max_new_tokens": None}, "`max_new_tokens` must be"),
        ({"canvas": CanvasOptions(mask_token_id=MASK), "eos_token_id": "end"}, "`eos_token_id` must be"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        diffusion_generate(small_model(0), some_prompt(0, 4), **{"max_new_tokens": 4, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"drafts": 0},
        {"drafts": 65},
        {"visible": "causal"},
        {"aligned": "end"},
        {"block_length": 0},
        {"mask_token_id": -1},
        {"shifted": 1},
        {"cache": None},
        {"policy": 1},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"`{next(iter(options))}` must be"):
        CanvasOptions(**options)


def test_foreign_inputs_are_refused() -> None:
    model, ids = small_model(0), some_prompt(0, 4)
    canvas = CanvasOptions(mask_token_id=MASK)
    with pytest.raises(InputError, match="holds `pixel_values`"):
        diffusion_generate(model, {"input_ids": ids, "pixel_values": ids}, canvas, max_new_tokens=4)
    with pytest.raises(InputError, match=r"`attention_mask` must be \(1, 4\)"):
        diffusion_generate(model, {"input_ids": ids, "attention_mask": ids[:, :2]}, canvas, max_new_tokens=4)
    with pytest.raises(InputError, match=f"row 0 holds the mask token {MASK}"):
        diffusion_generate(model, ids.index_fill(1, torch.tensor([2]), MASK), canvas, max_new_tokens=4)
    with pytest.raises(InputError, match="row 0 is empty"):
        diffusion_generate(model, {"input_ids": ids, "attention_mask": ids * 0}, canvas, max_new_tokens=4)
    with pytest.raises(InputError, match="`inputs` must be token ids"):
        diffusion_generate(model, [ids], canvas, max_new_tokens=4)  # type: ignore[arg-type] # wrong on purpose
