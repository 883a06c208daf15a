"""The errors that mmdec raises. `mmdec.types` and `mmdec` hand them on.

An error names the argument, the rule, the value and the remedy:
"`sample_rate` must be at least 8000 Hz, but is 4000. Resample the audio first."
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

REFUSED = 2  # the exit code of a process that ends with an error of mmdec's own


class MmdecError(Exception):
    """Every error that mmdec raises on purpose. The message is meant for the person who made the call."""


class InputError(MmdecError, ValueError):
    """An argument or a file breaks a rule. Nothing was computed and nothing was written."""


@contextmanager
def told() -> Iterator[None]:
    """For programs: an error of mmdec's own, also as the cause of another, is one sentence on stderr; exit code 2."""
    try:
        yield
    except Exception as error:
        own: BaseException | None = error
        while own is not None and not isinstance(own, MmdecError):
            own = own.__cause__
        if own is None:
            raise
        print(f"error: {own}", file=sys.stderr)
        raise SystemExit(REFUSED) from error
