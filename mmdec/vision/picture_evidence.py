"""Measures pictures, because the confidence of an answer also depends on what it is about.

Token probabilities do not show two kinds of failure: a model may be sure about an empty picture, or about a picture
unlike its training pictures. `structure` is computed from the pixels. One colour, a gradient or noise is equally rough
in all squares of a picture. In a scene, a page or a photograph the squares differ: edges are rare and close to each
other (Field, "What is the goal of sensory coding?", 1994). `distance` is computed by the model's own vision encoder, if
the model's folder has statistics of its training pictures (`mmdec.pretrained.image_familiarity`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from torch import Tensor

from mmdec.io.images import to_pil
from mmdec.pretrained.image_familiarity import FamiliarPictures
from mmdec.tasks.confidence import Evidence

STRUCTURE, DISTANCE = "structure", "distance"  # names of the evidence in confidence.json
REDUCED_SIDE = 128  # pixels: `structure` is computed on pictures that were reduced to sides of 128 to 255
MAX_SAMPLED_SIDE = 1024  # pixels: of larger pictures only every n-th row and column is read, which saves time
SQUARE_SIDE = 8  # side in pixels of the squares that `structure` compares
FAINT_EDGE = 2.0  # in grey levels: smaller differences between pixels are rounding, not edges
# maximum value of `structure`: a page of text has a lower value than a single sign, but is as good a picture
MAX_STRUCTURE = 0.1
STRUCTURE_OFFSET = 0.003  # added to `structure` before its logarithm is taken
MIN_DISTANCE = 1e-3  # minimum of the distance before its logarithm is taken


def picture_evidence(pictures: Sequence[np.ndarray], distances: Sequence[float] = ()) -> dict[str, float]:
    """Compute the evidence from a question's pictures: the mean logarithms of `structure` and of `distance`.

    Args:
        pictures: (H, W, 3) uint8 each.
        distances: One for each picture, or empty if unknown.

    Returns:
        Name of the evidence -> value; {} without pictures.
    """
    logarithms = {
        STRUCTURE: [math.log(min(structure(pixels), MAX_STRUCTURE) + STRUCTURE_OFFSET) for pixels in pictures]
    }
    if len(distances) == len(pictures):
        logarithms[DISTANCE] = [math.log(max(distance, MIN_DISTANCE)) for distance in distances]
    return {name: sum(values) / len(values) for name, values in logarithms.items() if values}


def with_earlier_pictures(evidence: Evidence, pictures: int, earlier: Evidence, earlier_pictures: int) -> Evidence:
    """Return the evidence of an answer in a chat, which may also be about the pictures of earlier turns.

    Args:
        evidence: The evidence of this turn.
        pictures: Number of its pictures.
        earlier: The evidence of the turn before, which covers all earlier pictures.
        earlier_pictures: Number of these pictures.
    """
    means = {
        name: (pictures * evidence.get(name, 0.0) + earlier_pictures * earlier[name]) / (pictures + earlier_pictures)
        for name in (STRUCTURE, DISTANCE)
        if name in earlier and (name in evidence or not pictures)
    }
    return {**evidence, **means}


def structure(pixels: np.ndarray) -> float:
    """Measure how unevenly edges are spread over a picture (H, W, 3).

    The measure is 0 if all squares of the picture are equally rough, and nearly 1 if one square has all edges.
    Brightness does not change the measure. Contrast changes it only for very faint pictures.
    """
    high, wide = (max(side // MAX_SAMPLED_SIDE, 1) for side in pixels.shape[:2])
    sampled = to_pil(pixels[::high, ::wide])
    reduced = sampled.reduce((max(sampled.width // REDUCED_SIDE, 1), max(sampled.height // REDUCED_SIDE, 1)))
    levels = np.asarray(reduced, np.float32)  # (h, w, 3), pixel values of the reduced picture
    across, down = np.diff(levels, axis=1, append=levels[:, -1:]), np.diff(levels, axis=0, append=levels[-1:])
    squares = _means((across**2 + down**2).mean(2))
    average, effective = float(np.sqrt(squares).mean()), math.sqrt(float(squares.mean()))
    return max(1 - (average + FAINT_EDGE) / (effective + FAINT_EDGE), 0.0)


def _means(values: np.ndarray) -> np.ndarray:
    """Average values (h, w) over squares of `SQUARE_SIDE` pixels; incomplete squares at the edges are left out.

    In smaller images the squares are smaller.
    """
    high, wide = (min(SQUARE_SIDE, side) for side in values.shape)
    rows, columns = values.shape[0] // high, values.shape[1] // wide
    return values[: rows * high, : columns * wide].reshape(rows, high, columns, wide).mean((1, 3))


def distances_of(familiar: FamiliarPictures, summaries: Tensor, counts: Sequence[int]) -> list[list[float]]:
    """Measure how different the pictures of each question are from the training pictures.

    Args:
        familiar: Statistics of the training pictures.
        summaries: (N, F), the vision encoder's features of each picture.
        counts: Number of pictures of each question. If a chat had to compute its cache again, `summaries` begins with
            pictures of earlier turns, which are skipped.

    Returns:
        For each question a list of distances, one for each picture.
    """
    new = familiar.distance(summaries[len(summaries) - sum(counts) :]).tolist()
    ends = list(accumulate(counts))
    return [new[end - count : end] for end, count in zip(ends, counts, strict=True)]
