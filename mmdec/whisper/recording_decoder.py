"""Decodes one recording as a generator of passes, so that a scheduler can run it together with other recordings.

`long_form` decides about windows, temperatures and segments. Here each of its windows is decoded by the loop of
`mmdec.core`, and what it costs is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from mmdec.checks.arguments import options_error
from mmdec.checks.devices import PASSED_ON
from mmdec.compat import CACHE_ARGUMENT
from mmdec.core.steps import PassResult, Round, Steps, compute_value, resume, timed
from mmdec.core.timing import Stopwatch
from mmdec.generation.drafter_choice import DraftInput
from mmdec.generation.generate import generate_option_names
from mmdec.io.audio import SAMPLE_RATE
from mmdec.targets.registry import target_of
from mmdec.tasks.usage import Usage
from mmdec.whisper.long_form import LongFormOptions, TimedSegment, WindowCall, align_tokens, transcribe_windows
from mmdec.whisper.repetition import has_end_token, is_runaway
from mmdec.whisper.request import TranscriptionRequest, first_timestamp_token
from mmdec.whisper.transcript import UNSPACED_LANGUAGES, Segment, reconcile_times, word_beginnings, words_from_tokens
from mmdec.whisper.usage_meter import UsageMeter
from mmdec.whisper.window_encoder import WindowEncoder

RUNAWAY_CHECK_TOKENS = 16  # number of new tokens between two checks whether the text repeats itself


@dataclass(frozen=True)
class DecodedRecording:
    """The text and the cost of one recording, or of one piece of it."""

    segments: list[Segment]
    language: str | None  # language code; None if the model has only one language
    usage: Usage
    samples: int  # duration in samples at 16 kHz
    features: float  # seconds for computing the log-mel features
    rest: float  # seconds of decoding outside the stages that are measured


class _CallbackError(Exception):
    """Wraps an exception of a caller's callback, so that no option of `generate` is blamed for it."""

    def __init__(self, original: Exception) -> None:
        super().__init__(str(original))
        self.original = original


@final
class RecordingDecoder:
    """Decodes one recording of a `transcribe` call.

    Args:
        request: The options of the call.
        index: The recording's index in the call.
        samples: (T,) at 16 kHz.
        on_window: Called before each window with the number of seconds before it.
        start: For a piece of a recording: seconds before it.
        total: For a piece of a recording: seconds of the whole recording.
    """

    def __init__(
        self,
        request: TranscriptionRequest,
        index: int,
        samples: Tensor,
        on_window: Callable[[float], None] | None = None,
        start: float = 0.0,
        total: float = 0.0,
    ) -> None:
        self._request, self._index, self._samples = request, index, samples
        self._draft_input = DraftInput(index, samples, start, total)
        self._speculation = request.speculation
        self._model = request.whisper.model
        self._on_window, self._on_round = (
            _wrap_callback(on_window),
            _wrap_callback(request.speculation.options.on_round),
        )
        self._target = target_of(self._model)
        self._encoder = WindowEncoder(self._model, request.margin)
        drafts = request.speculation.drafter_for(self._model) is not None
        self._meter = UsageMeter(first_timestamp_token(self._model), drafts)
        self._is_first_window = True

    def steps(self) -> Steps[DecodedRecording]:
        """Decode the recording, and ask for each pass.

        Returns:
            A `DecodedRecording`.

        Raises:
            InputError: For an option that the model rejects.
            Exception: What a callback raised.
        """
        request, samples = self._request, self._samples
        stopwatch = Stopwatch(self._model.device)
        self._speculation = request.speculation.for_inputs([self._draft_input])
        if self._speculation is not request.speculation:  # a text of the recording was made
            self._meter.usage.seconds["drafter"] += stopwatch.lap()
        inputs = request.features([samples])
        features = stopwatch.lap()
        times = None
        if request.timestamps == "word":
            decode = partial(request.whisper.tokenizer.decode, skip_special_tokens=True)
            times = align_tokens(self._model, partial(word_beginnings, decode=decode))
        windows = transcribe_windows(
            self._model,
            inputs["input_features"],
            self._encoder,
            self._decode_window,
            LongFormOptions.of(request.window_options(self._index, request.is_long(len(samples)))),
            attention_mask=inputs["attention_mask"],
            time_tokens=times,
        )
        try:
            result, seconds = yield from timed(windows, self._model.device, self._meter.usage.seconds)
        except PASSED_ON:
            raise
        except _CallbackError as error:
            raise error.original from None
        except Exception as error:
            # transformers raises ValueError for rejected options, and any exception for wrong types, before the first
            # window
            if isinstance(error, ValueError) or self._is_first_window:
                raise options_error(request.caller_options, error, generate_option_names(self._model)) from error
            raise
        rest = max(seconds - self._meter.loop_seconds, 0.0)
        stopwatch.lap()
        language = _language(request, result.windows[0].prompt)
        segments = _segments(request, result.segments, language, len(samples) / SAMPLE_RATE)
        return DecodedRecording(segments, language, self._meter.usage, len(samples), features, rest + stopwatch.lap())

    def _decode_window(self, call: WindowCall) -> Steps[Any]:
        """Decode one window at one temperature.

        Returns:
            What `generate` returns.
        """
        if self._on_window is not None and not call.attempt:
            hop = self._request.whisper.extractor.hop_length
            self._on_window(call.seek * hop / SAMPLE_RATE)
        self._is_first_window = False
        room = self._model.config.max_target_positions - call.input_ids.shape[1]
        self._meter.begin_window(room, again=call.attempt > 0)
        encoded = call.inputs["encoder_outputs"]
        seconds = self._encoder.encoded_seconds(encoded.last_hidden_state)
        output = yield from self._decode(call, seconds)
        if output is None:
            encode = partial(self._encoder, call.features, whole=True)
            whole = yield from compute_value(self._model.device, encode, "encoder", runs_aside=True)
            encoded.last_hidden_state = whole  # also for this window's other temperatures
            self._meter.restart()
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
            again = replace(call, inputs={**call.inputs, CACHE_ARGUMENT: cache})
            output = yield from self._decode(again, None)
        return output

    def _decode(self, call: WindowCall, encoded_seconds: float | None) -> Steps[Any]:
        """Run the rounds of one window.

        Args:
            encoded_seconds: How many seconds of the window the encoder read; None: all.

        Returns:
            The output; None if the encoder read only a part of the window, and the text does not end or repeats itself.
        """
        run = self._speculation.begin(self._target, self._model, call.input_ids, call.generation_config, **call.inputs)
        tokens, checked = list[int](), 0
        rounds = run.steps
        result: PassResult | None = None
        while (step := resume(rounds, result)) is not None:
            if not isinstance(step, Round):
                result = yield step
                continue
            result = None
            self._meter.count(step)
            if self._on_round is not None:
                self._on_round(replace(step, rows=[self._index]))
            tokens += [token for token in step.tokens[0] if token < self._meter.first_timestamp]
            if encoded_seconds is not None and len(tokens) >= checked + RUNAWAY_CHECK_TOKENS:
                checked = len(tokens)
                if is_runaway(tokens, encoded_seconds, self._model.config.vocab_size):
                    rounds.close()
                    return None
        if encoded_seconds is not None and not has_end_token(tokens, call.generation_config):
            return None
        return run.output(call.generation_config)


