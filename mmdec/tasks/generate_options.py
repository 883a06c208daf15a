"""Options of transformers' `generate` that callers pass through a task: which are refused, and the maximum length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from mmdec.checks.arguments import UnknownOption, format_value
from mmdec.errors import InputError
from mmdec.generation.inputs import generate_option_names
from mmdec.targets.decoder import DecoderTarget
from mmdec.targets.registry import make_target
from mmdec.targets.ropes import max_positions

RESERVED = {  # option of `generate` that no task accepts -> the task's argument to use instead, or ""
    "assistant_model": "drafter",
    # names of the key-value cache, since transformers 5.24 and before
    **dict.fromkeys(("cache", "past_key_values"), ""),
    "custom_generate": "drafter",
    "generation_config": "options",
    "num_return_sequences": "",
    "output_attentions": "",
    "output_hidden_states": "",
    "return_dict_in_generate": "",
    "token_healing": "",
    "tokenizer": "",
}
LENGTH_OPTIONS = ("max_new_tokens", "max_length")  # options of `generate` that limit a text's length
# maximum number of new tokens of a text, if neither the caller nor the model's generation config sets one
MAX_NEW_TOKENS = 512


def check_generate_options(
    options: Mapping[str, Any], model: PreTrainedModel, reserved: Mapping[str, str], otherwise: str
) -> None:
    """Check the names of the options of `generate` that the caller passed.

    Args:
        options: The caller's options.
        reserved: Option that the task sets itself -> the task's argument for it, or "" if there is none.
        otherwise: Name of a call that accepts a reserved option, for the message.

    Raises:
        InputError: For a reserved option, and for one that is not None and that `generate` does not have.
    """
    known = generate_option_names(model) | vars(model.generation_config).keys()
    for name, value in options.items():
        if name in reserved:
            remedy = f"Use `{reserved[name]}`." if reserved[name] else f"Call `{otherwise}` for it."
            raise InputError(f"`{name}` must be left out, but is {format_value(value)}. {remedy}")
        if value is not None and name not in known:
            raise UnknownOption(name, known)


def sets_length(options: Mapping[str, Any]) -> bool:
    return any(options.get(name) is not None for name in LENGTH_OPTIONS)


def with_length(options: Mapping[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """Return the options that are not None, and a `max_new_tokens` if neither they nor the model limit the length."""
    present = {name: value for name, value in options.items() if value is not None}
    config: Any = model.generation_config
    if not sets_length(present) and config.max_new_tokens is None:
        present["max_new_tokens"] = MAX_NEW_TOKENS
    return present


def length_errors(model: PreTrainedModel, inputs: Mapping[str, Any], rule: str, remedy: str) -> dict[int, InputError]:
    """Return an error for each prompt that is longer than the model's maximum.

    Args:
        model: The model.
        inputs: Inputs of `generate`.
        rule: Beginning of the message, in which `{most}` is the maximum.
        remedy: Last sentence of the message.

    Returns:
        Row -> error.
    """
    max_length = max_positions(model.config.get_text_config(decoder=True))
    # fast check: a prompt never needs more positions than it has tokens
    if max_length is None or inputs["input_ids"].shape[1] <= max_length:
        return {}
    target = make_target(model)
    assert isinstance(target, DecoderTarget)
    return {
        row: InputError(f"{rule.format(most=max_length)}, but takes {count}. {remedy}")
        for row, count in enumerate(target.prompt_positions(inputs))
        if count > max_length
    }
