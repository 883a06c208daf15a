"""Divides the inputs of a list into groups that share the passes of the model, and collects their results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, final

from transformers import PreTrainedModel

from mmdec.generation.generate import first_seed
from mmdec.generation.hf_bridge import keeps_state
from mmdec.generation.speculation import Speculation

Result = TypeVar("Result")


@final
@dataclass(frozen=True)
class InputGroup:
    """Inputs of a call whose prompts are read in one pass."""

    indices: list[int]  # in the call
    speculation: Speculation  # their decoding loop


@final
@dataclass(frozen=True)
class InputGroups:
    """All inputs of a call. The text of an input does not depend on its group.

    A group fills all rows and is read in one pass over its prompts, and the next begins when it has ended: each group
    has a pass, a call of the processor and a preparation of its own, which cost a small model more than rows that are
    free. Inputs that are sampled are groups of one, because each has a seed of its own: the call's plus its index. They
    begin as soon as there is room.
    """

    model: PreTrainedModel
    speculation: Speculation  # the decoding loop of the call
    groups: list[InputGroup]
    rows: int  # number of inputs that may be decoded at the same time
    refill: int  # number of free rows from which the next group begins

    @classmethod
    def of(
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
            speculation: The decoding loop of the call.
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
            return cls(model, speculation, single, rows, refill=1)
        starts = range(0, len(waiting), rows)
        together = [InputGroup(waiting[start : start + rows], speculation) for start in starts]
        return cls(model, speculation, together, rows, refill=rows)


def collect_in_order(
    finished: Iterable[Mapping[int, Result]],
    indices: Iterable[int],
    on_result: Callable[[int, Result], None] | None,
    errors: Collection[int] = (),
) -> dict[int, Result]:
    """Collect results as they end, and pass each to `on_result`, in the order of the inputs.

    Args:
        finished: Yields index -> result of some inputs, as they end.
        indices: The inputs' indices in the call, in their order.
        errors: Indices of the inputs that get no result; the decoding adds indices to it.

    Returns:
        Index -> result.
    """
    results, remaining = dict[int, Result](), list(indices)
    for some in finished:
        results |= some
        while on_result is not None and remaining and (remaining[0] in results or remaining[0] in errors):
            index = remaining.pop(0)
            if index in results:
                on_result(index, results[index])
    return results
