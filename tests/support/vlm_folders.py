"""Folders of vision-language models: a small random model of a family, with the processor of this family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedTokenizerFast

from mmdec.pretrained.vlm import without_video_processor
from tests.support.media_models import FOR, OWN, family_model
from tests.support.tiny_llava import build_tokenizer
from tests.support.tiny_vlm_folder import TEXTS, configure, settings

SIDE = {"height": 28, "width": 28}
QWEN = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
GLM = {
    "image_token": "<|image|>",
    "video_token": "<|video|>",
    "image_start_token": "<|begin_of_image|>",
    "image_end_token": "<|end_of_image|>",
    "video_start_token": "<|begin_of_video|>",
    "video_end_token": "<|end_of_video|>",
}
PIXTRAL = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
IDEFICS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
MARKS = {  # family -> special tokens of its tokenizer, by the attribute names that its processor uses
    "AyaVision": {
        "image_token": "<image>",
        "start_of_img_token": "<|START_OF_IMG|>",
        "end_of_img_token": "<|END_OF_IMG|>",
        "img_patch_token": "<|IMG_PATCH|>",
        "img_line_break_token": "<|IMG_LINE_BREAK|>",
        "tile_token": "TILE",
        "tile_global_token": "TILE_GLOBAL",
    },
    "Cohere2Vision": {
        "image_token": "<|IMG_PATCH|>",
        "boi_token": "<|START_OF_IMG|>",
        "eoi_token": "<|END_OF_IMG|>",
        "img_line_break_token": "<|IMG_LINE_BREAK|>",
    },
    "DeepseekVL": {"image_token": "<image_placeholder>"},
    "Gemma3": {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
    "Gemma4": {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "video_token": "<|video|>",
    },
    "Glm4v": GLM,
    "Glm4vMoe": GLM,
    "GlmOcr": GLM,
    "GotOcr2": {"image_token": "<imgpad>", "start_token": "<img>", "end_token": "</img>"},
    "Idefics2": {
        "image_token": "<image>",
        "image_boundary_token": "<fake_token_around_image>",
        "end_of_utterance_token": "<end_of_utterance>",
    },
    "Idefics3": IDEFICS,
    "InternVL": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    "Janus": {"image_token": "<image_placeholder>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"},
    "Kimi_K25": {"image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>"},
    "LightOnOcr": {
        "image_token": "<|image_pad|>",
        "image_break_token": "<|vision_pad|>",
        "image_end_token": "<|vision_end|>",
    },
    "Llama4": {
        "image_token": "<|image|>",
        "start_of_image_token": "<|image_start|>",
        "end_of_image_token": "<|image_end|>",
        "patch_token": "<|patch|>",
        "tile_x_separator_token": "<|tile_x_separator|>",
        "tile_y_separator_token": "<|tile_y_separator|>",
    },
    "LlavaOnevision": {"image_token": "<image>", "video_token": "<video>"},
    "Mistral3": PIXTRAL,
    "Ovis2": {
        "image_token": "<image>",
        "start_token": "<IMG_START>",
        "placeholder_token": "<IMG_ATOM>",
        "grid_token": "<IMG_GRID>",
        "column_token": "<IMG_COL>",
        "row_token": "<IMG_ROW>",
        "end_token": "<IMG_END>",
    },
    "PaliGemma": {"image_token": "<image>"},
    "Qwen3VLMoe": QWEN,
    "SmolVLM": {**IDEFICS, "video_token": "<video>"},
    "VideoLlava": {"image_token": "<image>", "video_token": "<video>"},
    "VipLlava": {"image_token": "<image>"},
}
PLACEHOLDER = {  # the mark that is an image's placeholder in token ids; default: "image_token"
    "AyaVision": "img_patch_token",
    "InternVL": "context_image_token",
    "Llama4": "patch_token",
    "Ovis2": "placeholder_token",
}
IN_TEXT = {  # what a chat template writes for an image; default: "image_token"
    "Gemma3": "<start_of_image>",
    "Glm4v": "<|begin_of_image|><|image|><|end_of_image|>",
    "Glm4vMoe": "<|begin_of_image|><|image|><|end_of_image|>",
    "GlmOcr": "<|begin_of_image|><|image|><|end_of_image|>",
    "InternVL": "<IMG_CONTEXT>",
    "Qwen3VLMoe": "<|vision_start|><|image_pad|><|vision_end|>",
}
COUNTS: dict[str, dict[str, Any]] = {  # settings of a processor from which it counts an image's placeholders
    "AyaVision": {"patch_size": 14, "downsample_factor": 2, "img_size": 28},
    "DeepseekVL": {"num_image_tokens": 4},
    "Gemma3": {"image_seq_length": 1},
    "Idefics2": {"image_seq_len": 64},
    "Idefics3": {"image_seq_len": 1},
    "InternVL": {"image_seq_length": 1},
    "Janus": {"num_image_tokens": 4},
    "LightOnOcr": {"patch_size": 14, "spatial_merge_size": 2},
    "Llama4": {"patch_size": 14, "pixel_shuffle_ratio": 0.5},
    "LlavaOnevision": {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    "Mistral3": {"patch_size": 14, "spatial_merge_size": 2},
    "Ovis2": {"image_seq_length": 4},
    "SmolVLM": {"image_seq_len": 1},
    "VideoLlava": {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
    "VipLlava": {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
}
NEEDS = {  # packages that a family's processor needs
    "Cohere2Vision": ("torchvision",),
    "Gemma4": ("torchvision",),
    "Kimi_K25": ("torchvision",),
    "Llama4": ("torchvision",),
    "Mistral3": ("torchvision",),
    "SmolVLM": ("torchvision", "num2words"),
    "VideoLlava": ("torchvision",),
}
NAMES = {"Glm4vMoe": "Glm4v", "GlmOcr": "Glm46V", "Mistral3": "Pixtral", "Qwen3VLMoe": "Qwen3VL", "VipLlava": "Llava"}
FAMILIES = tuple(family for family in MARKS if family != "GotOcr2")  # its processor writes the prompt itself


def template(mark: str) -> str:
    return (
        "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}" + mark + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
        "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %} assistant: {% endif %}"
    )


def seeing(family: str, seed: int = 0) -> tuple[Any, Any]:
    """Build a model and its processor."""
    marks = MARKS[family]
    mark = IN_TEXT.get(family) or marks["image_token"]
    base: Any = build_tokenizer(TEXTS * 3, 340)
    base.add_tokens([*marks.values()], special_tokens=True)
    named = {"bos_token": base.bos_token, "eos_token": base.eos_token, "pad_token": base.pad_token}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=base._tokenizer, extra_special_tokens=marks, padding_side="left", **named
    )
    made = processor(family, tokenizer, template(mark))  # some add tokens
    number: Any = tokenizer.convert_tokens_to_ids
    placeholder = number(marks[PLACEHOLDER.get(family, "image_token")])
    own: dict[str, Any] = {
        **OWN.get(family + FOR, {}),
        "image_token_id": placeholder,
        "image_token_index": placeholder,
        "text_config.vocab_size": len(tokenizer),
        "text_config.pad_token_id": tokenizer.pad_token_id,
    }
    if family == "Idefics3":
        own |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    if family == "Gemma4":
        own["text_config.vocab_size_per_layer_input"] = len(tokenizer)
    if family in ("Gemma3", "Gemma4"):  # with tied weights it would repeat its input
        own |= {"tie_word_embeddings": False, "text_config.tie_word_embeddings": False}
    for name in ("video_token_id", "video_token_index"):
        if "video_token" in marks:
            own[name] = number(marks["video_token"])
    model = family_model(family, own, seed)
    configure(model, tokenizer)
    return model, made


def processor(family: str, tokenizer: Any, chat_template: str) -> Any:
    """Build the family's processor, without video where it allows that."""
    kind: Any = getattr(transformers, NAMES.get(family, family) + "Processor")
    if family == "Gemma4":
        sound, video = transformers.Gemma4AudioFeatureExtractor(), transformers.Gemma4VideoProcessor()
        return kind(sound, pictures(family), tokenizer, video, chat_template=chat_template)
    if family in ("SmolVLM", "VideoLlava"):  # their video processor is needed for pictures, too
        parts: Any = {"video_processor": getattr(transformers, f"{family}VideoProcessor")()}
        parts |= {"image_processor": pictures(family), "tokenizer": tokenizer}
        return kind(**parts, chat_template=chat_template, **COUNTS[family])
    whole = kind if "video_processor" not in kind.get_attributes() else without_video_processor(kind)
    return whole(pictures(family), tokenizer, chat_template=chat_template, **COUNTS.get(family, {}))


