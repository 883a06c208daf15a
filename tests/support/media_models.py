"""A small random model of each family with image or audio input, and images and sound of several sizes for it.

Only the sizes differ from the family's default configuration. The number of an image's placeholders is that of the
model's image features.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.utils import logging

from mmdec.targets.families import AUDIO_FAMILIES
from tests.support.tiny_vlm_folder import sharpen

VOCABULARY = 64
IMAGE, VIDEO, AUDIO = 60, 61, 62  # placeholders
SMALL: dict[str, Any] = {  # value for every field of a configuration, or of a part of it, that has one of these names
    "hidden_size": 32,
    "d_model": 32,
    "embed_dim": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "mlp_dim": 48,
    "num_hidden_layers": 2,
    "encoder_layers": 2,
    "depth": 2,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "query_pre_attn_scalar": 8,
    "mm_tokens_per_image": 1,
    "sliding_window": 8,
    "projection_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "image_token_id": IMAGE,
    "image_token_index": IMAGE,
    "video_token_id": VIDEO,
    "video_token_index": VIDEO,
    "audio_token_id": AUDIO,
    "audio_token_index": AUDIO,
    "num_mel_bins": 16,
    "max_source_positions": 48,
    "initializer_range": 0.2,
}
PARTS = ("text_config", "vision_config", "audio_config", "encoder_config", "projector_config", "qformer_config")
FOR = "ForConditionalGeneration"


def shrunk(config: Any, own: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's fields with small sizes. own: other fields to set, by path ("vision_config.depth")."""
    given = {name: value for name, value in config.to_dict().items() if name not in ("transformers_version", "dtype")}
    for name in list(given):
        part = vars(config).get(name)
        if hasattr(part, "to_dict"):
            below = {path.partition(".")[2]: value for path, value in own.items() if path.startswith(f"{name}.")}
            given[name] = shrunk(part, below)
        elif name in SMALL and given[name] is not None:
            heads = name == "patch_size" and isinstance(given[name], (list, tuple))
            given[name] = [SMALL[name]] * 2 if heads else SMALL[name]
        elif name == "layer_types" and given[name]:
            given[name] = list(dict.fromkeys(given[name]))[:2]
            given[name] = (given[name] * 2)[:2]
    return given | {name: value for name, value in own.items() if "." not in name}


def family_model(family: str, own: dict[str, Any], seed: int) -> Any:
    """Build a small random model of a family, whose answers depend on its inputs. own: as for `shrunk`."""
    kind: Any = getattr(transformers, family + FOR)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(kind.config_class(**shrunk(kind.config_class(), own))).eval()
        sharpen(model, seed, 1.6)
    return model


@lru_cache(60)
def media_model(name: str, attention: str | None = None, seed: int = 0) -> Any:
    """Build a model with two layers in each part, float32, random weights. name: the class. attention: None: "sdpa" if
    the class supports it."""
    kind: Any = getattr(transformers, name)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = kind.config_class(**shrunk(kind.config_class(), OWN.get(name, {})))
            config.architectures = None
            model = kind(config).eval()
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.ndim > 1:
                        weight.normal_(0.0, 0.3)
            model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 2
    finally:
        logging.set_verbosity(verbosity)
    model.set_attn_implementation(attention or ("sdpa" if kind._supports_sdpa else "eager"))
    return model


