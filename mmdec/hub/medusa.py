"""Medusa heads on disk: config.json, heads.safetensors, a card; and what others have published, brought into this form.

The published checkpoints (aiola/whisper-medusa-v1, -linear-libri, -block-libri, -multilingual) hold a whole Whisper
beside the heads. Medusa-Block left it as it was: its heads attach to the stock model. Medusa-Linear trained its last
decoder layer and put one more head before the output: "its" text is that tuned model's. On the stock model, where the
heads converted here draft, the text stays the stock model's own, and they are right less often than for their own.
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
from torch import Tensor
from transformers import WhisperForConditionalGeneration

from mmdec.checks.arguments import show
from mmdec.checks.weights import checked_file, fill, read_settings, read_weights, shards
from mmdec.drafters.medusa import Medusa
from mmdec.hub.publish import whole_folder
from mmdec.nn.medusa import MedusaConfig, MedusaHeads
from mmdec.types import InputError

SYSTEM = "medusa"
WEIGHTS = "heads.safetensors"
KINDS = {"base_head": "linear", "medusa_block": "block", "whisper_block": "block"}  # theirs -> ours
HEAD = re.compile(r"medusa_heads\.(\d+)\.(\d+)\.linear\.(weight|bias)")
BLOCK = "medusa_block."
PUBLISHED = ("medusa_heads.", BLOCK)


def save_heads(
    directory: str | os.PathLike[str],
    heads: MedusaHeads,
    *,
    ranks: Sequence[Sequence[float]] | None = None,
    card: str | None = None,
) -> Path:
    """Write heads whole or not at all. ranks: chances of each head's ranks, as measured; trees start from them."""
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"`directory` must be new or empty, but '{target}' is not. Choose another.")
    with whole_folder(target) as fresh:
        config = {"system": SYSTEM, "heads": asdict(heads.config), "ranks": ranks}
        (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file({name: value.contiguous() for name, value in heads.state_dict().items()}, fresh / WEIGHTS)
        (fresh / "README.md").write_text(card or _card(heads.config), encoding="utf-8")
    return target


def load_heads(directory: str | os.PathLike[str], model: WhisperForConditionalGeneration) -> Medusa:
    """The drafter for this model, on its device and in its precision.

    Raises InputError for heads of another Whisper: other channels, tokens or mels.
    """
    try:
        place = Path(directory)
    except TypeError as error:
        raise InputError(f"`directory` must be a path, but is {show(directory)}. Name a folder.") from error
    if not isinstance(model, WhisperForConditionalGeneration):
        raise InputError(
            f"`model` must be a WhisperForConditionalGeneration, but is {show(model)}. Load the heads' own Whisper."
        )
    config, ranks, state = _read(place)
    shape = model.config
    for what, ours, theirs in (
        ("channels", config.hidden_size, shape.d_model),
        ("tokens", config.vocab_size, shape.vocab_size),
        ("mels", config.mels, shape.num_mel_bins),
    ):
        if ours != theirs:
            raise InputError(
                f"`model` must have {ours} {what} for these heads, but has {theirs}. They were trained for "
                f"{config.base or 'another Whisper'}; use heads trained for this model."
            )
    heads = fill(lambda: MedusaHeads(config), state, "directory", Path(directory))
    return Medusa(heads.to(model.device, model.dtype), model.proj_out, ranks)


def convert(source: str | os.PathLike[str], directory: str | os.PathLike[str]) -> Path:
    """Published heads (a directory with config.json and safetensors, one file or shards with an index) -> ours."""
    place = Path(source)
    if not (place / "config.json").is_file():
        raise InputError(f"`source` must hold config.json, but '{place}' does not. Give the checkpoint's directory.")
    config = read_settings(place / "config.json", "source")
    kind = KINDS.get(str(config.get("medusa_heads_type", "")))
    if kind is None or config.get("medusa_num_layers", 1) != 1:
        raise InputError(
            f"`source` must hold Medusa heads of one layer and of the types {', '.join(KINDS)}, but its config says "
            f"{config.get('medusa_heads_type')!r} with {config.get('medusa_num_layers', 1)} layers. Nothing to convert."
        )
    found = _published(place)
    first = 1 if kind == "linear" else 0  # the tuned model's own head comes first
    count = 1 + max((int(match[1]) for name in found if (match := HEAD.fullmatch(name))), default=-1) - first
    if count < 1:
        raise InputError(f"`source` must hold `medusa_heads.*`, but '{place}' holds none. Fetch all of its shards.")
    if count > len(found):
        raise InputError(f"`source` must hold heads 0 to {count - 1}, but '{place}' holds fewer. Fetch all its shards.")
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
            f"`source` must have the sizes of its heads in config.json, but '{place}' has not "
            f"({type(error).__name__}: {error}). Fetch it again."
        ) from error
    state = {}
    for name in names:
        if name.startswith("heads."):
            _, index, *rest = name.split(".")
            theirs = f"medusa_heads.{int(index) + first}.0.{'.'.join(rest)}"
        else:
            theirs = BLOCK + name.removeprefix("block.")
        state[name] = theirs
    missing = sorted(theirs for theirs in state.values() if theirs not in found)
    if missing:
        raise InputError(f"`source` must hold {missing[0]}, but '{place}' does not. Fetch all of its shards.")
    heads = fill(lambda: MedusaHeads(shape), {name: found[theirs] for name, theirs in state.items()}, "source", place)
    return save_heads(directory, heads)


