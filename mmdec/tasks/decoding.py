"""Decodes the inputs of one pass over prompts with a language model, and counts what each of them costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from transformers import PreTrainedModel

from mmdec.core.steps import ActiveTime, Steps
from mmdec.generation.generate import GenerateCall
from mmdec.generation.speculation import Speculation
from mmdec.tasks.generate_options import with_length
from mmdec.tasks.usage import Usage, count_round, rest_seconds
from mmdec.types import Round


def decode_inputs(
    model: PreTrainedModel,
    tokenizer: Any,
    speculation: Speculation,
    options: Mapping[str, Any],
    inputs: Mapping[str, Any],
    usage: Sequence[Usage],
    on_round: Callable[[Round], None],
) -> Steps[float]:
    """Decode inputs whose prompts are read in one pass, as a generator of passes.

    Args:
        model: The language model.
        tokenizer: Its tokenizer, for `stop_strings`.
        speculation: The drafter, rule and draft size.
        options: Further arguments of `generate`.
        inputs: The inputs of `generate`.
        usage: One for each input, which counts its rounds and gets its tokens.
        on_round: Called with each round after it was counted.

    Returns:
        Each input's share of the seconds outside the stages of `usage`.

    Raises:
        InputError: For an option that the model rejects.
    """
    drafts = speculation.drafter_for(model) is not None
    options = with_length(options, model)
    if "stop_strings" in options:
        options["tokenizer"] = tokenizer
    time = ActiveTime(model.device)
    run = GenerateCall.from_options(model, speculation, options).prepare(inputs)
    with closing(run.steps) as steps:
        while (round_ := (yield from time.next_round(steps))) is not None:
            count_round(round_, usage, drafts)
            on_round(round_)
            yield from time.wait(round_)
    return rest_seconds(time, usage)
