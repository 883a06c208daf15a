"""The inputs of one public call, a single one or a list, and its results and errors.

A call puts its inputs into an `InputBatch`, reads each (`collecting_error`), decodes those that were read, alone or in
groups that share the passes of the model (`InputGroups`), adds their results as they end (`add`), and returns them
(`finish`). One bad input does not cost the others: its error is raised after they are done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

from transformers import PreTrainedModel

from mmdec.checks.arguments import check_callable
from mmdec.errors import BatchError, InputError, without_frames
from mmdec.generation.generate import first_seed
from mmdec.generation.hf_bridge import keeps_state
from mmdec.generation.speculation import Speculation
from mmdec.tasks.confidence import confidence_error

Input = TypeVar("Input")  # type of one input as the caller gives it


@final
class InputBatch(Generic[Input]):
    """The inputs of one call, a single one or a list, their results, and the errors of those that were rejected.

    Args:
        inputs: The inputs.
        single: Whether the caller gave one input instead of a list.
        noun: The inputs' name in errors.
    """

    def __init__(self, inputs: Sequence[Input], single: bool, noun: str = "recordings") -> None:
        self.inputs, self.single, self.noun = inputs, single, noun
        self.errors: dict[int, InputError] = {}  # index of a rejected input -> its error
        self.results: dict[int, Any] = {}  # index of an input -> its result
        self._next = 0  # index of the first input whose result was not passed to `add`'s callback

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
            raise InputError(f"`{name}` must be left out for a list of {self.noun}, but is given. {remedy}")

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

    def add(self, results: Mapping[int, Any], on_result: Callable[[int, Any], None] | None = None) -> None:
        """Add results of inputs, and report those that are next in the order of the inputs.

        Args:
            results: Input index -> its result.
            on_result: Called with index and result, as soon as all earlier inputs have a result or an error.
        """
        self.results |= results
        while on_result is not None and (self._next in self.results or self._next in self.errors):
            index, self._next = self._next, self._next + 1
            if index in self.results:
                on_result(index, self.results[index])

    def finish(self, min_confidence: float | None, arguments: Mapping[int, str] | None = None) -> Any:
        """Reject results of low confidence, and return what the public call returns.

        A result of an input with an error is left out.

        Args:
            min_confidence: The argument `min_confidence`.
            arguments: Input index -> the name of the call's argument, for the error about an unsure result; None:
                "audio" for all.

        Returns:
            A single result, or the list of results.

        Raises:
            InputError: If the only input was rejected.
            BatchError: If some inputs of a list were rejected.
        """
        for index, result in self.results.items():
            refusal = confidence_error(
                result.confidence, min_confidence, "audio" if arguments is None else arguments[index]
            )
            if refusal is not None:
                self.errors.setdefault(index, refusal)
        errors = dict(sorted(self.errors.items()))
        if errors and self.single:
            raise errors[0]
        if errors:
            accepted = [None if index in errors else self.results[index] for index in range(len(self))]
            raise BatchError(accepted, errors, self.noun)
        return self.results[0] if self.single else [self.results[index] for index in range(len(self))]


@final
@dataclass(frozen=True)
class InputGroup:
    """Inputs of a call whose prompts are read in one pass."""

    indices: list[int]  # in the call
    speculation: Speculation  # their drafter, rule and draft size


@final
@dataclass(frozen=True)
class InputGroups:
    """All inputs of a call. The text of an input does not depend on its group.

    A group fills all rows and is read in one pass over its prompts, and the next begins when it has ended: each group
    has a pass, a call of the processor and a preparation of its own, which cost a small model more than rows that are
    free. Inputs that are sampled are groups of one, because each has a seed of its own: the call's plus its index. They
    begin as soon as there is room.
    """

    groups: list[InputGroup]
    rows: int  # number of inputs that may be decoded at the same time
    refill: int  # number of free rows from which the next group begins

    @classmethod
    def from_indices(
        cls,
        model: PreTrainedModel,
        speculation: Speculation,
        options: Mapping[str, Any],
        indices: Collection[int],
        rows: int,
    ) -> InputGroups:
        """Divide the inputs of a call.

        Args:
            model: The model.
            speculation: The drafter, rule and draft size of the call.
            options: Arguments of `model.generate`.
            indices: The inputs' indices in the call.
            rows: Number of inputs that may be decoded at the same time.
        """
        waiting = list(indices)
        seed = first_seed(model, speculation, options, draw=len(waiting) > 1)
        if keeps_state(options):
            rows = 1  # one after another, in their order
        if seed is not None:
            single = [InputGroup([index], speculation.with_seed(seed + index)) for index in waiting]
            return cls(single, rows, refill=1)
        starts = range(0, len(waiting), rows)
        together = [InputGroup(waiting[start : start + rows], speculation) for start in starts]
        return cls(together, rows, refill=rows)
