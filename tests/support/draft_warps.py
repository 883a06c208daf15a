"""How drafters draw in tests: at a temperature."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from mmdec.core.sampling import DraftWarp
from mmdec.types import Warp


def at_temperature(temperature: float) -> DraftWarp:
    return DraftWarp(warpers=[lambda ids, scores: scores / temperature])


def warp_at(temperature: float) -> Warp:
    """Return a plan's warp; it reads no text."""
    return partial(at_temperature(temperature), cast(Any, None))
