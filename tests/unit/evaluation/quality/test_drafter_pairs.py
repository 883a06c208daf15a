"""Drafters compared by picture, and with their picture shuffled."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmdec.evaluation.quality.drafter_epochs import epochs_of, main
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


def run(folder: Path, values: list[float], name: str = "dev/decoded") -> Path:
    """A run's folder as Lightning's CSVLogger leaves it."""
    rows = [f"{step * 10},{value}," if step % 2 else f"{step * 10},,{value}" for step, value in enumerate([1.0] * 2)]
    rows += [f"{100 + step},{value}," for step, value in enumerate(values)]
    (folder / "log").mkdir(parents=True)
    (folder / "log" / "metrics.csv").write_text("\n".join([f"step,{name},train/loss", *rows[:1], *rows[2:]]))
    return folder


def test_seeds_are_set_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = run(tmp_path / "a-1", [2.0, 3.0, 4.0]), run(tmp_path / "a-2", [3.0, 3.0])
    other, plot = run(tmp_path / "b-1", [1.0]), tmp_path / "epochs.png"
    assert epochs_of(one) == [2.0, 3.0, 4.0]
    monkeypatch.setattr(sys, "argv", ["drafter_epochs", f"eagle={one},{two}", f"msd={other}", "--plot", str(plot)])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| `eagle` | 2 | 2.50 (2.00 to 3.00) | 3.00 (3.00 to 3.00) | 4.00 (4.00 to 4.00) |"
    assert lines[3] == "| `msd` | 1 | 1.00 (1.00 to 1.00) |  |  |"
    with Image.open(plot) as picture:
        assert picture.width > 300


def test_runs_that_logged_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must have logged dev/decoded"):
        epochs_of(run(tmp_path / "a", [1.0], "dev/loss"))
    with pytest.raises(InputError, match="metrics"):
        epochs_of(tmp_path / "none")
