"""Reads and writes the folders of Medusa heads: config.json, heads.safetensors, a model card.

Published heads can be loaded without conversion.

The published checkpoints for Whisper (aiola/whisper-medusa-v1, -linear-libri, -block-libri, -multilingual) hold a whole
Whisper beside the heads. In a Medusa-Block checkpoint this Whisper is the original model, so the heads fit the original
model. In a Medusa-Linear checkpoint the Whisper's last decoder layer was trained, too, and one more head was added
before the output matrix; so this Whisper writes other texts than the original one. mmdec uses the heads with the
original model: the text is the original model's, and fewer drafted tokens are accepted.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmdec.checks.arguments import check_path, format_value
from mmdec.checks.weights import (
    build_with_weights,
    check_checkpoint_folder,
    read_settings,
    read_weights,
    report_damage,
    weight_file,
    weight_files,
)
from mmdec.drafters.fit import check_model_sizes
from mmdec.drafters.medusa.drafter import MedusaDrafter
from mmdec.drafters.medusa.network import MedusaConfig, MedusaHeads
from mmdec.errors import InputError
from mmdec.hub.checkpoint import tensor_names
from mmdec.hub.publish import write_model_folder

SYSTEM = "medusa"
HEADS_FILE = "heads.safetensors"
# a recording in the repository, for the example in the model card
EXAMPLE_RECORDING = "data/samples/english/austen.flac"
# kind of heads in published checkpoints -> mmdec's name
PUBLISHED_KINDS = {"base_head": "linear", "medusa_block": "block", "whisper_block": "block"}
WHISPER_HEAD_TENSOR = re.compile(r"medusa_heads\.(\d+)\.(\d+)\.linear\.(weight|bias)")
HEADS_PREFIX, BLOCK_PREFIX = "medusa_heads.", "medusa_block."


def recognises(described: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Return whether a folder holds published Medusa heads for Whisper.

    Args:
        described: The content of config.json.
        names: The tensors' names.
    """
    return not described.get("speculators_model_type") and any(name.startswith(HEADS_PREFIX) for name in names)


def save_heads(
    directory: str | os.PathLike[str],
    heads: MedusaHeads,
    *,
    ranks: Sequence[Sequence[float]] | None = None,
    place: Path | None = None,
) -> Path:
    """Write a folder of Medusa heads.

    If writing fails, no folder is left.

    Args:
        heads: The trained heads.
        ranks: ranks[k][r] is the measured probability that the r-th most probable token of head k is right; the first
            draft trees are made from these probabilities. None: not measured.
        place: Path of the folder in the example of the model card; None: the subfolder `medusa` of the model's folder.
    """
    config = {"system": SYSTEM, "model_type": "mmdec-drafter", "heads": asdict(heads.config), "ranks": ranks}
    return write_model_folder(directory, config, heads.state_dict(), _card(heads.config, place), HEADS_FILE)


def load_heads(directory: str | os.PathLike[str], model: PreTrainedModel) -> MedusaDrafter:
    """Load Medusa heads as a drafter for a model, on the model's device and in its precision.

    Args:
        directory: A folder in mmdec's or a published format.

    Raises:
        InputError: If the heads belong to another model (with other channels, tokens or mels).
    """
    folder = check_path("directory", directory, "Name a folder.")
    if not (isinstance(model, PreTrainedModel) and _takes_heads(model)):
        raise InputError(
            "`model` must be a loaded encoder-decoder that reads mels and has an output layer `proj_out`, but is "
            f"{format_value(model)}. Load the heads' own model."
        )
    config, ranks, state = _read(folder)
    shape = model.config
    sizes = {
        "channels": (config.hidden_size, shape.hidden_size),
        "tokens": (config.vocab_size, shape.vocab_size),
        "mels": (config.mels, shape.num_mel_bins),
    }
    check_model_sizes(sizes, config.base)
    heads = build_with_weights(lambda: MedusaHeads(config), state, "directory", folder)
    return MedusaDrafter(heads.to(model.device, model.dtype), cast(nn.Linear, model.proj_out), ranks)


def _takes_heads(model: PreTrainedModel) -> bool:
    config = model.config
    speech = getattr(config, "is_encoder_decoder", False) and all(
        hasattr(config, name) for name in ("d_model", "num_mel_bins")
    )
    return speech and isinstance(getattr(model, "proj_out", None), nn.Linear)


