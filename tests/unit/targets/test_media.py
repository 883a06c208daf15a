"""Tests MediaTarget: the models that it takes, and its errors for others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    MllamaConfig,
    MllamaForConditionalGeneration,
    PreTrainedModel,
)

import mmdec
from mmdec.errors import InputError
from mmdec.targets.media import MediaTarget, VisionReport
from mmdec.targets.registry import make_target
from mmdec.targets.text import TextTarget
from mmdec.types import Needs
from tests.support.media_models import IMAGE as IMAGE_TOKEN
from tests.support.media_models import VIDEO, media_model
from tests.support.tiny_text import language_model
from tests.support.tiny_vlm import CLIP, IMAGE, KINDS, TEXT, Picture, batch_of, vision_model

SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


def llava(**text: Any) -> LlavaForConditionalGeneration:
    config = LlavaConfig(text_config={**TEXT, **text}, vision_config=CLIP, image_token_index=IMAGE)
    return LlavaForConditionalGeneration(config).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_its_target(kind: str) -> None:
    model = vision_model(kind)
    target = make_target(model)
    assert isinstance(target, MediaTarget)
    assert (target.vocab_size, target.hidden_size, target.layers, target.positions) == (64, 32, 3, None)
    assert target.name.startswith(type(model).__name__)
    assert target.name != make_target(vision_model(kind, 1)).name


def test_a_language_model_has_no_media_target() -> None:
    assert isinstance(make_target(language_model("llama")), TextTarget)


@pytest.mark.parametrize("text", ["llama", "mistral", "qwen2", "gemma"])
def test_llava_has_any_language_model_that_a_text_target_takes(text: str) -> None:
    own = {"sliding_window": None} if text == "mistral" else {"head_dim": 8} if text == "gemma" else {}
    torch.manual_seed(0)
    model = llava(model_type=text, **own)
    inputs = batch_of("llava", [[[8, 9, 8, 9], Picture.random(1), [8, 9]]])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**inputs, **options)  # type: ignore[operator]
    result = mmdec.generate(model, inputs, "recycling", num_speculative_tokens=(5, 3), **options)
    assert torch.equal(result.sequences, expected)


def other_attention() -> PreTrainedModel:
    model = copy.deepcopy(vision_model("qwen2_vl"))
    model.config.text_config._attn_implementation = "flex_attention"
    return model


def other_kind() -> Any:
    with torch.device("meta"):
        return MllamaForConditionalGeneration(MllamaConfig())


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: llava(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "dynamic"),
        (other_attention, "flex_attention, which cannot mask a tree"),
        (
            other_kind,
            r"must be of a supported class, but is Mllama.*cross attention",
        ),
    ],
)
def test_models_that_cannot_work_are_refused(made: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_target(made())


@pytest.mark.parametrize(
    ("changes", "needs", "message"),
    [
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, Needs(), "inputs_embeds"),
        ({}, Needs(layers=(3,)), r"from 0 to 2, or -1"),
        ({}, Needs(encoder=True), "`drafter` must fit"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, Needs(), "Pad on the left"),
    ],
)
@pytest.mark.parametrize("kind", ["llava", "qwen3_vl"])
def test_inputs_that_cannot_work_are_refused(kind: str, changes: dict[str, Any], needs: Needs, message: str) -> None:
    inputs = {"input_ids": torch.full((1, 3), 9), **changes}
    with pytest.raises(InputError, match=message):
        MediaTarget(vision_model(kind)).prefill(inputs, needs)


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_only_prompts_without_pictures_tell_the_scheduler_their_length(kind: str) -> None:
    target = make_target(vision_model(kind))
    assert isinstance(target, MediaTarget)
    texts, picture = {"input_ids": torch.full((2, 5), 9)}, batch_of(kind, [[[8, 9], Picture.random(1), [8]]])
    assert target.prompt_tokens(texts) == 10
    assert target.prompt_tokens(picture) is None
    # as `generate` holds the pixels back
    prepared = target.prepare_inputs(picture["input_ids"], target.model.generation_config, picture)
    assert target.prompt_tokens(prepared) is None


@pytest.mark.parametrize(("kind", "where"), [("llava", "forward"), ("qwen2_vl", "get_rope_index")])
def test_running_out_of_memory_is_not_reported_as_wrong_input(
    kind: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a batch is tried again one by one."""
    model = copy.deepcopy(vision_model(kind))
    inputs = batch_of(kind, [[[8, 9], Picture.random(1), [8]]])

    def full(*_: object, **__: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model if where == "forward" else model.base_model, where, full)
    with pytest.raises(torch.OutOfMemoryError):
        MediaTarget(model).prefill(inputs, Needs())


def test_a_video_leaves_the_summaries_of_the_images() -> None:
    model = media_model("VideoLlavaForConditionalGeneration")
    generator = torch.Generator().manual_seed(0)
    image = {"pixel_values_images": torch.randn(1, 3, 28, 28, generator=generator)}
    video = {"pixel_values_videos": torch.randn(1, 2, 3, 28, 28, generator=generator)}
    with torch.no_grad():
        images = model.model.get_image_features(**image, return_dict=True).pooler_output
        frames = model.model.get_video_features(**video, return_dict=True).pooler_output
    image_ids, video_ids = [5, *[IMAGE_TOKEN] * len(images[0])], [6, *[VIDEO] * (len(frames) * len(frames[0]))]

    def summaries(ids: list[int], **media: Any) -> torch.Tensor | None:
        inputs = {"input_ids": torch.tensor([[1, *ids, 7]]), **media}
        round_ = next(iter(mmdec.stream(model, inputs, max_new_tokens=2, do_sample=False)))
        assert isinstance(round_.report, VisionReport)
        return round_.report.summaries

    expected = summaries(image_ids, **image)
    assert expected is not None
    assert len(expected) == 1
    both = summaries(image_ids + video_ids, **image, **video)
    assert both is not None
    assert torch.equal(both, expected)
    assert summaries(video_ids, **video) is None
