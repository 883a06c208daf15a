"""Tests the distance of a picture from those of training (Mahalanobis' distance to the nearest kind), and its file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import mmdec
from mmdec.errors import InputError
from mmdec.pretrained.image_familiarity import FAMILIAR_FILE, read_familiar
from mmdec.vision.picture_evidence import DISTANCE
from tests.support.empty_pictures import EMPTY, empty_picture

IMAGES = sorted((Path(__file__).parents[3] / "data" / "samples" / "images").glob("*.png"))


def test_a_distance_is_counted_in_deviations_of_the_nearest_kind(tmp_path: Path) -> None:
    """Two kinds far apart, wide along the first axis and narrow along the others."""
    assert read_familiar(tmp_path) is None
    tensors = {
        "means": torch.tensor([[0.0, 0.0, 0.0], [9.0, 9.0, 9.0]]),
        "whitening": torch.diag(1 / torch.tensor([3.0, 1.0, 1.0])),
    }
    save_file({name: tensor.half() for name, tensor in tensors.items()}, tmp_path / FAMILIAR_FILE)
    familiar = read_familiar(tmp_path)
    assert familiar is not None
    probes = torch.tensor([[0.0, 0.0, 0.0], [9.0, 9.0, 9.0], [3.0, 0.0, 0.0], [0.0, 3.0, 0.0], [9.0, 8.0, 9.0]])
    assert familiar.distance(probes).tolist() == pytest.approx([0, 0, 1, 3, 1], abs=5e-3)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"means": torch.zeros(2, 3)},
        {"means": torch.zeros(2, 3), "whitening": torch.zeros(3, 4)},
        {"means": torch.zeros(3), "whitening": torch.zeros(3, 3)},
        {"means": torch.full((2, 3), float("nan")), "whitening": torch.zeros(3, 3)},
    ],
)
def test_a_damaged_file_is_one_clear_error(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file(tensors, tmp_path / FAMILIAR_FILE)
    with pytest.raises(InputError, match=r"`model` must (have|hold)"):
        read_familiar(tmp_path)


def roc_area(above: list[float], below: list[float]) -> float:
    """Return how often a value of `above` exceeds one of `below`."""
    return float((np.array(above)[:, None] > np.array(below)).mean())


def test_the_shipped_model_is_surer_of_scenes_than_of_what_it_never_saw() -> None:
    draw, grid = np.random.default_rng(0), np.mgrid[0:128, 0:128]
    discs = [
        np.where(
            (np.hypot(*(grid - draw.integers(40, 88, (2, 1, 1)))) < draw.integers(20, 40))[..., None],
            *draw.integers(0, 256, (2, 3)),
        ).astype(np.uint8)
        for _ in range(12)
    ]
    empty = [empty_picture(kind, draw) for kind in EMPTY]
    descriptions = mmdec.describe([*IMAGES, *discs, *empty], "What is this?")
    scenes, others = descriptions[: len(IMAGES)], descriptions[len(IMAGES) :]
    assert min(out.confidence for out in scenes) > 0.9
    assert roc_area([out.evidence[DISTANCE] for out in others], [out.evidence[DISTANCE] for out in scenes]) > 0.9
    assert roc_area([out.confidence for out in scenes], [out.confidence for out in others]) > 0.95
    assert sum(out.confidence > 0.7 for out in others) <= 2  # a dull disc may be a ball in a room


def test_a_chat_counts_the_distance_of_each_of_its_pictures() -> None:
    one, other = IMAGES[0], IMAGES[1]
    single, second = (mmdec.describe(path, "What is this?").evidence[DISTANCE] for path in (one, other))
    chat = mmdec.Chat()
    assert chat.ask("What is this?", one).evidence[DISTANCE] == pytest.approx(single, abs=1e-4)
    assert chat.ask("And this?", other).evidence[DISTANCE] == pytest.approx((single + second) / 2, abs=1e-4)
    assert chat.ask("What is it?").evidence[DISTANCE] == pytest.approx((single + second) / 2, abs=1e-4)
    together = mmdec.describe([(one, other), one], "What is this?")
    assert together[0].evidence[DISTANCE] == pytest.approx((single + second) / 2, abs=1e-4)
    assert together[1].evidence[DISTANCE] == pytest.approx(single, abs=1e-4)
