"""Pictures, a question, and the answer of transformers' `generate`."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

QUESTION = "What is this?"


def pixels(seed: int, height: int = 24, width: int = 40) -> np.ndarray:
    """Draw a picture (height, width, 3) of large squares in random colours, which depend on the seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.NEAREST))


def stock(model: Any, processor: Any, prompt: str, *pictures: np.ndarray, **options: Any) -> list[int]:
    """Return the answer's tokens by transformers' `generate`, without mmdec."""
    content = [*[{"type": "image"}] * len(pictures), {"type": "text", "text": prompt}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    images = [Image.fromarray(picture) for picture in pictures] or None
    inputs = processor(images=images, text=text, return_tensors="pt", add_special_tokens=False)
    return model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :].tolist()