GLM: dict[str, Any] = {
    "vision_config.out_hidden_size": 32,
    "text_config.rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 2],
        "partial_rotary_factor": 1.0,
    },
}
# further settings that a family needs at these sizes, as for `shrunk`
OWN: dict[str, dict[str, Any]] = {
    f"Cohere2Vision{FOR}": {"alignment_intermediate_size": 64},
    f"LlavaOnevision{FOR}": {"image_grid_pinpoints": [[28, 28], [28, 56], [56, 28]]},
    f"VipLlava{FOR}": {"vision_feature_layers": [-2, -1]},
    f"Mistral3{FOR}": {"vision_config.image_size": 56},
    f"Gemma4{FOR}": {
        "vision_config": {
            **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "patch_size"), 4),
            **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
            **{"pooling_kernel_size": 2, "position_embedding_size": 160},
        },
        "audio_config": None,
        "text_config.layer_types": ["sliding_attention", "full_attention"],
        "text_config.per_layer_config": {1: {"head_dim": 16}},
        "text_config.vocab_size_per_layer_input": VOCABULARY,
        "text_config.hidden_size_per_layer_input": 8,
        "text_config.use_bidirectional_attention": "vision",
    },
    f"Kimi_K25{FOR}": {
        "projection_hidden_size": 32,
        **{
            f"vision_config.{name}": size
            for name, size in (("patch_size", 4), ("pos_emb_height", 8), ("pos_emb_width", 8))
        },
        **{f"text_config.{name}": 8 for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")},
        **{f"text_config.{name}": 1 for name in ("n_group", "topk_group", "first_k_dense_replace")},
        "text_config.moe_intermediate_size": 16,
        "text_config.num_key_value_heads": 4,
        "text_config.n_routed_experts": 4,
        "text_config.num_experts_per_tok": 2,
        "text_config.q_lora_rank": 16,
        "text_config.qk_head_dim": 16,
    },
    f"Voxtral{FOR}": {"audio_token_id": AUDIO, "audio_config.intermediate_size": 128},
    f"Llama4{FOR}": {
        "text_config.intermediate_size_mlp": 48,
        "text_config.attention_chunk_size": 8,
        "text_config.num_local_experts": 2,
        "vision_config.intermediate_size": 128,
        "vision_config.projector_input_dim": 32,
        "vision_config.projector_output_dim": 32,
        "vision_config.vision_output_dim": 32,
    },
    f"Qwen2_5OmniThinker{FOR}": {
        "vision_start_token_id": 58,
        "audio_start_token_id": 59,
        "text_config.rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        "vision_config.out_hidden_size": 32,
        "audio_config.output_dim": 32,
        "audio_config.n_window": 8,
    },
    f"Qwen3VLMoe{FOR}": {"vision_config.out_hidden_size": 32, "vision_config.deepstack_visual_indexes": [0, 1]},
    f"Glm4v{FOR}": GLM,
    f"GlmOcr{FOR}": GLM,
    f"Glm4vMoe{FOR}": {**GLM, "text_config.n_routed_experts": 4, "text_config.num_experts_per_tok": 2},
    f"GlmAsr{FOR}": {"audio_config.intermediate_size": 128},
    f"GraniteSpeech{FOR}": {
        "has_lora_adapter": False,
        "downsample_rate": 2,
        "window_size": 4,
        "encoder_config.input_dim": 16,
        "encoder_config.num_layers": 2,
        "encoder_config.hidden_dim": 32,
        "encoder_config.dim_head": 8,
        "encoder_config.context_size": 16,
        "encoder_config.max_pos_emb": 16,
        "projector_config.encoder_hidden_size": 32,
    },
    f"Qwen3ASR{FOR}": {
        "timestamp_token_id": 63,
        "audio_config.max_position_embeddings": 13,
        "audio_config.output_dim": 32,
        "audio_config.downsample_hidden_size": 8,
    },
}
FRAMES = 96  # feature frames of a sound
# families whose images are patches of a grid of any size
GRIDS = ("Qwen2_5Omni", "Qwen3VLMoe", "Glm4v", "GlmOcr", "Ernie4_5_VL", "PaddleOCRVL")


