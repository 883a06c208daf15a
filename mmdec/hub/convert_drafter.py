"""Converts published draft networks to the format of `mmdec.hub.drafters`.

EAGLE-1 and -2 (SafeAILab/EAGLE), MSD (Lyn-Lucy/MSD) and ViSpec (KangJialiang/ViSpec) have one decoder layer, fc and a
copy of the target's embedding, which is dropped because mmdec reads the target's own. The kind and the sizes of a
checkpoint follow from its tensors. MSD for LLaVA has exactly EAGLE's names and shapes; it is recognised by its config,
which describes a model that reads images.

| published | its target |
|---|---|
| EAGLE-1/2 | the language model it was trained for: same channels, tokens and tokenizer |
| MSD-LLaVA1.5-7B, -13B | liuhaotian/llava-v1.5, of 32000 tokens. llava-hf's has 64 more at the end: pass 32064 |
| MSD-Qwen2VL-7B-Instruct | Qwen/Qwen2-VL-7B-Instruct |
| ViSpec-* | the model in its name, as transformers has it (llava-hf, Qwen2.5-VL) |
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mmdec.checks.arguments import check_whole
from mmdec.checks.weights import (
    INDEX,
    WHOLE,
    check_finite_weights,
    damaged,
    fill,
    lies_inside,
    read_settings,
    read_weights,
    shards,
)
from mmdec.drafters.registry import network_class
from mmdec.hub.drafters import save_network
from mmdec.hub.publish import new_folder
from mmdec.nn.draft_network import MOST
from mmdec.types import InputError

System = Literal["eagle", "msd", "vispec"]
PICKLE = "pytorch_model.bin"
MAX_BYTES = 16 * 2**30
LAYER = "layers.0."
# tensors of the target, or computed
UNUSED = re.compile(r"(model\.)?embed_tokens\.weight|lm_head\.weight|.*\.rotary_emb\.inv_freq")
EAGLE3 = re.compile(r"midlayer\..*|d2t|t2d|layers\.0\.hidden_norm\.weight|norm\.weight")
VISION = ("vision_config", "mm_vision_tower")  # settings that only models with images have
PLAIN_ROPE = ("default", "mrope")  # drafters use positions 0, 1, 2, ..., for which M-RoPE's three axes are equal


def convert(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    system: System | None = None,
    vocab_size: int | None = None,
) -> Path:
    """Convert a published checkpoint to a folder for `mmdec.load_drafter`.

    source: a folder with config.json and safetensors or pytorch_model.bin. From a pickle only tensors are read; its
        code is not run.
    directory: the new folder, written atomically.
    system: for an EAGLE of a model that reads images, which looks like MSD.
    vocab_size: the target's, if its embedding was extended after training.
    Raises: InputError for EAGLE-3, FLASH and any other unsupported layout.
    """
    folder = Path(source)
    if not (folder / "config.json").is_file():
        lacks = "does not" if folder.is_dir() else "is no folder"
        raise InputError(f"`source` must hold config.json, but '{folder}' {lacks}. Give the checkpoint's folder.")
    target = new_folder(directory)
    if system not in (None, "eagle", "msd", "vispec"):
        raise InputError(f"`system` must be eagle, msd or vispec, but is {system!r:.60}. Leave it out.")
    if vocab_size is not None:
        check_whole("vocab_size", vocab_size, 1, MOST, "Give the target's number of tokens.")
    described = read_settings(folder / "config.json", "source")
    published = _read(folder)
    detected = _system(published, described, folder)
    if system is not None and "vispec" in (detected, system) and system != detected:
        raise InputError(f"`system` must be {detected} for this checkpoint, but is {system!r}. Leave it out.")
    name = system or detected
    state = {key: value for key, value in published.items() if not UNUSED.fullmatch(key)}
    sizes = _sizes(published, described, folder)
    if vocab_size is not None:
        sizes["vocab_size"] = vocab_size
    if name == "vispec":
        sizes["queries"] = len(state["imadpt.q"])
    if name == "msd":
        sizes["visual_token"] = "next"  # the published training and decoding use this layout
    kind = network_class(name)
    network = fill(lambda: kind(kind.config_class(**sizes)), state, "source", folder)
    dtype = state["fc.weight"].dtype
    return save_network(network.to(dtype), target, card=_card(name, sizes, folder))


def _read(folder: Path) -> dict[str, Tensor]:
    """All tensors, from safetensors if there are any, else from the pickle."""
    if (folder / WHOLE).is_file() or (folder / INDEX).is_file() or not (folder / PICKLE).is_file():
        return read_weights(shards(folder, "source"), "source")
    file = folder / PICKLE
    if not lies_inside(file, folder):
        raise InputError(f"`source` must hold its weights in its own folder, but '{file}' lies outside. Copy it there.")
    if file.stat().st_size > MAX_BYTES:
        raise InputError(
            f"`source` must hold at most {MAX_BYTES} bytes, but '{file}' has more. Name a draft network's."
        )
    with damaged(f"`source` must hold named tensors, but '{file}' does not"):
        state = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(state, Mapping) or not all(
            isinstance(key, str) and isinstance(value, Tensor) for key, value in state.items()
        ):
            raise ValueError("it holds something else than named tensors")
    check_finite_weights(state, file, "source")
    return dict(state)


def _system(state: Mapping[str, Tensor], described: Mapping[str, Any], folder: Path) -> System:
    """The drafter's name. Raises InputError, with the reason, for an unsupported layout."""
    if any(EAGLE3.fullmatch(name) for name in state):
        raise InputError(
            f"`source` must hold an EAGLE-1 or -2, MSD or ViSpec network, but '{folder}' holds EAGLE-3's: it reads "
            "three layers of the target and has its own LM head and vocabulary. Use an EAGLE-1 or -2 checkpoint."
        )
    if "fc_gate.weight" in state or "A" in state:
        raise InputError(
            f"`source` must hold an EAGLE-1 or -2, MSD or ViSpec network, but '{folder}' holds FLASH's, whose "
            "published decoding does not fit its training. Train one with the recipes."
        )
    needed = ("fc.weight", f"{LAYER}self_attn.q_proj.weight", f"{LAYER}self_attn.k_proj.weight")
    needed = (*needed, f"{LAYER}mlp.gate_proj.weight")
    for name in needed:
        if name not in state or state[name].dim() != 2 or not state[name].numel():
            raise InputError(f"`source` must hold '{name}', but '{folder}' does not. Name a draft network's folder.")
    others = [name for name in state if name.startswith("layers.") and not name.startswith(LAYER)]
    if others:
        raise InputError(
            f"`source` must have one layer, but '{folder}' holds '{others[0]}'. Networks of more are unknown."
        )
    if "imadpt.q" in state and state["imadpt.q"].dim() == 3:
        return "vispec"
    return "msd" if any(described.get(name) for name in VISION) else "eagle"


