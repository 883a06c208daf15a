"""SpecVLM, ViSpec and FLASH on tiny vision-language models: every draft against one recomputed from scratch."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

import mmdec
from mmdec.drafters.flash.drafter import FlashDrafter
from tests.support.compressing_drafters import ROWS, SYSTEMS, rounds_of
from tests.support.draft_networks import Checked, draft_network, tree_growing
from tests.support.tiny_text import language_model
from tests.support.tiny_vlm import Picture, batch_of, vision_model
from tests.support.toy_target import RandomBudget


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("row", range(len(ROWS)))
def test_the_cache_equals_recomputing_everything(system: str, row: int) -> None:
    """Through rejections and plain rounds: every draft, in float64; chains longer than the slots are of two blocks."""
    model = vision_model("llava")
    with torch.no_grad():
        double = type(model)(model.config).double().eval()
        double.load_state_dict(model.state_dict())
    own: dict[str, Any] = batch_of("llava", [ROWS[row]])
    pixels = {name: part.double() for name, part in own.items() if part.is_floating_point()}
    own |= pixels
    drafter = tree_growing(system.removesuffix("-tree"), double, width=3, **SYSTEMS[system])
    checked = Checked(drafter, double, pixels)
    rounds = rounds_of(double, checked, RandomBudget(Random(row)), own, 12)
    plain = rounds_of(double, None, RandomBudget(Random(row), 0), own, 12)
    assert checked.compared > 3
    assert [t for round_ in rounds for t in round_.tokens[0]] == [t for round_ in plain for t in round_.tokens[0]]


@pytest.mark.parametrize("system", SYSTEMS)
def test_ragged_batches_of_texts(system: str) -> None:
    model = language_model().double()
    drafter = tree_growing(system.removesuffix("-tree"), model, width=3, **SYSTEMS[system])
    checked = Checked(drafter, model)
    prompts = torch.tensor([[0, 0, 0, 5, 6, 7], [3, 4, 3, 4, 3, 4], [0, 0, 0, 0, 0, 9]])
    inputs = {"input_ids": prompts, "attention_mask": (prompts > 0).long()}
    rounds_of(model, checked, RandomBudget(Random(2)), inputs, 14)
    assert checked.compared > 8


def test_flash_drafts_beyond_its_slots_in_chains_alone() -> None:
    model = language_model()
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    for tree, plan, depth in ((False, (7, 7), 7), (False, (12, 4), 4), (True, (12, 7), 3)):
        drafted: list[int] = []
        network: Any = draft_network("flash", model, slots=3, tree=tree)
        drafter = FlashDrafter(network, model.get_input_embeddings(), model.get_output_embeddings())
        plug = mmdec.speculate(drafter, num_speculative_tokens=plan, on_round=_note(drafted))
        out = model.generate(ids, max_new_tokens=20, do_sample=False, custom_generate=plug)
        assert torch.equal(out, model.generate(ids, max_new_tokens=20, do_sample=False))
        assert max(drafted) == (depth if not tree else 12)


def _note(drafted: list[int]) -> Any:
    return lambda round_: drafted.append(round_.drafted[0])


@pytest.mark.parametrize("system", SYSTEMS)
def test_drawn_drafts_are_sound(system: str) -> None:
    """A drafter that fails would warn, and warnings are errors here; what is drawn is reported."""
    model = language_model()
    drafter = tree_growing(system.removesuffix("-tree"), model, width=3, **SYSTEMS[system])
    ids = torch.tensor([[5, 6, 7, 5, 6], [9, 8, 9, 8, 9]])
    for nodes in (7, (7, 3)):
        out = mmdec.generate(
            model,
            ids,
            drafter,
            rule="residual",
            num_speculative_tokens=nodes,
            seed=3,
            do_sample=True,
            max_new_tokens=12,
            eos_token_id=None,
        )
        assert out.sequences.shape == (2, 17)
        assert sum(sum(round_.drafted) for round_ in out.rounds) > 12


@pytest.mark.parametrize("system", ["specvlm", "vispec", "flash"])
def test_a_prompt_that_is_an_image_alone(system: str) -> None:
    model = vision_model("llava")
    changes: dict[str, Any] = {"specvlm": {"compressors": ("text-only",)}, "vispec": {"queries": 1}}.get(system, {})
    drafter = tree_growing(system, model, **changes)
    inputs = batch_of("llava", [[Picture.random(1)]], begin=False)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    out = mmdec.generate(model, inputs, drafter, num_speculative_tokens=(6, 3), **options)
    assert torch.equal(out.sequences, model.generate(**inputs, **options))
