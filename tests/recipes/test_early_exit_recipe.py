"""Runs the recipe of early exits for a few steps: it ends, and compares the texts itself."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "early_exit" / "train.py"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:drafter .* brought:UserWarning")
def test_the_recipe_prints_tokens_per_round_of_each_exit(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", [str(RECIPE), "--steps", "3", "--tokens", "12"])
    runpy.run_path(str(RECIPE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert sum("early exit, layers (" in line for line in lines) == 4
    assert sum("none: 1.00 tokens per round" in line for line in lines) == 4
