"""Reads and writes the folders of drafters with weights: config.json, model.safetensors, a model card.

A draft network that has no embedding or LM head of its own uses the target's. Published folders can be loaded without
conversion (`mmdec.pretrained.published`).

mmdec's config.json holds {"system": "eagle", ...the fields of the network's configuration}. "system" is the drafter's
name, by which the registry (`mmdec.drafters.registry`) says how it is loaded.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from mmdec.checks.arguments import check_instance, check_path, check_whole
from mmdec.checks.weights import (
    WEIGHTS_FILE,
    build_with_weights,
    check_checkpoint_folder,
    read_settings,
    read_weights,
    weight_file,
)
from mmdec.drafters.eagle.checkpoint import SYSTEMS, System
from mmdec.drafters.fit import check_model_sizes
from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.drafters.networks.weights import MAX_CONFIG_SIZE, DrafterWeights, WeightsConfig
from mmdec.drafters.registry import (
    DrafterEntry,
    Loader,
    check_drafter,
    drafter_entry,
    import_dotted,
    loader_names,
    network_class,
)
from mmdec.errors import InputError
from mmdec.hub.find import drafter_by_name
from mmdec.hub.publish import new_folder, write_model_folder
from mmdec.pretrained.language_model import config_class, is_language_model
from mmdec.pretrained.load_small_model import load_small_model
from mmdec.pretrained.published import find_format, read_published
from mmdec.types import Drafter

CONFIG_FILE = "config.json"
MODEL_TYPE = "mmdec-drafter"  # value of "model_type" in config.json
MAX_CONFIG_BYTES = 2**16
EXAMPLE_IMAGE = "data/samples/images/menu.png"  # an image in the repository, for the example in the model card


def load_drafter(
    folder: str | os.PathLike[str],
    model: PreTrainedModel,
    argument: str = "folder",
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    tokenizer: Any = None,
) -> Drafter:
    """Load a drafter with weights for one target model, on that model's device and in its precision.

    Load the drafter once and pass it to `generate`, `stream`, `speculate`, `transcribe` or `describe`. The drafter
    holds weights only, so several calls may share it.

    Args:
        folder: A folder, a Hugging Face id, or "<model>/<drafter>" for a shipped one ("vlm-scenes/eagle"). The folder
            may be in mmdec's own format (its config.json has the drafter's name, {"system": "medusa", ...}), or in one
            of the published formats in docs/which_drafter.md ("Published weights"). It may also hold a smaller language
            model, whose tokenizer may differ from the target's.
        model: The loaded target model.
        argument: The name of `folder` in error messages. Default "folder".
        revision: Branch, tag or commit of a Hugging Face id. Default: the main branch.
        token: Access token for a private or gated Hugging Face id. Default: that of `hf auth login`.
        tokenizer: The target's tokenizer; it is needed if the drafter is a smaller model with another vocabulary.
            Default None: the one in the target's folder.

    Returns:
        The drafter.

    Raises:
        InputError: If the folder holds no drafter, a file is damaged, or the drafter belongs to another model.
    """
    fetching = {name: value for name, value in (("revision", revision), ("token", token)) if value is not None}
    path = drafter_by_name(folder, argument, fetching) or check_path(argument, folder, "Name the drafter's folder.")
    check_instance("model", model, PreTrainedModel, "a loaded model of transformers", "Load it first.")
    loader = _loader(path, argument)
    drafter = load_small_model(path, model, tokenizer) if loader is load_small_model else loader(path, model)
    check_drafter(drafter)
    return drafter


def check_drafter_folder(folder: Path, model: Path, argument: str = "folder") -> None:
    """Check what a drafter's folder holds, before the target model is loaded.

    Args:
        folder: The drafter's folder.
        model: The target's folder.
        argument: The name of `folder` in error messages.

    Raises:
        InputError: If it holds no drafter, or a draft network or a smaller encoder-decoder of another model.
    """
    loader, text_config = _loader(folder, argument), _text_config(model)
    if text_config is None:
        return
    if loader is load_network_drafter:
        _check_fit(read_network(folder, text_config.vocab_size), text_config)
    small = _text_config(folder) if loader is load_small_model and text_config.is_encoder_decoder else None
    if small is not None and small.vocab_size != text_config.vocab_size:
        raise InputError(
            f"`{argument}` must have the target's {text_config.vocab_size} tokens, but '{folder}' has "
            f"{small.vocab_size}. Choose a smaller model with the target's tokenizer."
        )


def _text_config(folder: Path) -> Any:
    """Return the configuration of the text model in a folder; None for an unknown kind of model."""
    config_type = config_class(folder)
    settings = {} if config_type is None else read_settings(folder / CONFIG_FILE)
    return None if config_type is None else config_type.from_dict(settings).get_text_config(decoder=True)


def _loader(folder: Path, argument: str) -> Loader:
    if not (folder / CONFIG_FILE).is_file():
        raise InputError(
            f"`{argument}` must be a folder with a drafter's {CONFIG_FILE} and weights, but '{folder}' has no "
            f"{CONFIG_FILE}. Name the drafter's folder."
        )
    settings = read_settings(folder / CONFIG_FILE, argument)
    name = str(settings.get("system") or "")
    if not name:
        published = None if "system" in settings else find_format(folder, argument)
        if published is not None:
            return _entry_loader(published, argument)
        if is_language_model(folder):
            return load_small_model
        raise InputError(
            f"`{argument}` must hold a drafter of {', '.join(loader_names())}, or a smaller language model, but the "
            f"config.json of '{folder}' names none. Any other smaller model: load it with transformers, and pass the "
            "loaded model."
        )
    entry = drafter_entry(name)
    if entry is None or not entry.has_weights:
        raise InputError(
            f"`{argument}` must hold a drafter of {', '.join(loader_names())}, but '{folder}' holds "
            f"{name!r}. Name another folder."
        )
    return _entry_loader(entry, argument)


def _entry_loader(entry: DrafterEntry, argument: str) -> Loader:
    if entry.loader is None:
        return load_network_drafter
    return import_dotted(entry.loader, argument) if isinstance(entry.loader, str) else entry.loader


def save_network(network: DrafterWeights[Any], directory: str | os.PathLike[str], *, card: str | None = None) -> Path:
    """Write the folder of a draft network: config.json, model.safetensors and the model card.

    If writing fails, no folder is left.

    Args:
        network: A draft network.
        directory: The new folder.
        card: Text of README.md.

    Raises:
        InputError: If the folder exists and is not empty.
    """
    config = {"system": network.system, "model_type": MODEL_TYPE, **asdict(network.config)}
    return write_model_folder(directory, config, network.state_dict(), card or draft_card(network))


def convert(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    system: System | None = None,
    vocab_size: int | None = None,
) -> Path:
    """Load a published draft network and save it in mmdec's format.

    Args:
        source: A folder in a published format. (`mmdec.load_drafter` accepts such a folder without conversion, too).
        directory: The new folder, written atomically.
        system: The drafter's name; needed for an EAGLE whose target reads images, because its files look like an MSD's.
        vocab_size: The target's vocabulary size, if the target's embedding was enlarged after the drafter's training.

    Raises:
        InputError: For FLASH and any other format that is not supported.
    """
    folder = check_checkpoint_folder(source)
    target = new_folder(directory)
    if system not in (None, *SYSTEMS):
        raise InputError(f"`system` must be one of {', '.join(SYSTEMS)}, but is {system!r:.60}. Leave it out.")
    if vocab_size is not None:
        check_whole("vocab_size", vocab_size, 1, MAX_CONFIG_SIZE, "Give the target's number of tokens.")
    network = read_published(folder, "source", system, vocab_size)
    return save_network(network, target, card=published_card(network, folder))


def read_network(directory: str | os.PathLike[str], target_tokens: int | None = None) -> DrafterWeights[Any]:
    """Load a draft network on the CPU, without its target.

    A network in mmdec's format is loaded in float32, a published network in the file's precision.

    Args:
        target_tokens: The target's vocabulary size, for a published folder that does not contain this number.

    Raises:
        InputError: If the folder holds no draft network, or a file is damaged.
    """
    folder = check_path("directory", directory, "Name a folder.")
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise InputError(
            f"`directory` must hold a draft network's {CONFIG_FILE} and {WEIGHTS_FILE}, but '{folder}' has no "
            f"{CONFIG_FILE}. Name the drafter's folder."
        )
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise InputError(
            f"`directory` must hold a {CONFIG_FILE} of at most {MAX_CONFIG_BYTES} bytes, but '{file}' has more. "
            "Give another folder."
        )
    settings = read_settings(file, "directory")
    published = None if "system" in settings else find_format(folder, "directory")
    if published is not None and published.network is not None:
        return read_published(folder, "directory", target_tokens=target_tokens)
    settings.pop("model_type", None)
    kind = network_class(str(settings.pop("system", "")))
    config = _config(kind.config_class, settings, folder)
    state = read_weights([weight_file(folder, WEIGHTS_FILE, "directory")], "directory")
    return build_with_weights(lambda: kind(config), state, "directory", folder)


def load_network(directory: str | os.PathLike[str], model: PreTrainedModel) -> DrafterWeights[Any]:
    """Load a draft network for a target model, on the target's device and in the target's precision.

    Raises:
        InputError: If a file is damaged, or the network belongs to another model (with other channels, tokens or
            layers).
    """
    text_config = model.config.get_text_config(decoder=True)
    network = read_network(directory, text_config.vocab_size)
    _check_fit(network, text_config)
    return network.to(model.device, model.dtype)


def _check_fit(network: DrafterWeights[Any], text_config: Any) -> None:
    """Raise InputError if a draft network belongs to another model than that with this text configuration."""
    config = network.config = network.config.for_depth(text_config.num_hidden_layers)
    expected, actual = config.vocab_size, text_config.vocab_size
    sizes = {"channels": (config.target_size, text_config.hidden_size), "tokens": (expected, actual)}
    hint = f"If the model's first {expected} tokens are the drafter's, convert it with `--vocab-size {actual}`."
    check_model_sizes(sizes, config.trained_for, {"tokens": hint} if actual > expected else {})
    config.check_depth(text_config.num_hidden_layers)


def load_network_drafter(directory: str | os.PathLike[str], model: PreTrainedModel) -> Drafter:
    """Load the drafter that runs a draft network, for a target model.

    It uses the target's embedding and LM head, or the network's own if the network has them.
    """
    network, (embedding, output) = load_network(directory, model), _embedding_and_head(model)
    network.share_ends(embedding, output)
    return network.make_drafter(embedding, output)


def _embedding_and_head(model: PreTrainedModel) -> tuple[nn.Module, nn.Linear]:
    """Return the model's input embedding and LM head, which draft networks use, too."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(output, nn.Linear) or not isinstance(embedding, nn.Module):
        raise InputError(
            f"`model` must have an embedding and a linear LM head, but {type(model).__name__} does not. Load a causal "
            "language model, or one that reads images too."
        )
    return embedding, output


