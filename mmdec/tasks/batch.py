"""The inputs of one public call, a single one or a list, and its results and errors.

A call puts its inputs into an `InputBatch`, reads each (`collecting_error`), decodes those that were read, and returns
the results (`finish`). One bad input does not cost the others: its error is raised after they are done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar, final

from mmdec.checks.arguments import check_callable
from mmdec.errors import BatchError, InputError, without_frames
from mmdec.tasks.confidence import Confident, confidence_error

Input = TypeVar("Input")  # type of one input as the caller gives it


@final
class InputBatch(Generic[Input]):
    """The inputs of one call, a single one or a list, and the errors of those that were rejected.

    Args:
        inputs: The inputs.
        single: Whether the caller gave one input instead of a list.
        what: The inputs' name in errors.
    """

    def __init__(self, inputs: Sequence[Input], single: bool, what: str = "recordings") -> None:
        self.inputs, self.single, self.what = inputs, single, what
        self.errors: dict[int, InputError] = {}  # index of a rejected input -> its error

    def __len__(self) -> int:
        return len(self.inputs)

    def check_listener(self, name: str, function: object, rule: str, remedy: str) -> None:
        """Raise InputError if a callback is not callable, or is given for a list of inputs, where it is not supported.

        Args:
            name: The argument's name.
            function: The callback; None: there is none.
            rule: What the argument must be, for the message.
            remedy: What the caller can do, for the message.
        """
        check_callable(name, function, rule)
        if function is not None and not self.single:
            raise InputError(f"`{name}` cannot be combined with a list of {self.what}. {remedy}")

    @contextmanager
    def collecting_error(self, index: int) -> Iterator[None]:
        """Context manager: if the block raises InputError, add the error to `errors`, and continue after the block.

        Args:
            index: The input that the block reads.
        """
        try:
            yield
        except InputError as error:
            self.errors[index] = without_frames(error)

    def finish(
        self, results: Mapping[int, Confident], least: float | None, arguments: Mapping[int, str] | None = None
    ) -> Confident | list[Confident]:
        """Reject results of low confidence, and return what the public call returns.

        A result of an input with an error is left out.

        Args:
            results: Input index -> its result.
            least: The argument `min_confidence`.
            arguments: Input index -> the name of the call's argument, for the error about an unsure result; None:
                "audio" for all.

        Returns:
            A single result, or the list of results.

        Raises:
            InputError: If the only input was rejected.
            BatchError: If some inputs of a list were rejected.
        """
        for index, result in results.items():
            refusal = confidence_error(result.confidence, least, "audio" if arguments is None else arguments[index])
            if refusal is not None:
                self.errors.setdefault(index, refusal)
        errors = dict(sorted(self.errors.items()))
        if errors and self.single:
            raise errors[0]
        if errors:
            accepted = [None if index in errors else results[index] for index in range(len(self))]
            raise BatchError(accepted, errors, self.what)
        return results[0] if self.single else [results[index] for index in range(len(self))]