def _published(place: Path) -> dict[str, Tensor]:
    """The heads' weights, out of all that the checkpoint holds."""
    files = shards(place, "source", PUBLISHED)  # those without heads may be absent
    return read_weights(files, "source", PUBLISHED)


def _read(place: Path) -> tuple[MedusaConfig, list[list[float]] | None, dict[str, Tensor]]:
    if not (place / "config.json").is_file() or not (place / WEIGHTS).is_file():
        raise InputError(
            f"`directory` must hold config.json and {WEIGHTS}, but '{place}' does not. Convert published heads with "
            "`mmdec convert medusa IN OUT`."
        )
    config = read_settings(place / "config.json", "directory")
    if config.get("system") != SYSTEM:
        raise InputError(
            f"`directory` must hold Medusa heads, but '{place}' holds {config.get('system')!r}. Name their folder."
        )
    state = read_weights([checked_file(place, WEIGHTS, "directory")], "directory")
    try:
        shape = MedusaConfig(**config["heads"])
        if shape.heads > len(state):
            raise ValueError(f"{shape.heads} heads for {len(state)} tensors")
        ranks = config.get("ranks")
        if ranks is not None and not (len(ranks) == shape.heads and all(_is_chances(row) for row in ranks)):
            raise ValueError("`ranks` are no chances of each head's ranks")
        fill(lambda: MedusaHeads(shape), state, "directory", place)
    except InputError:
        raise
    except Exception as error:  # wrong types of any setting: networks raise what they like
        raise InputError(
            f"`directory` must hold whole heads, but config.json in '{place}' is damaged or of another version "
            f"({type(error).__name__}: {error!s:.300}). Fetch them again."
        ) from error
    return shape, ranks, state


def _is_chances(row: Any) -> bool:
    return isinstance(row, list) and bool(row) and all(type(one) in (int, float) and 0 <= one <= 1 for one in row)


def _card(config: MedusaConfig) -> str:
    base = config.base or "the Whisper they were trained for"
    text = f"# Medusa-{config.kind.capitalize()} heads\n\n{config.heads} heads for {base}"
    text += f" ({config.hidden_size} channels, {config.vocab_size} tokens, {config.mels} mels).\n"
    if config.tuned_base:
        text += (
            f"\nThey were trained on a tuned model, whose last decoder layer and output head are not those of {base}. "
            f"Drafting for {base} they leave its text as it is, and are right less often than published.\n"
        )
    return text