def _config(kind: type[WeightsConfig], settings: dict[str, Any], folder: Path) -> WeightsConfig:
    names = {field.name for field in fields(kind)}
    foreign = sorted(settings.keys() - names)
    try:
        if foreign:
            raise TypeError(f"`{foreign[0]}` is not one of its settings")
        return kind(**settings)
    except (InputError, TypeError) as error:
        raise InputError(
            f"`directory` must hold the settings of a draft network, but {CONFIG_FILE} in '{folder}' is damaged or of "
            f"another version ({error!s:.300}). Download it again."
        ) from error


def published_card(network: DraftNetwork, folder: Path) -> str:
    """Return the text of the model card for a published network.

    Args:
        folder: The folder that the network was read from.
    """
    config, entry = network.config, drafter_entry(network.system)
    name = network.system if entry is None else entry.note.partition(":")[0]
    text = f"# {name}, converted\n\nFrom the published checkpoint '{folder.name}'. Its target has "
    text += f"{config.target_size} channels and {config.vocab_size} tokens"
    text += ", whose embedding and LM head it reads." if network.own_head is None else "."
    return f"{text}\n\n{network.card_note}".rstrip() + "\n"


def draft_card(network: DrafterWeights[Any], reads_images: bool = True) -> str:
    """Return the text of a model card, which names the target.

    Args:
        reads_images: Whether the target reads images.
    """
    config = network.config
    count = sum(weight.numel() for weight in network.parameters())
    text = (
        f"---\nlibrary_name: mmdec\ntags: [speculative-decoding, {network.system}]\n---\n\n"
        f"# {network.system} drafter for {config.trained_for or 'the model that it was trained for'}\n\n"
        f"{count:,} parameters, for a target with {config.hidden_size} channels and {config.vocab_size} tokens. It "
        "proposes tokens and the target verifies them, so the text is the target's own.\n\n"
    )
    if not (reads_images and config.target):
        return text + "Pass its folder as `drafter`, or load it with `mmdec.load_drafter(folder, model)`.\n"
    return text + (
        f'In the target\'s folder, `drafter="{network.system}"` finds it:\n\n```python\nimport mmdec\n\n'
        f'out = mmdec.describe("{EXAMPLE_IMAGE}", model={json.dumps(config.target)}, drafter="{network.system}")\n'
        "print(out.text, out.tokens_per_round)\n```\n"
    )
