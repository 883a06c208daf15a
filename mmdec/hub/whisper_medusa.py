"""Converts published Medusa heads for Whisper to the format of `mmdec.hub.medusa`.

The published checkpoints (aiola/whisper-medusa-v1, -linear-libri, -block-libri, -multilingual) hold a whole Whisper
beside the heads. Medusa-Block did not change it: its heads fit the stock model. Medusa-Linear trained the last decoder
layer, too, and added a head before the output, so its published text is that of a tuned model. Here the converted heads
draft for the stock model: the text is the stock model's, and fewer drafted tokens are accepted.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from torch import Tensor

from mmdec.checks.weights import fill, read_settings, read_weights, shards
from mmdec.hub.medusa import save_heads
from mmdec.nn.medusa import MedusaConfig, MedusaHeads
from mmdec.types import InputError

KINDS = {"base_head": "linear", "medusa_block": "block", "whisper_block": "block"}  # theirs -> ours
HEAD = re.compile(r"medusa_heads\.(\d+)\.(\d+)\.linear\.(weight|bias)")
BLOCK = "medusa_block."
PUBLISHED = ("medusa_heads.", BLOCK)


def convert(source: str | os.PathLike[str], directory: str | os.PathLike[str]) -> Path:
    """Convert published heads: a directory with config.json and safetensors (one file, or shards with an index)."""
    folder = Path(source)
    if not (folder / "config.json").is_file():
        lacks = "does not" if folder.is_dir() else "is no directory"
        raise InputError(f"`source` must hold config.json, but '{folder}' {lacks}. Give the checkpoint's directory.")
    config = read_settings(folder / "config.json", "source")
    kind = KINDS.get(str(config.get("medusa_heads_type", "")))
    if kind is None or config.get("medusa_num_layers", 1) != 1:
        raise InputError(
            f"`source` must hold Medusa heads of one layer and of the types {', '.join(KINDS)}, but its config says "
            f"{config.get('medusa_heads_type')!r} with {config.get('medusa_num_layers', 1)} layers. Nothing to convert."
        )
    tensors = _published(folder)
    first = 1 if kind == "linear" else 0  # the tuned model's own head comes first
    count = 1 + max((int(match[1]) for name in tensors if (match := HEAD.fullmatch(name))), default=-1) - first
    if count < 1:
        raise InputError(f"`source` must hold `medusa_heads.*`, but '{folder}' holds none. Fetch all of its shards.")
    if count > len(tensors):
        raise InputError(
            f"`source` must hold heads 0 to {count - 1}, but '{folder}' holds fewer. Fetch all its shards."
        )
    try:
        shape = MedusaConfig(
            hidden_size=config["d_model"],
            vocab_size=config["vocab_size"],
            kind=kind,  # type: ignore[arg-type] # one of KINDS' values
            heads=count,
            attention_heads=config["decoder_attention_heads"] if kind == "block" else 0,
            ffn=config["decoder_ffn_dim"] if kind == "block" else 0,
            mels=config.get("num_mel_bins", 80),
            base=str(config.get("whisper_model_name") or ""),
            tuned_base=kind == "linear",
        )
        with torch.device("meta"):
            names = list(MedusaHeads(shape).state_dict())
    except (KeyError, TypeError, RuntimeError) as error:
        raise InputError(
            f"`source` must have the sizes of its heads in config.json, but '{folder}' has not "
            f"({type(error).__name__}: {error}). Fetch it again."
        ) from error
    state = {}
    for name in names:
        if name.startswith("heads."):
            _, index, *rest = name.split(".")
            published = f"medusa_heads.{int(index) + first}.0.{'.'.join(rest)}"
        else:
            published = BLOCK + name.removeprefix("block.")
        state[name] = published
    missing = sorted(published for published in state.values() if published not in tensors)
    if missing:
        raise InputError(f"`source` must hold {missing[0]}, but '{folder}' does not. Fetch all of its shards.")
    renamed = {name: tensors[published] for name, published in state.items()}
    heads = fill(lambda: MedusaHeads(shape), renamed, "source", folder)
    return save_heads(directory, heads)


def _published(folder: Path) -> dict[str, Tensor]:
    """The heads' weights in a checkpoint."""
    files = shards(folder, "source", PUBLISHED)  # shards without heads may be absent
    return read_weights(files, "source", PUBLISHED)
