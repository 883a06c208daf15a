"""Checks the arguments of `generate` and `stream`: the model's inputs, and the options of `model.generate`.

What transformers would only notice while decoding, or not at all, raises an error here.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationConfig, PreTrainedModel

from mmdec.checks.arguments import check_callable, check_instance, check_whole, format_value, options_error
from mmdec.checks.devices import PASSED_ON
from mmdec.compat import CACHE_ARGUMENT
from mmdec.errors import InputError
from mmdec.generation.hf_bridge import BEAMS_REMEDY

MAX_SEQUENCES = 1024  # maximum of `num_return_sequences`, the texts per prompt, so that memory is not exhausted
# option that `model.generate` does not pass to a custom loop -> what to use instead, for the error message
REPLACED_OPTIONS = {
    "assistant_model": "Give it as `drafter`.",
    "streamer": "Iterate over `mmdec.stream`, or call `model.generate(custom_generate=mmdec.speculate(streamer=...))`.",
}


def prompt_inputs(model: PreTrainedModel, inputs: object) -> dict[str, Any]:
    """Return the model's inputs by name, checked.

    Args:
        inputs: Token ids (B, P), or a tokenizer's or processor's output.

    Raises:
        InputError: If the model cannot read them.
    """
    if not isinstance(inputs, (Tensor, Mapping)):
        raise InputError(
            f"`inputs` must be token ids (B, P) or a tokenizer's output, but is {format_value(inputs)}. Call "
            'tokenizer(text, return_tensors="pt").'
        )
    main = "input_ids"  # name of the input that the model reads: token ids; for a speech model, sound features
    if model.config.is_encoder_decoder:
        main = str(model.main_input_name)
    named: dict[object, Any] = {main: inputs}
    if not isinstance(inputs, Tensor):
        named = dict(cast(Mapping[object, Any], inputs))
    if main not in named or not all(isinstance(name, str) for name in named):
        names = ", ".join(format_value(name) for name in list(named)[:9]) or "nothing"
        raise InputError(f"`inputs` must hold `{main}`, but holds {names}. Give ids or a tokenizer's output.")
    if named.get("decoder_input_ids") is not None:
        _check_ids(model, "decoder_input_ids", named["decoder_input_ids"])
    if main != "input_ids":
        sound = named[main]
        if not isinstance(sound, Tensor) or not sound.is_floating_point() or sound.ndim < 2 or 0 in sound.shape:
            fault = (
                f"is {sound.dtype} {tuple(sound.shape)}" if isinstance(sound, Tensor) else f"is {format_value(sound)}"
            )
            raise InputError(f"`{main}` must hold the sound of a batch, but {fault}. Pass the processor's own output.")
        return cast(dict[str, Any], named)
    _check_ids(model, "input_ids", named["input_ids"])
    return cast(dict[str, Any], named)


def _check_ids(model: PreTrainedModel, name: str, ids: object) -> None:
    """Raise InputError for token ids that the model cannot read.

    Args:
        name: The argument's name, for the error message.
    """
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        fault = f"holds {ids.dtype}" if isinstance(ids, Tensor) else f"is {format_value(ids)}"
        raise InputError(
            f'`{name}` must be a tensor of whole numbers, but {fault}. Pass return_tensors="pt" to the tokenizer.'
        )
    if ids.ndim != 2 or 0 in ids.shape:
        shape = tuple(ids.shape)
        raise InputError(f"`{name}` must be (B, P) with at least one token a row, but is {shape}. Add a BOS token.")
    if ids.device.type != model.device.type:
        raise InputError(f"`{name}` must be on the model's {model.device}, but is on {ids.device}. Move it there.")
    tokens = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    low, high = (int(end) for end in ids.aminmax())
    if not 0 <= low <= high < tokens:
        raise InputError(
            f"`{name}` must be between 0 and {tokens - 1}, the model's tokens, but ranges from {low} to {high}. Use "
            "the model's own tokenizer."
        )


def check_options(options: Mapping[str, Any]) -> None:
    """Raise InputError for options of `model.generate` that would fail or exhaust the memory before decoding begins."""
    _check_values(options)
    if "custom_generate" in options:
        raise InputError(
            f"`custom_generate` must be left out, but is {format_value(options['custom_generate'])}. Call "
            "`model.generate` to use another loop than mmdec's."
        )
    if options.get("cache_implementation") == "paged":
        raise InputError(
            "`cache_implementation` must be left out, but is 'paged', with which transformers runs a decoding loop of "
            "its own. Call `model.generate_batch` for it."
        )
    config = options.get("generation_config")
    if config is not None:
        check_instance(
            "generation_config", config, GenerationConfig, "a GenerationConfig", "Leave it out for the model's."
        )
    for name in ("output_hidden_states", "output_attentions"):
        if options.get(name):
            raise InputError(
                f"`{name}` must be left out, because a `Generation` holds only sequences and rounds. Pass it to "
                "`model.generate(..., custom_generate=mmdec.speculate(drafter))`."
            )
    for name, remedy in REPLACED_OPTIONS.items():
        if options.get(name) is not None:
            raise InputError(f"`{name}` must be left out, but is {format_value(options[name])}. {remedy}")
    # options that multiply the number of rows
    for name, maximum, remedy in (
        ("num_beams", 1, BEAMS_REMEDY),
        ("num_return_sequences", MAX_SEQUENCES, "Call it several times for more."),
    ):
        if options.get(name) is not None:
            check_whole(name, options[name], 1, maximum, remedy)
    check_callable("prefix_allowed_tokens_fn", options.get("prefix_allowed_tokens_fn"), "a function of a row and ids")
    for name in ("logits_processor", "stopping_criteria"):
        functions: object = options.get(name)
        if functions is not None and not (
            isinstance(functions, list) and all(map(callable, cast(list[object], functions)))
        ):
            raise InputError(
                f"`{name}` must be a list of functions, but is {format_value(cast(object, functions))}. Put it into a "
                "list."
            )


def check_named_inputs(named: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise InputError for a mask, positions or a cache that the model cannot read.

    Args:
        named: The model's inputs by name.
        options: The options of the call, which may hold inputs, too.
    """
    if twice := sorted(options.keys() & named.keys()):
        raise InputError(f"`{twice[0]}` must be given once, but is both in `inputs` and among the options. Drop one.")
    _check_values(named)


