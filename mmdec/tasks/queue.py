"""Decodes the inputs of a list: as many at a time as there is room for, which share the passes of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import closing
from typing import Any

from transformers import PreTrainedModel

from mmdec.core.scheduler import decode_together
from mmdec.core.steps import Steps
from mmdec.generation.generate import first_seed
from mmdec.generation.hf_bridge import keeps_state
from mmdec.generation.model_lock import reading
from mmdec.generation.speculation import Speculation


def decode_queue(
    model: PreTrainedModel,
    speculation: Speculation,
    options: Mapping[str, Any],
    indices: Iterable[int],
    rows: int,
    steps: Callable[[list[int], Speculation], Steps[Any]],
) -> Generator[Any]:
    """Decode inputs in groups. The text of an input does not depend on its group.

    A group fills all rows and is read in one pass over its prompts, and the next begins when it has ended: each group
    has a pass, a call of the processor and a preparation of its own, which cost a small model more than rows that are
    free. Inputs that are sampled are groups of one, because each has a seed of its own: the call's plus its index. They
    begin as soon as there is room.

    Args:
        model: The model.
        speculation: The decoding loop of the call.
        options: Arguments of `model.generate`.
        indices: The inputs' indices in the call.
        rows: Number of inputs that may be decoded at the same time.
        steps: Makes the decoding of a group from its indices and its decoding loop.

    Yields:
        What the steps of each group returned, as groups end. Meanwhile this thread holds the locks of the model and of
        the drafter's networks.
    """
    waiting = list(reversed(list(indices)))
    seed = first_seed(model, speculation, options, draw=len(waiting) > 1)
    if keeps_state(options):
        rows = 1  # one after another, in their order

    def take(room: int) -> tuple[None, Steps[Any], int] | None:
        group = [waiting.pop() for _ in range(min(len(waiting), room if seed is None else 1))]
        if not group:
            return None
        own = speculation if seed is None else speculation.with_seed(seed + group[0])
        return None, steps(group, own), len(group)

    with (
        reading(model, *speculation.networks),
        closing(decode_together(take, rows, refill=rows if seed is None else 1)) as ended,
    ):
        for _, result in ended:
            yield result


def ordered_reporter(
    indices: Iterable[int],
    results: Mapping[int, Any],
    on_result: Callable[[int, Any], None] | None,
    errors: Collection[int] = (),
) -> Callable[[], None]:
    """Return a function that passes new results to `on_result`, each once, in the order of the inputs.

    Args:
        indices: The inputs' indices in the call, in their order.
        results: Index -> result; the caller adds those that are finished.
        errors: Indices of the inputs that get no result; the caller adds indices to it.
    """
    remaining = list(indices)

    def report_finished() -> None:
        while on_result is not None and remaining and (remaining[0] in results or remaining[0] in errors):
            index = remaining.pop(0)
            if index in results:
                on_result(index, results[index])

    return report_finished