def _sizes(state: Mapping[str, Tensor], described: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Fields of the network's configuration: from shapes, or from the config if shapes do not show them."""
    size, joined = state["fc.weight"].shape
    if joined != 2 * size:
        raise InputError(
            f"`source` must have an fc of 2 x {size} channels, but '{folder}' has one of {joined}. A network that "
            "reads several layers is EAGLE-3's, which is not converted."
        )
    text_config = described.get("text_config") if isinstance(described.get("text_config"), dict) else {}
    settings = {**described, **(text_config or {})}
    heads = settings.get("num_attention_heads")
    rows = len(state[f"{LAYER}self_attn.q_proj.weight"])
    if type(heads) is not int or heads < 1 or rows % heads:
        raise InputError(
            f"`source` must say how many heads {rows} rows are, but `num_attention_heads` is {heads!r:.60}."
        )
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    if rope_type not in PLAIN_ROPE:
        raise InputError(
            f"`source` must have rotations that are not scaled, but `rope_scaling` is {rope_type!r:.60}. Such networks "
            "cannot be converted yet."
        )
    table = state.get("embed_tokens.weight", state.get("model.embed_tokens.weight"))
    dim = rows // heads
    return {
        "hidden_size": size,
        "vocab_size": len(table) if table is not None else settings.get("vocab_size"),
        "intermediate_size": len(state[f"{LAYER}mlp.gate_proj.weight"]),
        "num_attention_heads": heads,
        "num_key_value_heads": len(state[f"{LAYER}self_attn.k_proj.weight"]) // dim,
        "head_dim": dim,
        "rope_theta": (rope.get("rope_theta") if isinstance(rope, dict) else None) or settings.get("rope_theta", 1e4),
        "rms_norm_eps": settings.get("rms_norm_eps", 1e-6),
        "input_norm": f"{LAYER}input_layernorm.weight" in state,
        "attention_bias": f"{LAYER}self_attn.q_proj.bias" in state,
        "fc_bias": "fc.bias" in state,
    }


def _card(name: str, sizes: Mapping[str, Any], folder: Path) -> str:
    text = f"# {name.upper() if name != 'vispec' else 'ViSpec'}, converted\n\n"
    text += f"From the published checkpoint '{folder.name}'. Its target has {sizes['hidden_size']} channels and "
    text += f"{sizes['vocab_size']} tokens, whose embedding and LM head it reads."
    if name == "msd" and sizes["vocab_size"] == 32000:
        text += (
            "\n\nIt was trained for liuhaotian/llava-v1.5. llava-hf's has the same 32000 tokens and 64 more: convert "
            "with `--vocab-size 32064` to draft for that one; the network holds no row of the vocabulary."
        )
    return text + "\n"
