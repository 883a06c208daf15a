"""The errors that mmdec raises deliberately, and how a command-line program ends with one."""

from __future__ import annotations

import re
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

EXIT_CODE_REFUSED = 2  # exit code of a command that ends with an `MmdecError`


class MmdecError(Exception):
    """The base class of all errors that mmdec raises deliberately. The message is written for the caller."""


class InputError(MmdecError, ValueError):
    """An argument or a file breaks a rule. Nothing was written.

    A message names the argument, the rule, the value and, unless the rule itself says it, the remedy: "`sample_rate`
    must be at least 8000 Hz, but is 4000. Resample the audio first." Arguments, and values that it advises
    (`batch_size=1`), are in backquotes.

    Args:
        message: The message.
        argument: The wrong argument's name; None: the name in backquotes with which the message begins, if any.

    Attributes:
        argument: The wrong argument's name; None if it is not known.
    """

    def __init__(self, message: str, *, argument: str | None = None) -> None:
        super().__init__(message)
        named = re.match(r"`(\w+)`", message)
        self.argument = argument or (named and named[1])

    def with_names(self, names: Mapping[str, str]) -> InputError:
        """Return an error of the same message with other names of arguments; `rename_arguments` has the details."""
        renamed = self.argument and names.get(self.argument, self.argument)
        return InputError(rename_arguments(str(self), names), argument=renamed)


def rename_arguments(message: str, names: Mapping[str, str]) -> str:
    """Replace names in backquotes, such as `batch_size` and that of `batch_size=1`; the rest of the prose stays.

    Args:
        names: Name in the message -> its replacement, which is not itself a name in the message.
    """
    for name, other in names.items():
        message = message.replace(f"`{name}`", f"`{other}`").replace(f"`{name}=", f"`{other}=")
    return message


class BatchError(InputError):
    """Raised if some inputs of a list were rejected.

    Args:
        results: The results in the order of the inputs; None for rejected inputs.
        errors: Index of a rejected input -> its error.
        what: The inputs' name in the message.
    """

    def __init__(self, results: list[Any], errors: dict[int, InputError], what: str = "recordings") -> None:
        self.results = results
        self.errors = errors
        first = next(iter(errors))
        super().__init__(
            f"{len(errors)} of {len(results)} {what} were rejected, the first at index {first}: {errors[first]}"
            + (" The others are in `results` of this error." if len(errors) < len(results) else "")
        )


def without_frames(error: InputError) -> InputError:
    """Drop the tracebacks of an error that is stored: their frames would keep the batch's other inputs alive."""
    chained: BaseException | None = error
    while chained is not None:
        chained.__traceback__ = None
        chained = chained.__cause__ or chained.__context__
    return error


@contextmanager
def exit_on_error() -> Generator[None]:
    """Context manager for command-line programs: print an mmdec error on stderr, exit with `EXIT_CODE_REFUSED`.

    An exception whose chain of causes (`__cause__`) contains an mmdec error is handled in the same way. Other
    exceptions are not changed.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, MmdecError):
            cause = cause.__cause__
        if cause is None:
            raise
        sys.stderr.write(f"error: {cause}\n")
        raise SystemExit(EXIT_CODE_REFUSED) from error
