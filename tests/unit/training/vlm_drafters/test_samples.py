"""Questions are taken as the choice says; videos are folders of frames; what does not fit is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmdec.training.vlm_drafters.samples import Choice, Sample, choose, read_samples
from mmdec.types import InputError

LONG = "word " * 30


def write(root: Path, rows: list[dict[str, Any]]) -> Path:
    (root / "train.json").write_text(json.dumps(rows), encoding="utf-8")
    return root


def row(number: int, *answers: str, **fields: Any) -> dict[str, Any]:
    said = [part for place, answer in enumerate(answers) for part in (f"Question {place}?", answer)]
    turns = [{"from": ("human", "gpt")[at % 2], "value": value} for at, value in enumerate(said)]
    return {"id": number, "conversations": turns, **fields}


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(path)


def test_questions_are_chosen_by_kind(tmp_path: Path) -> None:
    for number in range(10):
        picture(tmp_path / "images" / f"{number}.png")
    rows = [row(number, LONG, "short", "brief", image=f"{number}.png") for number in range(10)]
    corpus = write(tmp_path, rows)
    assert len(read_samples(corpus, "train", 8)) == 30
    found = read_samples(corpus, "train", 8, Choice(12, 0.5, seed=1))
    assert [one.words for one in found] == [30] * 6 + [1] * 6
    assert len({one.images for one in found[:6]}) == 6  # of different pictures, as long as there are
    assert len({one.name for one in found}) == 12
    assert found == read_samples(corpus, "train", 8, Choice(12, 0.5, seed=1))
    assert found != read_samples(corpus, "train", 8, Choice(12, 0.5, seed=2))
    assert len(read_samples(corpus, "train", 8, Choice(25, None))) == 25  # more than one of a picture, where needed
    assert len(read_samples(corpus, "train", 8, Choice(100, 0.5))) == 30


def test_a_kind_that_is_rare_gives_way() -> None:
    samples = [Sample(str(n), "?", words=30 if n < 2 else 1) for n in range(10)]
    found = choose(iter(samples), Choice(8, 0.5))
    assert sum(one.words >= 20 for one in found) == 2
    assert len(found) == 8


def test_frames_are_spread_over_the_video(tmp_path: Path) -> None:
    for number in range(9):
        picture(tmp_path / "images" / "film" / f"{number:03d}.png")
    (sample,) = read_samples(write(tmp_path, [row(0, "A film.", video="film")]), "train", 3)
    assert [path.stem for path in sample.video] == ["000", "004", "008"]
    assert sample.visual
    plain = sample.without_pictures()
    assert not plain.visual
    assert plain.name == f"{sample.name}/text"
    assert plain.without_pictures() == plain


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"video": "none"}, "must be a folder of frames"),
        ({"video": "../film"}, "inside the folder"),
        ({"video": 3}, "beside the images"),
        ({"image": "none.png"}, "must hold its pictures"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_samples(write(tmp_path, [row(0, "Yes.", **fields)]), "train", 3)
    with pytest.raises(InputError, match=r"must hold dev\.json"):
        read_samples(tmp_path, "dev", 3)
