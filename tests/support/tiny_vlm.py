"""Tiny vision-language models of several kinds with random weights, and prompts in the form that their processors give,
made from rows of text, images and videos."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

PAD, BOS, EOS = 0, 1, 2
START, END, IMAGE, VIDEO = 60, 61, 62, 63
VOCABULARY = 64
WORDS = range(6, 58)
KINDS = ("llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
AXES = KINDS[2:]  # kinds whose positions have three axes
SHIPPED = Path(__file__).parents[2] / "models" / "vlm-scenes"  # LLaVA's architecture, trained
SPREAD = 0.25
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
CLIP: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
PATCHES: dict[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "hidden_size": 32,
    "in_channels": 3,
}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
PINPOINTS = [[8, 16], [16, 8], [16, 16]]
SIZES = [(16, 16), (8, 16), (24, 16)]  # height and width of images
NAMES = {
    "llava": "Llava",
    "llava_next": "LlavaNext",
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
}


@dataclass(frozen=True)
class Picture:
    """An image, or a video if it has several frames."""

    pixels: Tensor  # (frames, 3, H, W)

    @classmethod
    def random(cls, seed: int, size: tuple[int, int] = (8, 8), frames: int = 1) -> Picture:
        generator = torch.Generator().manual_seed(seed)
        return cls(torch.randn(frames, 3, *size, generator=generator))


Part = Sequence[int] | Picture  # a part of a row: token ids, or an image or video
Row = list[Part]


@cache
def vision_model(kind: str, seed: int = 0) -> Any:
    """Build a model in float32. Its weights are so large that texts depend on all inputs."""
    if kind == "shipped":
        return transformers.LlavaForConditionalGeneration.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    name = NAMES[kind]
    if kind in AXES:
        vision = dict(PATCHES)
        if kind == "qwen2_vl":
            vision |= {"embed_dim": 32, "mlp_ratio": 2}
        else:
            vision |= {"intermediate_size": 48, "out_hidden_size": 32}
        if kind == "qwen2_5_vl":
            vision |= {"window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2}
        if kind == "qwen3_vl":
            vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
        text = {**TEXT, "rope_parameters": dict(MROPE), "head_dim": 8}
        config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **TOKENS)
    else:
        own = {"image_grid_pinpoints": PINPOINTS} if kind == "llava_next" else {}
        text = {**TEXT, "model_type": "llama"}
        config = getattr(transformers, f"{name}Config")(
            text_config=text, vision_config=CLIP, image_token_index=IMAGE, vision_feature_layer=-2, **own
        )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, SPREAD)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model.eval()


def batch_of(kind: str, rows: Sequence[Row], begin: bool = True) -> dict[str, Tensor]:
    """Make the model's inputs for rows, in the form of the kind's processor, padded on the left. begin: add the token
    that begins a text."""
    images, videos = list[Picture](), list[Picture]()
    texts = [[BOS][:begin] + _row(kind, row, images, videos) for row in rows]
    width = max(map(len, texts))
    ids = torch.tensor([[PAD] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    batch = {"input_ids": ids, "attention_mask": mask}
    if kind in AXES:
        batch["mm_token_type_ids"] = (ids == IMAGE) * 1 + (ids == VIDEO) * 2
    if images:
        batch |= _pixels(kind, images)
    if videos:
        patches = [_patches(video) for video in videos]
        batch["pixel_values_videos"] = torch.cat([pixels for pixels, _ in patches])
        batch["video_grid_thw"] = torch.tensor([grid for _, grid in patches])
        if kind == "qwen2_5_vl":
            batch["second_per_grid_ts"] = torch.tensor([1.5] * len(videos))
    return batch


def _row(kind: str, row: Row, images: list[Picture], videos: list[Picture]) -> list[int]:
    """Return a row's token ids, and append its images and videos to the lists."""
    ids: list[int] = []
    for part in row:
        if not isinstance(part, Picture):
            ids += part
        elif len(part.pixels) == 1 or kind not in AXES:  # LLaVA takes a video as images
            for frame in part.pixels:
                images.append(Picture(frame[None]))
                ids += _placeholders(kind, images[-1])
        else:
            videos.append(part)
            ids += _video(kind, part)
    return ids


def image_token(kind: str) -> int:
    """Return the id of the token that is an image's placeholder."""
    return int(vision_model(kind).config.image_token_id) if kind == "shipped" else IMAGE