def _language(request: TranscriptionRequest, prompt: Sequence[int]) -> str | None:
    """Return the language code in a prompt, the token after the start token; None if the model has one language."""
    settings: Any = request.whisper.model.generation_config
    codes: Mapping[int, str]
    codes = {number: token[2:-2] for token, number in (getattr(settings, "lang_to_id", None) or {}).items()}
    start: int = settings.decoder_start_token_id
    ids = [*prompt, -1]
    return codes.get(ids[ids.index(start) + 1])


def _segments(
    request: TranscriptionRequest, timed: Sequence[TimedSegment], language: str | None, seconds: float
) -> list[Segment]:
    """Convert timed tokens to `Segment`s with text, and with words if word timestamps were requested.

    Args:
        seconds: Duration of the recording. No segment ends after this time, although the model also reads the silence
            after the recording.
    """
    tokenizer, first = request.whisper.tokenizer, first_timestamp_token(request.whisper.model)
    special = set(tokenizer.all_special_ids)
    segments = list[Segment]()
    for segment in timed:
        tokens = segment.tokens
        start, end = (min(round(time, 3), seconds) for time in (segment.start, segment.end))
        words = None
        if segment.token_starts is not None and segment.token_seconds is not None:
            starts, ends = (
                [min(round(time, 3), seconds) for time in times.tolist()]
                for times in (segment.token_starts, segment.token_starts + segment.token_seconds)
            )
            text = [index for index, token in enumerate(tokens) if token < first and token not in special]
            words = words_from_tokens(
                [tokens[index] for index in text],
                [starts[index] for index in text],
                [ends[index] for index in text],
                tokenizer.decode,
                language not in UNSPACED_LANGUAGES,
            )
        segments.append(Segment(start, end, tokenizer.decode(tokens, skip_special_tokens=True).strip(), tokens, words))
    return reconcile_times(segments) if request.timestamps == "word" else segments


def _wrap_callback(function: Callable[..., None] | None) -> Callable[..., None] | None:
    """Wrap a callback, so that its exceptions are raised as `_CallbackError`. For None, return None."""
    if function is None:
        return None

    def call(*arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:
            raise _CallbackError(error) from error

    return call
