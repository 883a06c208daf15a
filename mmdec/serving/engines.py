"""Engines: each makes the jobs of one task (transcription, speech translation, answers) with one model.

A job's steps are those of the library's own calls, so the server's results equal those of the library. Answers to all
requests share the passes of their model, and so do recordings. A translation is one computation: the graph decoder has
few passes, none of which another request could share.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar, cast, final

from torch import Tensor

import mmdec
from mmdec.checks.arguments import suggesting_options
from mmdec.core.growing_text import GrowingText
from mmdec.core.steps import Compute, Steps, watch_rounds
from mmdec.daspeech.translator import SpeechTranslator
from mmdec.errors import InputError
from mmdec.generation.generate import GenerateCall
from mmdec.generation.speculation import DecodingOptions, Speculation
from mmdec.io.audio import SAMPLE_RATE
from mmdec.pretrained.audio_lm import LoadedAudioLm
from mmdec.pretrained.language_model import LoadedLanguageModel
from mmdec.pretrained.vlm import LoadedVlm
from mmdec.serving.answers import AnswerText, TextDeltas
from mmdec.serving.dialogue import Dialogue
from mmdec.serving.job import Job
from mmdec.serving.scheduler_thread import DecodingStopped, Priority
from mmdec.targets.ropes import max_positions
from mmdec.tasks.audio import describe_silence
from mmdec.tasks.confidence import read_calibrations
from mmdec.tasks.generate_options import length_errors, with_length
from mmdec.tasks.options import option_names
from mmdec.tasks.usage import Usage
from mmdec.types import Round
from mmdec.vision.answer import ANSWER, DescriptionRequest, answer_steps
from mmdec.vision.options import DescribeOptions
from mmdec.whisper.audio_language_model import AudioLmRequest, recording_steps
from mmdec.whisper.decoder import can_use_eager_copy
from mmdec.whisper.live import LiveTranscriber, StreamUpdate
from mmdec.whisper.options import TranscribeOptions
from mmdec.whisper.recordings import transcription_steps
from mmdec.whisper.request import can_translate
from mmdec.whisper.transcribe import LoadedTranscriber, transcription_request

Updates: TypeAlias = "Callable[[], Generator[StreamUpdate]]"


@final
@dataclass(frozen=True)
class EngineOptions:
    """Decoding options that all models of a server share."""

    threads: int | None = None  # number of CPU threads of torch
    # measured times and acceptance rates, shared by all requests; None: `mmdec.default_statistics()`
    statistics: mmdec.DecodingStatistics | None = None


@final
@dataclass(frozen=True)
class SpeechInputs:
    """A recording to transcribe, read and checked."""

    samples: Tensor  # (T,), 16 kHz
    options: TranscribeOptions
    # what an audio language model reads; None for silence, which is not decoded, and for Whisper
    inputs: Mapping[str, Any] | None = None
    tokens: int = 0  # that its cache may come to hold; Whisper's caches are small and not counted


@final
class TranscriptionEngine:
    """The engine for transcription."""

    task = "transcription"

    def __init__(self, loaded: LoadedTranscriber, options: EngineOptions) -> None:
        self.loaded, self._options = loaded, options

    @property
    def translates(self) -> bool:
        """Whether the model can translate into English."""
        return not isinstance(self.loaded, LoadedAudioLm) and can_translate(self.loaded.model.generation_config)

    def read_speech(self, samples: Any, **options: Any) -> SpeechInputs:
        """Check a recording and its options, and make what an audio language model reads.

        Args:
            samples: 16 kHz samples (T,).
            options: For `mmdec.transcribe`; an option that is None is left out.

        Raises:
            InputError: For a wrong option, or a recording that the model does not take.
        """
        loaded, options = self.loaded, _given(options)
        if isinstance(loaded, LoadedAudioLm):
            options["do_sample"] = "temperature" in options  # otherwise the model's settings would decide it
        chosen = TranscribeOptions.from_keywords(options | {"statistics": self._options.statistics})
        if not isinstance(loaded, LoadedAudioLm):
            return SpeechInputs(samples, chosen)
        request = transcription_request(loaded, chosen, 1)
        assert isinstance(request, AudioLmRequest)
        request.check(samples)
        if describe_silence(samples):
            return SpeechInputs(samples, chosen)  # it is not decoded
        inputs = request.inputs({0: samples})
        length = {"max_new_tokens": cast(Any, loaded.model.generation_config).max_new_tokens}
        length |= with_length(request.options, loaded.model)
        return SpeechInputs(
            samples, chosen, inputs, _cache_tokens(loaded.model, int(inputs["input_ids"].shape[1]), length)
        )

    def job(self, speech: SpeechInputs) -> Job:
        """Make a job of a recording that `read_speech` has read."""
        # The lock of the model is held while its rows run. A call that changes the model to compute the times of words
        # takes it itself.
        loaded = self.loaded
        shares = (
            isinstance(loaded, LoadedAudioLm) or speech.options.timestamps != "word" or can_use_eager_copy(loaded.model)
        )
        models = (self.loaded.model,) if shares else ()
        steps, seconds = partial(self._steps, speech=speech), len(speech.samples) / SAMPLE_RATE
        return Job(self, steps, models, speech.tokens, priority=Priority.JOB, seconds=seconds)

    def live(self, **options: Any) -> LiveTranscriber:
        """Make a live transcriber.

        Args:
            options: For `mmdec.transcribe_stream`.

        Raises:
            InputError: For a wrong option.
        """
        shared = self._options
        return LiveTranscriber(model=self.loaded, threads=shared.threads, statistics=shared.statistics, **options)

    def _steps(self, job: Job, speech: SpeechInputs) -> Steps[Any]:
        """Transcribe a recording. If it cannot join a batch, it is one computation."""
        samples = speech.samples
        # Text is streamed only if it cannot change later. It can change in two cases: windows of a long recording may
        # be decoded again from the last timestamp; the output of Qwen3-ASR begins with the name of the language.
        long = not isinstance(self.loaded, LoadedAudioLm) and self.loaded.is_long(len(samples))
        grows = not (long or describe_silence(samples) or hasattr(self.loaded.processor, "parse_output"))
        text, deltas = GrowingText(self.loaded.tokenizer), TextDeltas()

        def on_round(round_: Round) -> None:
            if job.is_cancelled:
                raise DecodingStopped("the client has gone")
            if job.streams and grows:
                text.add(round_.tokens[0])
                if piece := deltas.next_delta(text.text):
                    job.put_event("text", piece)

        options = replace(speech.options, on_round=on_round)
        result: mmdec.Transcript
        if job.models:
            request = transcription_request(self.loaded, options, 1)
            if isinstance(request, AudioLmRequest):
                result = yield from recording_steps(request, samples, speech.inputs)
            else:
                request.check(samples)
                result = yield from transcription_steps(request, samples)
        else:
            fixed = {"sample_rate": SAMPLE_RATE, "model": self.loaded, "threads": self._options.threads}
            call = partial(mmdec.transcribe, samples, **options.changed(), **fixed)
            computed = yield Compute(self.loaded.model.device, call)
            assert computed is not None
            result = computed.value
        if job.streams and (rest := deltas.end(result.text)):
            job.put_event("text", rest)
        return result


@final
class LiveEngine:
    """The engine of a session of live transcription."""

    task = "live transcription"

    def __init__(self, transcriber: TranscriptionEngine) -> None:
        self._device = transcriber.loaded.model.device

    def job(self, updates: Updates, count: Callable[[StreamUpdate], None]) -> Job:
        """Make a job that sends each update of a transcriber as an event.

        Args:
            updates: Begins to compute the updates.
            count: Called with each update.
        """
        steps = partial(self._steps, updates=updates, count=count)
        return Job(self, steps, priority=Priority.REALTIME)  # a transcriber takes its locks itself

    def _steps(self, job: Job, updates: Updates, count: Callable[[StreamUpdate], None]) -> Steps[Any]:
        """Compute the updates one after another; between two of them, other requests are decoded."""
        with closing(updates()) as computed:
            while True:
                result = yield Compute(self._device, partial(next, computed, None))
                update: StreamUpdate | None = None if result is None else result.value
                if update is None:
                    return
                count(update)
                job.put_event("text", update)


@final
class TranslationEngine:
    """The engine for speech translation."""

    task = "translation"

    def __init__(self, translator: SpeechTranslator, options: EngineOptions) -> None:
        self.translator, self._options = translator, options

    def job(self, samples: Any) -> Job:
        """Make a job of 16 kHz samples (T,) of French speech. `translate_speech` takes its locks itself."""
        steps = partial(self._steps, samples=samples)
        return Job(self, steps, priority=Priority.JOB, seconds=len(samples) / SAMPLE_RATE)

    def _steps(self, job: Job, samples: Any) -> Steps[Any]:
        def check_connection(_: Any) -> None:
            if job.is_cancelled:
                raise DecodingStopped("the client has gone")

        options: dict[str, Any] = {
            "sample_rate": SAMPLE_RATE,
            "model": self.translator,
            "threads": self._options.threads,
        }
        call = partial(mmdec.translate_speech, samples, on_pass=check_connection, **options)
        result = yield Compute(self.translator.device, call)
        assert result is not None
        return result.value


class CheckedPrompt(Protocol):
    """A prompt that an engine has read and checked."""

    @property
    def tokens(self) -> int:
        """The number of its tokens."""
        ...


Prompt = TypeVar("Prompt", bound=CheckedPrompt)


class DialogueEngine(Protocol[Prompt]):
    """Makes the jobs of a model that continues dialogues."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def calibrated(self) -> bool:
        """Whether its answers have calibrated confidences."""
        ...

    def read_dialogue(self, messages: Sequence[Mapping[str, Any]], pictures: Sequence[bytes]) -> Prompt:
        """Read and check a dialogue.

        Args:
            messages: In the format of chat templates, the content of each as a list of parts.
            pictures: Files' bytes, in the order of the image parts.
        """
        ...

    def job(self, prompt: Prompt, **options: Any) -> Job:
        """Make a job that continues a prompt. Its result is an `Answer`.

        Args:
            options: Arguments of `generate`, `seed` among them; an option that is None is left out.

        Raises:
            InputError: For a wrong option.
        """
        ...


