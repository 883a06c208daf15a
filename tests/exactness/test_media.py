"""Tests models with images or sound end to end: with any draft, the tokens equal those of `generate`."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

import mmdec
from mmdec.compat import CACHE_ARGUMENT, transformers_release
from mmdec.errors import InputError
from mmdec.targets.families import AUDIO_FAMILIES, MEDIA_FAMILIES, UNSUPPORTED_CLASSES, VISION_FAMILIES
from mmdec.targets.media import MediaTarget
from mmdec.targets.registry import make_target
from tests.exactness.pairwise import cover, each_value
from tests.support.audio_lm_folders import FAMILIES as LISTENING
from tests.support.grid import WHOLE, slow_but
from tests.support.media_models import FOR, media_inputs, media_model
from tests.support.random_drafter import RandomDrafter
from tests.support.vision_drafters import DRAFTERS
from tests.support.vlm_folders import FAMILIES as DESCRIBED
from tests.support.vlm_folders import NEEDS as SEEING_NEEDS

AXES = ("Qwen2_5OmniThinker", "Qwen3VLMoe", "Glm4v", "Glm4vMoe", "GlmOcr")  # positions of three axes
ELSEWHERE = ("Llava", "LlavaNext", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL")  # tests/exactness/test_vision.py
# transformers' own `generate` fails: its `forward` reads a field that the language model's output does not have
BROKEN = ("Llama4",) if transformers_release() == (5, 24) else ()
NAMED = [name for name in MEDIA_FAMILIES.split() if name not in (*ELSEWHERE, *BROKEN)]
ONE_AXIS = [name for name in NAMED if name not in AXES]
ROWS = {"none": [0], "one": [1], "three": [3], "batch": [2, 1, 0, 1]}  # images or sounds of each row
GRID = {
    "family": NAMED,
    "rows": list(ROWS),
    "drafter": ["lookup", "recycling", "wild", "eagle", "eagle3", "msd", "heads", "small"],
    "nodes": [None, 1, 5, (12, 4)],
    "sampled": [False, True],
}
CASES = cover(GRID, WHOLE)
ENDS = [2, 5]
HELD = [0, *range(56, 63)]  # padding, placeholders and their marks are no answers


def drafter(name: str, expected: Tensor, model: Any) -> Any:
    """Networks of random weights read the model's states; "small" is a language model that reads text alone."""
    return RandomDrafter(0.3, expected.tolist(), 0.9) if name == "wild" else DRAFTERS[name](model, expected.tolist())


@pytest.mark.parametrize("case", slow_but(CASES, each_value(CASES)), ids=lambda case: "-".join(map(str, case.values())))
def test_drafts_change_no_text(case: dict[str, Any]) -> None:
    model = media_model(case["family"] + FOR)
    inputs = media_inputs(model, ROWS[case["rows"]])
    options: dict[str, Any] = {"max_new_tokens": 15, "eos_token_id": ENDS, "suppress_tokens": HELD}
    options["do_sample"] = case["sampled"]
    if case["sampled"] and len(inputs["input_ids"]) > 1:  # draws for each row, as with no drafter
        options["seed"] = 3
        expected = mmdec.generate(model, inputs, None, **options).sequences
    else:
        torch.manual_seed(7)
        expected = model.generate(**inputs, **options)
    named = drafter(case["drafter"], expected, model)
    torch.manual_seed(7)
    result = mmdec.generate(model, inputs, named, num_speculative_tokens=case["nodes"], **options)
    assert torch.equal(result.sequences, expected)


@pytest.mark.parametrize(
    "family", [name for name in ("Gemma3", "PaliGemma", "InternVL", "Llama4", "Qwen2Audio", "Glm4v") if name in NAMED]
)
def test_the_drop_in_gives_what_generate_gives(family: str) -> None:
    model = media_model(family + FOR)
    inputs = media_inputs(model, [1, 2, 0], seed=4)
    options: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": ENDS, "do_sample": False, "suppress_tokens": HELD}
    expected = model.generate(**inputs, **options)
    plug = mmdec.speculate(RandomDrafter(0.4, expected.tolist(), 0.8), num_speculative_tokens=(16, 5))
    assert torch.equal(model.generate(**inputs, **options, custom_generate=plug), expected)


