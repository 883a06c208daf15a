"""Reads networks of EAGLE's family in their published formats, which are recognised by tensor names and config.json.

| format | recognised by | its target |
|---|---|---|
| EAGLE-1/2 (SafeAILab) | `fc.weight` (H, 2 H), `layers.0.*` | the language model it was trained for |
| MSD | the same, and a config of a model that reads images | MSD-LLaVA1.5-*: liuhaotian/llava-v1.5, of 32000 \
tokens. llava-hf's has 64 more at the end: convert with 32064. MSD-Qwen2VL-7B-Instruct: Qwen/Qwen2-VL-7B-Instruct |
| ViSpec | `imadpt.*` | the model in its name, as transformers has it |
| EAGLE-3 (SafeAILab, SpecForge, AngelSlim, NVIDIA; NeMo with `model.` in front) | `midlayer.*` | |
| EAGLE-3 of speculators | `layers.0.hidden_norm.weight`; sizes in `transformer_layer_config` | its verifier |
| P-EAGLE | EAGLE-3's and `mask_hidden` | |

If a known format is not supported, the error names it. A tensor that the format does not have is an error: if it were
ignored, fewer drafts would be accepted. Only copies of the target's parts are ignored: its head, its norm, computed
rotations, and the embedding of EAGLE-1/2.

The ids of the target layers that EAGLE-3 reads have two meanings. "Boundary k" is the residual stream that enters layer
k, so the output of layer k - 1. speculators' top-level ids are boundaries. In `eagle_config` the ids are outputs if the
first one is 1 (SpecForge, AngelSlim, NVIDIA), else boundaries. Without ids the boundaries are 2, n // 2 and n - 3 for n
target layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from mmdec.drafters.networks.checkpoint import (
    FIRST_LAYER,
    PLAIN_ROPE,
    SCALED_ROPE,
    attention_sizes,
    build_network,
    check_layer,
    check_no_system,
    layered_fields,
    mmdec_fields,
    published_settings,
    read_rope,
    rename_tensors,
    with_vocabulary_tables,
)
from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.errors import InputError
from mmdec.hub.checkpoint import Checkpoint

System = Literal["eagle", "msd", "vispec"]
SYSTEMS: tuple[System, ...] = get_args(System)
# EAGLE-1/2's tensors that are not read: copies of the target's, and computed rotations
UNUSED_TENSORS = re.compile(r"(model\.)?embed_tokens\.weight|lm_head\.weight|.*\.rotary_emb\.inv_freq")
EAGLE3_TENSORS = re.compile(r"(model\.)?(midlayer\..*|layers\.0\.hidden_norm\.weight|mask_hidden)")
NETWORK_TENSORS = re.compile(r"(model\.)?((encoder\.)?fc\.weight|fc_gate\.weight|imadpt\..*)")
VISION_CONFIG_KEYS = ("vision_config", "mm_vision_tower")  # config entries that only models that read images have


def recognises(described: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Return whether a folder holds a network of EAGLE's family, or one like it that no other format explains.

    Args:
        described: The content of config.json.
        names: The tensors' names.
    """
    kind = described.get("speculators_model_type") or ""
    if kind or any(EAGLE3_TENSORS.fullmatch(name) for name in names):
        return kind in ("", "eagle3", "peagle")
    return any(NETWORK_TENSORS.fullmatch(name) for name in names)


def read_published(
    checkpoint: Checkpoint, system: str | None, vocab_size: int | None, target_tokens: int | None
) -> DraftNetwork:
    """Make the network of a folder; see `mmdec.pretrained.published.PublishedFormat`."""
    if any(EAGLE3_TENSORS.fullmatch(name) for name in checkpoint.state):
        check_no_system(system, "EAGLE-3")
        return _eagle3(checkpoint, vocab_size)
    return _eagle(checkpoint, system, vocab_size)


