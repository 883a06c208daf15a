"""Finds vision-language models, and loads each once, together with its processor.

A model's folder has the files that transformers writes: config.json, generation_config.json, safetensors, tokenizer,
processor and chat template. A drafter with weights is in the subfolder <name> of the model's folder, or in
<model>-<name> beside the model's folder. Pickles and remote code are rejected.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import torch
import transformers
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PROCESSOR_MAPPING,
    AutoProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
)

from mmdec.checks.devices import check_device
from mmdec.checks.weights import read_settings, report_damage
from mmdec.errors import InputError
from mmdec.hub.cache import LoadedModels, path_version
from mmdec.hub.find import find_model, model_kind
from mmdec.pretrained import DEFAULT_VLM
from mmdec.pretrained.image_familiarity import FAMILIAR_FILE, FamiliarPictures, read_familiar
from mmdec.pretrained.language_model import DRAFTER_WEIGHT_FILES, config_class, read_pretrained
from mmdec.pretrained.loaded_media_model import LoadedMediaModel

PACKAGES = ("torchvision", "num2words")  # packages that some processors need
# processors that need their video processor even if they only read pictures
NEED_VIDEO = ("Gemma4Processor", "SmolVLMProcessor", "VideoLlavaProcessor")
SHIPPED_MODEL_TYPE = "llava"  # transformers' model_type of the shipped model
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
VLM_FILES = (
    "*.json",
    "*.txt",
    "*.jinja",
    "*.model",
    "*.md",
    "model.safetensors",
    "model-*.safetensors",
    FAMILIAR_FILE,
    *DRAFTER_WEIGHT_FILES,
)


@final
@dataclass(frozen=True)
class LoadedVlm(LoadedMediaModel):
    """A vision-language model with its processor. All callers share one object, and none changes the weights."""

    # statistics of the training images; None: unknown
    familiar: FamiliarPictures | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Check the processor.

        Raises:
            InputError: If it belongs to another model or has no chat template.
        """
        check_processor(self.model, self.processor, "image", "Use a LLaVA or a Qwen-VL.")

    @property
    def image_token(self) -> str:
        """The text that stands for an image in a prompt, such as "<image>"."""
        return cast(Any, self.processor).image_token


def check_processor(model: PreTrainedModel, processor: Any, kind: str, remedy: str, template: bool = True) -> None:
    """Raise InputError if the processor belongs to another model or has no chat template.

    Args:
        kind: What the model reads: "image" or "audio".
        remedy: Which models to use, for the message.
        template: Whether a chat template is required.
    """
    token: int | None = getattr(model.config, f"{kind}_token_id", None)
    mark: str | None = getattr(processor, f"{kind}_token", None)
    if token is None or mark is None:
        raise InputError(
            f"`model` must read {kind}s, but {type(model).__name__} with {type(processor).__name__} names no {kind} "
            f"token. {remedy}"
        )
    tokenizer = processor.tokenizer
    written = tokenizer.convert_tokens_to_ids(mark)
    if token not in (written, *(getattr(processor, f"{kind}_token_ids", None) or ())) and not (
        kind == "image" and _writes(processor, token)
    ):
        raise InputError(
            f"`processor` must write an {kind} as token {token} for this model, but {mark!r} is {written}. Load it "
            "from the model's folder."
        )
    tokens = cast(torch.nn.Embedding, model.get_input_embeddings()).num_embeddings
    if len(tokenizer) > tokens:
        raise InputError(
            f"`processor` must have at most {tokens} tokens for this model, but has {len(tokenizer)}. Load it from "
            "the model's folder."
        )
    if template and not getattr(processor, "chat_template", None):
        if not getattr(tokenizer, "chat_template", None):
            raise InputError(
                "`processor` must have a chat template, which writes a question as this model reads it, but has none. "
                "Use an instruction-tuned model, or set `processor.chat_template`."
            )
        processor.chat_template = tokenizer.chat_template
    if model.training:
        raise InputError("`model` must be in evaluation mode, but is being trained. Call `model.eval()`.")


def _writes(processor: Any, token: int) -> bool:
    """Return whether the processor writes this token id instead of an image's placeholder text."""
    picture = np.full((64, 64, 3), 128, np.uint8)
    try:
        batch = processor(images=[[picture]], text=[processor.image_token], return_tensors="pt")
        return bool((batch["input_ids"] == token).any())
    except Exception:  # all exceptions, because processors raise errors of many types
        return False


_models = LoadedModels[LoadedVlm]()


