"""Decodes one window of a recording, at several temperatures if need be, and counts what this costs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast, final

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, WhisperForConditionalGeneration
from transformers.generation.logits_process import WhisperNoSpeechDetection
from transformers.modeling_outputs import BaseModelOutput

from mmdec.core.steps import ActiveTime, Compute, Steps
from mmdec.errors import InputError
from mmdec.generation.hf_bridge import return_prepared
from mmdec.generation.speculation import Speculation
from mmdec.targets.encoded import INPUT_FEATURES
from mmdec.targets.registry import make_target
from mmdec.tasks.usage import Cut, Usage
from mmdec.types import Round
from mmdec.whisper.progress import PartProgress
from mmdec.whisper.repetition import has_end_token, is_runaway, token_compression_ratio
from mmdec.whisper.target import generate_processors
from mmdec.whisper.window_encoder import FRAMES_PER_SECOND, WindowEncoder
from mmdec.whisper.window_options import WindowOptions

RUNAWAY_CHECK_TOKENS = 16  # new tokens between two checks for a text that repeats itself


# Times the tokens of a window: (the output object, with `cross_attentions`; the window's features; number of prompt
# tokens; frames with sound, None: all) -> start and duration in seconds of each of the L tokens (L,).
TimeTokens = Callable[[Any, Tensor, int, int | None], tuple[Tensor, Tensor | None]]


@final
@dataclass(frozen=True, kw_only=True)
class PreparedRecording:
    """A recording, or a part of one, before it is decoded: its features, and what decodes them."""

    # its attention implementation is not changed, not even to time tokens
    model: WhisperForConditionalGeneration
    speculation: Speculation  # the drafter, rule and draft size
    options: WindowOptions
    features: Tensor  # (1, mels, T), one window or more
    frames_per_second: float = FRAMES_PER_SECOND  # of the features
    margin: float | None = None  # a window is encoded up to this many seconds after its sound; None: to its end
    attention_mask: Tensor | None = None  # (1, T), 1 at frames with sound; only `time_tokens` reads it
    time_tokens: TimeTokens | None = None  # None: tokens are left without times
    index: int = 0  # of the recording in the call
    progress: PartProgress | None = None  # gets the seconds before each window
    seconds: Mapping[str, float] = field(default_factory=lambda: {})  # stage -> seconds of preparing it


@dataclass
class Window:
    """A window to decode."""

    features: Tensor  # (1, mels, F), what the encoder read
    encoded: BaseModelOutput  # the encoder's output; replaced if more of the window is encoded
    seek: int  # the recording's frame at which the window begins
    frames: int  # number of the window's frames that belong to the recording
    ids: Tensor  # (1, P), the prompt that the text continues
    mask: Tensor | None  # (1, P), False where `ids` is padding; None without padding


@dataclass(frozen=True)
class DecodedWindow:
    """The text of one window, and how it was decoded."""

    prompt: list[int]  # the tokens that the text continues
    tokens: list[int]  # the text, without the end token
    temperature: float | None  # temperature of the text; lower ones were tried before
    skipped: bool  # whether the window counts as silence, so that its text was dropped
    compression_ratio: float | None  # None without `compression_ratio_threshold`
    avg_logprob: float | None  # mean over the tokens, the end token included; None without `logprob_threshold`


@final
class UsageMeter:
    """Counts the rounds of one recording, and measures its seconds.

    A window may be decoded again, at a higher temperature or with more of its sound encoded. Rounds and seconds of all
    its decodings count; log-probabilities and cuts are those of the last.

    Args:
        recording: The recording.
    """

    def __init__(self, recording: PreparedRecording) -> None:
        self.usage = Usage()
        self.usage.seconds.update(recording.seconds)
        self.first_timestamp = recording.options.first_timestamp  # the confidence ignores timestamp tokens
        self._device = recording.model.device
        self.time = ActiveTime(self._device)
        self._loop_seconds = 0.0  # seconds in the loop of `mmdec.core` and in the drafter
        self._drafts = recording.speculation.drafter_for(recording.model) is not None
        self._room = 0  # tokens that the model can write after the prompt of this window
        self._tokens = 0  # tokens written in this decoding of the window
        self._earlier = 0  # number of log-probabilities of earlier windows
        self._earlier_cut: Cut | None = None  # `Usage.cut` after earlier windows

    def compute(self, stage: str, function: Callable[[], Any], runs_on_side_thread: bool = False) -> Steps[Any]:
        """Ask for a computation of the model, and add its seconds to a stage.

        Returns:
            Its result.
        """
        result = yield from self.time.wait(Compute(self._device, function, runs_on_side_thread))
        self.usage.seconds[stage] += result.seconds
        return result.value

    def end(self) -> None:
        """Add the seconds outside all stages."""
        self.usage.seconds["rest"] += max(self.time.seconds - self._loop_seconds, 0.0)

    def begin_window(self, room: int, again: bool) -> None:
        """Begin to decode a window.

        Args:
            room: Number of tokens that the model can write after the prompt.
            again: Whether the window was decoded before.
        """
        self._room = room
        if not again:
            self._earlier = len(self.usage.logprobs)
            self._earlier_cut = self.usage.cut
        self.restart()

    def restart(self) -> None:
        """Drop the log-probabilities and cuts of this window's text, because it is decoded again."""
        del self.usage.logprobs[self._earlier :]
        self.usage.cut = self._earlier_cut
        self._tokens = 0

    def count(self, round_: Round) -> None:
        """Add a round of the recording."""
        tokens, usage = round_.tokens[0], self.usage
        usage.add_round(round_, 0, self._drafts)
        self._tokens += len(tokens)
        if any(round_.is_cut):
            usage.note_cut(Cut(self._tokens, self._tokens < self._room))
        logprobs = [0.0] * len(tokens) if round_.logprobs is None else round_.logprobs[0].tolist()
        usage.logprobs += [
            logprob for token, logprob in zip(tokens, logprobs, strict=False) if token < self.first_timestamp
        ]
        self._loop_seconds += round_.core_seconds + round_.drafter_seconds
        usage.seconds["decoder"] += (
            round_.target_seconds + round_.core_seconds + (0.0 if self._drafts else round_.drafter_seconds)
        )


