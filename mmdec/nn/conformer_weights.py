"""Converts the names of the speech encoder's weights between fairseq, fairseq2 and mmdec.

The three encoders hold the same tensors in the same shapes; only the names differ. mmdec's are fairseq's without
`encoder.`; fairseq2's are those of its `s2t_conformer` with `use_relative_pos=True`. Nothing is copied: the result
holds the same tensor objects. The caller opens files, also those that keep the weights under "model".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from mmdec.nn.conformer import EncoderConfig, SpeechEncoder
from mmdec.types import InputError

FRONT_NAMES: dict[str, str] = {  # our module -> fairseq2's
    "subsample.conv_layers.0": "encoder_frontend.feature_extractor.layers.0.conv",
    "subsample.conv_layers.1": "encoder_frontend.feature_extractor.layers.1.conv",
    "linear": "encoder_frontend.proj",
}
BLOCK_NAMES: dict[str, str] = {  # our module (or bare tensor) in a Conformer block -> fairseq2's
    "ffn1.layer_norm": "ffn1_layer_norm",
    "ffn1.w_1": "ffn1.inner_proj",
    "ffn1.w_2": "ffn1.output_proj",
    "self_attn_layer_norm": "self_attn_layer_norm",
    "self_attn.linear_q": "self_attn.q_proj",
    "self_attn.linear_k": "self_attn.k_proj",
    "self_attn.linear_v": "self_attn.v_proj",
    "self_attn.linear_out": "self_attn.output_proj",
    "self_attn.linear_pos": "self_attn.sdpa.r_proj",
    "self_attn.pos_bias_u": "self_attn.sdpa.u_bias",
    "self_attn.pos_bias_v": "self_attn.sdpa.v_bias",
    "conv_module.layer_norm": "conv_layer_norm",
    "conv_module.pointwise_conv1": "conv.pointwise_conv1",
    "conv_module.depthwise_conv": "conv.depthwise_conv",
    "conv_module.batch_norm": "conv.batch_norm",
    "conv_module.pointwise_conv2": "conv.pointwise_conv2",
    "ffn2.layer_norm": "ffn2_layer_norm",
    "ffn2.w_1": "ffn2.inner_proj",
    "ffn2.w_2": "ffn2.output_proj",
    "final_layer_norm": "layer_norm",
}


def from_fairseq2(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """fairseq2 `s2t_conformer` state -> state of our `SpeechEncoder`. Weights of a decoder are left out."""
    encoder = {name: value for name, value in state.items() if name.startswith(("encoder.", "encoder_frontend."))}
    names = _names(encoder, r"encoder\.layers\.(\d+)\.", _fairseq2_name)
    return _checked(_renamed(encoder, {theirs: ours for ours, theirs in names.items()}, "a fairseq2 s2t_conformer"))


def to_fairseq2(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State of our `SpeechEncoder` -> fairseq2's names (`encoder_frontend.*` and `encoder.*`)."""
    return _renamed(_checked(state), _names(state, _OUR_BLOCK, _fairseq2_name), "a SpeechEncoder")


def from_fairseq(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """fairseq `s2t_conformer` or DASpeech state -> state of our `SpeechEncoder`. Other weights are left out."""
    encoder = {name: value for name, value in state.items() if name.startswith("encoder.")}
    names = _names(encoder, r"encoder\.conformer_layers\.(\d+)\.", _fairseq_name)
    return _checked(_renamed(encoder, {theirs: ours for ours, theirs in names.items()}, "a fairseq s2t_conformer"))


def to_fairseq(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State of our `SpeechEncoder` -> fairseq's and DASpeech's names (`encoder.*`)."""
    return _renamed(_checked(state), _names(state, _OUR_BLOCK, _fairseq_name), "a SpeechEncoder")


def encoder_config(state: Mapping[str, Tensor], dropout: float = 0.1) -> EncoderConfig:
    """The configuration of the encoder with this state (our names); `dropout` cannot be read from weights."""
    block = "conformer_layers.0."
    try:
        return EncoderConfig(
            features=state["subsample.conv_layers.0.weight"].shape[1],  # (channels, features, 5)
            channels=state["subsample.conv_layers.0.weight"].shape[0],
            d_model=state["linear.weight"].shape[0],
            ffn=state[block + "ffn1.w_1.weight"].shape[0],
            heads=state[block + "self_attn.pos_bias_u"].shape[0],
            layers=_layers(state, _OUR_BLOCK),
            kernel=state[block + "conv_module.depthwise_conv.weight"].shape[2],
            dropout=dropout,
        )
    except (KeyError, IndexError) as error:
        raise InputError(
            "`state` must be that of a SpeechEncoder, but its sizes cannot be read off its tensors "
            f"({type(error).__name__}: {error}). Pass a whole state, from one model."
        ) from error


_OUR_BLOCK = r"conformer_layers\.(\d+)\."


def _fairseq_name(ours: str) -> str:
    return f"encoder.{ours}"


def _fairseq2_name(ours: str) -> str:
    block = re.match(_OUR_BLOCK, ours)
    rest = ours[block.end() :] if block else ours
    names = BLOCK_NAMES if block else FRONT_NAMES
    prefix = f"encoder.layers.{block[1]}." if block else ""
    if rest in names:
        return prefix + names[rest]
    module, _, tensor = rest.rpartition(".")
    return f"{prefix}{names[module]}.{tensor}"


def _layers(names: Iterable[str], block: str) -> int:
    """Number of blocks in the names; at least 1, so that an empty state gives an error about missing weights."""
    return max(1, len({layer[1] for name in names if (layer := re.match(block, name))}))


def _names(state: Mapping[str, Tensor], block: str, rename: Callable[[str], str]) -> dict[str, str]:
    """A table for each block in `state`: our name -> the other library's name."""
    with torch.device("meta"):
        ours = SpeechEncoder(EncoderConfig(layers=_layers(state, block))).state_dict()
    return {name: rename(name) for name in ours}


def _renamed(state: Mapping[str, Tensor], names: Mapping[str, str], kind: str) -> dict[str, Tensor]:
    """Rename `state`. Raises InputError if its keys are not exactly those of `names`."""
    missing = [name for name in names if name not in state]
    unexpected = [name for name in state if name not in names]
    if missing or unexpected:
        parts = [f"lacks {_listed(missing)}"] if missing else []
        parts += [f"has the unexpected {_listed(unexpected)}"] if unexpected else []
        raise InputError(
            f"`state` must hold the tensors of {kind} encoder with relative positions, but {' and '.join(parts)}. "
            "Pass the state of such an encoder, under the names it was saved with."
        )
    return {new: state[old] for old, new in names.items()}


def _checked(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state (our names) if its names and shapes fit one `SpeechEncoder`, else raise InputError."""
    names = _names(state, _OUR_BLOCK, str)
    state = _renamed(state, names, "a SpeechEncoder")
    with torch.device("meta"):
        expected = SpeechEncoder(encoder_config(state)).state_dict()
    for name, value in state.items():
        if value.shape != expected[name].shape:
            raise InputError(
                f"`state` must have shapes that fit one encoder, but {name} is {tuple(value.shape)} "
                f"where the others ask for {tuple(expected[name].shape)}. Pass a whole state, from one model."
            )
    return state


def _listed(names: list[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