def load_vlm(
    model: str | os.PathLike[str] = DEFAULT_VLM,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> LoadedVlm:
    """Load a vision-language model.

    It is loaded once for each folder, device and dtype; later calls return the same object.

    Args:
        model: A shipped name, a folder or a Hugging Face id.
        device: None: a GPU if there is one, else the CPU.
        dtype: Dtype of the weights.

    Raises:
        InputError: If there is no such model, or its files are damaged, not safetensors, or outside its folder.
    """
    directory = find_model(model, SHIPPED_MODEL_TYPE, VLM_FILES)
    torch_device = check_device(device)
    key = (path_version(directory), str(torch_device), str(dtype))
    return _models.get(key, lambda: _read(directory, torch_device, dtype))


def read_vlm(directory: Path) -> PreTrainedModel:
    """Load the model in a folder, in float32 on the CPU.

    Raises:
        InputError: If files are damaged or outside the folder.
    """
    return read_pretrained(directory, *_types(directory), "vision-language model")


def _types(directory: Path) -> tuple[type[PreTrainedConfig], type[PreTrainedModel]]:
    """Return transformers' classes of the configuration and the model in a folder. Remote code is not considered."""
    if not reads_images(directory):
        raise InputError(
            f"`model` must be a vision-language model, but '{directory}' is {model_kind(directory) or 'no model'!r}. "
            "Name a LLaVA or a Qwen-VL."
        )
    config_type = cast(type[PreTrainedConfig], config_class(directory))
    return config_type, cast(type[PreTrainedModel], MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_type])


def is_vision_language_model(directory: Path) -> bool:
    """Return whether a folder holds a model that reads images, with a processor.

    Without a processor such a model is a language model.
    """
    return reads_images(directory) and any((directory / name).is_file() for name in PROCESSOR_FILES)


def reads_images(directory: Path) -> bool:
    """Return whether config.json in `directory` is that of a model of transformers that reads images and writes text.

    Some of these models, such as Gemma 3, are causal language models as well.
    """
    config_type = config_class(directory)
    return config_type is not None and config_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def read_processor(directory: Path) -> ProcessorMixin:
    """Load the processor in a folder.

    If torchvision is missing, the processor is loaded without its video processor, where possible.

    Raises:
        InputError: If the processor is damaged, or needs a package that is not installed.
    """
    with report_damage(
        f"`model` must have a whole tokenizer and image processor, but those in '{directory}' are damaged"
    ):
        try:
            return AutoProcessor.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except (ImportError, OSError, ValueError) as error:
            kind = None if isinstance(error, ValueError) else _processor_type(directory)
            if kind is not None and _has_video(kind):
                return without_video_processor(kind).from_pretrained(
                    directory, local_files_only=True, trust_remote_code=False
                )
            package = next((name for name in PACKAGES if name in str(error).lower() and find_spec(name) is None), None)
            if package is None:
                raise
            raise InputError(
                f"`model` must have a processor that can be read here, but that of '{directory}' needs {package}. Run "
                f"`pip install {package}`."
            ) from error


def _has_video(kind: type[ProcessorMixin]) -> bool:
    """Return whether a processor class has a video processor that is not needed for pictures."""
    try:
        return "video_processor" in kind.get_attributes() and kind.__name__ not in NEED_VIDEO
    except ImportError:  # the class itself needs a package that is missing
        return False


def _processor_type(directory: Path) -> type[ProcessorMixin]:
    """Return the processor class that the settings in a folder name, or transformers' class for the model."""
    settings = directory / "processor_config.json"
    named = read_settings(settings).get("processor_class") if settings.is_file() else None
    if isinstance(named, str) and named.endswith("Processor") and isinstance(getattr(transformers, named, None), type):
        return cast(type[ProcessorMixin], getattr(transformers, named))
    return cast(type[ProcessorMixin], PROCESSOR_MAPPING[_types(directory)[0]])


def without_video_processor(kind: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """Make a subclass of a processor class that works without its video processor."""

    class ForPictures(kind):
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: Any = None, **options: Any) -> None:
            parts = {"image_processor": image_processor, "tokenizer": tokenizer, "video_processor": None}
            super().__init__(**parts, chat_template=chat_template, **options)

        @staticmethod
        def validate_init_kwargs(processor_config: Any, valid_kwargs: Any) -> Any:
            """Keep all settings of the folder's complete processor, such as the number of tokens of an image."""
            named = [name for name in inspect.signature(kind.__init__).parameters if name != "video_processor"]
            return kind.validate_init_kwargs(processor_config, named)

    ForPictures.__name__ = kind.__name__
    return ForPictures


def _read(directory: Path, device: torch.device, dtype: torch.dtype) -> LoadedVlm:
    network: Any = read_vlm(directory)
    processor, familiar = read_processor(directory), read_familiar(directory)
    return LoadedVlm(network.to(device, dtype), processor, directory, familiar=familiar)
