"""Measures transcription: `mmdec.transcribe`, the public call, beside transformers' own loops on the same features.

mmdec's costs are those that `mmdec.transcribe` returns. transformers' loops run through `model.generate`, with the
features and arguments that `transcribe` would give it. A call's seconds divide into reading (checks of the samples),
features (log-mel), encoder (all its passes, an assistant's encoder included) and decoder: all the rest up to the text,
that is passes, drafting, verification, logits processors and transformers' own preparation.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, final

from torch import Tensor

from mmdec.audio import SAMPLE_RATE
from mmdec.evaluation.quality.harness import Harness, Measurement, Method, counted, quiet
from mmdec.generation.run import DecodingOptions, Speculation
from mmdec.hub.medusa import WEIGHTS
from mmdec.hub.whisper import HEADS, LoadedWhisper
from mmdec.pipelines.inputs import Audio, read
from mmdec.pipelines.transcription.request import TranscriptionRequest
from mmdec.pipelines.transcription.transcribe import transcribe
from mmdec.runtime import Stopwatch, timed_passes


@final
class TranscriptionHarness(Harness[Tensor]):
    """A LoadedWhisper, the language of the recordings, and the maximum number of new tokens in a window."""

    def __init__(self, whisper: LoadedWhisper, language: str | None = "en", max_new_tokens: int | None = None) -> None:
        """language: None detects it. A model of one language ignores it."""
        self.whisper, self.model = whisper, whisper.model
        multilingual = getattr(self.model.generation_config, "is_multilingual", False)
        self.language = language if multilingual else None
        self.options = {"num_beams": 1, "max_new_tokens": max_new_tokens}

    def read(self, audio: Audio) -> Tensor:
        """A recording as `transcribe` reads it: 16 kHz (T,). Raises InputError if `transcribe` would refuse it."""
        return self._request(1).check(read(audio))

    def is_long(self, samples: Tensor) -> bool:
        """Whether samples (T,) fill more than one window, so that transformers' long-form code decodes them."""
        return self._request(1).is_long(len(samples))

    def measure(self, inputs: Sequence[Tensor], method: Method) -> Measurement:
        """Decode recordings (T,) of 16 kHz as one batch; recordings of more than a window form a batch of their own."""
        measure = self._transcribe if method.loop == "mmdec" else self._generate
        with quiet(), counted(self.model.get_decoder()) as passes, counted(self.model.get_encoder()) as windows:
            measurement = measure(inputs, method)
        return replace(measurement, passes=len(passes), windows=len(windows))

    def _transcribe(self, recordings: Sequence[Tensor], method: Method) -> Measurement:
        """Call `mmdec.transcribe`; seconds and rounds are those of the transcripts."""
        stopwatch = Stopwatch(self.model.device)
        transcripts = transcribe(
            list(recordings),
            sample_rate=SAMPLE_RATE,
            model=self.whisper,
            language=self.language,
            batch_size=len(recordings),
            **self.options,
            **method.options,
        )
        total = stopwatch.lap()
        seconds = {
            stage: sum(transcript.timings[stage] for transcript in transcripts)
            for stage in ("features", "encoder", "drafter", "total")
        }
        # Each window begins with a pass over the prompt, which is no round.
        rounds = [transcript.rounds - transcript.windows for transcript in transcripts]
        return Measurement(
            tokens=[transcript.tokens for transcript in transcripts],
            texts=[transcript.text for transcript in transcripts],
            features=seconds["features"],
            encoder=seconds["encoder"],
            decoder=seconds["total"] - seconds["features"] - seconds["encoder"],
            drafter=seconds["drafter"],
            total=total,
            rounds=sum(rounds),
            drafted_tokens=sum(
                round(transcript.tokens_per_round * count)
                for transcript, count in zip(transcripts, rounds, strict=True)
                if count
            ),
        )

    def _generate(self, recordings: Sequence[Tensor], method: Method) -> Measurement:
        """Call `model.generate`, in the batches of `transcribe`."""
        tokens: list[list[int]] = [[] for _ in recordings]
        device, features, rest, encoder = self.model.device, 0.0, 0.0, list[float]()
        whole, stopwatch = Stopwatch(device), Stopwatch(device)
        samples = [read(recording, SAMPLE_RATE) for recording in recordings]
        request = self._request(len(recordings))
        with ExitStack() as stack:
            for network in (self.model, *method.networks):
                if network.config.is_encoder_decoder:
                    stack.enter_context(
                        timed_passes(network.get_encoder(), device, lambda seconds, *_: encoder.append(seconds))
                    )
            for batch in request.batches(dict(enumerate(map(len, samples))), len(samples)):
                stopwatch.lap()
                inputs = request.features([samples[index] for index in batch])
                features += stopwatch.lap()
                arguments = request.arguments(batch, request.is_long(len(samples[batch[0]])))
                output: Any = self.model.generate(**inputs, **arguments, **method.options)
                for index, segments in zip(batch, output["segments"], strict=True):
                    tokens[index] = [token for segment in segments for token in segment["tokens"].tolist()]
                rest += stopwatch.lap()
        stopwatch.lap()
        texts = [self.whisper.tokenizer.decode(row, skip_special_tokens=True).strip() for row in tokens]
        return Measurement(
            tokens=tokens,
            texts=texts,
            features=features,
            encoder=sum(encoder),
            decoder=rest + stopwatch.lap() - sum(encoder),
            drafter=0.0,
            total=whole.lap(),
        )

    def _request(self, recordings: int) -> TranscriptionRequest:
        plain = Speculation(DecodingOptions(drafter=None))
        return TranscriptionRequest.of(self.whisper, plain, self.options, recordings, language=self.language)


def has_heads(whisper: LoadedWhisper) -> bool:
    """Whether the model's folder holds Medusa heads."""
    return whisper.directory is not None and (whisper.directory / HEADS / WEIGHTS).is_file()
