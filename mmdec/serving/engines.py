"""Engines: each decodes the jobs of one task (transcription, speech translation, questions about pictures) with one
model.

A batch of jobs is decoded by one call of `mmdec.transcribe`, `mmdec.translate_speech`, or the function behind
`mmdec.describe`. So the server's results equal those of the library.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import mmdec
from mmdec.daspeech.translator import SpeechTranslator
from mmdec.pretrained.audio_lm import LoadedAudioLm
from mmdec.serving.dialogue import Dialogue, answer_dialogues
from mmdec.serving.queue import DecodingStopped, DisconnectCriterion, Job
from mmdec.tasks.confidence import read_calibrations
from mmdec.tasks.inputs import describe_silence
from mmdec.vision.answer import ANSWER
from mmdec.vision.options import DescribeOptions
from mmdec.whisper.live import LiveTranscriber
from mmdec.whisper.options import TranscribeOptions
from mmdec.whisper.request import can_translate
from mmdec.whisper.transcribe import LoadedTranscriber

# characters that are not sent while they end the text so far: further tokens may still change them
WITHHELD_CHARACTERS = " \t\r\n\ufffd"
RATE = 16_000  # sample rate in Hz of the audio that jobs hold


@final
@dataclass(frozen=True)
class EngineOptions:
    """Decoding options that all models of a server share."""

    rows: int = 8  # maximum batch size
    threads: int | None = None  # number of CPU threads of torch
    # measured times and acceptance rates, shared by all requests; None: `mmdec.default_statistics()`
    statistics: mmdec.DecodingStatistics | None = None


@final
class TextDeltas:
    """Divides a growing text into pieces for streaming.

    Holds how much of the text was sent; text that was sent never changes.

    Args:
        stops: Strings at which the text ends. The first of them, and what follows it, is not sent.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops, self._sent = stops, 0

    def until_stop(self, text: str) -> str:
        """Return the text up to the first stop string."""
        return text[: min((text.find(stop) for stop in self._stops if stop in text), default=len(text))]

    def next_delta(self, text: str) -> str:
        """Return the part of the text that can be sent now and was not sent before.

        Not yet sent: trailing spaces, an incomplete character, and an end that may be the beginning of a stop string.

        Args:
            text: The whole text so far.
        """
        text = self.until_stop(text.lstrip())
        ends = [n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        return self._new(text[: len(text) - max(ends, default=0)].rstrip(WITHHELD_CHARACTERS))

    def end(self, text: str) -> str:
        """Return the part of the final text that was not sent before.

        Args:
            text: The whole text.
        """
        return self._new(text)

    def _new(self, text: str) -> str:
        new, self._sent = text[self._sent :], max(self._sent, len(text))
        return new


@final
class TranscriptionEngine:
    """The engine for transcription. A job holds samples (T,); its key holds the options of `mmdec.transcribe`."""

    task = "transcription"

    def __init__(self, loaded: LoadedTranscriber, options: EngineOptions) -> None:
        self.loaded, self._options = loaded, options

    @property
    def translates(self) -> bool:
        """Whether the model can translate into English."""
        own = self.loaded
        return not isinstance(own, LoadedAudioLm) and can_translate(own.model.generation_config)

    def job(self, samples: Any, **options: Any) -> Job:
        """Make a job of 16 kHz samples (T,).

        Args:
            options: For `mmdec.transcribe`; an option that is None is left out.

        Raises:
            InputError: For a wrong option.
        """
        given = {name: value for name, value in options.items() if value is not None}
        chosen = TranscribeOptions.of(given).changed()
        if isinstance(self.loaded, LoadedAudioLm):  # without `do_sample`, the model's settings would decide it
            chosen["do_sample"] = "temperature" in chosen
        extractor, windows = self.loaded.extractor, not isinstance(self.loaded, LoadedAudioLm)
        long = windows and len(samples) // extractor.hop_length > extractor.nb_max_frames
        kind = "silent" if describe_silence(samples) else "long" if long else "short"
        rows = self._options.rows if kind == "short" else 1
        return Job(self, (kind, *sorted(chosen.items())), samples, rows, len(samples) / RATE)

    def live(self, **options: Any) -> LiveTranscriber:
        """Make a live transcriber.

        Args:
            options: For `mmdec.transcribe_stream`.

        Raises:
            InputError: For a wrong option.
        """
        shared = self._options
        return LiveTranscriber(model=self.loaded, threads=shared.threads, statistics=shared.statistics, **options)

    def decode(self, jobs: Sequence[Job]) -> Sequence[Any]:
        """Transcribe the jobs as one batch.

        Returns:
            For each job a `Transcript` or an exception.
        """
        kind, *given = jobs[0].key  # type: ignore[misc] # `job` makes such keys
        options: dict[str, Any] = dict(given)
        # Text is streamed only if it cannot change later. It can change in two cases: windows of a long recording may
        # be decoded again from the last timestamp; the output of Qwen3-ASR begins with the name of the language.
        grows = kind == "short" and not hasattr(self.loaded.processor, "parse_output")
        tokens: list[list[int]] = [[] for _ in jobs]
        deltas = [TextDeltas() for _ in jobs]

        def hear(round_: Any) -> None:
            if all(job.disconnected for job in jobs):
                raise DecodingStopped
            for row, new in zip(round_.rows, round_.tokens, strict=True):
                if jobs[row].streams and grows:
                    tokens[row] += new
                    text = self.loaded.tokenizer.decode(tokens[row], skip_special_tokens=True)
                    if piece := deltas[row].next_delta(text):
                        jobs[row].put_event("text", piece)

        def call() -> Any:
            return mmdec.transcribe(
                [job.payload for job in jobs],
                sample_rate=RATE,
                model=self.loaded,
                threads=self._options.threads,
                statistics=self._options.statistics,
                batch_size=len(jobs),
                on_round=hear,
                stopping_criteria=[DisconnectCriterion(jobs)],
                **options,
            )

        results = _results(call)
        for job, result, delta in zip(jobs, results, deltas, strict=True):
            if job.streams and isinstance(result, mmdec.Transcript) and (rest := delta.end(result.text)):
                job.put_event("text", rest)
        return results


@final
class TranslationEngine:
    """The engine for speech translation. A job holds samples (T,). On a CPU, each recording is translated by itself."""

    task = "translation"

    def __init__(self, translator: SpeechTranslator, options: EngineOptions) -> None:
        self.translator, self._options = translator, options
        self._rows = 1 if translator.device.type == "cpu" else options.rows

    def job(self, samples: Any) -> Job:
        """Make a job of 16 kHz samples (T,) of French speech."""
        return Job(self, (), samples, self._rows, len(samples) / RATE)

    def decode(self, jobs: Sequence[Job]) -> Sequence[Any]:
        """Translate the jobs.

        On a GPU they are one batch; on a CPU there is only one job.

        Returns:
            For each job a `Translation` or an exception.
        """

        def check_connection(_: Any) -> None:
            if jobs[0].disconnected:
                raise DecodingStopped

        call = partial(mmdec.translate_speech, sample_rate=RATE, model=self.translator, threads=self._options.threads)
        if len(jobs) == 1:
            return _results(lambda: [call(jobs[0].payload, on_pass=check_connection)])
        return _results(lambda: call([job.payload for job in jobs]))


@final
class AnswerEngine:
    """The engine for questions about pictures.

    A job holds a `Dialogue`; its key holds the options of `mmdec.describe`.
    """

    task = "answer"

    def __init__(self, vlm: Any, options: EngineOptions) -> None:
        self.vlm, self._options = vlm, options
        # whether confidences are calibrated for this model
        self.calibrated = ANSWER in read_calibrations(vlm.directory)

    def job(self, dialogue: Dialogue, **options: Any) -> Job:
        """Make a job that continues a dialogue.

        Args:
            options: For `mmdec.describe`; an option that is None is left out.

        Raises:
            InputError: For a wrong option.
        """
        given = {name: value for name, value in options.items() if value is not None}
        chosen = DescribeOptions.of(given).changed()
        # random numbers depend on the row's index in the batch, so only a batch of one row gives the same answer for a
        # seed
        rows = 1 if "seed" in chosen else self._options.rows
        return Job(self, tuple(sorted(chosen.items())), dialogue, rows)

    def decode(self, jobs: Sequence[Job]) -> Sequence[Any]:
        """Answer the jobs as one batch.

        Returns:
            For each job a `Description`, whose text ends before the first stop string, or an exception.
        """
        options: dict[str, Any] = dict(jobs[0].key)  # type: ignore[call-overload] # `job` makes such keys
        stops = options.pop("stop_strings", ())
        options |= {"stop_strings": list(stops)} if stops else {}
        texts, deltas = [""] * len(jobs), [TextDeltas(stops) for _ in jobs]

        def hear(round_: Any) -> None:
            if all(job.disconnected for job in jobs):
                raise DecodingStopped
            for row, piece in zip(round_.rows, round_.text, strict=True):
                texts[row] += piece
                if jobs[row].streams and (new := deltas[row].next_delta(texts[row])):
                    jobs[row].put_event("text", new)

        dialogues = [job.payload for job in jobs]
        options |= {
            "on_round": hear,
            "stopping_criteria": [DisconnectCriterion(jobs)],
            "statistics": self._options.statistics,
        }
        results = [*_results(lambda: answer_dialogues(self.vlm, dialogues, threads=self._options.threads, **options))]
        for index, (job, delta) in enumerate(zip(jobs, deltas, strict=True)):
            result = results[index]
            if stops and isinstance(result, mmdec.Description):
                whole = self.vlm.tokenizer.decode(result.tokens, skip_special_tokens=True)
                result = results[index] = replace(result, text=delta.until_stop(whole).strip())
            if job.streams and isinstance(result, mmdec.Description) and (rest := delta.end(result.text)):
                job.put_event("text", rest)
        return results


AnyEngine = TranscriptionEngine | TranslationEngine | AnswerEngine


def load_engine(model: str, options: EngineOptions, device: str | None, dtype: Any) -> tuple[str, AnyEngine]:
    """Load a model by name, folder or hub id.

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
    return name, AnswerEngine(loaded, options)


def _results(call: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    """Call `call`, which decodes a batch, and return a result for each input.

    An input that was rejected has its exception as result.
    """
    try:
        return call()
    except mmdec.BatchError as error:
        return [error.errors.get(index, result) for index, result in enumerate(error.results)]
