"""A corpus of a few small pictures with questions, and a LLaVA with random weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import GenerationConfig

from mmdec.hub.vlm import load_vlm
from mmdec.nn.fingerprint import fingerprint
from mmdec.training.vlm.export import build_processor
from mmdec.training.vlm.network import Shape, build_model
from mmdec.training.vlm.tokens import build_tokenizer
from tests.support.tiny_vlm_folder import drafter_weights, settings

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
            said = [f"<image>\n{ASKED[0]}", f"A {colour} square. " * 8, ASKED[1], f"{colour}."]
            turns = [{"from": ("human", "gpt")[at % 2], "value": value} for at, value in enumerate(said)]
            rows.append({"id": number, "image": f"{split}/{number}.png", "conversations": turns})
        (root / f"{split}.json").write_text(json.dumps(rows), encoding="utf-8")
    return root


def write_target(folder: Path, seed: int = 0) -> Path:
    """Write the LLaVA. Its weights are so large that its answers depend on picture and question."""
    tokenizer = build_tokenizer([*ASKED, *["A red green blue grey square."] * 4], 300)
    vocabulary = tokenizer.get_vocab()
    units = sorted(vocabulary, key=vocabulary.__getitem__)
    shape = Shape(
        image=32, vision_width=16, vision_layers=1, vision_heads=2, vision_ffn=16,
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


def write_scenes(root: Path) -> Path:
    """Write the squares with scored questions, in dev and test."""
    write_squares(root)
    rows = json.loads((root / "dev.json").read_text(encoding="utf-8"))
    for row in rows:
        colour = COLOURS[row["id"] % 4]
        row["turns"] = [
            {"task": "describe", "expected": "", "claims": [[colour, "square"]]},
            {"task": "colour", "expected": colour, "claims": []},
        ]
    for split in ("dev", "test"):
        (root / f"{split}.json").write_text(json.dumps(rows), encoding="utf-8")
    shutil.copytree(root / "images" / "dev", root / "images" / "test")
    return root


def add_drafter(model: Path, system: str, seed: int = 0, base: str | None = None) -> Path:
    """Write a drafter with random weights into a model's folder. base: the fingerprint of the weights that it is for;
    None: those of the model."""
    vlm = load_vlm(model, "cpu")
    folder = drafter_weights(system, vlm.model, model / system, seed)
    settings(folder, "config.json", target="tiny", base=fingerprint(vlm.model) if base is None else base)
    return folder


def files(folder: Path) -> Mapping[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
