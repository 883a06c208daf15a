"""Finds Whisper models, and loads each once, together with its processor.

A model's Medusa heads are loaded when they are needed. A model's folder has the files that transformers writes
(config.json, generation_config.json, safetensors, tokenizer and feature extractor). Medusa heads are in the subfolder
`medusa` of the model's folder. Pickles and remote code are rejected.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast, final

import torch
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration, WhisperProcessor

from mmdec.checks.devices import check_device
from mmdec.checks.weights import (
    build_with_weights,
    check_extractor,
    check_generation,
    check_layer_counts,
    read_settings,
    read_weights,
    report_damage,
    weight_files,
)
from mmdec.drafters.registry import auto_names
from mmdec.errors import InputError
from mmdec.hub.cache import LoadedModels, path_version
from mmdec.hub.find import find_model, model_kind
from mmdec.io.audio import SAMPLE_RATE
from mmdec.nn.int8 import quantise_linears
from mmdec.pretrained.language_model import GENERATION_FILE, read_pretrained
from mmdec.pretrained.loaded_media_model import LoadedMediaModel
from mmdec.pretrained.plain_text import PlainText
from mmdec.whisper.options import DEFAULT_WHISPER
from mmdec.whisper.unpadded_encoder import UnpaddedEncoder, UnpaddedEncoderConfig

WHISPER_KIND = "whisper"  # transformers' model_type
MEDUSA = "medusa"
WHISPER_FILES = ("*.json", "*.txt", "*.md", "model.safetensors", "model-*.safetensors")
WHISPER_FILES += tuple(f"{name}/*.safetensors" for name in auto_names(speech=True))  # drafters in the model's folder


@final
@dataclass(frozen=True)
class LoadedWhisper(LoadedMediaModel):
    """A Whisper with its processor. All callers share one object, and none changes the weights."""

    model: WhisperForConditionalGeneration
    processor: WhisperProcessor

    def __post_init__(self) -> None:
        """Check model and processor.

        Raises:
            InputError: If the processor belongs to another model, or the model is in training mode.
        """
        shape, extractor, tokenizer = self.model.config, self.extractor, self.tokenizer
        settings: Any = self.model.generation_config
        # two frames for each position, because the encoder's second convolution has stride 2
        frames = 2 * shape.max_source_positions
        for part, expected, actual in (
            ("mels", shape.num_mel_bins, extractor.feature_size),
            ("frames in a window", frames, extractor.nb_max_frames),
            ("samples per second", SAMPLE_RATE, extractor.sampling_rate),
            ("as the token <|notimestamps|>", *self._marks(settings)),
        ):
            if expected != actual:
                raise InputError(
                    f"`processor` must have {expected} {part} for this model, but has {actual}. Load it from the "
                    "model's folder."
                )
        if len(tokenizer) > shape.vocab_size:
            raise InputError(
                f"`processor` must have at most {shape.vocab_size} tokens for this model, but has {len(tokenizer)}. "
                "Load it from the model's folder."
            )
        if self.model.training:
            raise InputError("`model` must be in evaluation mode, but is being trained. Call `model.eval()`.")

    @cached_property
    def plain(self) -> PlainText:
        """The tokenizer for callers' prompts, which reads special tokens in them as text."""
        return PlainText(self.tokenizer)

    @property
    def extractor(self) -> Any:
        """The processor's feature extractor."""
        return self.processor.feature_extractor

    def is_long(self, samples: int) -> bool:
        """Return whether a recording with this number of samples is longer than one window (30 s)."""
        return samples // self.extractor.hop_length > self.extractor.nb_max_frames

    def _marks(self, settings: Any) -> tuple[int | None, int | None]:
        mark: int | None = getattr(settings, "no_timestamps_token_id", None)
        return mark, None if mark is None else self.tokenizer.convert_tokens_to_ids("<|notimestamps|>")


_whispers = LoadedModels[LoadedWhisper]()


