"""What `mmdec bench drafters` decodes: a loaded model, and prompts, recordings or questions about pictures for it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmdec.bench.options import DrafterBenchOptions
from mmdec.bench.pairing import Group, length_groups, task_groups
from mmdec.bench.prompts import BEGINNINGS, INSTRUCTIONS, encode_prompts, read_chat_prompts
from mmdec.errors import InputError
from mmdec.evaluation.description import DescriptionHarness, questions_of
from mmdec.evaluation.harness import Harness, Measurement, Method, parse_language
from mmdec.evaluation.language_model import LanguageHarness, TokenPrompt
from mmdec.evaluation.transcription import AudioLmHarness, TranscriptionHarness
from mmdec.generation.drafter_source import LoadedTarget
from mmdec.hub.find import model_kind
from mmdec.pretrained.audio_lm import LoadedAudioLm, audio_family, load_audio_lm
from mmdec.pretrained.language_model import LoadedLanguageModel, is_language_model, load_language_model
from mmdec.pretrained.vlm import LoadedVlm, is_vision_language_model, load_vlm
from mmdec.training.corpora.admission import Admission
from mmdec.training.corpora.image_text import ImageQuestion, by_task
from mmdec.whisper.checkpoint import WHISPER_KIND, LoadedWhisper, load_whisper
from mmdec.whisper.hypothesis_call import read_text_file, text_for

Input = TypeVar("Input")
MAX_NEW_TOKENS = 128
DEFAULT_PER_KIND = 2  # prompts of each kind of the built-in ones
WORD_BINS = ((0, 5), (6, 20), (21, 39), (40, 100_000))  # least and most words of each bin of transcripts
ANSWER_BINS = ((1, 8), (9, 32), (33, 64), (65, 100_000))  # least and most new tokens of each bin of answers
SAMPLE_RECORDINGS = Path("data/samples/english")
RECORDING_SUFFIXES = (".flac", ".wav", ".mp3", ".ogg")


@final
@dataclass(frozen=True)
class NamedRecording:
    """A recording to decode."""

    path: Path
    samples: Tensor  # (T,) 16 kHz mono


@final
class RecordingHarness(Harness[NamedRecording]):
    """Transcribes recordings with one loaded model, and measures the calls."""

    def __init__(self, harness: TranscriptionHarness | AudioLmHarness) -> None:
        self._harness = harness

    def measure(self, inputs: Sequence[NamedRecording], method: Method) -> Measurement:
        return self._harness.measure([recording.samples for recording in inputs], method)


class Workload(ABC, Generic[Input]):
    """A loaded model and the inputs to decode."""

    bench: str  # name of the report
    noun: str  # what the inputs are, in the plural
    model: PreTrainedModel
    loaded_target: LoadedTarget | None  # finds drafters in the model's folder; None: there is nothing to find
    directory: Path
    harness: Harness[Input]
    inputs: Sequence[Input]

    @abstractmethod
    def small_network(self, folder: Path) -> tuple[PreTrainedModel, dict[str, Any]] | None:
        """Load a smaller model.

        Returns:
            The network, and further options of transformers' assisted generation; None: the folder holds a drafter.
        """

    @abstractmethod
    def groups(self, measured: Sequence[Measurement]) -> list[Group]:
        """Group the inputs that were measured, which are the first.

        Args:
            measured: One measurement of each.
        """

    def label(self, index: int) -> str:
        """Name an input in lines of progress."""
        return f"{index + 1} of {len(self.inputs)}"


@final
class PromptWorkload(Workload[TokenPrompt]):
    """Prompts for a language model."""

    bench, noun, loaded_target = "drafters-text", "prompts", None

    def __init__(self, language: LoadedLanguageModel, prompts: Sequence[TokenPrompt]) -> None:
        self.language, self.model, self.directory, self.inputs = language, language.model, language.directory, prompts
        self.harness = LanguageHarness(language)

    def small_network(self, folder: Path) -> tuple[PreTrainedModel, dict[str, Any]] | None:
        if not is_language_model(folder):
            return None
        small, language = load_language_model(folder, self.model.device), self.language
        options: dict[str, Any] = {}
        if small.tokenizer.get_vocab() != language.tokenizer.get_vocab():
            options = {"tokenizer": language.tokenizer, "assistant_tokenizer": small.tokenizer}
        return small.model, options

    def groups(self, measured: Sequence[Measurement]) -> list[Group]:
        return task_groups([prompt.task for prompt in self.inputs[: len(measured)]])

    def label(self, index: int) -> str:
        return f"{super().label(index)}, {self.inputs[index].task}"


@final
class RecordingWorkload(Workload[NamedRecording]):
    """Recordings for a Whisper or an audio language model."""

    bench, noun = "drafters-audio", "recordings"

    def __init__(
        self,
        loaded: LoadedWhisper | LoadedAudioLm,
        directory: Path,
        paths: Sequence[Path],
        harness: TranscriptionHarness | AudioLmHarness,
    ) -> None:
        self.loaded_target, self.model, self.directory = loaded, loaded.model, directory
        self.harness = RecordingHarness(harness)
        self.inputs = [NamedRecording(path, harness.read(path)) for path in paths]

    def small_network(self, folder: Path) -> tuple[PreTrainedModel, dict[str, Any]] | None:
        if isinstance(self.loaded_target, LoadedWhisper):
            return (load_whisper(folder, self.model.device).model, {}) if model_kind(folder) == WHISPER_KIND else None
        return (load_language_model(folder, self.model.device).model, {}) if is_language_model(folder) else None

    def groups(self, measured: Sequence[Measurement]) -> list[Group]:
        words = [len(measurement.texts[0].split()) for measurement in measured]
        return [Group("all", "all", range(len(words))), *length_groups(words, WORD_BINS, "words")]

    def label(self, index: int) -> str:
        return f"{super().label(index)}, {self.inputs[index].path.name}"


@final
class QuestionWorkload(Workload[ImageQuestion]):
    """Questions about pictures for a vision-language model."""

    bench, noun = "drafters-images", "questions"

    def __init__(
        self, vlm: LoadedVlm, directory: Path, questions: Sequence[ImageQuestion], max_new_tokens: int | None
    ) -> None:
        self.loaded_target, self.model, self.directory, self.inputs = vlm, vlm.model, directory, questions
        self.harness = DescriptionHarness(vlm, max_new_tokens)

    def small_network(self, folder: Path) -> tuple[PreTrainedModel, dict[str, Any]] | None:
        return (load_vlm(folder, self.model.device).model, {}) if is_vision_language_model(folder) else None

    def groups(self, measured: Sequence[Measurement]) -> list[Group]:
        tokens = [len(measurement.tokens[0]) for measurement in measured]
        tasks = task_groups([question.task for question in self.inputs[: len(measured)]])
        return [*tasks, *length_groups(tokens, ANSWER_BINS, "tokens")]

    def label(self, index: int) -> str:
        return f"{super().label(index)}, {self.inputs[index].task}"


def kind_of_inputs(directory: Path, audio: Sequence[Path], images: object) -> str:
    """Return what the model in a folder decodes here: "audio", "images" or "text".

    Raises:
        InputError: If the inputs are for another kind of model.
    """
    of_model = model_kind(directory)
    if of_model == WHISPER_KIND or audio_family(directory):
        kind = "audio"
    elif is_vision_language_model(directory):
        kind = "images"
    elif is_language_model(directory):
        kind = "text"
    else:
        raise InputError(
            f"`model` must be a language model, or one for sound or pictures, but '{directory}' is "
            f"{repr(of_model) if of_model else 'none'}."
        )
    for name, given, needed in (("audio", audio, "audio"), ("images", images, "images")):
        if given and kind != needed:
            raise InputError(
                f"`{name}` must be for a model that reads it, but '{directory.name}' is {of_model!r}. Leave it out."
            )
    return kind


def _recordings(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix in RECORDING_SUFFIXES)


def load_workload(kind: str, directory: Path, device: torch.device, options: DrafterBenchOptions) -> Workload[Any]:
    """Read the inputs, then load the model.

    Args:
        kind: "text", "images" or "audio".
        directory: The model's folder.
        device: Where the model is loaded.
        options: What is decoded.

    Raises:
        InputError: If there is nothing to decode, or the model is damaged.
    """
    per_kind = options.per_kind
    if per_kind is None and options.data is None and options.images is None:
        per_kind = DEFAULT_PER_KIND
    if kind == "text":
        given = None if options.data is None else read_chat_prompts(os.fspath(options.data))
        language = load_language_model(directory, device)
        prompts = (INSTRUCTIONS if language.tokenizer.chat_template else BEGINNINGS) if given is None else given
        chosen: Any = in_turn(by_task(list[Any](prompts), per_kind))
        return PromptWorkload(language, encode_prompts(language, chosen, options.max_new_tokens or MAX_NEW_TOKENS))
    if kind == "images":
        admission = Admission(options.allow_absolute_paths)
        questions = questions_of(options.data, options.images, options.prompt, per_kind, admission)
        return QuestionWorkload(load_vlm(directory, device), directory, in_turn(questions), options.max_new_tokens)
    if options.data is not None:
        raise InputError("`data` must be prompts or pictures, but this is a speech model. Give `audio` instead.")
    recordings = options.audio or _recordings(SAMPLE_RECORDINGS)
    if not recordings:
        raise InputError(f"`audio` must name recordings where '{SAMPLE_RECORDINGS}' has none. Name files or a folder.")
    for path in recordings:
        if not path.is_file():
            raise InputError(f"`audio` must be files, but '{path}' is none. Check the path.")
        for folder in options.draft_text:
            read_text_file(text_for(path, folder))
    if audio_family(directory):
        hearing = load_audio_lm(directory, device)
        return RecordingWorkload(hearing, directory, recordings, AudioLmHarness(hearing, options.max_new_tokens))
    whisper = load_whisper(directory, device)
    harness = TranscriptionHarness(whisper, parse_language(options.language), options.max_new_tokens)
    return RecordingWorkload(whisper, directory, recordings, harness)


def in_turn(inputs: Sequence[Any]) -> list[Any]:
    """Order inputs so that their kinds take turns: a run that is stopped early has measured some of each.

    Args:
        inputs: Each has its kind as `task`.
    """
    numbers = Counter[str]()
    turns: list[int] = []
    for item in inputs:
        turns.append(numbers[item.task])
        numbers[item.task] += 1
    return [inputs[index] for index in sorted(range(len(inputs)), key=turns.__getitem__)]
