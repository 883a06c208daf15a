"""The errors that mmdec raises, also exported by `mmdec.types` and `mmdec`.

A message names the argument, the rule, the value and the remedy:
"`sample_rate` must be at least 8000 Hz, but is 4000. Resample the audio first."
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

REFUSED = 2  # exit code of a command that ends with an `MmdecError`


class MmdecError(Exception):
    """The base of all errors that mmdec raises deliberately. The message addresses the caller."""


class InputError(MmdecError, ValueError):
    """An argument or a file breaks a rule. Nothing was computed and nothing was written."""


@contextmanager
def told() -> Iterator[None]:
    """For command-line programs: an mmdec error, also as a cause, becomes one sentence on stderr and exit code 2."""
    try:
        yield
    except Exception as error:
        own: BaseException | None = error
        while own is not None and not isinstance(own, MmdecError):
            own = own.__cause__
        if own is None:
            raise
        sys.stderr.write(f"error: {own}\n")
        raise SystemExit(REFUSED) from error