def load_whisper(
    model: str | os.PathLike[str] = DEFAULT_WHISPER,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> LoadedWhisper:
    """Load a Whisper.

    It is loaded once for each folder, device and dtype; later calls return the same object.

    Args:
        model: A shipped name, a folder or a Hugging Face id.
        device: None: a GPU if there is one, else the CPU.
        dtype: Dtype of the weights; torch.int8, only on a CPU: see `mmdec.nn.int8.quantise_linears`.

    Raises:
        InputError: If there is no such model, or its files are damaged, not safetensors, or outside its folder.
    """
    directory = find_model(model, WHISPER_KIND, WHISPER_FILES)
    _check(directory, os.fspath(model))
    checked = check_device(device)
    key = (path_version(directory), path_version(directory.resolve() / MEDUSA), str(checked), str(dtype))
    return _whispers.get(key, lambda: _read(directory, checked, dtype))


def _check(directory: Path, name: str) -> None:
    system = model_kind(directory)
    if system != WHISPER_KIND:
        remedy = "Call `mmdec.translate_speech` for it." if system == "daspeech" else "Name another model."
        raise InputError(f"`model` must be a Whisper, but '{name}' is {system or 'no model'!r}. {remedy}")


def read_whisper(directory: Path) -> WhisperForConditionalGeneration:
    """Load the Whisper in a folder, in float32 on the CPU.

    Raises:
        InputError: If files are damaged or outside the folder.
    """
    model = read_pretrained(directory, WhisperConfig, WhisperForConditionalGeneration, "Whisper", converted=False)
    # older folders have the generation settings in the model's config.json
    if not (directory / GENERATION_FILE).is_file():
        with report_damage(f"`model` must be a whole Whisper, but '{directory}' is damaged or of another version"):
            settings = read_settings(directory / "config.json")
            model.generation_config = GenerationConfig.from_model_config(cast(Any, settings))
            check_generation(model.generation_config, model.config, directory)
    return cast(WhisperForConditionalGeneration, model)


def _read(directory: Path, device: torch.device, dtype: torch.dtype) -> LoadedWhisper:
    model = read_whisper(directory)
    check_extractor(directory)
    with report_damage(
        f"`model` must have a whole tokenizer and feature extractor, but those in '{directory}' are damaged"
    ):
        processor = WhisperProcessor.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    if dtype == torch.int8:
        model.to(device)  # type: ignore[arg-type] # transformers declares a str
        quantise_linears(model)
    else:
        # transformers raises an error here if bitsandbytes has quantised the weights
        with report_damage(f"`model` must have weights in floating point, but those in '{directory}' are quantised"):
            cast(Any, model).to(device, dtype)
    return LoadedWhisper(model, processor, directory)


ENCODER_PREFIX = "model.encoder."


def load_whisper_encoder(model: str | os.PathLike[str]) -> UnpaddedEncoder:
    """Load the speech encoder of a Whisper, in float32 and frozen.

    Args:
        model: A shipped name, a folder or a Hugging Face id.

    Raises:
        InputError: If there is no such model, or its files are damaged.
    """
    folder: Path = find_model(
        model, WHISPER_KIND, ("config.json", "model.safetensors", "model-*.safetensors", "*.index.json")
    )
    settings = read_settings(folder / "config.json")
    if settings.get("model_type") != WHISPER_KIND:
        raise InputError(f"`model` must be a Whisper, but '{os.fspath(model)}' is {settings.get('model_type')!r:.60}.")
    try:
        config = UnpaddedEncoderConfig.of(settings)
    except KeyError as error:
        raise InputError(f"`model` must name its sizes, but '{folder}' lacks {error}. Download it again.") from None
    weights = read_weights(weight_files(folder, prefixes=(ENCODER_PREFIX,)), prefixes=(ENCODER_PREFIX,))
    check_layer_counts(settings, weights)
    state = {name.removeprefix(ENCODER_PREFIX): tensor for name, tensor in weights.items()}
    return build_with_weights(lambda: UnpaddedEncoder(config), state, "model", folder).eval().requires_grad_(False)
