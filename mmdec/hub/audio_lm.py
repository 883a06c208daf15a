"""Finds language models that hear, as Qwen2-Audio does, and loads each once, with the processor that reads its sound.

A model's folder is as transformers writes it; pickles, remote code and adapters are refused.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast, final

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoProcessor, PreTrainedModel, ProcessorMixin

from mmdec.audio import SAMPLE_RATE
from mmdec.checks.devices import check_device
from mmdec.checks.weights import check_extractor, damaged, read_settings
from mmdec.hub.find import LoadedModels, find, kind, version
from mmdec.hub.language_model import FILES, read_network
from mmdec.hub.vlm import check_processor
from mmdec.targets.media import HEARING
from mmdec.types import InputError

FAMILIES = HEARING.split()
ADAPTER = "adapter_config.json"
VOXTRAL = "Voxtral"  # whose tokenizer is its makers' package


@final
@dataclass
class LoadedAudioLm:
    """A model with its processor, shared by all callers, which only read the weights."""

    model: PreTrainedModel
    processor: ProcessorMixin
    directory: Path | None = None  # the model's folder, in which drafters are searched
    drafters: LoadedModels[Any] = field(default_factory=LoadedModels, repr=False)  # read from folders, by version
    checked: set[str] = field(default_factory=set, repr=False)  # names of drafters that were checked and fit

    def __post_init__(self) -> None:
        """Raises InputError if the processor belongs to another model, reads another rate, or writes no request."""
        template = not type(self.model).__name__.startswith(VOXTRAL)
        check_processor(self.model, self.processor, "audio", f"Use one of {', '.join(FAMILIES)}.", template)
        rate = getattr(self.extractor, "sampling_rate", SAMPLE_RATE)
        if rate != SAMPLE_RATE:
            raise InputError(
                f"`processor` must read {SAMPLE_RATE} samples a second, but reads {rate}. Load it from where the model "
                "is."
            )

    @property
    def tokenizer(self) -> Any:
        """The processor's tokenizer."""
        return cast(Any, self.processor).tokenizer

    @property
    def extractor(self) -> Any:
        """The processor's part that makes features of sound."""
        parts: Any = self.processor
        return getattr(parts, "feature_extractor", None) or parts.audio_processor

    @property
    def most_seconds(self) -> float | None:
        """The longest recording that the processor reads whole; None: any."""
        if type(self.model).__name__.startswith("Qwen2Audio"):  # its processor pads to one window, and cuts
            return float(self.extractor.chunk_length)
        return getattr(self.processor, "max_audio_len", None)


_models = LoadedModels[LoadedAudioLm]()


def family(directory: Path) -> str:
    """The family of a folder's model, such as "Qwen2Audio"; "" if it is none that hears."""
    model_type = kind(directory)
    name = CONFIG_MAPPING[model_type].__name__.removesuffix("Config") if model_type in CONFIG_MAPPING else ""
    return name if name in FAMILIES else ""


def load_audio_lm(
    model: str | os.PathLike[str],
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> LoadedAudioLm:
    """Load a language model that hears; once for each model, device and dtype.

    model: a directory or a hub id. device: None for a GPU if there is one. dtype: None for float32.
    Raises: InputError if there is no such model, its processor needs a package that is missing, or its files are
        damaged, not safetensors, or outside its folder.
    """
    directory = find(model, None, FILES)
    name, checked = family(directory), check_device(device)
    if not name:
        raise InputError(
            f"`model` must be a language model that hears ({', '.join(FAMILIES)}), but '{directory}' is "
            f"{kind(directory) or 'no model'!r}. Name one."
        )
    if read_settings(directory / "config.json").get("has_lora_adapter") or (directory / ADAPTER).is_file():
        raise InputError(
            f"`model` must be whole in its folder, but '{directory}' has an adapter beside it. Load both with "
            "transformers and peft, and give the model with its `processor`."
        )
    key = (version(directory), str(checked), str(dtype))
    return _models.get(key, lambda: _read(directory, name, checked, dtype))


def _read(directory: Path, name: str, device: torch.device, dtype: torch.dtype) -> LoadedAudioLm:
    check_extractor(directory)
    if name == VOXTRAL and find_spec("mistral_common") is None:
        raise InputError(
            f"`model` must have a processor that can be read here, but that of '{directory}' needs a package. Run `pip "
            "install mistral-common`."
        )
    with damaged(f"`model` must have a whole tokenizer and feature extractor, but those in '{directory}' are damaged"):
        processor = AutoProcessor.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    network: Any = getattr(transformers, f"{name}ForConditionalGeneration")
    model: Any = read_network(directory, network.config_class, network, "language model that hears")
    return LoadedAudioLm(model.to(device, dtype), processor, directory)