@final
class VisionEngine:
    """The engine for questions about pictures."""

    task = "answer"

    def __init__(self, vlm: LoadedVlm, options: EngineOptions) -> None:
        self.vlm, self._options = vlm, options
        # whether confidences are calibrated for this model
        self.calibrated = ANSWER in read_calibrations(vlm.directory)

    @property
    def tokenizer(self) -> Any:
        return self.vlm.tokenizer

    def read_dialogue(self, messages: Sequence[Mapping[str, Any]], pictures: Sequence[bytes]) -> Dialogue:
        return Dialogue.from_messages(self.vlm, [dict(message) for message in messages], pictures)

    def job(self, prompt: Dialogue, **options: Any) -> Job:
        options = _given(options)
        stops = options.pop("stop_strings", ())
        options |= {"stop_strings": list(stops)} if stops else {}
        chosen = DescribeOptions.from_keywords(options | {"statistics": self._options.statistics})
        steps = partial(self._steps, dialogue=prompt, options=chosen, stops=stops)
        return Job(self, steps, (self.vlm.model,), _cache_tokens(self.vlm.model, prompt.tokens, options))

    def _steps(self, job: Job, dialogue: Dialogue, options: DescribeOptions, stops: Sequence[str]) -> Steps[Any]:
        with suggesting_options(option_names(DescribeOptions)):
            request = DescriptionRequest.from_options(self.vlm, options)
        usage, pictures = Usage(), [dialogue.question.pictures]
        text = AnswerText(job, usage, self.tokenizer, stops, strips=True)
        steps = answer_steps(request, dialogue.inputs, pictures, dialogue.seconds, usage=[usage])
        (description,) = yield from watch_rounds(steps, lambda _: text.send())
        return text.finish(description.timings, confidence=description.confidence)


