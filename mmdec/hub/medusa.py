"""Medusa heads on disk: config.json, heads.safetensors, a card. Published heads for Whisper are converted to that.

The published checkpoints (aiola/whisper-medusa-v1, -linear-libri, -block-libri, -multilingual) hold a whole Whisper
beside the heads. Medusa-Block did not change it: its heads fit the stock model. Medusa-Linear trained the last decoder
layer, too, and added a head before the output, so its published text is that of a tuned model. Here the converted heads
draft for the stock model: the text is the stock model's, and fewer drafted tokens are accepted.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmdec.checks.arguments import show
from mmdec.checks.weights import checked_file, damaged, fill, read_settings, read_weights, shards
from mmdec.drafters.medusa import Medusa
from mmdec.hub.publish import new_folder, whole_folder
from mmdec.nn.medusa import MedusaConfig, MedusaHeads
from mmdec.types import InputError

SYSTEM = "medusa"
WEIGHTS = "heads.safetensors"
RECORDING = "data/samples/english/sentence.flac"  # a recording in the checkout, for the card's example
KINDS = {"base_head": "linear", "medusa_block": "block", "whisper_block": "block"}  # theirs -> ours
HEAD = re.compile(r"medusa_heads\.(\d+)\.(\d+)\.linear\.(weight|bias)")
BLOCK = "medusa_block."
PUBLISHED = ("medusa_heads.", BLOCK)


def save_heads(
    directory: str | os.PathLike[str],
    heads: MedusaHeads,
    *,
    ranks: Sequence[Sequence[float]] | None = None,
) -> Path:
    """Write a folder of heads. If writing fails, no folder is left.

    heads: the trained heads. ranks: measured chances [head][rank], from which trees start.
    """
    target = new_folder(directory)
    with whole_folder(target) as fresh:
        config = {"system": SYSTEM, "model_type": "mmdec-drafter", "heads": asdict(heads.config), "ranks": ranks}
        (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file({name: value.contiguous() for name, value in heads.state_dict().items()}, fresh / WEIGHTS)
        (fresh / "README.md").write_text(_card(heads.config), encoding="utf-8")
    return target


def load_heads(directory: str | os.PathLike[str], model: PreTrainedModel) -> Medusa:
    """Load the drafter for this model, on its device and in its precision.

    Raises: InputError if the heads belong to another model (other channels, tokens or mels).
    """
    try:
        folder = Path(directory)
    except TypeError as error:
        raise InputError(f"`directory` must be a path, but is {show(directory)}. Name a folder.") from error
    if not (isinstance(model, PreTrainedModel) and _takes_heads(model)):
        raise InputError(
            "`model` must be a loaded encoder-decoder that reads mels and has an output layer `proj_out`, but is "
            f"{show(model)}. Load the heads' own model."
        )
    config, ranks, state = _read(folder)
    shape: Any = model.config
    for what, expected, actual in (
        ("channels", config.hidden_size, shape.d_model),
        ("tokens", config.vocab_size, shape.vocab_size),
        ("mels", config.mels, shape.num_mel_bins),
    ):
        if expected != actual:
            raise InputError(
                f"`model` must have {expected} {what} for these heads, but has {actual}. They were trained for "
                f"{config.base or 'another model'}; use heads trained for this model."
            )
    heads = fill(lambda: MedusaHeads(config), state, "directory", Path(directory))
    output: Any = model.proj_out
    return Medusa(heads.to(model.device, model.dtype), output, ranks)


def read_heads(directory: str | os.PathLike[str]) -> tuple[MedusaHeads, list[list[float]] | None]:
    """Load heads in float32 on the CPU, without a model, and the chances of their ranks. Raises InputError."""
    config, ranks, state = _read(Path(directory))
    return fill(lambda: MedusaHeads(config), state, "directory", Path(directory)), ranks


def _takes_heads(model: PreTrainedModel) -> bool:
    config = model.config
    speech = getattr(config, "is_encoder_decoder", False) and all(
        hasattr(config, name) for name in ("d_model", "num_mel_bins")
    )
    return speech and isinstance(getattr(model, "proj_out", None), nn.Linear)


def _read(folder: Path) -> tuple[MedusaConfig, list[list[float]] | None, dict[str, Tensor]]:
    if not (folder / "config.json").is_file() or not (folder / WEIGHTS).is_file():
        raise InputError(
            f"`directory` must hold config.json and {WEIGHTS}, but '{folder}' does not. Convert published heads with "
            "`mmdec convert medusa IN OUT`."
        )
    config = read_settings(folder / "config.json", "directory")
    if config.get("system") != SYSTEM:
        raise InputError(
            f"`directory` must hold Medusa heads, but '{folder}' holds {config.get('system')!r}. Name their folder."
        )
    state = read_weights([checked_file(folder, WEIGHTS, "directory")], "directory")
    with damaged(
        f"`directory` must hold whole heads, but config.json in '{folder}' is damaged or of another version",
        "Fetch them again.",
    ):
        shape = MedusaConfig(**config["heads"])
        if shape.heads > len(state):
            raise ValueError(f"{shape.heads} heads for {len(state)} tensors")
        ranks = config.get("ranks")
        if ranks is not None and not (len(ranks) == shape.heads and all(_is_chances(row) for row in ranks)):
            raise ValueError("`ranks` are no chances of each head's ranks")
        fill(lambda: MedusaHeads(shape), state, "directory", folder)
    return shape, ranks, state


def _is_chances(row: Any) -> bool:
    return isinstance(row, list) and bool(row) and all(type(p) in (int, float) and 0 <= p <= 1 for p in row)


def _card(config: MedusaConfig) -> str:
    base = config.base or "the model they were trained for"
    text = f"# Medusa-{config.kind.capitalize()} heads\n\n{config.heads} heads for {base}"
    text += f" ({config.hidden_size} channels, {config.vocab_size} tokens, {config.mels} mels).\n"
    if config.tuned_base:
        text += (
            f"\nThey were trained on a tuned model, whose last decoder layer and output head are not those of {base}. "
            f"Drafting for {base} they leave its text as it is, and are right less often than published.\n"
        )
    if config.base:
        text += (
            "\nGive this folder as `drafter`. In the model's folder they are its drafter, `medusa`:\n\n"
            "```python\nimport mmdec\n\n"
            f'out = mmdec.transcribe("{RECORDING}", model={json.dumps(config.base)}, drafter="medusa")\n'
            "print(out.text, out.tokens_per_round)\n```\n"
        )
    return text


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
