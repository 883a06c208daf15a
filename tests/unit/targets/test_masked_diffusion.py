"""Sessions of masked diffusion models against one pass over the whole text under a mask that is built cell by cell."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion, Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

from mmdec.errors import InputError
from mmdec.targets.masked_diffusion import CanvasLayout, check_canvas_model, open_session
from tests.support.tiny_text import VOCABULARY, language_model

MASK = VOCABULARY - 1
LAYOUTS = [
    CanvasLayout(visible, 4, MASK, shifted, aligned, cache)  # type: ignore[arg-type] # literals
    for visible, shifted, aligned, cache in product(
        ("block", "full"), (False, True), ("prompt", "start"), (True, False)
    )
    if visible == "block" or cache
]


def naive_logits(model: PreTrainedModel, layout: CanvasLayout, text: list[int], prompt: int, start: int) -> Tensor:
    """Return the logits that predict the tokens of the block at `start`, from one pass over the text (N,)."""
    offset = (layout.block_length - prompt % layout.block_length) % layout.block_length
    if layout.aligned == "start":
        offset = 0
    mask = torch.zeros(1, 1, len(text), len(text), dtype=model.dtype)
    for query in range(len(text)):
        for key in range(len(text)):
            later = (key + offset) // layout.block_length > (query + offset) // layout.block_length
            if layout.visible == "block" and later:
                mask[..., query, key] = torch.finfo(model.dtype).min
    logits = model(input_ids=torch.tensor([text]), attention_mask=mask).logits[0]
    places = range(start, start + layout.block_length)
    return torch.stack([logits[max(place - layout.shifted, 0)] for place in places])


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@torch.inference_mode()
def test_each_canvas_is_scored_as_if_it_were_alone(layout: CanvasLayout, kind: str) -> None:
    model = language_model(kind).double().eval()
    draws, prompt_length, blocks = torch.Generator().manual_seed(1), 6, 3
    prompt = torch.randint(MASK, (prompt_length,), generator=draws)
    session: Any = open_session(model, layout, prompt, blocks)
    given = 0 if layout.aligned == "prompt" else prompt_length % 4
    end = len(session.text) + 4 * blocks
    assert session.canvas.tolist() == prompt[prompt_length - given :].tolist() + [MASK] * (4 - given)
    for _ in range(blocks):
        start = len(session.text)
        for count in (1, 3, 2):
            canvases = session.canvas.expand(count, -1).clone()
            for canvas in canvases:
                kept = torch.rand(4 - given, generator=draws) < 0.5
                canvas[given:][kept] = torch.randint(MASK, (4 - given,), generator=draws)[kept]
            scores = session.score(canvases)
            for canvas, score in zip(canvases, scores, strict=True):
                text = session.text.tolist() + canvas.tolist()
                if layout.visible == "full":
                    text += [MASK] * (end - len(text))
                expected = naive_logits(model, layout, text, prompt_length, start)
                torch.testing.assert_close(score[given:], expected[given:], rtol=1e-9, atol=1e-9)
        block = session.canvas.clone()
        block[given:] = torch.randint(MASK, (4 - given,), generator=draws)
        session.commit(block)
        given = 0


def test_complete_blocks_are_computed_once() -> None:
    model, columns = language_model("llama").eval(), list[int]()
    model.register_forward_pre_hook(
        lambda _, args, named: columns.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    session: Any = open_session(model, CanvasLayout("block", 4, MASK), torch.arange(8), 2)
    with torch.inference_mode():
        session.score(session.canvas[None])
        session.score(session.canvas[None])
        session.commit(torch.arange(4))
        session.score(session.canvas.expand(3, -1))
        session.score(session.canvas[None])
    assert columns == [8 + 4, 4, 4 + 3 * 4, 4]


def test_models_with_windows_are_refused() -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}
    config = Gemma3TextConfig(vocab_size=32, num_hidden_layers=2, num_key_value_heads=1, sliding_window=4, **sizes)
    with pytest.raises(InputError, match=r"attends to all tokens in every layer.*Gemma3ForCausalLM"):
        check_canvas_model(Gemma3ForCausalLM(config))


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InputError, match="`model` must be a loaded model of transformers, but is 'llama'"):
        check_canvas_model("llama")  # type: ignore[arg-type] # wrong on purpose


def test_attention_without_masks_of_ones_own_is_refused() -> None:
    model = language_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(InputError, match=r"`attn_implementation` must be.*flash_attention_2"):
        check_canvas_model(model)


def test_diffusion_gemma_is_refused_with_the_reason() -> None:
    model = DiffusionGemmaForBlockDiffusion.__new__(DiffusionGemmaForBlockDiffusion)  # without its 26 billion weights
    with pytest.raises(InputError, match=r"reads the logits of the step before.*Call `model.generate`"):
        check_canvas_model(model)
