"""Loads language models with their tokenizers, by folder or Hugging Face id.

A folder has the files that transformers writes: config.json, generation_config.json, safetensors and tokenizer. Pickles
and remote code are rejected.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast, final

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mmdec.checks.arguments import format_value
from mmdec.checks.devices import check_device
from mmdec.checks.weights import REJECTED_SETTINGS, check_generation, load_pretrained, read_settings, report_damage
from mmdec.drafters.registry import auto_names
from mmdec.errors import InputError
from mmdec.hub.cache import LoadedModels, path_version
from mmdec.hub.find import find_model, model_kind
from mmdec.pretrained.plain_text import PlainText

GENERATION_FILE = "generation_config.json"
LANGUAGE_MODEL_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "model.safetensors", "model-*.safetensors")
# drafters' weights inside the model's folder
DRAFTER_WEIGHT_FILES = tuple(f"{name}/*.safetensors" for name in auto_names())
LANGUAGE_MODEL_FILES += DRAFTER_WEIGHT_FILES
# names of tokenizers' files; a model's folder must have at least one of these files
TOKENIZER_MARKERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@final
@dataclass(frozen=True)
class LoadedLanguageModel:
    """A language model, its tokenizer, and the folder that both were loaded from."""

    model: PreTrainedModel
    tokenizer: Any
    directory: Path

    @cached_property
    def plain(self) -> PlainText:
        """What keeps special tokens in texts of callers apart from those of the chat template."""
        return PlainText(self.tokenizer)

    def chat_inputs(self, messages: Sequence[Mapping[str, str]]) -> dict[str, Tensor]:
        """Make the inputs of `generate` of a dialogue, as the model's chat template writes it. The model continues it.

        Args:
            messages: The `role` and the `content` of each, the oldest first. Special tokens in them are text.

        Returns:
            Token ids and mask (1, P).

        Raises:
            InputError: If there is no chat template, or it refuses the messages or leaves one out.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError(
                f"`model` must have a chat template, which writes messages as it reads them, but that in "
                f"'{self.directory}' has none. Use an instruction-tuned model, or let this one complete a text."
            )
        texts = self.plain.hide([message["content"] for message in messages], "messages")
        hidden = [{**message, "content": text} for message, text in zip(messages, texts, strict=True)]
        try:
            text: str = self.tokenizer.apply_chat_template(hidden, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            raise InputError(
                f"`messages` must be what the model's chat template takes, but it says: {error}. Change roles or order."
            ) from error
        lost = next((each for each in texts if each.strip() not in text), None)
        if lost is not None:
            dropped = format_value(self.plain.restore(lost))
            raise InputError(
                f"`messages` must be what the model's chat template writes, but it drops {dropped}. "
                "Leave these messages out."
            )
        reader = self.plain.reader if self.plain.hides([text]) else self.tokenizer
        return self._inputs(reader([text], add_special_tokens=False, return_tensors="pt"))

    def text_inputs(self, text: str) -> dict[str, Tensor]:
        """Make the inputs of `generate` of a text, as the tokenizer reads it: special tokens in it are special.

        Returns:
            Token ids and mask (1, P).

        Raises:
            InputError: If it has no tokens.
        """
        read = self.tokenizer(text, return_tensors="pt")
        if not read["input_ids"].shape[1]:
            raise InputError("`prompt` must have at least one token, but is empty. Write the beginning of a text.")
        return self._inputs(read)

    def _inputs(self, read: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: read[name].to(self.model.device) for name in ("input_ids", "attention_mask")}


def load_language_model(
    model: str | os.PathLike[str],
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> LoadedLanguageModel:
    """Load a language model and its tokenizer.

    Args:
        model: A folder or Hugging Face id.
        device: None: a GPU if there is one, else the CPU.
        dtype: Dtype of the weights.

    Raises:
        InputError: If there is no such model, its files are damaged or not safetensors, or it has no tokenizer.
    """
    directory = find_model(model, None, LANGUAGE_MODEL_FILES)
    torch_device = check_device(device)
    tokenizer = folder_tokenizer(directory)
    if tokenizer is None:
        raise InputError(
            f"`model` must have a tokenizer, but '{directory}' holds none of {', '.join(TOKENIZER_MARKERS)}. Download "
            "it again, or save the tokenizer there."
        )
    network: Any = read_language_model(directory)
    return LoadedLanguageModel(network.to(torch_device, dtype), tokenizer, directory)


_models = LoadedModels[LoadedLanguageModel]()


def load_language_model_once(
    model: str | os.PathLike[str], device: str | torch.device | None = None, dtype: torch.dtype = torch.float32
) -> LoadedLanguageModel:
    """Load a language model as `load_language_model` does, but once for each folder, device and dtype.

    All callers share the object, and none may change its weights.
    """
    directory = find_model(model, None, LANGUAGE_MODEL_FILES)
    torch_device = check_device(device)
    key = path_version(directory), str(torch_device), str(dtype)
    return _models.get(key, lambda: load_language_model(directory, torch_device, dtype))


def is_language_model(directory: Path) -> bool:
    """Return whether config.json in `directory` is that of a causal language model of transformers."""
    config_type = config_class(directory)
    return config_type is not None and config_type in MODEL_FOR_CAUSAL_LM_MAPPING


def read_language_model(directory: Path, argument: str = "model") -> PreTrainedModel:
    """Load the language model in a folder, in float32 on the CPU.

    Raises:
        InputError: For damaged files, and for another kind of model.
    """
    config_type = config_class(directory)
    if config_type is None or config_type not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(
            f"`{argument}` must be a language model, but '{directory}' is {model_kind(directory) or 'no model'!r}. "
            "Name a Llama, a Qwen2 or another decoder-only model."
        )
    return read_pretrained(directory, config_type, MODEL_FOR_CAUSAL_LM_MAPPING[config_type], "language model", argument)


def read_pretrained(
    directory: Path, config_type: Any, network: Any, noun: str, argument: str = "model", converted: bool = True
) -> PreTrainedModel:
    """Load the model in a folder, in float32 on the CPU, in evaluation mode.

    Args:
        config_type: Class of the configuration in transformers.
        network: Class of the model in transformers.
        noun: The kind of model in words, for errors.
        converted: Whether transformers converts weights of this kind of model when it loads them.

    Raises:
        InputError: If a file is damaged.
    """
    settings = read_settings(directory / "config.json", argument)
    with report_damage(f"`{argument}` must be a whole {noun}, but '{directory}' is damaged or of another version"):
        config = config_type.from_dict(
            {name: value for name, value in settings.items() if name not in REJECTED_SETTINGS}
        )
        model = load_pretrained(cast(type[PreTrainedModel], network), config, directory, argument, converted)
        if (directory / GENERATION_FILE).is_file():
            model.generation_config = GenerationConfig.from_dict(read_settings(directory / GENERATION_FILE))
            check_generation(model.generation_config, config.get_text_config(decoder=True), directory)
    return model.eval()


def folder_tokenizer(directory: Path | None) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a model's folder; None if there is none.

    Raises:
        InputError: If it is damaged.
    """
    if directory is None or not any((directory / name).is_file() for name in TOKENIZER_MARKERS):
        return None
    with report_damage(f"`model` must have a whole tokenizer, but that in '{directory}' is damaged"):
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def config_class(directory: Path) -> type[PreTrainedConfig] | None:
    """Return transformers' configuration class for a model's folder, by its config.json; None for an unknown model.

    Code in the folder is never run.
    """
    model_type = model_kind(directory)
    is_known = model_type in CONFIG_MAPPING  # `CONFIG_MAPPING.get` does not work, because its entries are loaded lazily
    return CONFIG_MAPPING[model_type] if is_known else None
