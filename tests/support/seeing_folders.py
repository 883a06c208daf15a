"""Folders of models that see: a small random model of a family with the family's own processor, built here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerFast

from mmdec.hub.vlm import for_pictures
from mmdec.training.vlm.tokens import build_tokenizer
from tests.support.media_models import FOR, OWN, shrunk
from tests.support.tiny_vlm_folder import TEXTS, configure, settings, sharpen

SIDE = {"height": 28, "width": 28}
MARKS = {  # the tokens of a family's tokenizer, by the names that its processor reads
    "LlavaOnevision": {"image_token": "<image>", "video_token": "<video>"},
    "Gemma3": {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
    "Idefics3": {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    },
    "InternVL": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
}
IN_TEXT = {"Gemma3": "<start_of_image>", "InternVL": "<IMG_CONTEXT>"}  # what a template writes; others "<image>"
COUNTS: dict[str, dict[str, Any]] = {  # the placeholders of an image
    "LlavaOnevision": {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    "Gemma3": {"image_seq_length": 1},
    "Idefics3": {"image_seq_len": 1},
    "InternVL": {"image_seq_length": 1},
}
FAMILIES = tuple(MARKS)


def template(mark: str) -> str:
    return (
        "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}" + mark + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
        "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %} assistant: {% endif %}"
    )


def seeing(family: str, seed: int = 0) -> tuple[Any, Any]:
    """A model and its processor."""
    marks, mark = MARKS[family], IN_TEXT.get(family, "<image>")
    base: Any = build_tokenizer(TEXTS * 3, 340)
    base.add_tokens([*marks.values()], special_tokens=True)
    named = {"bos_token": base.bos_token, "eos_token": base.eos_token, "pad_token": base.pad_token}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=base._tokenizer, extra_special_tokens=marks, padding_side="left", **named
    )
    number: Any = tokenizer.convert_tokens_to_ids
    placeholder = number(marks.get("context_image_token") or marks["image_token"])
    own: dict[str, Any] = {
        **OWN.get(family + FOR, {}),
        "image_token_id": placeholder,
        "image_token_index": placeholder,
        "text_config.vocab_size": len(tokenizer),
        "text_config.pad_token_id": tokenizer.pad_token_id,
    }
    if family == "Idefics3":
        own |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    if family == "Gemma3":  # tied, it would repeat what it reads
        own |= {"tie_word_embeddings": False, "text_config.tie_word_embeddings": False}
    for name in ("video_token_id", "video_token_index"):
        if "video_token" in marks:
            own[name] = number(marks["video_token"])
    kind: Any = getattr(transformers, family + FOR)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(kind.config_class(**shrunk(kind.config_class(), own))).eval()
        sharpen(model, seed, 1.6)
    configure(model, tokenizer)
    return model, processor(family, tokenizer, template(mark))


def processor(family: str, tokenizer: Any, chat_template: str) -> Any:
    """The family's own, without its part for video."""
    kind: Any = getattr(transformers, family + "Processor")
    if family == "Gemma3":
        return kind(
            transformers.Gemma3ImageProcessorPil(size=SIDE), tokenizer, chat_template=chat_template, **COUNTS[family]
        )
    if family == "Idefics3":
        pictures: Any = transformers.Idefics3ImageProcessorPil(
            size={"longest_edge": 28}, max_image_size={"longest_edge": 28}, do_image_splitting=False
        )
        return kind(pictures, tokenizer, chat_template=chat_template, **COUNTS[family])
    if family == "InternVL":
        pictures = transformers.GotOcr2ImageProcessorPil(size=SIDE, crop_to_patches=False)
        return for_pictures(kind)(pictures, tokenizer, chat_template=chat_template, **COUNTS[family])
    pictures = transformers.LlavaOnevisionImageProcessorPil(
        size=SIDE, image_grid_pinpoints=OWN[family + FOR]["image_grid_pinpoints"]
    )
    return for_pictures(kind)(pictures, tokenizer, chat_template=chat_template, **COUNTS[family])


def write(family: str, folder: Path, seed: int = 0) -> Path:
    model, made = seeing(family, seed)
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    settings(folder, "processor_config.json", **COUNTS[family])
    return folder
