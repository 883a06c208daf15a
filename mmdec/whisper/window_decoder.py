"""Runs a Whisper on the windows of one recording: encodes and decodes each, and counts what this costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from mmdec.compat import CACHE_ARGUMENT
from mmdec.core.steps import PassResult, Round, Steps, compute_value, resume
from mmdec.generation.speculation import Speculation
from mmdec.targets.registry import target_of
from mmdec.whisper.features import FRAMES_PER_SECOND
from mmdec.whisper.repetition import has_end_token, is_runaway
from mmdec.whisper.special_tokens import first_timestamp_token
from mmdec.whisper.usage_meter import UsageMeter
from mmdec.whisper.window_encoder import WindowEncoder

RUNAWAY_CHECK_TOKENS = 16  # number of new tokens between two checks whether the text repeats itself
SOUND = "sound"  # attribute of the encoder's output that holds the features that the encoder has read


@dataclass(frozen=True)
class WindowCall:
    """The decoding of one window at one temperature, prepared for `Speculation.begin`."""

    input_ids: Tensor  # (1, P), what the text continues
    generation_config: GenerationConfig
    inputs: Mapping[str, Any]  # all other arguments that transformers passes to a custom decoding loop
    features: Tensor  # (1, mels, F), what the encoder read
    seek: int  # the frame of the recording at which the window begins
    attempt: int  # how often the window was decoded before, at lower temperatures


class CallbackError(Exception):
    """Wraps an exception of a caller's callback, so that no option of `generate` is blamed for it."""

    def __init__(self, original: Exception) -> None:
        super().__init__(str(original))
        self.original = original


@final
class WindowDecoder:
    """Encodes and decodes the windows of one recording.

    Args:
        model: The Whisper.
        speculation: The decoding loop.
        index: The recording's index in the call, for `speculation.options.on_round`.
        margin: A window is encoded up to this many seconds after its sound; None: to its end.
        on_window: Called before each window with the number of seconds before it.
    """

    def __init__(
        self,
        model: WhisperForConditionalGeneration,
        speculation: Speculation,
        index: int = 0,
        margin: float | None = None,
        on_window: Callable[[float], None] | None = None,
    ) -> None:
        self._model, self._speculation, self._index = model, speculation, index
        self._on_window = _wrap_callback(on_window)
        self._on_round = _wrap_callback(speculation.options.on_round)
        self._target = target_of(model)
        self._encoder = WindowEncoder(model, margin)
        self.meter = UsageMeter(first_timestamp_token(model), speculation.drafter_for(model) is not None)
        self.has_begun = False  # whether the options of the first window were accepted

    def encode(self, features: Tensor) -> Steps[BaseModelOutput]:
        """Compute the encoder's states of a window's features (1, mels, F), which are padded to a whole window."""
        encode = partial(self._encoder, features)
        states = yield from compute_value(features.device, encode, "encoder", runs_aside=True)
        encoded = BaseModelOutput(last_hidden_state=states)
        setattr(encoded, SOUND, features)  # some drafters read the sound
        return encoded

    def decode(self, call: WindowCall) -> Steps[Any]:
        """Decode one window at one temperature.

        Returns:
            What `generate` returns: token ids (1, L), or transformers' output object if the configuration asks for one.

        Raises:
            CallbackError: If a callback fails.
        """
        if self._on_window is not None and not call.attempt:
            self._on_window(call.seek / FRAMES_PER_SECOND)
        self.has_begun = True
        room = self._model.config.max_target_positions - call.input_ids.shape[1]
        self.meter.begin_window(room, again=call.attempt > 0)
        encoded = call.inputs["encoder_outputs"]
        seconds = self._encoder.encoded_seconds(encoded.last_hidden_state)
        output = yield from self._decode(call, seconds)
        if output is None:
            encode = partial(self._encoder, call.features, whole=True)
            whole = yield from compute_value(self._model.device, encode, "encoder", runs_aside=True)
            encoded.last_hidden_state = whole  # also for this window's other temperatures
            self.meter.restart()
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
            self.meter.count(step)
            if self._on_round is not None:
                self._on_round(replace(step, rows=[self._index]))
            tokens += [token for token in step.tokens[0] if token < self.meter.first_timestamp]
            if encoded_seconds is not None and len(tokens) >= checked + RUNAWAY_CHECK_TOKENS:
                checked = len(tokens)
                if is_runaway(tokens, encoded_seconds, self._model.config.vocab_size):
                    rounds.close()
                    return None
        if encoded_seconds is not None and not has_end_token(tokens, call.generation_config):
            return None
        return run.output(call.generation_config)


def _wrap_callback(function: Callable[..., None] | None) -> Callable[..., None] | None:
    """Wrap a callback, so that its exceptions are raised as `CallbackError`. For None, return None."""
    if function is None:
        return None

    def call(*arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:
            raise CallbackError(error) from error

    return call
