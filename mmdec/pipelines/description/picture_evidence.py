"""Whether a picture shows anything, and whether it is like those that the model was trained on.

The tokens do not tell: a model may be as sure about an empty picture, or one of another style, as about any other.

`structure` is told from the pixels. One colour, a gradient or noise is as rough in one square as in the next. In a
scene, a page or a photograph the squares differ, for edges are rare and lie together (Field, "What is the goal of
sensory coding?", 1994). `distance` is told by the model's own vision encoder, where the model's folder says what it was
trained on: see `mmdec.hub.vlm`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmdec.hub.vlm import LoadedVlm
from mmdec.images import ImageSource, read_image, to_pil
from mmdec.pipelines.confidence import Evidence
from mmdec.targets.vlm import Encoded

STRUCTURE, DISTANCE = "structure", "distance"  # the evidence's names in confidence.json
SIDE = 128  # pixels: larger pictures are averaged to sides of 128 to 255
ENOUGH = 1024  # pixels: of still larger ones only every second, third... row and column is read, which saves time
SQUARE = 8  # pixels
FAINT = 2.0  # grey levels: differences below are no edges but rounding
MOST = 0.1  # of structure: all that have more are pictures alike, a page of text with little and a lone sign with much
FLOOR = 0.003  # added before the logarithm
NEAREST = 1e-3  # the least distance
TOGETHER = 32  # pictures in a pass of the encoder


def picture_evidence(
    pictures: Sequence[np.ndarray], distances: Sequence[float] = (), earlier: Evidence | None = None, count: int = 0
) -> dict[str, float]:
    """Of the pictures (H, W, 3) uint8 that a question is about: the mean logarithms of their structure, of each `MOST`
    at most, and of their distances, where these are known. Of no pictures nothing, for which a calibration takes what
    is typical.

    earlier: evidence of `count` pictures that came before in a chat, which belong to the question as well.
    """
    logarithms = {STRUCTURE: [math.log(min(structure(pixels), MOST) + FLOOR) for pixels in pictures]}
    if len(distances) == len(pictures):
        logarithms[DISTANCE] = [math.log(max(distance, NEAREST)) for distance in distances]
    told: dict[str, float] = {}
    for name, values in logarithms.items():
        if count and earlier is not None and name in earlier:
            values = [*values, *[earlier[name]] * count]
        if values:
            told[name] = sum(values) / len(values)
    return told


@torch.inference_mode()
def summaries(vlm: LoadedVlm, sources: Sequence[ImageSource]) -> Tensor | None:
    """(N, F): what a model's vision encoder makes of pictures, as `FamiliarPictures` takes it; None for a model whose
    encoder has no states of each picture's own."""
    processor: Any = vlm.processor
    model: Any = vlm.model
    seen: list[Tensor] = []
    for start in range(0, len(sources), TOGETHER):
        pictures = [to_pil(read_image(source)) for source in sources[start : start + TOGETHER]]
        pixels = processor.image_processor(images=pictures, return_tensors="pt").to(model.device, model.dtype)
        summary = Encoded.of(model.get_image_features(**pixels, return_dict=True)).summaries
        if summary is None:
            return None
        seen.append(summary.float().cpu())
    return torch.cat(seen)


def structure(pixels: np.ndarray) -> float:
    """From 0, where all squares of a picture (H, W, 3) are equally rough, to nearly 1, where one has all the edges.

    It is the same for any brightness and, but for faint pictures, any contrast.
    """
    high, wide = (max(side // ENOUGH, 1) for side in pixels.shape[:2])
    read = to_pil(pixels[::high, ::wide])
    reduced = read.reduce((max(read.width // SIDE, 1), max(read.height // SIDE, 1)))
    levels = np.asarray(reduced, np.float32)  # (h, w, 3)
    across, down = np.diff(levels, axis=1, append=levels[:, -1:]), np.diff(levels, axis=0, append=levels[-1:])
    squares = _means((across**2 + down**2).mean(2))
    average, effective = float(np.sqrt(squares).mean()), math.sqrt(float(squares.mean()))
    return max(1 - (average + FAINT) / (effective + FAINT), 0.0)


def _means(values: np.ndarray) -> np.ndarray:
    """Mean of (h, w) over each whole square. Narrow images have squares of their own width."""
    high, wide = (min(SQUARE, side) for side in values.shape)
    rows, columns = values.shape[0] // high, values.shape[1] // wide
    return values[: rows * high, : columns * wide].reshape(rows, high, columns, wide).mean((1, 3))