def image_inputs(model: Any, count: int, generator: torch.Generator) -> tuple[dict[str, Tensor], list[int]]:
    """Draw `count` images in the shape that the family's processor gives. Returns the model's inputs, and the number of
    placeholders of each image."""
    name = type(model).__name__
    side = 56 if name.startswith("Mistral3") else 28
    pixels = torch.randn(count, 3, side, side, generator=generator)
    inputs: dict[str, Tensor] = {"pixel_values": pixels}
    if name.startswith(("Idefics", "SmolVLM")):
        inputs = {"pixel_values": pixels[:, None]}
    if name.startswith(("Mistral3", "LightOnOcr")):
        inputs["image_sizes"] = torch.tensor([[side, side]] * count)
    if name.startswith("LlavaOnevision"):
        sizes = ([[28, 28], [30, 56], [56, 20]] * count)[:count]
        patches = ([1 + 1, 2 + 1, 2 + 1] * count)[:count]
        shaped = torch.zeros(count, max(patches), 3, 28, 28)
        for image, number in enumerate(patches):
            shaped[image, :number] = torch.randn(number, 3, 28, 28, generator=generator)
        inputs = {"pixel_values": shaped, "image_sizes": torch.tensor(sizes)}
    if name.startswith(GRIDS):
        grids = torch.tensor(([[1, 4, 4], [1, 2, 4], [1, 4, 2]] * count)[:count])
        vision = model.config.vision_config
        size = 3 * vision.patch_size**2 * getattr(vision, "temporal_patch_size", 1)
        patches = torch.randn(int(grids.prod(1).sum()), size, generator=generator)
        inputs = {"pixel_values": patches, "image_grid_thw": grids}
    if name.startswith("Kimi"):
        grids = torch.tensor(([[1, 4, 4], [1, 2, 4], [1, 4, 2]] * count)[:count])
        patches = torch.randn(int(grids.prod(1).sum()), 3, 4, 4, generator=generator)
        inputs = {"pixel_values": patches, "image_grid_thw": grids}
    if name.startswith("Gemma4"):
        places = torch.full((count, 16, 2), -1)
        for image, (high, wide) in enumerate(([[4, 4], [2, 4], [4, 2]] * count)[:count]):
            places[image, : high * wide] = torch.cartesian_prod(torch.arange(high), torch.arange(wide)).flip(1)
        inputs = {"pixel_values": torch.rand(count, 16, 48, generator=generator), "image_position_ids": places}
    if name.startswith("VideoLlava"):
        inputs = {"pixel_values_images": pixels}
    call = getattr(model, "get_image_features", None) or model.model.get_image_features
    with torch.no_grad():
        output = call(**inputs, return_dict=True)
        parts = output.last_hidden_state if output.pooler_output is None else output.pooler_output
    if isinstance(parts, Tensor):
        total = parts.numel() // parts.shape[-1]
        return inputs, [total // count] * count
    return inputs, [len(part.reshape(-1, part.shape[-1])) for part in parts]


def sound_inputs(model: Any, lengths: list[int], generator: torch.Generator) -> tuple[dict[str, Tensor], list[int]]:
    """Draw sounds of these lengths, in frames, in the shape that the family's processor gives. Returns the model's
    inputs, and the number of placeholders of each sound."""
    name = type(model).__name__
    size = 100 if name.startswith("Qwen3ASR") else FRAMES  # a multiple of its window
    mask = (torch.arange(size)[None] < torch.tensor(lengths)[:, None]).long()
    mels = torch.randn(len(lengths), 16, size, generator=generator) * mask[:, None]
    if name.startswith(("Qwen2Audio", "MusicFlamingo")):
        counts = ((mask.sum(1) - 1) // 2 + 1 - 2) // 2 + 1
        mask_name = "feature_attention_mask" if name.startswith("Qwen2Audio") else "input_features_mask"
        return {"input_features": mels, mask_name: mask}, counts.tolist()
    masked = {} if name.startswith("Voxtral") else {"input_features_mask": mask}
    inputs = {"input_features": mels, **masked}
    if name.startswith("GraniteSpeech"):
        inputs = {"input_features": mels.transpose(1, 2).contiguous()}
    call = getattr(model, "get_audio_features", None) or model.model.get_audio_features
    counts = []
    with torch.no_grad():
        for row in range(len(lengths)):
            part = call(**{key: value[row : row + 1] for key, value in inputs.items()}, return_dict=True).pooler_output
            part = part if isinstance(part, Tensor) else torch.cat(list(part))
            counts.append(part.numel() // part.shape[-1])
    if name.startswith("GraniteSpeech"):
        counted = [min(count, max(1, length * count // FRAMES)) for count, length in zip(counts, lengths, strict=True)]
        seen = torch.arange(max(counts))[None] < torch.tensor(counted)[:, None]
        return {**inputs, "input_features_mask": seen}, counted
    return inputs, counts


def omni_inputs(model: Any, rows: list[int], seed: int) -> dict[str, Tensor]:
    """Make a batch as `media_inputs` does, with images and sounds in turn, each between its marks."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(rows)
    images, sounds = (total + 1) // 2, total // 2
    inputs: dict[str, Tensor] = {}
    counts: list[list[int]] = [[], []]
    if images:
        inputs, counts[0] = image_inputs(model, images, generator)
    if sounds:
        lengths = torch.tensor([60 + 8 * (index % 4) for index in range(sounds)])
        mask = (torch.arange(FRAMES)[None] < lengths[:, None]).long()
        inputs["input_features"] = torch.randn(sounds, 16, FRAMES, generator=generator) * mask[:, None]
        inputs["feature_attention_mask"] = mask
        counts[1] = (((lengths - 1) // 2 + 1 - 2) // 2 + 1).tolist()
    texts, given = list[list[int]](), 0
    for held in rows:
        text = [1]
        for _ in range(held):
            kind = given % 2
            text += [5, (58, 59)[kind], *[(IMAGE, AUDIO)[kind]] * counts[kind].pop(0), (57, 56)[kind]]
            given += 1
        part = torch.randint(3, 50, (3,), generator=generator).tolist()
        texts.append(text + part + part)
    return {**padded(texts), **inputs}


def padded(texts: list[list[int]]) -> dict[str, Tensor]:
    """Return ids and mask (B, P) of texts, padded on the left."""
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    return {"input_ids": ids, "attention_mask": mask}


def media_inputs(model: Any, rows: list[int], seed: int = 0) -> dict[str, Tensor]:
    """Make a batch of prompts, padded on the left. rows: number of images or sounds in each row."""
    if type(model).__name__.startswith("Qwen2_5Omni"):
        return omni_inputs(model, rows, seed)
    generator = torch.Generator().manual_seed(seed)
    hears = type(model).__name__.removesuffix(FOR) in AUDIO_FAMILIES.split()
    token, total = (AUDIO if hears else IMAGE), sum(rows)
    inputs: dict[str, Tensor] = {}
    counts: list[int] = []
    if total and hears:
        whole = type(model).__name__.startswith("Voxtral")  # its windows have a fixed length
        lengths = [FRAMES if whole or not index else 60 + 8 * (index % 4) for index in range(total)]
        inputs, counts = sound_inputs(model, lengths, generator)
    elif total:
        inputs, counts = image_inputs(model, total, generator)
    texts: list[list[int]] = []
    for held in rows:
        text = [1]
        for _ in range(held):
            text += [*torch.randint(3, 50, (2,), generator=generator).tolist(), *[token] * counts.pop(0)]
        part = torch.randint(3, 50, (3,), generator=generator).tolist()
        texts.append(text + part + part)
    text = padded(texts)
    ids = text["input_ids"]
    types = (
        {"token_type_ids": (ids == token).long()} if type(model).__name__.startswith(("Gemma3", "PaliGemma")) else {}
    )
    if type(model).__name__.startswith((*GRIDS, "Gemma4")):
        types = {"mm_token_type_ids": (ids == token).long()}
    return {**text, **types, **inputs}
