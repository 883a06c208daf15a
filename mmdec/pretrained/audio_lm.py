"""Finds audio language models, such as Qwen2-Audio, and loads each once, together with its processor.

A model's folder has the files that transformers writes. Pickles, remote code and adapters are rejected.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoProcessor

from mmdec.checks.devices import PASSED_ON, check_device
from mmdec.checks.files import error_line
from mmdec.checks.weights import check_extractor, read_settings, report_damage
from mmdec.errors import InputError
from mmdec.hub.cache import LoadedModels, path_version
from mmdec.hub.find import find_model, model_kind
from mmdec.io.audio import SAMPLE_RATE
from mmdec.pretrained.language_model import LANGUAGE_MODEL_FILES, read_pretrained
from mmdec.pretrained.loaded_media_model import LoadedMediaModel
from mmdec.pretrained.vlm import check_processor
from mmdec.targets.families import AUDIO_FAMILIES

AUDIO_FAMILY_NAMES = AUDIO_FAMILIES.split()
ADAPTER_CONFIG = "adapter_config.json"
# the prompt's instruction, if the caller gives none and the processor has none of its own
DEFAULT_INSTRUCTION = "Transcribe the speech."
VOXTRAL = "Voxtral"  # beginning of the names of classes whose tokenizer needs the package mistral-common


@final
@dataclass(frozen=True)
class LoadedAudioLm(LoadedMediaModel):
    """An audio language model with its processor. All callers share one object, and none changes the weights."""

    def __post_init__(self) -> None:
        """Check the processor.

        Raises:
            InputError: If it belongs to another model, expects a sample rate other than 16 kHz, or has no chat template
                (Voxtral needs none).
        """
        template = not type(self.model).__name__.startswith(VOXTRAL)
        check_processor(self.model, self.processor, "audio", f"Use one of {', '.join(AUDIO_FAMILY_NAMES)}.", template)
        rate = getattr(self.extractor, "sampling_rate", SAMPLE_RATE)
        if rate != SAMPLE_RATE:
            raise InputError(
                f"`processor` must read {SAMPLE_RATE} samples per second, but reads {rate}. Load it from the model's "
                "folder."
            )

    @property
    def extractor(self) -> Any:
        """The processor's feature extractor."""
        parts: Any = self.processor
        return getattr(parts, "feature_extractor", None) or parts.audio_processor

    @property
    def max_seconds(self) -> float | None:
        """The maximum seconds of a recording that the processor reads without cutting it; None: no maximum."""
        if type(self.model).__name__.startswith("Qwen2Audio"):  # its processor silently cuts recordings at one window
            return float(self.extractor.chunk_length)
        return getattr(self.processor, "max_audio_len", None)

    @property
    def requests(self) -> Mapping[str, Any]:
        """The parameters of the processor's `apply_transcription_request`, by name; empty without such a method."""
        call = getattr(self.processor, "apply_transcription_request", None)
        return {} if call is None else inspect.signature(call).parameters

    @property
    def written(self) -> bool:
        """Whether the processor's `apply_transcription_request` can return the prompt as text.

        Voxtral's cannot.
        """
        return "tokenize" in self.requests

    def check(self, samples: Tensor) -> None:
        """Raise InputError if samples (T,) are longer than `max_seconds`."""
        seconds = len(samples) / SAMPLE_RATE
        if self.max_seconds is not None and seconds > self.max_seconds:
            raise InputError(
                f"`audio` must last at most {self.max_seconds:g} seconds for {type(self.model).__name__}, but lasts "
                f"{seconds:.1f}. Cut it."
            )

    def _texts(self, prompt: str | None, named: Mapping[str, Any], count: int) -> list[str]:
        """Write the prompt of each recording as text, with one placeholder for the audio.

        Args:
            prompt: The instruction; None: the processor's own, else `DEFAULT_INSTRUCTION`.
            named: {"language": the language of each recording}, or {} if the model detects the languages.
            count: Number of recordings.

        Returns:
            The prompts.
        """
        processor: Any = self.processor
        instruction, mark = prompt or DEFAULT_INSTRUCTION, processor.audio_token
        if self.written:
            # a second of silence for each recording, because the text does not depend on the audio
            nothing = [torch.zeros(SAMPLE_RATE).numpy()] * count
            request = partial(processor.apply_transcription_request, nothing, prompt=prompt, tokenize=False, **named)
            tries: list[Callable[[], list[str]]] = [request]
        else:  # some chat templates take the content as plain text instead of a list of parts, so both forms are tried
            content = [{"type": "audio"}, {"type": "text", "text": instruction}], f"{mark}{instruction}"
            messages = [[{"role": "user", "content": each}] for each in content]
            write = partial(processor.apply_chat_template, add_generation_prompt=True, tokenize=False)
            tries = [lambda each=each: [write(each)] * count for each in messages]
        why = ""
        for attempt in tries:
            try:
                texts = attempt()
            except Exception as error:  # a template may raise any exception
                why = f"fails ({error_line(error)})"
                continue
            if all(text.count(mark) == 1 for text in texts) and (self.written or instruction in texts[0]):
                return texts
            why = f"writes {texts[0].count(mark)} {mark!r}"
        raise InputError(
            f"`model` must place a recording and the request in its text, but its chat template {why}. Fix "
            "`processor.chat_template`."
        )

    def inputs(
        self, recordings: Sequence[Tensor], prompt: str | None = None, languages: Sequence[str | None] | None = None
    ) -> dict[str, Any]:
        """Make the inputs with which `generate` transcribes recordings (T,).

        Prompts are padded on the left.

        Args:
            prompt: The instruction; None: the processor's own, else `DEFAULT_INSTRUCTION`.
            languages: Each recording's language (None: the model detects it); None: the model detects all languages.

        Raises:
            InputError: If the processor rejects a recording.
        """
        processor: Any = self.processor
        sounds, begin = [samples.numpy() for samples in recordings], self.tokenizer.bos_token
        named = {} if languages is None else {"language": [*languages]}
        whole = bool(self.requests) and not self.written
        if prompt is not None:
            (prompt,) = self.plain.hide([prompt])
        texts = [""] if whole else self._texts(prompt, named, len(sounds))
        if self.plain.hides(texts):
            processor = self.plain.processor
        padded = {
            "padding": True,
            "padding_side": "left",
            "add_special_tokens": not (begin and texts[0].startswith(begin)),
        }
        rate = {"sampling_rate": SAMPLE_RATE}
        try:
            if whole:
                keywords = {"model_id": "", "format": ["wav"] * len(sounds), **rate, **named}
                batch = processor.apply_transcription_request(sounds, **keywords)
            else:
                kinds = {"text_kwargs": padded, "audio_kwargs": rate}
                batch = processor(text=texts, audio=sounds, return_tensors="pt", **kinds)
        except PASSED_ON:
            raise
        except Exception as error:  # all exceptions, because processors raise errors of many types
            raise InputError(
                f"`audio` must be what {type(processor).__name__} takes, but it refuses "
                f"{', '.join(f'{len(samples) / SAMPLE_RATE:.2f} s' for samples in recordings)} "
                f"({error_line(error)}). Cut or lengthen the sound."
            ) from error
        return dict(batch.to(self.model.device, self.model.dtype))


