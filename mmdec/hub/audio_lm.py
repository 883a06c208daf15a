"""Finds audio language models, such as Qwen2-Audio, and loads each once, with the processor that reads its sound.

A model's folder is as transformers writes it; pickles, remote code and adapters are refused.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast, final

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoProcessor, PreTrainedModel, ProcessorMixin

from mmdec.audio import SAMPLE_RATE
from mmdec.checks.devices import PASSED_ON, check_device
from mmdec.checks.weights import check_extractor, damaged, read_settings
from mmdec.hub.find import LoadedModels, find, kind, version
from mmdec.hub.language_model import FILES, read_network
from mmdec.hub.vlm import check_processor
from mmdec.targets.media import HEARING
from mmdec.types import InputError

FAMILIES = HEARING.split()
ADAPTER = "adapter_config.json"
REQUEST = "Transcribe the speech."  # the request to a model whose processor writes none itself
VOXTRAL = "Voxtral"  # its tokenizer needs the package mistral-common


@final
@dataclass
class LoadedAudioLm:
    """A model with its processor. All callers share this object, and only read the weights."""

    model: PreTrainedModel
    processor: ProcessorMixin
    directory: Path | None = None  # the model's folder, in which drafters are searched
    drafters: LoadedModels[Any] = field(default_factory=LoadedModels, repr=False)  # drafters loaded from folders
    checked: set[str] = field(default_factory=set, repr=False)  # names of drafters that were checked and fit

    def __post_init__(self) -> None:
        """Raises InputError if the processor belongs to another model, expects another sample rate than 16 kHz, or has
        no chat template (Voxtral needs none)."""
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
        """Return the processor's tokenizer."""
        return cast(Any, self.processor).tokenizer

    @property
    def extractor(self) -> Any:
        """Return the processor's feature extractor."""
        parts: Any = self.processor
        return getattr(parts, "feature_extractor", None) or parts.audio_processor

    @property
    def most_seconds(self) -> float | None:
        """Return the seconds of the longest recording that the processor does not cut; None: there is no limit."""
        if type(self.model).__name__.startswith("Qwen2Audio"):  # its processor cuts at one window, without an error
            return float(self.extractor.chunk_length)
        return getattr(self.processor, "max_audio_len", None)

    @property
    def requests(self) -> Mapping[str, Any]:
        """Return the parameters of `processor.apply_transcription_request`; empty without such a method."""
        call = getattr(self.processor, "apply_transcription_request", None)
        return {} if call is None else inspect.signature(call).parameters

    @property
    def written(self) -> bool:
        """Return whether `apply_transcription_request` can return the prompt as text. Voxtral's cannot."""
        return "tokenize" in self.requests

    def check(self, samples: Tensor) -> Tensor:
        """Return samples (T,) unchanged. Raises InputError if they are longer than `most_seconds`."""
        most, seconds = self.most_seconds, len(samples) / SAMPLE_RATE
        if most is not None and seconds > most:
            raise InputError(
                f"`audio` must last at most {most:g} seconds for {type(self.model).__name__}, but lasts {seconds:.1f}. "
                "Cut it."
            )
        return samples

    def _texts(self, prompt: str | None, named: Mapping[str, Any], count: int) -> list[str]:
        """Return the text of each recording's prompt, with one placeholder for its sound. prompt: the request; None:
        the processor's own, else `REQUEST`. count: number of recordings. named: {"language": the recordings'
        languages}, or {} if the model shall detect them."""
        processor: Any = self.processor
        asked, mark = prompt or REQUEST, processor.audio_token
        if self.written:
            nothing = [torch.zeros(SAMPLE_RATE).numpy()] * count  # silence: the sound does not change the text
            request = partial(processor.apply_transcription_request, nothing, prompt=prompt, tokenize=False, **named)
            tries: list[Callable[[], list[str]]] = [request]
        else:  # some templates take the request as plain text, not as a list of parts
            content = [{"type": "audio"}, {"type": "text", "text": asked}], f"{mark}{asked}"
            messages = [[{"role": "user", "content": each}] for each in content]
            write = partial(processor.apply_chat_template, add_generation_prompt=True, tokenize=False)
            tries = [lambda each=each: [write(each)] * count for each in messages]
        why = ""
        for attempt in tries:
            try:
                texts = attempt()
            except Exception as error:  # whatever a template raises
                why = f"fails ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
                continue
            if all(text.count(mark) == 1 for text in texts) and (self.written or asked in texts[0]):
                return texts
            why = f"writes {texts[0].count(mark)} {mark!r}"
        raise InputError(
            f"`model` must place a recording and the request in its text, but its chat template {why}. Mend "
            "`processor.chat_template`."
        )

    def inputs(
        self, recordings: Sequence[Tensor], prompt: str | None = None, languages: Sequence[str | None] | None = None
    ) -> dict[str, Any]:
        """Return the inputs of `generate` for the transcription of recordings (T,), padded on the left.

        prompt: the request; None: the processor's own, else `REQUEST`. languages: each recording's language; None: the
            model detects it.
        Raises: InputError if the processor refuses a recording.
        """
        processor: Any = self.processor
        sounds, begin = [samples.numpy() for samples in recordings], self.tokenizer.bos_token
        named = {} if languages is None else {"language": [*languages]}
        whole = bool(self.requests) and not self.written
        texts = [""] if whole else self._texts(prompt, named, len(sounds))
        padded = {
            "padding": True,
            "padding_side": "left",
            "add_special_tokens": not (begin and texts[0].startswith(begin)),
        }
        rate = {"sampling_rate": SAMPLE_RATE}
        try:
            if whole:
                given = {"model_id": "", "format": ["wav"] * len(sounds), **rate, **named}
                made = processor.apply_transcription_request(sounds, **given)
            else:
                kinds = {"text_kwargs": padded, "audio_kwargs": rate}
                made = processor(text=texts, audio=sounds, return_tensors="pt", **kinds)
        except PASSED_ON:
            raise
        except Exception as error:  # processors raise various errors
            raise InputError(
                f"`audio` must be what {type(processor).__name__} takes, but it refuses "
                f"{', '.join(f'{len(samples) / SAMPLE_RATE:.2f} s' for samples in recordings)} "
                f"({type(error).__name__}: {' '.join(str(error).split())[:200]}). Cut or lengthen the sound."
            ) from error
        return dict(made.to(self.model.device, self.model.dtype))


_models = LoadedModels[LoadedAudioLm]()


def family(directory: Path) -> str:
    """Return the family of a folder's model, such as "Qwen2Audio"; "" if it is not an audio language model."""
    model_type = kind(directory)
    name = CONFIG_MAPPING[model_type].__name__.removesuffix("Config") if model_type in CONFIG_MAPPING else ""
    return name if name in FAMILIES else ""


def load_audio_lm(
    model: str | os.PathLike[str],
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> LoadedAudioLm:
    """Load an audio language model; once for each model, device and dtype.

    model: a directory or a hub id. device: None: a GPU if there is one, else the CPU. dtype: that of the weights.
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
