"""What decoding statistics hold, as plain values that can be compared."""

from __future__ import annotations

from collections import deque
from typing import Any


def measurements(value: Any) -> Any:
    """Return an object's attributes as nested dicts and lists, without locks."""
    if isinstance(value, dict):
        return {key: measurements(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [measurements(item) for item in value]
    if hasattr(value, "__dict__"):
        return {name: measurements(item) for name, item in vars(value).items() if name.strip("_") != "lock"}
    return value
