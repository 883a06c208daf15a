"""Tiny vision-language models, a LLaVA and a Qwen2.5-VL, with random weights, tokenizer, processor and chat template.

The LLaVA has the architecture of the shipped model vlm-scenes, and its folder the same format.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
)

from mmdec.drafters.registry import network_class
from mmdec.pretrained.drafters import save_network
from mmdec.pretrained.vlm import without_video_processor
from tests.support.tiny_llava import Shape, build_model, build_processor, build_tokenizer

TEXTS = ["What is this?", " A menu with SOUP for 12.50.", "Where is the red star?", " In the top left.", "It is 09:30."]
SHAPE = Shape(32, 16, 16, 2, 2, 24, 24, 3, 2, 12, 32, 512)
NEW = 24  # tokens of an answer, at most
QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def sharpen(model: PreTrainedModel, seed: int, scale: float) -> None:
    """Draw random weights so large that answers depend on picture and question, and end at different lengths."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, scale / parameter.shape[-1] ** 0.5)


def configure(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    """Set the model's generation settings: greedy, at most `NEW` tokens, with the tokenizer's special tokens."""
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=NEW,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def llava(seed: int = 0) -> tuple[LlavaForConditionalGeneration, Any]:
    """Build a LLaVA and its processor: pictures of 32 x 32 pixels in 4 patches."""
    tokenizer = build_tokenizer(TEXTS * 3, 320)
    vocabulary = tokenizer.get_vocab()
    model = build_model(SHAPE, sorted(vocabulary, key=vocabulary.__getitem__), seed).eval()
    sharpen(model, seed, 1.6)
    configure(model, tokenizer)
    return model, build_processor(tokenizer, SHAPE)


def write(directory: Path, seed: int = 0) -> Path:
    """Write the LLaVA's folder, which `load_vlm` can load."""
    model, processor = llava(seed)
    model.half().save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory


def qwen(seed: int = 0) -> tuple[Qwen2_5_VLForConditionalGeneration, Any]:
    """Build a Qwen2.5-VL and its processor, without video: patches of 4 x 4 pixels, 4 patches for each visual token."""
    tokenizer = build_tokenizer(TEXTS * 3, 340)
    marks = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_tokens(marks, special_tokens=True)
    tokenizer.image_token = marks[4]
    number = tokenizer.convert_tokens_to_ids
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = QWEN_TEMPLATE
    start, end, image, video = (number(mark) for mark in marks[2:])
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        },
        vision_config={
            "depth": 2,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "hidden_size": 32,
            "in_channels": 3,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    sharpen(model, seed, 1.6)
    configure(model, tokenizer)
    pictures = Qwen2VLImageProcessorPil(
        patch_size=4, temporal_patch_size=2, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
    )
    processor: Any = without_video_processor(Qwen2_5_VLProcessor)(pictures, tokenizer, chat_template=QWEN_TEMPLATE)
    return model, processor


def drafter_weights(system: str, model: Any, folder: Path, seed: int = 0) -> Path:
    """Write a draft network with random weights for the model."""
    torch.manual_seed(seed)
    kind: Any = network_class(system)
    network = kind(kind.config_class.like(model.config.get_text_config()))
    for weight in network.parameters():
        torch.nn.init.normal_(weight, 0.0, 0.3)
    return save_network(network, folder)


def settings(folder: Path, name: str, **changes: Any) -> None:
    """Change fields of a JSON file in a folder; None removes a field."""
    result = json.loads((folder / name).read_text(encoding="utf-8")) | changes
    fields = {field: value for field, value in result.items() if value is not None}
    (folder / name).write_text(json.dumps(fields), encoding="utf-8")