def _placeholders(kind: str, image: Picture) -> list[int]:
    if kind in AXES:
        _, (_, high, wide) = _patches(image)
        return [START, *[IMAGE] * (high * wide // 4), END]
    pixels = _pixels(kind, [image])
    with torch.no_grad():
        features = vision_model(kind).model.get_image_features(**pixels, return_dict=True)
    return [image_token(kind)] * len(features.pooler_output[0])


def _video(kind: str, video: Picture) -> list[int]:
    _, (times, high, wide) = _patches(video)
    each = [VIDEO] * (high * wide // 4)
    if kind != "qwen3_vl":
        return [START, *each * times, END]
    return [token for time in range(times) for token in (WORDS[time], START, *each, END)]  # the time's token first


def _patches(picture: Picture) -> tuple[Tensor, list[int]]:
    """Cut a picture into patches (patches, 3 * 2 * 4 * 4), in the order of merged squares. Returns them and their
    grid."""
    pixels = picture.pixels
    if len(pixels) % 2:
        pixels = torch.cat([pixels, pixels[-1:]])
    frames, _, height, width = pixels.shape
    times, high, wide = frames // 2, height // 4, width // 4
    parts = pixels.reshape(times, 2, 3, high // 2, 2, 4, wide // 2, 2, 4)
    return parts.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(times * high * wide, -1), [times, high, wide]


def _pixels(kind: str, images: list[Picture]) -> dict[str, Tensor]:
    if kind in AXES:
        patches = [_patches(image) for image in images]
        return {
            "pixel_values": torch.cat([pixels for pixels, _ in patches]),
            "image_grid_thw": torch.tensor([grid for _, grid in patches]),
        }
    if kind in ("llava", "shipped"):
        side = int(vision_model(kind).config.vision_config.image_size)
        return {"pixel_values": torch.cat([_resized(image.pixels, (side, side)) for image in images])}
    tiles = [_tiles(image) for image in images]
    most = max(map(len, tiles))
    stacked = [torch.cat([part, part.new_zeros(most - len(part), *part.shape[1:])]) for part in tiles]
    sizes = torch.tensor([list(image.pixels.shape[2:]) for image in images])
    return {"pixel_values": torch.stack(stacked), "image_sizes": sizes}


def _tiles(image: Picture) -> Tensor:
    """Cut an image as LLaVA-NeXT does. Returns (1 + tiles, 3, 8, 8): the whole image, and the tiles of the grid that
    fits it best."""
    from transformers.image_processing_utils import select_best_resolution

    high, wide = select_best_resolution(tuple(image.pixels.shape[2:]), PINPOINTS)
    large = _resized(image.pixels, (high, wide))
    tiles = large.reshape(3, high // 8, 8, wide // 8, 8).permute(1, 3, 0, 2, 4).reshape(-1, 3, 8, 8)
    return torch.cat([_resized(image.pixels, (8, 8)), tiles])


def _resized(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    return torch.nn.functional.interpolate(pixels, size, mode="bilinear", align_corners=False)


def words(rng: random.Random, most: int = 4) -> list[int]:
    """Draw a phrase and repeat it, so that prompt lookup finds drafts."""
    return [rng.choice(WORDS) for _ in range(rng.randint(2, most))] * 2


def row_of(rng: random.Random, content: str) -> Row:
    """Draw a row. content: "none": text alone; "one" or "three" images of different sizes; "video"."""
    seed = lambda: rng.randrange(2**31)  # noqa: E731
    if content == "none":
        return [words(rng)]
    if content == "one":
        return [words(rng), Picture.random(seed(), rng.choice(SIZES)), words(rng)]
    if content == "three":
        return [part for size in SIZES for part in (Picture.random(seed(), size), words(rng))]
    return [words(rng), Picture.random(seed(), (8, 16), 4), words(rng)]


OPTIONS: dict[str, Any] = {
    "max_new_tokens": 12,
    "pad_token_id": PAD,
    "eos_token_id": [EOS, 7, 31],
    "suppress_tokens": [PAD, IMAGE, VIDEO],  # a later turn would take them for padding or placeholders
}


def second_turn(
    kind: str, rows: list[Row], more: list[Row], sequences: Tensor, mask: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Make the inputs of a chat's next turn: for the whole chat, and for the new part alone (with the whole chat's
    mask). sequences: ids of the first turn with its answer. mask: the first turn's."""
    new = batch_of(kind, more, begin=False)
    whole = batch_of(kind, [[*row, *part] for row, part in zip(rows, more, strict=True)])
    after = torch.cat([mask, (sequences[:, mask.shape[1] :] != PAD).long(), new["attention_mask"]], 1)
    whole |= {"input_ids": torch.cat([sequences, new["input_ids"]], 1), "attention_mask": after}
    if kind in AXES:
        ids = whole["input_ids"]
        whole["mm_token_type_ids"] = (ids == IMAGE) * 1 + (ids == VIDEO) * 2
    return whole, {**new, "attention_mask": after}