@pytest.mark.parametrize("family", ONE_AXIS)
def test_a_chat_goes_on_from_its_cache(family: str) -> None:
    """Two turns, the second with text alone, equal transformers' own two turns."""
    model = media_model(family + FOR)
    inputs = media_inputs(model, [1], seed=2)
    options: dict[str, Any] = {"max_new_tokens": 9, "eos_token_id": None, "do_sample": False, "suppress_tokens": HELD}
    caches = [DynamicCache(config=model.config), DynamicCache(config=model.config)]
    plug = mmdec.speculate("lookup", num_speculative_tokens=4)
    for turn in range(2):
        expected = model.generate(**inputs, **options, **{CACHE_ARGUMENT: caches[0]})
        result = model.generate(**inputs, **options, **{CACHE_ARGUMENT: caches[1]}, custom_generate=plug)
        assert torch.equal(result, expected), turn
        ids = torch.cat([expected, torch.tensor([[7, 9, 8, 7, 9]])], 1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if family in ("Gemma3", "PaliGemma"):
            inputs["token_type_ids"] = torch.zeros_like(ids)


@pytest.mark.parametrize("family", AXES)
def test_a_chat_of_three_axes_goes_on_from_its_cache(family: str) -> None:
    """The second turn equals the whole chat from scratch: transformers keeps positions on the model between turns."""
    model = media_model(family + FOR)
    inputs = media_inputs(model, [1], seed=2)
    options: dict[str, Any] = {"max_new_tokens": 9, "eos_token_id": None, "do_sample": False, "suppress_tokens": HELD}
    cache = DynamicCache(config=model.config)
    first = mmdec.generate(model, {**inputs, CACHE_ARGUMENT: cache}, "lookup", **options).sequences
    assert torch.equal(first, model.generate(**inputs, **options))
    ids = torch.cat([first, torch.tensor([[7, 9, 8, 7, 9]])], 1)
    whole = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "mm_token_type_ids" in inputs:
        whole["mm_token_type_ids"] = (ids == 60).long()
    again = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE_ARGUMENT: cache}
    result = mmdec.generate(model, again, "lookup", num_speculative_tokens=4, **options).sequences
    assert torch.equal(result, model.generate(**whole, **options))


def test_each_family_has_its_target() -> None:
    for family in NAMED:
        assert type(make_target(media_model(family + FOR))) is MediaTarget
    assert all("audio" in media_model(family + FOR).input_modalities for family in AUDIO_FAMILIES.split())


NEEDS = {**SEEING_NEEDS, "Voxtral": ("mistral-common",)}  # packages of processors
NOT_DESCRIBED = {
    "GotOcr2": "its processor writes the prompt itself",
    "Qwen2_5OmniThinker": "its folder holds the model that speaks, too; `mmdec.generate` takes the thinker",
}
SEEN = (*DESCRIBED, *ELSEWHERE)
HEARD = (*LISTENING, "Voxtral")


def rows() -> list[str]:
    """Return the table of the page, a line for each family."""
    seen = [f"| `{name}{FOR}` | exact | {_door(name, SEEN)} |" for name in VISION_FAMILIES.split()]
    heard = [f"| `{name}{FOR}` | exact | {_door(name, HEARD)} |" for name in AUDIO_FAMILIES.split()]
    return [*seen, *heard, *(f"| `{name}` | refused: {why} | |" for name, why in UNSUPPORTED_CLASSES.items())]


def _door(name: str, tried: tuple[str, ...]) -> str:
    """Whether `describe` or `transcribe` takes the family with its own processor."""
    if name in NOT_DESCRIBED:
        return f"refused: {NOT_DESCRIBED[name]}"
    needed = f"; needs {' and '.join(NEEDS[name])}" if name in NEEDS else ""
    assert name in tried
    return f"exact{needed}"


def test_the_page_lists_the_families() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "pictures.md").read_text(encoding="utf-8")
    assert [line for line in page.splitlines() if line.startswith("| `")] == rows()


@pytest.mark.parametrize("name", UNSUPPORTED_CLASSES)
def test_other_families_are_refused_by_name(name: str) -> None:
    """Only a model's class is looked at, so no model is built."""
    model = object.__new__(getattr(transformers, name))
    model.__dict__["training"] = False
    with pytest.raises(InputError, match=re.escape(f"{name}: {UNSUPPORTED_CLASSES[name]}")):
        make_target(model)


def test_what_does_not_fit_is_refused() -> None:
    model = media_model("InternVL" + FOR)
    inputs = media_inputs(model, [2])
    for wrong in (
        {**inputs, "pixel_values": inputs["pixel_values"][:1]},
        {**inputs, "pixel_values": torch.randn(2, 3, 27, 28)},
        {**inputs, "input_ids": inputs["input_ids"].clamp(max=50)},
    ):
        with pytest.raises(InputError):
            mmdec.generate(model, wrong, "lookup", max_new_tokens=3)
    plug = mmdec.speculate("lookup")
    cache = copy.deepcopy(inputs)
    with pytest.raises(InputError, match="num_beams"):
        model.generate(**cache, num_beams=2, max_new_tokens=3, custom_generate=plug)


@pytest.mark.parametrize("kind", ["Gemma3", "InternVL"])
@pytest.mark.parametrize("family", ["AudioFlamingo3", "Qwen2Audio"])
def test_a_small_model_that_sees_drafts_for_one_that_hears(family: str, kind: str) -> None:
    """A small model that cannot hear reads only the text."""
    model, inputs = media_model(family + FOR), media_inputs(media_model(family + FOR), [2, 1, 0, 1])
    options: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": ENDS, "do_sample": False, "suppress_tokens": HELD}
    result = mmdec.generate(model, inputs, media_model(kind + FOR), num_speculative_tokens=4, **options)
    assert torch.equal(result.sequences, model.generate(**inputs, **options))
    assert result.tokens_per_round > 1  # some of its drafts are right
