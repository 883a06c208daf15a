"""Tests `mmdec.describe` and `mmdec.Chat` with a model folder of each family: the tokens equal those of `generate` with
the family's processor."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmdec
from mmdec.errors import InputError
from mmdec.io.images import to_pil
from mmdec.pretrained.vlm import load_vlm
from tests.support.grid import slow_but
from tests.support.tiny_vlm_folder import settings
from tests.support.vlm_folders import FAMILIES, NEEDS, write

pytestmark = [  # of transformers' own processors, and of a random Llama 4
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Casting complex values:UserWarning"),
]
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "drafter": "lookup", "num_speculative_tokens": 4}
SEEDS = {"Idefics2": 2}  # whose answers differ
SIZES = [(40, 60), (56, 28), (70, 30)]


@pytest.fixture(scope="module")
def pictures() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 255, (*size, 3), dtype=np.uint8) for size in SIZES]


@pytest.fixture(scope="module", params=slow_but(FAMILIES, slice(None, None, 3)))
def vlm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    for package in NEEDS.get(request.param, ()):
        pytest.importorskip(package)
    folder: Path = tmp_path_factory.mktemp("seeing") / request.param
    return load_vlm(write(request.param, folder, SEEDS.get(request.param, 0)))


def inputs_of(vlm: Any, groups: list[list[np.ndarray]], texts: list[str]) -> Any:
    """Process questions with the family's processor."""
    images = [[to_pil(pixels) for pixels in group] for group in groups]
    return vlm.processor(
        images=images if any(images) else None, text=texts, padding=True, padding_side="left", return_tensors="pt"
    ).to("cpu", vlm.model.dtype)


def stock_answer(vlm: Any, group: list[np.ndarray], prompt: str) -> str:
    content = [*[{"type": "image"}] * len(group), {"type": "text", "text": prompt}]
    return vlm.processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    ).removeprefix(vlm.tokenizer.bos_token)


def ended(vlm: Any, tokens: list[int]) -> list[int]:
    end = vlm.tokenizer.eos_token_id
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def test_answers_are_those_of_generate(vlm: Any, pictures: list[np.ndarray]) -> None:
    """One question, and three together with one, two and no pictures; the model is found by its folder."""
    groups, prompts = [[pictures[0]], pictures[1:], []], ["What is this?", "Where is the red star?", "It is 09:30."]
    texts = [vlm.tokenizer.bos_token + stock_answer(vlm, *question) for question in zip(groups, prompts, strict=True)]
    expected = []
    for chosen in ([0], [0, 1, 2]):
        inputs = inputs_of(vlm, [groups[index] for index in chosen], [texts[index] for index in chosen])
        made = vlm.model.generate(**inputs, max_new_tokens=12, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        expected.append([ended(vlm, row) for row in made.tolist()])
    single = mmdec.describe(pictures[0], prompts[0], model=vlm.directory, **OPTIONS)
    together = mmdec.describe([tuple(group) for group in groups], prompts, model=vlm.directory, **OPTIONS)
    assert single.tokens == expected[0][0]
    assert [answer.tokens for answer in together] == expected[1]
    assert len({tuple(answer.tokens) for answer in together}) > 1
    assert single.timings["vision"] > 0


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_processor_that_needs_a_package_is_refused(tmp_path: Path) -> None:
    folder = write("LlavaOnevision", tmp_path / "seeing")
    settings(folder, "processor_config.json", processor_class="PixtralProcessor")
    with pytest.raises(InputError, match="pip install torchvision"):
        mmdec.describe(np.zeros((28, 28, 3), np.uint8), model=folder)


def test_a_processor_that_writes_the_prompt_itself_is_refused(tmp_path: Path, pictures: list[np.ndarray]) -> None:
    with pytest.raises(InputError, match="multi_page"):
        mmdec.describe(pictures[0], model=write("GotOcr2", tmp_path / "seeing"), drafter="lookup")


def test_a_chat_answers_as_the_whole_dialogue(vlm: Any, pictures: list[np.ndarray]) -> None:
    """Three turns with one, another and no picture give what the whole dialogue gives from scratch."""
    chat, shown = mmdec.Chat(model=vlm.directory, **OPTIONS), list[np.ndarray]()
    for prompt, group in (("What is this?", pictures[:1]), ("And this?", pictures[1:2]), ("Why?", [])):
        before = len(chat.tokens)
        if not group and type(vlm.processor).__name__ == "PaliGemmaProcessor":
            with pytest.raises(InputError, match="a question without one"):
                chat.ask(prompt)
            return
        answer = chat.ask(prompt, tuple(group))
        shown += group
        answer_tokens = answer.tokens[:-1] if answer.tokens[-1] == vlm.tokenizer.eos_token_id else answer.tokens
        ids = torch.tensor([chat.tokens[: len(chat.tokens) - len(answer_tokens)]])
        assert ids.shape[1] > before
        inputs = dict(inputs_of(vlm, [[pixels] for pixels in shown], [vlm.image_token] * len(shown)))
        inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in inputs:
                inputs[name] = (ids == vlm.model.config.image_token_id).long()
        made = vlm.model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        assert answer.tokens == ended(vlm, made.tolist())
