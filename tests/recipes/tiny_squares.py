"""A corpus of a few small pictures with questions, and a LLaVA with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import GenerationConfig

from tests.support.tiny_llava import Shape, build_model, build_processor, build_tokenizer

COLOURS = ("red", "green", "blue", "grey")
ASKED = ("Describe it.", "What colour is it?")


def write_squares(root: Path) -> Path:
    """Write squares of noise with two questions about each, of which one has a long answer."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 12), ("dev", 4)):
        rows = []
        for number in range(count):
            path = root / "images" / split / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 255, (32, 32, 3), np.uint8)).save(path)
            colour = COLOURS[number % 4]
            texts = [f"<image>\n{ASKED[0]}", f"A {colour} square. " * 8, ASKED[1], f"{colour}."]
            turns = [{"from": ("human", "gpt")[at % 2], "value": value} for at, value in enumerate(texts)]
            rows.append({"id": number, "image": f"{split}/{number}.png", "conversations": turns})
        (root / f"{split}.json").write_text(json.dumps(rows), encoding="utf-8")
    return root


def write_target(folder: Path, seed: int = 0) -> Path:
    """Write the LLaVA. Its weights are so large that its answers depend on picture and question."""
    tokenizer = build_tokenizer([*ASKED, *["A red green blue grey square."] * 4], 300)
    vocabulary = tokenizer.get_vocab()
    units = sorted(vocabulary, key=vocabulary.__getitem__)
    shape = Shape(
        image=32, patch=16, vision_width=16, vision_layers=1, vision_heads=2, vision_ffn=16,
        width=16, layers=2, heads=2, head_dim=8, ffn=16, positions=512,
    )  # fmt: skip
    model = build_model(shape, units, seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 0.3)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    build_processor(tokenizer, shape).save_pretrained(folder)
    return folder
