"""Warnings that point at the user's line."""

from __future__ import annotations

import inspect
import warnings

LIBRARIES = {"mmdec", "torch", "transformers", "contextlib"}  # the user's code calls mmdec, also through the others


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn as if the user's line that led here had warned, so that Python shows that line, and once for each line."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
