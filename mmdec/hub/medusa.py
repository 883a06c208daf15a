"""Medusa heads on disk: config.json, heads.safetensors, a card."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmdec.checks.arguments import show
from mmdec.checks.weights import checked_file, fill, read_settings, read_weights
from mmdec.drafters.medusa import Medusa
from mmdec.hub.publish import whole_folder
from mmdec.nn.medusa import MedusaConfig, MedusaHeads
from mmdec.types import InputError

SYSTEM = "medusa"
WEIGHTS = "heads.safetensors"
RECORDING = "data/samples/english/sentence.flac"  # a recording in the checkout, for the card's example


def save_heads(
    directory: str | os.PathLike[str],
    heads: MedusaHeads,
    *,
    ranks: Sequence[Sequence[float]] | None = None,
    card: str | None = None,
) -> Path:
    """Write a folder of heads. If writing fails, no folder is left.

    heads: the trained heads. ranks: measured chances [head][rank], from which trees start. card: text of README.md.
    """
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"`directory` must be new or empty, but '{target}' is not. Choose another.")
    with whole_folder(target) as fresh:
        config = {"system": SYSTEM, "model_type": "mmdec-drafter", "heads": asdict(heads.config), "ranks": ranks}
        (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file({name: value.contiguous() for name, value in heads.state_dict().items()}, fresh / WEIGHTS)
        (fresh / "README.md").write_text(card or _card(heads.config), encoding="utf-8")
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
    try:
        shape = MedusaConfig(**config["heads"])
        if shape.heads > len(state):
            raise ValueError(f"{shape.heads} heads for {len(state)} tensors")
        ranks = config.get("ranks")
        if ranks is not None and not (len(ranks) == shape.heads and all(_is_chances(row) for row in ranks)):
            raise ValueError("`ranks` are no chances of each head's ranks")
        fill(lambda: MedusaHeads(shape), state, "directory", folder)
    except InputError:
        raise
    except Exception as error:  # networks raise various errors for settings of wrong types
        raise InputError(
            f"`directory` must hold whole heads, but config.json in '{folder}' is damaged or of another version "
            f"({type(error).__name__}: {error!s:.300}). Fetch them again."
        ) from error
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
            "\nIn the model's folder they are its drafter, `medusa`:\n\n```python\nimport mmdec\n\n"
            f'out = mmdec.transcribe("{RECORDING}", model={json.dumps(config.base)}, drafter="medusa")\n'
            "print(out.text, out.tokens_per_round)\n```\n"
        )
    return text
