"""A smaller copy of a language model: some of its layers, with the same weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from mmdec.errors import InputError
from mmdec.targets.hf_target import has_hooks, shallow_copy
from mmdec.targets.recurrent_cache import has_states


def smaller_copy(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Copy a decoder-only language model without some of its layers. The copy shares all weights.

    Embedding, final norm and LM head stay. In the copy's configuration and its cache, only the remaining layers count.

    Args:
        model: The model, which is not changed.
        layers: Indices of the layers that stay, ascending, from 0.

    Raises:
        InputError: If layers cannot be left out of this kind of model.
    """
    model_config: Any = model.config
    path, stack = _layers_of(model)
    config = copy.deepcopy(model_config)
    for name, value in list(vars(config).items()):  # what the configuration says of each layer
        if isinstance(value, (list, tuple)) and len(value) == len(stack):
            setattr(config, name, type(value)(value[index] for index in layers))
    config.num_hidden_layers = len(layers)
    smaller = part = shallow_copy(model)
    for name in path[:-1]:
        _set_config(part, config)
        part._modules[name] = shallow_copy(cast(nn.Module, part._modules[name]))
        part = cast(Any, part._modules[name])
    _set_config(part, config)
    part._modules[path[-1]] = nn.ModuleList([_indexed_copy(stack[layer], index) for index, layer in enumerate(layers)])
    return smaller


def _layers_of(model: PreTrainedModel) -> tuple[list[str], nn.ModuleList]:
    """Return the names that lead from a model to the list of its decoder layers, and this list."""
    config: Any = model.config
    rule = "`drafter` must be another one than early_exit for this model"
    remedy = 'Use "lookup" or "recycling".'
    if config.is_encoder_decoder or config.get_text_config(decoder=True) is not config:
        raise InputError(
            f"{rule}: only decoder-only language models can skip layers, not {type(model).__name__}. {remedy}"
        )
    if has_states(config) or getattr(config, "num_kv_shared_layers", 0):
        raise InputError(f"{rule}: layers of {type(model).__name__} read the states of others. {remedy}")
    for name, part in model.named_modules():
        if isinstance(part, nn.ModuleList) and len(part) == config.num_hidden_layers:
            if any("forward" in vars(inner) for inner in part.modules()) or any(map(has_hooks, part)):
                raise InputError(f"{rule}: its layers have hooks, which are tied to the whole model. Remove them.")
            return name.split("."), part
    raise InputError(
        f"{rule}: the {config.num_hidden_layers} layers of {type(model).__name__} are not in one list. {remedy}"
    )


def _set_config(part: nn.Module, config: Any) -> None:
    if "config" in vars(part):
        vars(part)["config"] = config


def _indexed_copy(module: nn.Module, index: int) -> nn.Module:
    """Copy a layer and its parts, which share the weights, with another index in the cache."""
    same = shallow_copy(module)
    if "layer_idx" in vars(same):
        vars(same)["layer_idx"] = index
    for name, part in same._modules.items():
        if part is not None:
            same._modules[name] = _indexed_copy(part, index)
    return same