@final
@dataclass(frozen=True)
class TextInputs:
    """A prompt of text that was read and checked."""

    inputs: Mapping[str, Tensor]  # token ids and mask (1, P)
    strips: bool  # whether spaces at both ends of the answer are dropped

    @property
    def tokens(self) -> int:
        """The number of its tokens."""
        return int(self.inputs["input_ids"].shape[1])


@final
class TextEngine:
    """The engine of a language model: it continues dialogues and texts."""

    task = "text"
    calibrated = False

    def __init__(self, loaded: LoadedLanguageModel, options: EngineOptions) -> None:
        self.loaded = loaded
        self._speculation = Speculation(DecodingOptions(statistics=options.statistics))

    @property
    def tokenizer(self) -> Any:
        return self.loaded.tokenizer

    def read_dialogue(self, messages: Sequence[Mapping[str, Any]], pictures: Sequence[bytes]) -> TextInputs:
        if pictures:
            raise InputError("`messages` must have no pictures for this model, which reads text. Leave them out.")
        turns = [
            {"role": message["role"], "content": "".join(part["text"] for part in message["content"])}
            for message in messages
        ]
        return self._checked(self.loaded.chat_inputs(turns), strips=True)

    def read_text(self, text: str) -> TextInputs:
        """Read and check a text to complete."""
        return self._checked(self.loaded.text_inputs(text), strips=False)

    def _checked(self, inputs: Mapping[str, Tensor], strips: bool) -> TextInputs:
        rule = "`prompt` must take at most the model's {most} positions, the chat template included"
        for error in length_errors(self.loaded.model, inputs, rule, "Shorten it.").values():
            raise error
        return TextInputs(inputs, strips)

    def job(self, prompt: TextInputs, **options: Any) -> Job:
        options = _given(options)
        speculation = self._speculation.with_seed(options.pop("seed", None))
        stops = options.pop("stop_strings", ())
        options |= {"stop_strings": list(stops), "tokenizer": self.tokenizer} if stops else {}
        steps = partial(self._steps, prompt=prompt, speculation=speculation, options=options, stops=stops)
        model = self.loaded.model
        return Job(self, steps, (model,), _cache_tokens(model, prompt.tokens, options))

    def _steps(
        self,
        job: Job,
        prompt: TextInputs,
        speculation: Speculation,
        options: Mapping[str, Any],
        stops: Sequence[str],
    ) -> Steps[Any]:
        run = GenerateCall.from_options(self.loaded.model, speculation, options).prepare(prompt.inputs)
        usage = Usage()
        text = AnswerText(job, usage, self.tokenizer, stops, prompt.strips)

        def on_round(round_: Round) -> None:
            usage.add_timed_round(round_, 0, drafts=True)
            text.send()

        yield from watch_rounds(run.steps, on_round)
        return text.finish(usage.seconds)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _cache_tokens(model: Any, prompt: int, options: Mapping[str, Any]) -> int:
    """Return how many tokens the cache of an answer may come to hold.

    Args:
        prompt: Number of the prompt's tokens.
        options: Those of the answer; `max_new_tokens` is one of them.
    """
    positions = max_positions(model.config.get_text_config(decoder=True))
    longest = prompt + int(options["max_new_tokens"])
    return longest if positions is None else min(longest, max(positions, prompt))


AnyEngine = TranscriptionEngine | TranslationEngine | VisionEngine | TextEngine


def load_engine(model: str, options: EngineOptions, device: str | None, dtype: Any) -> tuple[str, AnyEngine]:
    """Load a model by name, folder or Hugging Face id.

    Args:
        options: Decoding options.

    Returns:
        The model's name for clients, and its engine.

    Raises:
        InputError: If there is no such model, or it does not fit the device or dtype.
    """
    loaded = mmdec.load(model, device, dtype=dtype)
    name = Path(model).resolve().name if os.path.isdir(model) else model
    if isinstance(loaded, LoadedTranscriber):
        return name, TranscriptionEngine(loaded, options)
    if isinstance(loaded, SpeechTranslator):
        return name, TranslationEngine(loaded, options)
    if isinstance(loaded, LoadedLanguageModel):
        return name, TextEngine(loaded, options)
    return name, VisionEngine(loaded, options)