def _eagle(checkpoint: Checkpoint, system: str | None, vocab_size: int | None) -> DraftNetwork:
    """Make an EAGLE-1/2, MSD or ViSpec network."""
    detected = _system(checkpoint)
    if system is not None and "vispec" in (detected, system) and system != detected:
        raise InputError(f"`system` must be {detected} for this checkpoint, but is {system!r}. Leave it out.")
    name = system or detected
    state = {key: value for key, value in checkpoint.state.items() if not UNUSED_TENSORS.fullmatch(key)}
    sizes = _sizes(checkpoint)
    if vocab_size is not None:
        sizes["vocab_size"] = vocab_size
    if name == "vispec":
        sizes["queries"] = len(state["imadpt.q"])
    if name == "msd":
        sizes["visual_token"] = "next"  # as MSD's published code does in training and decoding
    return build_network(name, sizes, state, checkpoint)


def _system(checkpoint: Checkpoint) -> System:
    """Return mmdec's name of the drafter.

    Raises:
        InputError: For a format that is not supported; the message says why.
    """
    state = checkpoint.state
    rule = "hold an EAGLE, MSD or ViSpec network"
    if "fc_gate.weight" in state or "A" in state:
        raise checkpoint.error(
            rule, "holds FLASH's, whose published decoding does not fit its training", "Train one with the recipes."
        )
    for name in ("fc.weight", *(f"{FIRST_LAYER}{part}.weight" for part in ("self_attn.q_proj", "self_attn.k_proj"))):
        checkpoint.shape(name)
    checkpoint.shape(f"{FIRST_LAYER}mlp.gate_proj.weight")
    others = [name for name in state if name.startswith("layers.") and not name.startswith(FIRST_LAYER)]
    if others:
        raise checkpoint.error("have one layer", f"holds '{others[0]}'", "Networks of more are unknown.")
    if "imadpt.q" in state and state["imadpt.q"].dim() == 3:
        return "vispec"
    return "msd" if any(checkpoint.config.get(name) for name in VISION_CONFIG_KEYS) else "eagle"


