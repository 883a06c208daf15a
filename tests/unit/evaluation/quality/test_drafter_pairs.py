"""Drafters compared by picture, and with their picture shuffled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmdec.evaluation.quality.drafter_pairs import ShuffledPicture, compare_drafters, difference, tokens_per_round
from mmdec.hub.vlm import load_vlm
from mmdec.types import Context, InputError
from tests.support.pictures import pixels
from tests.support.tiny_vlm_folder import drafter_weights, write


def test_only_the_pictures_columns_change_places() -> None:
    seen: list[Context] = []

    class Watching:
        name, needs = "watching", None

        def start(self, context: Context) -> None:
            seen.append(context)

    columns = torch.arange(12.0)[None, :, None].repeat(2, 1, 3)
    visual = torch.zeros(2, 12, dtype=torch.bool)
    visual[0, 2:9] = True
    context: Any = Context(
        torch.zeros(2, 12), torch.ones(2, 12), torch.zeros(1), torch.zeros(1), {-1: columns}, columns, visual
    )
    ShuffledPicture(Watching()).start(context)  # type: ignore[arg-type]
    for values in (seen[0].embeds, seen[0].features[-1]):
        assert values is not None
        first = values[0, :, 0].tolist()
        assert sorted(first[2:9]) == list(range(2, 9)) != first[2:9]
        assert first[:2] + first[9:] == [0, 1, 9, 10, 11]
        assert torch.equal(values[1], columns[1])  # without a picture
    assert torch.equal(seen[0].embeds, seen[0].features[-1])  # type: ignore[arg-type]


def test_the_difference_is_of_sums_and_pairs_narrow_its_interval() -> None:
    draw = np.random.default_rng(1)
    rounds = draw.integers(5, 50, 60).astype(float)
    rate = draw.uniform(2, 6, 60)  # pictures differ much, drafters little
    a, b = np.stack([rounds * rate, rounds], 1), np.stack([rounds * (rate - 0.2), rounds], 1)
    found = difference(a, b)
    assert found["value"] == pytest.approx(0.2) == tokens_per_round(a) - tokens_per_round(b)
    assert 0.19 < found["low"] <= 0.2 + 1e-9 <= found["high"] + 2e-9 < 0.22
    same = difference(a, a)
    assert same == {"value": 0.0, "low": 0.0, "high": 0.0}


def test_a_comparison_names_every_seed(tmp_path: Path) -> None:
    folder = write(tmp_path / "tiny")
    vlm = load_vlm(folder, "cpu")
    (tmp_path / "images").mkdir()
    for seed in range(4):
        drafter_weights("msd" if seed < 2 else "eagle", vlm.model, tmp_path / f"d{seed}", seed)
        Image.fromarray(pixels(seed)).save(tmp_path / "images" / f"{seed}.png")
    rows = [{"image": f"{n % 4}.png", "question": f"What is {n}?", "category": "a", "answer": "x"} for n in range(6)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    drafters = [tmp_path / f"d{seed}" for seed in range(4)]
    report = compare_drafters(drafters[:2], drafters[2:], tmp_path / "q.jsonl", vlm, plan="4x2", limit=None)
    assert (report["questions"], report["pictures"]) == (6, 4)
    rates = report["tokens_per_round"]
    assert {name: len(found) for name, found in rates.items()} == {
        "a": 2, "a shuffled": 2, "b": 2, "b shuffled": 2,
    }  # fmt: skip
    assert all(rate >= 1 for found in rates.values() for rate in found)
    assert report["a_less_b"]["low"] <= report["a_less_b"]["value"] <= report["a_less_b"]["high"]
    json.dumps(report)
    for call, said in (
        ({"a": drafters[:1], "b": drafters[1:3]}, "as many drafters"),
        ({"a": drafters[:1], "b": drafters[1:2], "plan": "learned"}, "fixed draft size"),
    ):
        with pytest.raises(InputError, match=said):
            compare_drafters(questions=tmp_path / "q.jsonl", model=vlm, **call)  # type: ignore[arg-type]
