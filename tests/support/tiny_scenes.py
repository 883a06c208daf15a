"""A corpus of squares in one colour with questions, ten in each split, to train the small vision-language model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from mmdec.training.vlm.tokens import PRINTED

SHAPE = {"image": 32, "vision_width": 16, "vision_layers": 1, "vision_heads": 2, "vision_ffn": 16}
SHAPE |= {"width": 16, "layers": 2, "heads": 2, "head_dim": 8, "ffn": 16, "positions": 512}


def write_scenes(root: Path) -> Path:
    """Write {train,dev}.json, {train,dev}.cells.npy and images/ into `root`."""
    draw = np.random.default_rng(0)
    for split in ("train", "dev"):
        rows = []
        for number in range(10):
            colour = ("red", "blue")[number % 2]
            pixels = np.zeros((32, 32, 3), np.uint8)
            pixels[..., 0 if colour == "red" else 2] = draw.integers(150, 255)
            path = root / "images" / split / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
            described = f"A {colour} square that says {number}."
            said = ["<image>\nDescribe it.", described, "What colour is it?", f"{colour.capitalize()}."]
            turns = [
                {"task": "describe", "expected": "", "claims": [[colour, "square"]]},
                {"task": "colour", "expected": colour, "claims": []},
            ]
            rows.append(
                {
                    "id": number,
                    "image": f"{split}/{number}.png",
                    "conversations": [
                        {"from": ("human", "gpt")[at % 2], "value": value} for at, value in enumerate(said)
                    ],
                    "turns": turns,
                    "prints": [[str(number), [number % 4]]],
                }
            )
        (root / f"{split}.json").write_text(json.dumps(rows), encoding="utf-8")
        cells = np.ones((10, 4, 8, 2), np.uint8)
        for number in range(10):  # the digit stands in one cell of its patch
            cells[number, number % 4, :, 0] = 0
            cells[number, number % 4, number % 8, 0] = PRINTED.index(str(number)) + 1
        np.save(root / f"{split}.cells.npy", cells)
    return root