def _sizes(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the fields of EAGLE-1/2's configuration, from tensor shapes where possible, else from the config."""
    state, settings = checkpoint.state, published_settings(checkpoint)
    size, width = checkpoint.shape("fc.weight")
    if width != 2 * size:
        raise checkpoint.error(
            f"have an fc of 2 x {size} channels",
            f"has one of {width}",
            "A network that reads several layers is EAGLE-3's, and holds 'midlayer.' or 'layers.0.hidden_norm.weight'.",
        )
    table = state.get("embed_tokens.weight", state.get("model.embed_tokens.weight"))
    return {
        **attention_sizes(checkpoint, settings),
        "hidden_size": size,
        "vocab_size": len(table) if table is not None else settings.get("vocab_size"),
        "rope_theta": read_rope(checkpoint, settings, PLAIN_ROPE)[0],
        "input_norm": f"{FIRST_LAYER}input_layernorm.weight" in state,
    }


def _eagle3(checkpoint: Checkpoint, vocab_size: int | None) -> DraftNetwork:
    """Make an EAGLE-3 or P-EAGLE network from a flat config or from speculators'.

    Args:
        vocab_size: The target's vocabulary size; None: the size in the folder.
    """
    checkpoint = rename_tensors(checkpoint, lambda name: re.sub(r"^midlayer\.", FIRST_LAYER, name))
    sizes = _eagle3_sizes(checkpoint, vocab_size)
    return build_network("eagle3", sizes, with_vocabulary_tables(checkpoint, sizes), checkpoint)


def _eagle3_sizes(checkpoint: Checkpoint, vocab_size: int | None) -> dict[str, Any]:
    """Return the fields of EAGLE-3's configuration.

    Args:
        vocab_size: The target's vocabulary size; None: the size in the folder.
    """
    state, described, settings = checkpoint.state, checkpoint.config, published_settings(checkpoint)
    size, width = checkpoint.shape("fc.weight")
    target = described.get("target_hidden_size") or size
    if type(target) is not int or target < 1 or width % target:
        raise checkpoint.error(
            f"say how many states of the target {width} inputs of fc are",
            f"has `target_hidden_size` {target!r:.60}",
            "Set `target_hidden_size` in config.json to the target's `hidden_size`.",
        )
    if checkpoint.shape(f"{FIRST_LAYER}self_attn.q_proj.weight")[1] != 2 * size:
        raise checkpoint.error(
            f"have a first layer that reads 2 x {size} channels", "does not", "Name EAGLE-3's folder."
        )
    check_layer(checkpoint, settings)
    _, rope = read_rope(checkpoint, settings, (*PLAIN_ROPE, *SCALED_ROPE))
    sections = rope.get("mrope_section") or ()
    options = described.get("eagle_config")
    options = {**(options if isinstance(options, dict) else {}), **described}
    mask = options.get("mask_token_id")
    if "mask_hidden" in state and type(mask) is not int:
        raise checkpoint.error(
            "name the token of columns without one, since it holds 'mask_hidden'",
            f"has `mask_token_id` {mask!r:.60}",
            "Set `mask_token_id` in config.json as in training.",
        )
    flags = {name: bool(options.get(name)) for name in ("norm_before_residual", "norm_output")}
    return {
        **layered_fields(checkpoint, settings, vocab_size),
        **flags,
        "target_hidden_size": target,
        "draft_vocab_size": checkpoint.shape("lm_head.weight")[0],
        "features": width // target,
        "layers": _layers_read(checkpoint),
        "positions": "axes" if sections else "temporal",
        "mrope_section": tuple(sections),
        "mrope_interleaved": bool(rope.get("mrope_interleaved")),
        "norm_before_fc": _by_tensor(checkpoint, options, "norm_before_fc", "input_norm.weight"),
        "fc_norm": _by_tensor(checkpoint, options, "fc_norm", "fc_norm.0.weight"),
        "qk_norm": f"{FIRST_LAYER}self_attn.q_norm.weight" in state,
        "output_bias": f"{FIRST_LAYER}self_attn.o_proj.bias" in state,
        "mask_token": mask if "mask_hidden" in state else None,
        **mmdec_fields(described, ("positions", "pictures", "base", "target")),
    }


def _by_tensor(checkpoint: Checkpoint, options: Mapping[str, Any], flag: str, tensor: str) -> bool:
    """Return whether the network has a certain norm.

    Args:
        flag: The config's option for this norm.
        tensor: Name of the norm's weights.

    Raises:
        InputError: If the option and the weights contradict each other.
    """
    holds = tensor in checkpoint.state
    if flag in options and bool(options[flag]) != holds:
        raise checkpoint.error(
            f"hold '{tensor}' if and only if `{flag}` is true",
            f"has `{flag}` {options[flag]!r:.60} and {'holds it' if holds else 'lacks it'}",
            "Use config.json and weights of the same training run.",
        )
    return holds


def _layers_read(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the indices of the target layers whose outputs an EAGLE-3 reads; () for the default layers."""
    name, eagle_config = "eagle_aux_hidden_state_layer_ids", checkpoint.config.get("eagle_config")
    ids = checkpoint.config.get(name)
    outputs = False
    if ids is None and isinstance(eagle_config, dict):
        ids = eagle_config.get(name)
        outputs = bool(ids) and ids[0] == 1
    if ids is None:
        return ()
    boundaries = [number + outputs if type(number) is int else 0 for number in ids] if isinstance(ids, list) else [0]
    if min(boundaries, default=0) < 1:
        raise checkpoint.error(
            f"have whole numbers of at least 1 in `{name}`", f"has {ids!r:.60}", "Set them as in training."
        )
    return tuple(boundary - 1 for boundary in boundaries)
