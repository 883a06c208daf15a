"""Whether an image shows anything, judged by its pixels: real images are rough in some places and smooth in others.

Tokens do not tell: a model may be as certain about an empty image as about any other. In one colour, a gradient or
noise all squares are equally rough. In a scene, a page or a photograph they differ, because edges are rare and
clustered (Field, "What is the goal of sensory coding?", 1994).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mmdec.images import to_pil

STRUCTURE = "structure"  # key of the evidence in confidence.json
SIDE = 128  # pixels: larger images are averaged down to sides of 128 to 255
ENOUGH = 1024  # pixels: of still larger images only every second, third, ... row and column is read, for speed
SQUARE = 8  # side of a square in pixels
FAINT = 2.0  # grey levels: smaller differences are rounding, not edges
MOST = 0.1  # maximum structure: all images above count as equal, a page of text and a single sign alike
FLOOR = 0.003  # added before the logarithm


def picture_evidence(pictures: Sequence[np.ndarray]) -> dict[str, float]:
    """The mean log structure of a question's images (H, W, 3) uint8, each capped at `MOST`; {} without images.

    A calibration replaces missing evidence by its typical value.
    """
    if not pictures:
        return {}
    logarithms = [math.log(min(structure(pixels), MOST) + FLOOR) for pixels in pictures]
    return {STRUCTURE: sum(logarithms) / len(logarithms)}


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
