"""Tests unknown models, and known ones that were changed: errors say what is wrong, and nothing is ignored silently."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from transformers import ChameleonConfig, ChameleonForConditionalGeneration, LlamaConfig, LlamaForCausalLM

import mmdec
from mmdec.compat import CACHE_ARGUMENT
from mmdec.errors import InputError
from mmdec.targets.registry import make_target
from mmdec.types import Needs
from tests.support.tiny_text import language_model
from tests.support.tiny_vlm import TEXT, vision_model
from tests.support.tiny_whisper import whisper

IDS = torch.tensor([[5, 6, 7, 8]])
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


class OwnVlmConfig(LlamaConfig):
    model_type = "own-vlm"


class OwnVlm(LlamaForCausalLM):
    """Reads a picture, and has a flat configuration: nothing but its `forward` tells it from a language model."""

    config_class = OwnVlmConfig

    def __init__(self, config: OwnVlmConfig) -> None:
        super().__init__(config)
        self.look = nn.Linear(12, config.hidden_size)
        self.post_init()

    def forward(  # type: ignore[override] # as a user writes it
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,  # its name before transformers 5.24
        cache: Any = None,
        pixel_values: Any = None,
        logits_to_keep: int = 0,
        **more: Any,
    ) -> Any:
        if pixel_values is not None:
            embeds = self.get_input_embeddings()(input_ids) + self.look(pixel_values.flatten(1))[:, None]
            more, input_ids = {**more, "inputs_embeds": embeds}, None
        held = past_key_values if cache is None else cache
        return super().forward(input_ids, attention_mask, position_ids, held, logits_to_keep=logits_to_keep, **more)


@functools.cache
def own_vlm() -> OwnVlm:
    torch.manual_seed(0)
    return OwnVlm(OwnVlmConfig(**TEXT, initializer_range=0.3)).eval()


@pytest.mark.parametrize("name", ["pixel_values", "image_grid_thw", "input_features"])
def test_a_foreign_class_decodes_text_and_refuses_pictures(name: str) -> None:
    model = own_vlm()
    assert torch.equal(mmdec.generate(model, IDS, **OPTIONS).sequences, model.generate(IDS, **OPTIONS))  # type: ignore[operator]
    inputs = {"input_ids": IDS, name: torch.randn(1, 12)}
    with pytest.raises(InputError, match=f"`{name}` must be left out.* of OwnVlm"):
        make_target(model).prefill(inputs, Needs())


def test_every_public_call_refuses_its_pictures() -> None:
    model, inputs = own_vlm(), {"input_ids": IDS, "pixel_values": torch.randn(1, 12)}
    entry_points: list[Any] = [
        lambda: mmdec.generate(model, inputs, **OPTIONS),
        lambda: list(mmdec.stream(model, inputs, **OPTIONS)),
        lambda: model.generate(**inputs, **OPTIONS, custom_generate=mmdec.speculate()),  # type: ignore[operator]
    ]
    for entry_point in entry_points:
        with pytest.raises(InputError, match="`pixel_values` must be left out"):
            entry_point()


def test_chameleon_is_refused_for_its_pictures() -> None:
    """Its vocabulary contains image tokens, which two small layers cannot have."""
    tokens = {f"IMGIMG{chr(65 + index % 8)}{chr(65 + index // 8)}Z": 20 + index for index in range(64)}
    vq: dict[str, Any] = {"num_embeddings": 64, "embed_dim": 16, "base_channels": 32, "latent_channels": 16}
    vq |= {"resolution": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1}
    shape = {**TEXT, "vocab_size": 200, "num_key_value_heads": 4}
    config = ChameleonConfig(**shape, vocabulary_map={"<image>": 10, **tokens}, vq_config=vq)
    with pytest.raises(
        InputError, match=r"Chameleon\w+ reads pictures .* Of models that do, .* Llava, .* work"
    ) as caught:
        mmdec.generate(ChameleonForConditionalGeneration(config).eval(), IDS, **OPTIONS)
    assert "GPTNeoX" not in str(caught.value)


def test_a_forward_that_was_replaced_names_what_it_lacks() -> None:
    model, wrapped = copy.deepcopy(language_model()), copy.deepcopy(language_model())
    stock: Any = model.forward
    model.forward = lambda input_ids=None, attention_mask=None, **more: stock(input_ids, attention_mask, **more)
    with pytest.raises(InputError, match=rf"`model\.forward` must name .* not name position_ids, {CACHE_ARGUMENT}, "):
        mmdec.generate(model, IDS, **OPTIONS)
    own: Any = wrapped.forward
    wrapped.forward = functools.wraps(own)(lambda *given, **more: own(*given, **more))
    assert torch.equal(mmdec.generate(wrapped, IDS, **OPTIONS).sequences, language_model().generate(IDS, **OPTIONS))


def checkpointing(model: Any) -> Any:
    """Return a copy whose layers are marked as `gradient_checkpointing_enable` marks them."""
    copied = copy.deepcopy(model)
    for part in copied.modules():
        if hasattr(part, "gradient_checkpointing"):
            part.gradient_checkpointing = True
    return copied


@pytest.mark.parametrize("make", [language_model, lambda: vision_model("llava"), whisper])
def test_gradient_checkpointing_keeps_no_cache(make: Any) -> None:
    model = checkpointing(make())
    assert make_target(model)  # only training does without a cache
    with pytest.raises(InputError, match=r"gradient checkpointing.*`model\.eval\(\)`"):
        make_target(model.train())


def test_a_smaller_model_with_gradient_checkpointing_is_no_drafter() -> None:
    small = checkpointing(language_model()).train()
    with pytest.raises(InputError, match="`drafter` must keep a cache"):
        mmdec.generate(language_model(), IDS, small, **OPTIONS)