@final
class WindowDecoder:
    """Decodes the windows of one recording.

    Args:
        recording: The recording.
        initial: The tokens that each text begins with.
        encoder: Encodes a window again if the text of a part of it does not end.
        meter: Counts the rounds.
    """

    def __init__(
        self, recording: PreparedRecording, initial: Sequence[int], encoder: WindowEncoder, meter: UsageMeter
    ) -> None:
        self._recording = recording
        self._model, self._options = recording.model, recording.options
        self._target = make_target(recording.model)
        self._initial = initial
        self._encoder = encoder
        self._meter = meter
        self._max_length = self._options.settings.max_length  # grows with each window; unused with `max_new_tokens`
        with self._options.errors(self._model):
            self._processors, self._silence = _processors(self._model, self._options, len(initial))

    def decode(self, window: Window) -> Steps[tuple[DecodedWindow, Any]]:
        """Decode a window at one temperature after another, until its text is not refused.

        Returns:
            The text, and what `generate` returns for it: token ids (1, L), or transformers' output object.

        Raises:
            InputError: For an option that the model rejects.
        """
        prompt = window.ids.shape[1]
        temperatures = self._options.temperatures
        attempts = 0  # number of temperatures tried
        self._make_room(prompt)
        while True:
            temperature = temperatures[attempts]
            self._meter.begin_window(self._model.config.max_target_positions - prompt, again=attempts > 0)
            partial_seconds = self._encoder.encoded_seconds(window.encoded[0])
            output = yield from self._decode_once(window, temperature, partial_seconds)
            if output is None:
                # Only a part of the window was encoded. The other temperatures reuse the states of the whole window.
                window.encoded = yield from encode_window(self._encoder, window.features, self._meter, to_end=True)
                self._meter.restart()
                output = yield from self._decode_once(window, temperature, None)
            attempts += 1
            decoded = yield from self._judge(window, temperature, output)
            refused = self._options.refuses(decoded.compression_ratio, decoded.avg_logprob)
            if decoded.skipped or not refused or attempts == len(temperatures):
                return decoded, output

    def _make_room(self, prompt: int) -> None:
        """Set the maximum length of the next window's text, and where it begins.

        Args:
            prompt: Number of tokens that the text continues.
        """
        room, new = self._model.config.max_target_positions, self._options.settings.max_new_tokens
        if new is None:
            # The prompt of each window is added, and stays in it for the next window, as in transformers.
            self._max_length = min(self._max_length + min(room // 2 - 1, prompt), room)
        elif new + prompt > room:
            raise InputError(
                f"`max_new_tokens` must be at most {room - prompt} after {prompt} tokens of prompt and previous text, "
                f"but is {new}. Lower it, or shorten the prompt."
            )
        for processor in self._processors:
            if hasattr(processor, "set_begin_index"):
                processor.set_begin_index(prompt)

    def _decode_once(
        self, window: Window, temperature: float | None, partial_seconds: float | None
    ) -> Steps[Any | None]:
        """Decode what is encoded of a window at a temperature.

        Args:
            partial_seconds: Duration of the sound if only a part of the window is encoded. None: the text is accepted
                as it is.

        Returns:
            What `generate` returns for the text; None if the text of a part of the window does not end.
        """
        ids, config, inputs = self._prepare(window, temperature)
        run = self._recording.speculation.prepare_run(self._target, ids, config, **inputs)
        ends = yield from self._run_rounds(run.steps, config, partial_seconds)
        return run.output(config) if ends else None

    def _run_rounds(self, steps: Steps[Any], config: GenerationConfig, partial_seconds: float | None) -> Steps[bool]:
        """Run a decoding to its end, or until its text runs away.

        Args:
            steps: The decoding.
            config: The model's prepared generation config.
            partial_seconds: Duration of the sound if only a part of the window is encoded. None: the text is accepted
                as it is.

        Returns:
            Whether the text ends.
        """
        on_round = self._recording.speculation.options.on_round
        tokens = list[int]()
        checked = 0  # number of tokens at the last check
        with closing(steps):
            while (round_ := (yield from self._meter.time.next_round(steps))) is not None:
                self._meter.count(round_)
                if on_round is not None:
                    on_round(replace(round_, rows=[self._recording.index]))
                tokens += [token for token in round_.tokens[0] if token < self._meter.first_timestamp]
                if partial_seconds is not None and len(tokens) >= checked + RUNAWAY_CHECK_TOKENS:
                    checked = len(tokens)
                    if is_runaway(tokens, partial_seconds, self._model.config.vocab_size):
                        return False
        return partial_seconds is None or has_end_token(tokens, config)

    def _judge(self, window: Window, temperature: float | None, output: Any) -> Steps[DecodedWindow]:
        """Measure what may refuse a window's text, or drop it as silence.

        Args:
            temperature: Temperature at which the text was decoded.
            output: What `generate` returns for the text.
        """
        options = self._options
        tokens = _new_tokens(output, window.ids.shape[1], options.settings)
        ratio = logprob = no_speech = None
        if options.compression_ratio_threshold is not None:
            ratio = token_compression_ratio(tokens, self._model.config.vocab_size)
        if options.logprob_threshold is not None:
            logprob = _mean_logprob(output.scores, tokens, temperature or 0.0)
            if options.no_speech_threshold is not None and logprob < options.logprob_threshold:
                no_speech = yield from self._no_speech_prob(window)
        return DecodedWindow(
            prompt=window.ids[0].tolist(),
            tokens=tokens[:-1] if tokens[-1] == options.settings.eos_token_id else tokens,
            temperature=temperature,
            skipped=no_speech is not None and no_speech > cast(float, options.no_speech_threshold),
            compression_ratio=ratio,
            avg_logprob=logprob,
        )

    def _prepare(self, window: Window, temperature: float | None) -> tuple[Tensor, GenerationConfig, dict[str, Any]]:
        """Let the `generate` of all models, not Whisper's own, prepare the decoding of a window at a temperature.

        Returns:
            The prompt (1, P), the completed generation config, and the inputs of the decoder.
        """
        samples = temperature is not None and temperature > 0
        config = copy.copy(self._options.settings)
        config.suppress_tokens = config.begin_suppress_tokens = None  # `self._processors` suppress them
        config.max_length = self._max_length
        config.do_sample = samples
        config.temperature = temperature if samples else 1.0
        arguments = {
            "inputs": window.features,
            "encoder_outputs": window.encoded,
            "attention_mask": self._recording.attention_mask,
            "decoder_input_ids": window.ids,
            "logits_processor": self._processors,
            # otherwise `generate` would add the model's own processors to those above
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
            **({} if window.mask is None else {"decoder_attention_mask": window.mask}),
            **self._options.others,
        }
        generate = cast(Any, GenerationMixin).generate
        with self._options.errors(self._model):
            return generate(self._model, **arguments, generation_config=config, custom_generate=return_prepared)

    def _no_speech_prob(self, window: Window) -> Steps[float]:
        """Return the probability that a window is silent: of its token after the start token."""
        if self._silence is not None:
            return float(self._silence.no_speech_prob[0])
        logits = yield from known_logits(self._model, window.ids, window.mask, window.encoded, self._meter)
        at_start = logits[0, window.ids.shape[1] - len(self._initial)]
        return float(at_start.float().softmax(-1)[self._options.settings.no_timestamps_token_id - 1])


def _processors(
    model: WhisperForConditionalGeneration, options: WindowOptions, begin: int
) -> tuple[list[Any], WhisperNoSpeechDetection | None]:
    """Make the logits processors of all windows, in transformers' order, the caller's last.

    Args:
        begin: Number of tokens that each text begins with.

    Returns:
        The processors; and the one that notes the probability of silence, if the first logits hold it, else None.
    """
    settings, noted, silence = options.settings, list[Any](), None
    if options.no_speech_threshold is not None and begin == 1:
        # the probability is that after the start token, whose logits are those of the first new token
        silence = WhisperNoSpeechDetection(settings.no_timestamps_token_id - 1, begin)
        noted.append(silence)
    rules = generate_processors(settings, model.device, begin, settings.return_timestamps)
    return [*noted, *rules, *options.logits_processor], silence


def encode_window(
    encoder: WindowEncoder, features: Tensor, meter: UsageMeter, to_end: bool = False
) -> Steps[BaseModelOutput]:
    """Encode a window. A scheduler may do so beside the passes of other decodings.

    Args:
        features: (1, mels, F), which the output also holds, because some drafters read them.
        to_end: Encode to the window's end, whatever the encoder's margin.
    """
    states = yield from meter.compute("encoder", partial(encoder, features, to_end), runs_on_side_thread=True)
    encoded = BaseModelOutput(last_hidden_state=states)
    setattr(encoded, INPUT_FEATURES, features)
    return encoded


def known_logits(
    model: WhisperForConditionalGeneration,
    ids: Tensor,
    mask: Tensor | None,
    encoded: BaseModelOutput,
    meter: UsageMeter,
) -> Steps[Tensor]:
    """Compute the decoder's logits (1, P, V) after each of the P tokens of a known text.

    Args:
        ids: (1, P).
        mask: (1, P), False where a token is padding; None: nowhere.
        encoded: The encoder's states.
    """
    options: dict[str, Tensor] = {}
    if mask is not None:
        positions = (mask.long().cumsum(-1) - 1).masked_fill(~mask, 0)
        options = {"decoder_attention_mask": mask, "decoder_position_ids": positions}
    run = partial(cast(Any, model), encoder_outputs=encoded, decoder_input_ids=ids, use_cache=False, **options)
    output = yield from meter.compute("decoder", run)
    return output.logits


def _new_tokens(output: Any, prompt: int, settings: Any) -> list[int]:
    """Return the new tokens of an output of `generate`, with their end token, but without padding."""
    ids: Tensor = output if isinstance(output, Tensor) else output.sequences
    tokens: list[int] = ids[0, prompt:].tolist()
    if tokens[-1] == settings.pad_token_id:
        padding = tokens.count(settings.pad_token_id) - (settings.pad_token_id == settings.eos_token_id)
        tokens = tokens[: len(tokens) - padding]
    return tokens


def _mean_logprob(scores: Sequence[Tensor], tokens: Sequence[int], temperature: float) -> float:
    """Return the mean log-probability of the tokens, the end token included.

    Args:
        scores: (1, V) for each new token, the logits after all processors, which divide by the temperature.
    """
    logits = torch.stack(list(scores))[: len(tokens), 0]
    chosen = torch.tensor(tokens[-len(logits) :], device=logits.device)
    scaled = (logits * (temperature or 1)).float()
    logprobs = scaled.log_softmax(-1).to(logits.dtype).gather(1, chosen[:, None])[:, 0].cpu()
    return float(sum(logprobs) / len(chosen))  # summed in order, as in transformers: the last bit may decide