_models = LoadedModels[LoadedAudioLm]()


def audio_family(directory: Path) -> str:
    """Return the family of the model in a folder, such as "Qwen2Audio"; "" if it is not an audio language model."""
    model_type = model_kind(directory)
    name = CONFIG_MAPPING[model_type].__name__.removesuffix("Config") if model_type in CONFIG_MAPPING else ""
    return name if name in AUDIO_FAMILY_NAMES else ""


def load_audio_lm(
    model: str | os.PathLike[str],
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> LoadedAudioLm:
    """Load an audio language model.

    It is loaded once for each folder, device and dtype; later calls return the same object.

    Args:
        model: A folder or a Hugging Face id.
        device: None: a GPU if there is one, else the CPU.
        dtype: Dtype of the weights.

    Raises:
        InputError: If there is no such model, a package that its processor needs is missing, or its files are damaged,
            not safetensors, or outside its folder.
    """
    directory = find_model(model, None, LANGUAGE_MODEL_FILES)
    name, checked = audio_family(directory), check_device(device)
    if not name:
        raise InputError(
            f"`model` must be an audio language model ({', '.join(AUDIO_FAMILY_NAMES)}), but '{directory}' is "
            f"{model_kind(directory) or 'no model'!r}. Give such a model."
        )
    if read_settings(directory / "config.json").get("has_lora_adapter") or (directory / ADAPTER_CONFIG).is_file():
        raise InputError(
            f"`model` must be complete in its folder, but '{directory}' also holds an adapter. Load both with "
            "transformers and peft, and give the model with its `processor`."
        )
    key = (path_version(directory), str(checked), str(dtype))
    return _models.get(key, lambda: _read(directory, name, checked, dtype))


def _read(directory: Path, name: str, device: torch.device, dtype: torch.dtype) -> LoadedAudioLm:
    check_extractor(directory)
    if name == VOXTRAL and find_spec("mistral_common") is None:
        raise InputError(
            f"`model` must have a processor that can be read here, but that of '{directory}' needs a package. Run `pip "
            "install mistral-common`."
        )
    with report_damage(
        f"`model` must have a whole tokenizer and feature extractor, but those in '{directory}' are damaged"
    ):
        processor = AutoProcessor.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    network: Any = getattr(transformers, f"{name}ForConditionalGeneration")
    model: Any = read_pretrained(directory, network.config_class, network, "language model that hears")
    return LoadedAudioLm(model.to(device, dtype), processor, directory)
