"""Promotions in which a test sets the score of each model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmdec.evaluation.release.promotion import SYSTEMS


def scored(
    monkeypatch: pytest.MonkeyPatch, system: str, found: dict[Path, float], write: Callable[[Any, float], None]
) -> None:
    """Replace a system's measurement: each model's report gets its figure in `found` (folder -> figure). write: puts a
    figure into a report."""
    measured = SYSTEMS[system]

    def measure(model: Path, *rest: Any) -> Any:
        report = measured.measure(model, *rest)
        write(report, found[model])
        return report

    monkeypatch.setitem(SYSTEMS, system, replace(measured, measure=measure))
