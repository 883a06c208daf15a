"""Draft networks on disk: config.json, model.safetensors, a card. Neither embedding nor LM head: they are the target's.

config.json holds {"system": "eagle", ...the fields of the network's configuration}; see `mmdec.drafters.registry`.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from mmdec.checks.arguments import show
from mmdec.checks.weights import WHOLE, checked_file, fill, read_settings, read_weights
from mmdec.drafters.flash import Flash
from mmdec.drafters.registry import network_class
from mmdec.drafters.tree_growing import TreeGrowing
from mmdec.hub.publish import whole_folder
from mmdec.nn.draft_network import DraftConfig, DraftNetwork
from mmdec.nn.flash import FlashNetwork
from mmdec.types import InputError

CONFIG = "config.json"
MODEL_TYPE = "mmdec-drafter"  # for transformers' AutoConfig
MAX_CONFIG_BYTES = 2**16
PICTURE = "data/samples/images/menu.png"  # an image in the checkout, for the card's example


def save_network(network: DraftNetwork, directory: str | os.PathLike[str], *, card: str | None = None) -> Path:
    """Write a network's folder: config.json, model.safetensors and the card. If writing fails, no folder is left.

    network: a draft network. directory: the new folder. card: text of README.md.
    Raises: InputError if the directory exists and is not empty.
    """
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"`directory` must be new or empty, but '{target}' is not. Choose another.")
    with whole_folder(target) as fresh:
        config = {"system": network.system, "model_type": MODEL_TYPE, **asdict(network.config)}
        (fresh / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        state = {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}
        save_file(state, fresh / WHOLE)
        (fresh / "README.md").write_text(card or draft_card(network), encoding="utf-8")
    return target


def read_network(directory: str | os.PathLike[str]) -> DraftNetwork:
    """Load a network in float32 on the CPU, without a target. Raises InputError if the folder, settings or weights are
    bad."""
    try:
        folder = Path(directory)
    except TypeError as error:
        raise InputError(f"`directory` must be a path, but is {show(directory)}. Name a folder.") from error
    file = folder / CONFIG
    if not file.is_file():
        raise InputError(
            f"`directory` must hold a draft network's {CONFIG} and {WHOLE}, but '{folder}' has no {CONFIG}. Name the "
            "drafter's folder."
        )
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise InputError(
            f"`directory` must hold a {CONFIG} of at most {MAX_CONFIG_BYTES} bytes, but '{file}' has more."
        )
    settings = read_settings(file, "directory")
    settings.pop("model_type", None)
    kind = network_class(str(settings.pop("system", "")))
    config = _config(kind.config_class, settings, folder)
    state = read_weights([checked_file(folder, WHOLE, "directory")], "directory")
    return fill(lambda: kind(config), state, "directory", folder)


def load_network(directory: str | os.PathLike[str], model: PreTrainedModel) -> DraftNetwork:
    """Load the network for this model, on its device and in its precision.

    Raises: InputError also if the network belongs to another model (other channels or tokens, or layers it does not
        have).
    """
    network = read_network(directory)
    config, shape = network.config, model.config.get_text_config(decoder=True)
    for what, expected, actual in (
        ("channels", config.hidden_size, shape.hidden_size),
        ("tokens", config.vocab_size, shape.vocab_size),
    ):
        if expected != actual:
            longer = (
                f" If the model's first {expected} tokens are the drafter's, convert it again with `--vocab-size "
                f"{actual}`."
            )
            raise InputError(
                f"`model` must have {expected} {what} for this drafter, but has {actual}. It was trained for "
                f"{config.trained_for or 'another model'}; use a drafter trained for this model."
                + longer
                * (what == "tokens" and actual > expected)
            )
    if max(config.layers) > shape.num_hidden_layers - 2 or min(config.layers) < -1:
        raise InputError(
            f"`model` must have the layers {config.layers} for this drafter, but has {shape.num_hidden_layers} in all. "
            f"It was trained for {config.trained_for or 'another model'}; use a drafter trained for this model."
        )
    return network.to(model.device, model.dtype)


def load_tree_growing(directory: str | os.PathLike[str], model: PreTrainedModel) -> TreeGrowing:
    """Load a drafter for this model: the network grows EAGLE-2 trees with the model's embedding and LM head."""
    return TreeGrowing(load_network(directory, model), *_ends(model))


def load_flash(directory: str | os.PathLike[str], model: PreTrainedModel) -> Flash:
    """Load FLASH's drafter for this model. Raises InputError if the folder holds another system's network."""
    network = load_network(directory, model)
    if not isinstance(network, FlashNetwork):
        raise InputError(f"`directory` must hold FLASH's network, but holds {network.system}'s. Name another folder.")
    return Flash(network, *_ends(model))


def _ends(model: PreTrainedModel) -> tuple[nn.Module, nn.Linear]:
    """The model's embedding and LM head."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(output, nn.Linear) or not isinstance(embedding, nn.Module):
        raise InputError(
            f"`model` must have an embedding and a linear LM head, but {type(model).__name__} has not. Load a causal "
            "language model, or one that reads images too."
        )
    return embedding, output


def _config(kind: type[DraftConfig], settings: dict[str, Any], folder: Path) -> DraftConfig:
    names = {field.name for field in fields(kind)}
    foreign = sorted(settings.keys() - names)
    try:
        if foreign:
            raise TypeError(f"`{foreign[0]}` is none of its settings")
        return kind(**settings)
    except (InputError, TypeError) as error:
        raise InputError(
            f"`directory` must hold the settings of a draft network, but {CONFIG} in '{folder}' is damaged or of "
            f"another version ({error!s:.300}). Fetch it again."
        ) from error


def draft_card(network: DraftNetwork, reads_images: bool = True) -> str:
    """A model card that names the target. reads_images: whether the target does."""
    config = network.config
    count = sum(weight.numel() for weight in network.parameters())
    text = (
        f"# A drafter: {network.system}\n\n{count:,} parameters, for "
        f"{config.trained_for or 'the model that it was trained for'}. The target has {config.hidden_size} channels "
        f"and {config.vocab_size} tokens. The drafter proposes tokens; the target checks them, and its text stays its "
        "own.\n\n"
    )
    if not (reads_images and config.target):
        return text + "Pass its folder as `drafter`, or load it with `mmdec.load_drafter(folder, model)`.\n"
    return text + (
        f"In the target's folder it is found by its name, `{network.system}`:\n\n```python\nimport mmdec\n\n"
        f'out = mmdec.describe("{PICTURE}", model={json.dumps(config.target)}, drafter="{network.system}")\n'
        "print(out.text, out.tokens_per_round)\n```\n"
    )
