"""A checkout in which `make train` trains a small network of one system for one epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmdec.training import timed_run
from mmdec.training.__main__ import main
from mmdec.training.timed_run import Allowance, Outcome, Runner, System


def enter(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout / "recipes").symlink_to(Path(__file__).parents[2] / "recipes")
    monkeypatch.chdir(checkout)
    monkeypatch.setattr("sys.argv", ["train"])  # it has pytest's arguments
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.delenv(name, raising=False)


def make_small(monkeypatch: pytest.MonkeyPatch, data: dict[str, Any], model: dict[str, Any], **trainer: Any) -> None:
    """Change options of all systems' recipes, and remove the least training time."""
    configure = System.configuration

    def small(*arguments: Any) -> dict[str, Any]:
        recipe = configure(*arguments)
        recipe["trainer"] |= trainer
        recipe["data"]["init_args"] |= data
        recipe["model"]["init_args"] |= model
        return recipe

    monkeypatch.setattr(System, "configuration", small)
    monkeypatch.setattr(timed_run, "LEAST", 0.0)


def run_here(name: str, *arguments: str) -> None:
    assert name == "mmdec.training"
    main(arguments)


def train_for(system: System, seconds: float, runner: Runner = run_here, fresh: bool = False) -> Outcome:
    """Train with a clock that stands still at a past time, so that exactly one epoch runs."""
    return system.train(Allowance(1000 + seconds, lambda: 1000.0), runner, fresh)