def _read(folder: Path) -> tuple[MedusaConfig, list[list[float]] | None, dict[str, Tensor]]:
    """Return the heads' shape, acceptance by rank (None: unknown) and weights, of mmdec's or a published folder."""
    is_own_format = (folder / HEADS_FILE).is_file()
    if (folder / "config.json").is_file() and not is_own_format and recognises({}, tensor_names(folder, "directory")):
        heads = _published_heads(folder, "directory")
        return heads.config, None, heads.state_dict()
    if not (folder / "config.json").is_file() or not is_own_format:
        raise InputError(
            f"`directory` must hold config.json and {HEADS_FILE}, or published Medusa heads, but '{folder}' does not. "
            "Name the heads' folder."
        )
    config = read_settings(folder / "config.json", "directory")
    if config.get("system") != SYSTEM:
        raise InputError(
            f"`directory` must hold Medusa heads, but '{folder}' holds {config.get('system')!r}. Name their folder."
        )
    state = read_weights([weight_file(folder, HEADS_FILE, "directory")], "directory")
    with report_damage(
        f"`directory` must hold whole heads, but config.json in '{folder}' is damaged or of another version",
        "Fetch them again.",
    ):
        shape = MedusaConfig(**config["heads"])
        if shape.heads > len(state):
            raise ValueError(f"{shape.heads} heads for {len(state)} tensors")
        ranks = config.get("ranks")
        if ranks is not None and not (len(ranks) == shape.heads and all(_is_probabilities(row) for row in ranks)):
            raise ValueError("`ranks` are not the probabilities of each head's ranks")
        build_with_weights(lambda: MedusaHeads(shape), state, "directory", folder)
    return shape, ranks, state


def _is_probabilities(row: Any) -> bool:
    return isinstance(row, list) and bool(row) and all(type(p) in (int, float) and 0 <= p <= 1 for p in row)


def _card(config: MedusaConfig, place: Path | None) -> str:
    base = config.base or "the model they were trained for"
    text = f"# Medusa-{config.kind.capitalize()} heads\n\n{config.heads} heads for {base}"
    text += f" ({config.hidden_size} channels, {config.vocab_size} tokens, {config.mels} mels).\n"
    if config.tuned_base:
        text += (
            f"\nThey were trained for a fine-tuned model, whose last decoder layer and output head differ from those "
            f"of {base}. With {base} the text is still its own, but fewer drafts are accepted than published.\n"
        )
    if config.base:
        drafter = SYSTEM if place is None else str(place)
        text += (
            "\nPass this folder as `drafter`, and the model's folder or Hugging Face id as `model`. In the model's "
            'folder, `drafter="medusa"` finds them:\n\n'
            "```python\nimport mmdec\n\n"
            f'out = mmdec.transcribe("{EXAMPLE_RECORDING}", model={json.dumps(config.base)}, '
            f"drafter={json.dumps(drafter)})\n"
            "print(out.text, out.tokens_per_round)\n```\n"
        )
    return text


def convert_medusa(source: str | os.PathLike[str], directory: str | os.PathLike[str]) -> Path:
    """Load published Medusa heads for Whisper and save them in mmdec's format.

    Args:
        source: A folder with config.json and safetensors (one file, or several with an index).

    Returns:
        `directory`.
    """
    folder = check_checkpoint_folder(source)
    return save_heads(directory, _published_heads(folder, "source"))


def _published_heads(folder: Path, argument: str) -> MedusaHeads:
    """Load aiola's heads in float32, from a checkpoint that also holds the whole Whisper.

    Args:
        argument: Name of the caller's argument, for errors.
    """
    config = read_settings(folder / "config.json", argument)
    kind = PUBLISHED_KINDS.get(str(config.get("medusa_heads_type", "")))
    if kind is None or config.get("medusa_num_layers", 1) != 1:
        raise InputError(
            f"`{argument}` must hold Medusa heads of one layer and of the types {', '.join(PUBLISHED_KINDS)}, but "
            "its config "
            f"says {config.get('medusa_heads_type')!r} with {config.get('medusa_num_layers', 1)} layers. "
            "Name a checkpoint with such heads."
        )
    prefixes = (HEADS_PREFIX, BLOCK_PREFIX)  # the checkpoint may lack files in which no heads are stored
    tensors = read_weights(weight_files(folder, argument, prefixes), argument, prefixes)
    first = 1 if kind == "linear" else 0  # in Medusa-Linear head 0 belongs to the changed model, so it is left out
    count = (
        1
        + max((int(match[1]) for name in tensors if (match := WHISPER_HEAD_TENSOR.fullmatch(name))), default=-1)
        - first
    )
    if count < 1:
        raise InputError(
            f"`{argument}` must hold `medusa_heads.*`, but '{folder}' holds none. Fetch all of its shards."
        )
    if count > len(tensors):
        raise InputError(
            f"`{argument}` must hold heads 0 to {count - 1}, but '{folder}' holds fewer. Fetch all its shards."
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
            f"`{argument}` must have the sizes of its heads in config.json, but '{folder}' does not "
            f"({type(error).__name__}: {error}). Download it again."
        ) from error
    state = {}
    for name in names:
        if name.startswith("heads."):
            _, index, *rest = name.split(".")
            published = f"medusa_heads.{int(index) + first}.0.{'.'.join(rest)}"
        else:
            published = BLOCK_PREFIX + name.removeprefix("block.")
        state[name] = published
    missing = sorted(published for published in state.values() if published not in tensors)
    if missing:
        raise InputError(f"`{argument}` must hold {missing[0]}, but '{folder}' does not. Fetch all of its shards.")
    renamed = {name: tensors[published] for name, published in state.items()}
    return build_with_weights(lambda: MedusaHeads(shape), renamed, argument, folder)
