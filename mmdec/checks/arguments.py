"""Checks of arguments that several calls have.

Each InputError names the argument, what it must be, its value and what to do. This module does not import torch.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path, PurePath
from typing import TypeVar, cast, final

from mmdec.checks.files import error_line
from mmdec.errors import InputError

T = TypeVar("T")
MAX_QUOTED_CHARACTERS = 80  # maximum characters of a value that an error message quotes
# maximum CPU threads: if the system cannot start that many, OpenMP aborts the process
MAX_THREADS = max(64, os.cpu_count() or 1)
MAX_NODES = 1024  # maximum nodes of a draft; the size of the attention mask grows with the square of this number


def format_value(value: object) -> str:
    """Convert a value to text for an error message: its repr if it is short, else its type.

    The text contains no memory address, so it is the same in every process.
    """
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        try:
            text = repr(value)
        except ValueError:  # Python refuses to print an integer of thousands of digits
            return f"a huge {type(value).__name__}"
        return text if len(text) <= MAX_QUOTED_CHARACTERS else f"{text[: MAX_QUOTED_CHARACTERS - 3]}..."
    if isinstance(value, PurePath):
        return f"the path {str(value)!r:.{MAX_QUOTED_CHARACTERS}}"
    if isinstance(value, (list, tuple)) and len(value) <= 4:
        parts = ", ".join(format_value(item) if not isinstance(item, (list, tuple)) else "..." for item in value)
        text = f"[{parts}]" if isinstance(value, list) else f"({parts}{',' if len(value) == 1 else ''})"
        if len(text) <= MAX_QUOTED_CHARACTERS:
            return text
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"an object of type {name}" if name[:1].isupper() else f"{'an' if name[:1] in 'aeiou' else 'a'} {name}"


def check_whole(name: str, value: object, minimum: int, maximum: int, remedy: str) -> int:
    """Return `value` as an int; raise InputError unless it is a whole number from `minimum` to `maximum`.

    NumPy's integers are accepted; True and "2" are not.

    Args:
        name: The argument's name in the error.
        remedy: The error's last sentence.
    """
    number: int | None = None
    if not isinstance(value, bool):
        try:
            number = operator.index(value)  # type: ignore[arg-type] # TypeError if the value is not an integer
        except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers raises one of the latter two
            number = None
    if number is None or not minimum <= number <= maximum:
        rule = f"a whole number from {minimum} to {maximum}" if minimum < maximum else minimum
        raise InputError(f"`{name}` must be {rule}, but is {format_value(value)}. {remedy}", argument=name)
    return number


def check_threads(threads: object) -> int | None:
    """Return a valid number of torch's threads; None if it is to be chosen later.

    Raises:
        InputError: If it is not valid.
    """
    if threads is None:
        return None
    return check_whole("threads", threads, 1, MAX_THREADS, "Leave it out to have them chosen.")


def check_nodes(nodes: object) -> int | tuple[int, int] | None:
    """Return a valid draft size: an int (tokens of a chain), (nodes, depth) of a tree, or None.

    Raises:
        InputError: If it is not valid.
    """
    name, remedy = "num_speculative_tokens", "Give nodes, or (nodes, depth) of a tree; 0 is plain decoding."
    if nodes is None:
        return None
    if isinstance(nodes, (tuple, list)):
        if len(nodes) != 2:
            raise InputError(
                f"`{name}` must be one number or two, but is {format_value(nodes)}. {remedy}", argument=name
            )
        return check_whole(name, nodes[0], 0, MAX_NODES, remedy), check_whole(name, nodes[1], 1, MAX_NODES, remedy)
    return check_whole(name, nodes, 0, MAX_NODES, remedy)


def check_seed(seed: object) -> int | None:
    """Return a valid seed for torch's generators, or None.

    Raises:
        InputError: If it is not valid.
    """
    return None if seed is None else check_whole("seed", seed, -(2**63), 2**64 - 1, "Leave it out for torch's own.")


def check_switch(name: str, value: object) -> bool:
    """Return the argument `name`; raise InputError unless it is True or False."""
    if not isinstance(value, bool):
        raise InputError(f"`{name}` must be True or False, but is {format_value(value)}.", argument=name)
    return value


def check_instance(name: str, value: object, kind: type[T], rule: str, remedy: str = "") -> T:
    """Return the argument `name`; raise InputError unless it is an instance of the class `kind`.

    Args:
        rule: What it must be, in words.
        remedy: The error's last sentence, where the rule alone does not say what to do.
    """
    if not isinstance(value, kind):
        raise InputError(f"`{name}` must be {rule}, but is {format_value(value)}. {remedy}".rstrip(), argument=name)
    return value


def check_path(name: str, value: object, remedy: str) -> Path:
    """Return the argument `name` as a `Path`; raise InputError unless it is a path that is not empty.

    Args:
        remedy: The error's last sentence.
    """
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise InputError(f"`{name}` must be a path, but is {format_value(value)}. {remedy}", argument=name)
    return Path(cast(str, value))


def check_choice(name: str, value: object, choices: Sequence[str], remedy: str = "") -> None:
    """Raise InputError unless the argument `name` is one of `choices`.

    Args:
        remedy: The error's last sentence, where the rule alone does not say what to do.
    """
    if not isinstance(value, str) or value not in choices:
        raise InputError(
            f"`{name}` must be one of {', '.join(choices)}, but is {format_value(value)}. {remedy}".rstrip(),
            argument=name,
        )


def check_callable(name: str, value: object, rule: str) -> None:
    """Raise InputError unless the argument `name` is None or a callable that is no class.

    Args:
        rule: What it must be, in words.
    """
    if value is not None and (not callable(value) or isinstance(value, type)):
        raise InputError(
            f"`{name}` must be {rule} or None, but is {format_value(value)}. Pass a function.", argument=name
        )


def check_methods(name: str, value: object, methods: tuple[str, ...], remedy: str) -> None:
    """Raise InputError unless the argument `name` is an object (not a class) with these methods.

    Args:
        remedy: The error's last sentence.
    """
    lacking = [method for method in methods if not callable(getattr(value, method, None))]
    if lacking or isinstance(value, type):
        fault = f"which lacks `{lacking[0]}`" if lacking else "which is a class, not an object of it"
        raise InputError(
            f"`{name}` must be an object with {', '.join(methods)}, but is {format_value(value)}, {fault}. {remedy}",
            argument=name,
        )


def check_finite(name: str, value: float, remedy: str) -> float:
    """Return the argument `name`; raise InputError if it is NaN or infinite.

    Args:
        remedy: The error's last sentence.
    """
    if not math.isfinite(value):
        raise InputError(f"`{name}` must be a finite number, but is {value}. {remedy}", argument=name)
    return value


def did_you_mean(word: object, names: Iterable[str]) -> str:
    """Return the end of an error about a misspelt name: " Did you mean 'eagle'?"; "" if no name is similar."""
    near = get_close_matches(word, [*names], 1) if isinstance(word, str) else []
    return f" Did you mean {near[0]!r}?" if near else ""


@final
class UnknownOption(InputError):
    """Raised for an option that neither the mmdec call nor transformers' `generate` has.

    Args:
        name: The unknown option.
        names: All valid options, for a suggestion.
    """

    def __init__(self, name: str, names: Iterable[str]) -> None:
        self.name, self.names = name, sorted(names)
        super().__init__(
            f"`{name}` must be an option of this call or of `model.generate`, but it is not one."
            f"{did_you_mean(name, self.names)} Check the spelling.",
            argument=name,
        )

    def __reduce__(self) -> tuple[type[UnknownOption], tuple[str, list[str]]]:
        """Make the error picklable, so that it can be passed between processes."""
        return UnknownOption, (self.name, self.names)


@contextmanager
def suggesting_options(names: Iterable[str]) -> Iterator[None]:
    """Add `names` to the valid names in which an `UnknownOption` from the `with` block looks for a similar one."""
    try:
        yield
    except UnknownOption as error:
        raise UnknownOption(error.name, {*error.names, *names}) from error.__cause__


def options_error(passed_options: Collection[str], error: Exception, names: Collection[str]) -> InputError:
    """Make the InputError for options that transformers' `generate` rejected.

    Args:
        passed_options: Names of the options that the caller passed.
        error: The exception that `generate` raised.
        names: All valid option names, for a suggestion.
    """
    for name in sorted(passed_options):
        if name not in names and repr(name) in str(error):
            return UnknownOption(name, names)
    options = ", ".join(f"`{name}`" for name in sorted(passed_options)) or "none"
    return InputError(
        f"`options` must be what `model.generate` takes, but it refuses those given ({options}): "
        f"{error_line(error)}. Change or drop them."
    )
