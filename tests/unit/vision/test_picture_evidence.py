"""Tests the measure of a picture's content: low for one colour, gradients and noise, higher for scenes, at any size."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import mmdec
from mmdec.io.images import read_image
from mmdec.pretrained.vlm import LoadedVlm, load_vlm
from mmdec.tasks.confidence import Calibration, write_calibrations
from mmdec.vision.picture_evidence import MAX_STRUCTURE, STRUCTURE, STRUCTURE_OFFSET, picture_evidence, structure
from tests.support.empty_pictures import EMPTY, empty_picture
from tests.support.tiny_vlm_folder import write

IMAGES = sorted((Path(__file__).parents[3] / "data" / "samples" / "images").glob("*.png"))
LIMIT = 0.04  # below: empty pictures; above: samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model that judges its answers by the picture alone."""
    folder = write(tmp_path_factory.mktemp("models") / "tiny")
    slope, middle = 4.0, math.log(LIMIT)
    write_calibrations(folder, {"answer": Calibration({STRUCTURE: slope}, -slope * middle, {STRUCTURE: middle})}, {})
    return folder


@pytest.fixture(scope="module")
def vlm(folder: Path) -> LoadedVlm:
    return load_vlm(folder, "cpu")


@pytest.mark.parametrize("kind", EMPTY)
def test_empty_pictures_have_no_structure(kind: str) -> None:
    draw = np.random.default_rng(0)
    assert max(structure(empty_picture(kind, draw)) for _ in range(20)) < LIMIT


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_samples_have_structure_at_any_size_brightness_and_contrast(path: Path) -> None:
    pixels = read_image(path)
    assert structure(pixels) > 2 * LIMIT
    image = Image.fromarray(pixels)
    for size in ((96, 96), (500, 300), (1300, 2600)):
        assert structure(np.asarray(image.resize(size, Image.Resampling.BICUBIC))) > 2 * LIMIT
    assert structure((pixels // 3 + 150).astype(np.uint8)) > 2 * LIMIT


def test_structure_is_none_when_even_and_most_when_concentrated() -> None:
    every = np.zeros((128, 128, 3), np.uint8)
    every[4::8, 4::8] = 255
    one = np.zeros((128, 128, 3), np.uint8)
    one[4, 4] = 255
    assert structure(every) < 1e-5
    rough = 255 * math.sqrt(4 / 64)  # of the one square of 256, and its share of the whole below
    assert structure(one) == pytest.approx(1 - (rough / 256 + 2) / (rough / 16 + 2), abs=1e-5)


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (7, 5), (10, 4000), (129, 255), (4100, 4100)])
def test_pictures_of_any_shape_are_rated(shape: tuple[int, int]) -> None:
    flat = np.full((*shape, 3), 90, np.uint8)
    noise = np.random.default_rng(1).integers(0, 256, (*shape, 3), np.uint8)
    assert structure(flat) == 0
    assert 0 <= structure(noise) < LIMIT


def test_several_pictures_are_averaged_and_none_gives_no_evidence() -> None:
    scene, flat = read_image(IMAGES[0]), np.zeros((40, 40, 3), np.uint8)
    assert picture_evidence([]) == {}
    faint = np.zeros((128, 128, 3), np.uint8)
    faint[32:40, 32] = 5
    assert STRUCTURE_OFFSET < structure(faint) < MAX_STRUCTURE < structure(scene)
    assert picture_evidence([faint])[STRUCTURE] == pytest.approx(math.log(structure(faint) + STRUCTURE_OFFSET))
    single = picture_evidence([scene])[STRUCTURE]
    assert single == pytest.approx(math.log(MAX_STRUCTURE + STRUCTURE_OFFSET))
    assert picture_evidence([scene, flat])[STRUCTURE] == pytest.approx((single + math.log(STRUCTURE_OFFSET)) / 2)


def test_answers_about_empty_pictures_are_less_sure(vlm: LoadedVlm) -> None:
    scene, flat = read_image(IMAGES[0]), np.full((50, 60, 3), 200, np.uint8)
    options = {"model": vlm, "drafter": None, "max_new_tokens": 3}
    shown, empty, both = mmdec.describe([scene, flat, (scene, flat)], "What is this?", **options)
    assert empty.confidence < 0.01 < both.confidence < 0.9 < shown.confidence


def test_a_question_without_a_picture_is_neutral(vlm: LoadedVlm) -> None:
    answer = mmdec.describe([()], "What is this?", model=vlm, drafter=None, max_new_tokens=3)[0]
    assert answer.confidence == pytest.approx(0.5)
    assert STRUCTURE not in answer.evidence


def test_a_chat_is_judged_by_all_its_pictures(vlm: LoadedVlm) -> None:
    scene, flat = read_image(IMAGES[0]), np.full((50, 60, 3), 200, np.uint8)
    chat = mmdec.Chat(model=vlm, drafter=None, max_new_tokens=3)
    first, again = chat.ask("What is this?", scene), chat.ask("And its colour?")
    assert again.confidence == first.confidence > 0.9
    both = picture_evidence([scene, flat])[STRUCTURE]
    assert chat.ask("And this?", flat).evidence[STRUCTURE] == pytest.approx(both)