def pictures(family: str) -> Any:
    """Build the family's image processor, which resizes pictures to small ones."""
    known: Any = transformers
    square = known.GotOcr2ImageProcessorPil
    edges = {"size": {"longest_edge": 28}, "do_image_splitting": False}
    grids = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    area = {"size": {"shortest_edge": 28 * 28, "longest_edge": 64 * 64}, **grids}
    if family in ("AyaVision", "GotOcr2", "InternVL"):
        return square(size=SIDE, crop_to_patches=False, max_patches=3)
    if family == "Cohere2Vision":
        return known.Cohere2VisionImageProcessor(size=SIDE, patch_size=1, crop_to_patches=False, max_patches=3)
    if family in ("DeepseekVL", "Janus"):
        return getattr(known, f"{family}ImageProcessorPil")(size=SIDE, min_size=14)
    if family == "Gemma3":
        return known.Gemma3ImageProcessorPil(size=SIDE)
    if family == "Gemma4":
        return known.Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    if family in ("Glm4v", "Glm4vMoe"):
        return known.Glm4vImageProcessorPil(**area)
    if family == "GlmOcr":
        return known.Glm46VImageProcessorPil(**area)
    if family == "Idefics2":
        return known.Idefics2ImageProcessorPil(size={"shortest_edge": 28, "longest_edge": 28}, do_image_splitting=False)
    if family in ("Idefics3", "SmolVLM"):
        return getattr(known, f"{family}ImageProcessorPil")(max_image_size={"longest_edge": 28}, **edges)
    if family == "Kimi_K25":
        return known.Kimi_K25ImageProcessor(patch_size=4, size={"max_height": 32, "max_width": 32})
    if family in ("LightOnOcr", "Mistral3"):
        return known.PixtralImageProcessorPil(size={"longest_edge": 56}, patch_size={"height": 14, "width": 14})
    if family == "Llama4":
        return known.Llama4ImageProcessor(size=SIDE, max_patches=3)
    if family == "Ovis2":
        return known.Ovis2ImageProcessorPil(size=SIDE, crop_to_patches=False)
    if family == "PaliGemma":
        return known.SiglipImageProcessorPil(size=SIDE, image_seq_length=4)
    if family == "Qwen3VLMoe":
        return known.Qwen2VLImageProcessorPil(**area)
    if family == "VideoLlava":
        return known.VideoLlavaImageProcessor(size={"shortest_edge": 28}, crop_size=SIDE)
    if family == "VipLlava":
        return known.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=SIDE)
    return known.LlavaOnevisionImageProcessorPil(
        size=SIDE, image_grid_pinpoints=OWN[family + FOR]["image_grid_pinpoints"]
    )


def write(family: str, folder: Path, seed: int = 0) -> Path:
    model, made = seeing(family, seed)
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    settings(folder, "processor_config.json", **COUNTS.get(family, {}))
    return folder
