"""The inputs of a language model's `generate`: token ids and other tokenizer outputs, checked."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationConfig, PreTrainedModel

from mmdec.checks.arguments import check_callable, check_whole, show
from mmdec.types import InputError

MAX_SEQUENCES = 1024  # maximum sequences per prompt
INSTEAD = {  # options that `generate` does not pass to a custom loop, with the alternative
    "assistant_model": "Give it as `drafter`.",
    "streamer": "Iterate over `mmdec.stream`, or call `model.generate(custom_generate=mmdec.speculate(streamer=...))`.",
}


def prompt_inputs(model: PreTrainedModel, inputs: object) -> dict[str, Any]:
    """Model inputs by name, from token ids or a tokenizer's output. Raises InputError if the model cannot read them."""
    if not isinstance(inputs, (Tensor, Mapping)):
        raise InputError(
            f"`inputs` must be token ids (B, P) or a tokenizer's output, but is {show(inputs)}. Call "
            'tokenizer(text, return_tensors="pt").'
        )
    named: dict[object, Any] = {"input_ids": inputs}
    if not isinstance(inputs, Tensor):
        named = dict(cast(Mapping[object, Any], inputs))
    if "input_ids" not in named or not all(isinstance(name, str) for name in named):
        listed = ", ".join(show(name) for name in list(named)[:9]) or "nothing"
        raise InputError(f"`inputs` must hold `input_ids`, but holds {listed}. Give ids or a tokenizer's output.")
    ids = named["input_ids"]
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        fault = f"holds {ids.dtype}" if isinstance(ids, Tensor) else f"is {show(ids)}"
        raise InputError(
            f'`input_ids` must be a tensor of whole numbers, but {fault}. Pass return_tensors="pt" to the tokenizer.'
        )
    if ids.ndim != 2 or 0 in ids.shape:
        shape = tuple(ids.shape)
        raise InputError(f"`input_ids` must be (B, P) with at least one token a row, but is {shape}. Add a BOS token.")
    if ids.device.type != model.device.type:
        raise InputError(f"`input_ids` must be on the model's {model.device}, but is on {ids.device}. Move it there.")
    tokens = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    low, high = (int(end) for end in ids.aminmax())
    if not 0 <= low <= high < tokens:
        raise InputError(
            f"`input_ids` must lie from 0 to {tokens - 1}, the model's tokens, but go from {low} to {high}. Use the "
            "model's own tokenizer."
        )
    return cast(dict[str, Any], named)


def check_options(options: Mapping[str, Any], named: Mapping[str, Any]) -> None:
    """Raise InputError for options of `generate` that would fail or exhaust the memory before the loop starts.

    named: the inputs by name.
    """
    if "custom_generate" in options:
        raise InputError(
            f"`custom_generate` must be left out, but is {show(options['custom_generate'])}. Call `model.generate` for "
            "another loop than mmdec's."
        )
    if options.get("cache_implementation") == "paged":
        raise InputError(
            "`cache_implementation` must be left out, but is 'paged', with which transformers runs a decoding loop of "
            "its own. Call `model.generate_batch` for it."
        )
    for name, remedy in INSTEAD.items():
        if options.get(name) is not None:
            raise InputError(f"`{name}` must be left out, but is {show(options[name])}. {remedy}")
    if twice := sorted(options.keys() & named.keys()):
        raise InputError(f"`{twice[0]}` must be given once, but is among `inputs` and the options. Drop one.")
    for name in ("num_beams", "num_return_sequences"):  # they multiply the rows
        if options.get(name) is not None:
            most = 1 if name == "num_beams" else MAX_SEQUENCES
            check_whole(name, options[name], 1, most, "Beams need `model.generate`'s own loop.")
    for name in ("attention_mask", "position_ids"):
        value = {**named, **options}.get(name)
        if value is not None and not isinstance(value, Tensor):
            raise InputError(f"`{name}` must be a tensor, but is {show(value)}. Pass the tokenizer's own.")
        if name == "attention_mask" and value is not None and not bool(((value == 0) | (value == 1)).all()):
            raise InputError("`attention_mask` must hold 0 and 1, but holds other numbers. Pass the tokenizer's own.")
    check_callable("prefix_allowed_tokens_fn", options.get("prefix_allowed_tokens_fn"), "a function of a row and ids")
    cache = {**named, **options}.get("past_key_values")
    if cache is not None and not isinstance(cache, Cache):
        raise InputError(f"`past_key_values` must be a DynamicCache, but is {show(cache)}. Leave it out.")
    for name in ("logits_processor", "stopping_criteria"):
        listed: object = options.get(name)
        if listed is not None and not _functions(listed):
            raise InputError(f"`{name}` must be a list of functions, but is {show(listed)}. Put it into a list.")


def tokenizer_options(options: dict[str, Any], model: PreTrainedModel) -> tuple[Any, bool]:
    """Remove from `options` those that need a tokenizer, which `generate` does not pass to a custom loop.

    Returns: the strings at which a text ends, or None; and whether to heal the prompts' last tokens.
    """
    taken: dict[str, Any] = {}
    for name in ("stop_strings", "token_healing"):
        if own := getattr(model.generation_config, name, None):  # the model's own setting, if the call has none
            raise InputError(
                f"`model.generation_config.{name}` must be None, but is {show(own)}. Set it to None, and pass `{name}` "
                "with `tokenizer`."
            )
        value, given = options.pop(name, None), options.get("generation_config")
        if value is None and getattr(given, name, None) is not None:
            value = getattr(given, name)
            options["generation_config"] = given = copy.deepcopy(given)
            setattr(given, name, None)
        taken[name] = value
        if value not in (None, False) and options.get("tokenizer") is None:
            raise InputError(f"`tokenizer` must be given with `{name}`, but is None. Pass the model's tokenizer.")
    return taken["stop_strings"], bool(taken["token_healing"])


def healed(ids: Tensor, mask: Tensor | None, model: PreTrainedModel, tokenizer: Any) -> Tensor:
    """Token ids (B, P) after `generate`'s token healing.

    Raises: InputError if their number changes, because mask (B, P) would no longer fit.
    """
    found = cast(Any, model).heal_tokens(ids, tokenizer)
    if found.shape != ids.shape or mask is None:
        given = f"have {found.shape[1]} columns for {ids.shape[1]}" if mask is not None else "come without their mask"
        raise InputError(
            f"`token_healing` must be given with `attention_mask` and prompts that keep their length, but they {given}."
            " Pass the tokenizer's own output for texts without spaces at their ends."
        )
    return found


def option_names(model: PreTrainedModel) -> set[str]:
    """All names that `model.generate` takes: its arguments, generation settings, and the model's inputs."""
    functions: tuple[Any, ...] = (model.generate, model.prepare_inputs_for_generation, model.forward)
    taken = {name for function in functions for name in signature(function).parameters}
    return {name for name in {*taken, *vars(GenerationConfig())} if not name.startswith("_")}


def _functions(listed: object) -> bool:
    """Whether this is a list of callables."""
    return isinstance(listed, list) and all(map(callable, cast(list[object], listed)))
