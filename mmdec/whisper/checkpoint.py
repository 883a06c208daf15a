"""Finds Whisper models, and loads each once, together with its processor. A model's Medusa heads are loaded when they
are needed.

A model's folder has the files that transformers writes (config.json, generation_config.json, safetensors, tokenizer and
feature extractor). Medusa heads are in the subfolder `medusa` of the model's folder. Pickles and remote code are
rejected.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast, final

import torch
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration, WhisperProcessor

from mmdec.checks.arguments import did_you_mean, format_value
from mmdec.checks.devices import check_device
from mmdec.checks.weights import (
    build_with_weights,
    check_extractor,
    check_generation,
    check_layer_counts,
    lies_inside,
    read_settings,
    read_weights,
    report_damage,
    weight_files,
)
from mmdec.drafters.registry import auto_names, drafter_names
from mmdec.errors import InputError
from mmdec.hub.cache import LoadedModels, path_version
from mmdec.hub.find import drafter_folder, find_model, model_kind, path_text
from mmdec.io.audio import SAMPLE_RATE
from mmdec.nn.int8 import quantise_linears
from mmdec.pretrained.drafters import load_drafter
from mmdec.pretrained.language_model import GENERATION_FILE, read_pretrained
from mmdec.pretrained.plain_text import PlainText
from mmdec.types import Drafter
from mmdec.whisper.encoder import WhisperEncoder, WhisperEncoderConfig
from mmdec.whisper.options import DEFAULT_MODEL

WHISPER_KIND = "whisper"  # transformers' model_type
MEDUSA = "medusa"
WHISPER_FILES = ("*.json", "*.txt", "*.md", "model.safetensors", "model-*.safetensors")
WHISPER_FILES += tuple(f"{name}/*.safetensors" for name in auto_names(speech=True))  # drafters in the model's folder


@final
@dataclass
class LoadedWhisper:
    """A Whisper with its processor. All callers share one object, and none changes the weights."""

    model: WhisperForConditionalGeneration
    processor: WhisperProcessor
    # the model's folder, where drafters are looked for; None: the model was not loaded from a folder
    directory: Path | None = None
    # cache of drafters that were loaded from folders
    _drafters: LoadedModels[Drafter] = field(default_factory=LoadedModels, repr=False)

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

    @property
    def tokenizer(self) -> Any:
        """The processor's tokenizer."""
        return self.processor.tokenizer  # type: ignore[attr-defined] # set by name

    @cached_property
    def plain(self) -> PlainText:
        """The tokenizer for callers' prompts, which reads special tokens in them as text."""
        return PlainText(self.tokenizer)

    @property
    def extractor(self) -> Any:
        """The processor's feature extractor."""
        return self.processor.feature_extractor

    def read_drafter(self, folder: Path) -> Drafter:
        """Load the drafter in a folder, on the model's device and in its precision.

        It is loaded once, and again if its files have changed.

        Raises:
            InputError: If the folder holds no drafter that fits the model.
        """
        return self._drafters.get(path_version(folder), lambda: load_drafter(folder, self.model, "drafter"))

    def heads(self, directory: str | os.PathLike[str] | None = None) -> Drafter:
        """Load Medusa heads as a drafter.

        Args:
            directory: The heads' folder; None: the subfolder `medusa` of the model's folder.

        Raises:
            InputError: If there are none.
        """
        return self.own_drafter(MEDUSA) if directory is None else self.drafter_from(directory)

    def own_drafter(self, name: str) -> Drafter:
        """Load a drafter with weights that belongs to the model.

        Args:
            name: Such as "ctc".

        Raises:
            InputError: If there is none, or it is damaged or outside the model's folder.
        """
        folder = None if self.directory is None else drafter_folder(self.directory, name)
        if folder is None or self.directory is None:
            where = f"'{self.directory / name}' has none" if self.directory is not None else "the caller loaded it"
            raise InputError(
                f"`drafter` must be {', '.join(map(repr, drafter_names()))}, a folder, an object or None for a "
                f"`model` without the drafter '{name}', and {where}. Train one, or convert a published one with "
                "`mmdec convert`, and give its folder."
            )
        home = self.directory.resolve()
        if folder.parent == home and not lies_inside(folder, home):
            raise InputError(
                f"`model` must hold its drafters in its own folder, but '{folder}' leads outside. Give the drafter's "
                "own folder as `drafter`."
            )
        return self.read_drafter(folder)

    def drafter_from(self, directory: str | os.PathLike[str]) -> Drafter:
        """Load a drafter with weights from a folder that the caller names.

        Raises:
            InputError: If there is no such folder, or it holds no drafter that fits the model.
        """
        names = [*auto_names(speech=True), *drafter_names()]
        rule = f"{', '.join(map(repr, names))}, a folder"
        folder = Path(path_text(directory, "drafter", rule))
        if not folder.is_dir():
            raise InputError(
                f"`drafter` must be {rule} with weights, an object or None, but is {format_value(str(directory))}, "
                f"and no such folder exists.{did_you_mean(str(directory), names)}"
            )
        return self.read_drafter(folder)

    def _marks(self, settings: Any) -> tuple[int | None, int | None]:
        mark: int | None = getattr(settings, "no_timestamps_token_id", None)
        return mark, None if mark is None else self.tokenizer.convert_tokens_to_ids("<|notimestamps|>")


_whispers = LoadedModels[LoadedWhisper]()


def load_whisper(
    model: str | os.PathLike[str] = DEFAULT_MODEL,
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


def load_whisper_encoder(model: str | os.PathLike[str]) -> WhisperEncoder:
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
        config = WhisperEncoderConfig.of(settings)
    except KeyError as error:
        raise InputError(f"`model` must name its sizes, but '{folder}' lacks {error}. Download it again.") from None
    weights = read_weights(weight_files(folder, prefixes=(ENCODER_PREFIX,)), prefixes=(ENCODER_PREFIX,))
    check_layer_counts(settings, weights)
    state = {name.removeprefix(ENCODER_PREFIX): tensor for name, tensor in weights.items()}
    return build_with_weights(lambda: WhisperEncoder(config), state, "model", folder).eval().requires_grad_(False)
