"""The errors that mmdec raises. `mmdec.types` and `mmdec` hand them on.

An error names the argument, the rule, the value and the remedy:
"`sample_rate` must be at least 8000 Hz, but is 4000. Resample the audio first."
"""

from __future__ import annotations


class MmdecError(Exception):
    """Every error that mmdec raises on purpose. The message is meant for the person who made the call."""


class InputError(MmdecError, ValueError):
    """An argument or a file breaks a rule. Nothing was computed and nothing was written."""