def _check_values(values: Mapping[str, Any]) -> None:
    for name in ("attention_mask", "position_ids"):
        value = values.get(name)
        if value is not None and not isinstance(value, Tensor):
            raise InputError(f"`{name}` must be a tensor, but is {format_value(value)}. Pass the tokenizer's own.")
        if name == "attention_mask" and value is not None and not bool(((value == 0) | (value == 1)).all()):
            raise InputError("`attention_mask` must hold 0 and 1, but holds other numbers. Pass the tokenizer's own.")
    cache = values.get(CACHE_ARGUMENT)
    if cache is not None and not isinstance(cache, Cache):
        raise InputError(f"`{CACHE_ARGUMENT}` must be a DynamicCache, but is {format_value(cache)}. Leave it out.")


def tokenizer_options(options: dict[str, Any], model: PreTrainedModel) -> tuple[Any, bool]:
    """Remove the options that need a tokenizer, because `model.generate` does not pass its tokenizer to a custom loop.

    Returns:
        `stop_strings`, the strings at which a text ends, or None; and whether to apply `token_healing`.
    """
    values: dict[str, Any] = {}
    for name in ("stop_strings", "token_healing"):
        if setting := getattr(model.generation_config, name, None):  # the model's setting, unless the call has one
            raise InputError(
                f"`model.generation_config.{name}` must be None, but is {format_value(setting)}. Set it to None, and "
                f"pass `{name}` with `tokenizer`."
            )
        value, config = options.pop(name, None), options.get("generation_config")
        if value is None and getattr(config, name, None) is not None:
            value = getattr(config, name)
            options["generation_config"] = config = copy.deepcopy(config)
            setattr(config, name, None)
        values[name] = value
        if value not in (None, False) and options.get("tokenizer") is None:
            raise InputError(f"`tokenizer` must be given with `{name}`, but is None. Pass the model's tokenizer.")
    return values["stop_strings"], bool(values["token_healing"])


def heal_tokens(ids: Tensor, mask: Tensor | None, model: PreTrainedModel, tokenizer: Any) -> Tensor:
    """Return the token ids (B, P) after transformers' token healing, which replaces the end of each prompt.

    Raises:
        InputError: If the number of tokens changes, because the mask (B, P) would no longer fit.
    """
    healed = cast(Any, model).heal_tokens(ids, tokenizer)
    if healed.shape != ids.shape or mask is None:
        problem = (
            f"have {healed.shape[1]} columns for {ids.shape[1]}" if mask is not None else "come without their mask"
        )
        raise InputError(
            f"`token_healing` must be given with `attention_mask` and prompts that keep their length, but they "
            f"{problem}. Pass the tokenizer's own output for texts without spaces at their ends."
        )
    return healed


def generate_option_names(model: PreTrainedModel) -> set[str]:
    """Return the names of all arguments of `model.generate`: its own, generation settings, and the model's inputs."""
    functions: tuple[Any, ...] = (model.generate, model.prepare_inputs_for_generation, model.forward)
    parameters = {name for function in functions for name in signature(function).parameters}
    return {name for name in {*parameters, *vars(GenerationConfig())} if not name.startswith("_")}


@contextmanager
def options_errors(model: PreTrainedModel, passed: Collection[str], others: Collection[str] = ()) -> Generator[None]:
    """Context manager: turn what transformers raises for options, which may be anything, into InputErrors.

    Args:
        model: The model.
        passed: Names of the options that may be the cause.
        others: Names of the call's arguments that are not `model.generate`'s, for suggestions.
    """
    try:
        yield
    except PASSED_ON:
        raise
    except Exception as error:
        raise options_error(passed, error, {*generate_option_names(model), *others}) from error
