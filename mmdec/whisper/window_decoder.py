"""Decodes the windows of one `generate` call of Whisper by the loop of `mmdec.core`.

transformers' long-form code divides recordings into windows. It calls the `custom_generate` of the call, a
`WindowDecoder`, once for each window and temperature, with those rows of the batch that are still decoded. It does not
tell which recordings these are: `monitor_progress` shows which have sound left for a new window, and `_need_fallback`
decides for each row whether it is decoded again at a higher temperature.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, WhisperForConditionalGeneration

from mmdec.compat import CACHE_ARGUMENT
from mmdec.core.loop import Round
from mmdec.generation.run import Speculation
from mmdec.targets.registry import target_of
from mmdec.whisper.batcher import PassBatcher
from mmdec.whisper.caching_encoder import can_use_eager_copy, with_caching_encoder
from mmdec.whisper.request import first_timestamp_token
from mmdec.whisper.target import WhisperTarget
from mmdec.whisper.usage_meter import UsageMeter
from mmdec.whisper.words import WordBeginnings, time_tokens

RUNAWAY_CHECK_TOKENS = 16  # number of new tokens between two checks whether the text repeats itself
MAX_TOKENS_PER_SECOND, EXTRA_TOKENS = 12, 24  # a text with more than 12 tokens a second, plus 24, cannot be speech
# maximum compression ratio of the token ids as bytes, Whisper's threshold; above it, text repeats
MAX_COMPRESSION_RATIO = 1.35


@final
class WindowDecoder:
    """The decoding loop of one `generate` call.

    Use `decoder.model.generate(..., custom_generate=decoder, monitor_progress=decoder.begin_window)`.

    Args:
        model: The caller's model, which is not changed: `decoder.model` is a copy for one call.
        speculation: The decoding loop with its drafter.
        recordings: Batch size.
        on_window: Called with the argument of `begin_window`.
        on_round: Called with each round; its rows are indices in the batch.
        margin: Seconds that the encoder reads after the audio; None: up to 30 s in all.
        word_beginnings: Tells which tokens begin a word, for word timestamps; None: no word timestamps.
        pass_batcher: Lets several calls share decoder passes; None: no sharing.
    """

    def __init__(
        self,
        model: WhisperForConditionalGeneration,
        speculation: Speculation,
        recordings: int,
        *,
        on_window: Callable[[Tensor], None] | None = None,
        on_round: Callable[[Round], None] | None = None,
        margin: float | None = None,
        word_beginnings: WordBeginnings | None = None,
        pass_batcher: PassBatcher | None = None,
    ) -> None:
        self._first_timestamp = first_timestamp_token(model)
        drafts = speculation.drafter_for(model) is not None
        self.meter = UsageMeter(recordings, self._first_timestamp, drafts, model.device)
        self.prompts: list[list[int]] = []  # token ids of each recording's prompt in the first window
        # a model for this call only, whose encoder is timed
        self.model, self._encoder = with_caching_encoder(
            model, self.meter.count_encoder, can_use_eager_copy(model), margin, pass_batcher
        )
        if word_beginnings is not None:
            time_tokens(self.model, word_beginnings, lambda: self._encoder.sound)
        self._need_fallback = self.model._need_fallback  # type: ignore[operator] # a method of transformers' Whisper
        vars(self.model)["_need_fallback"] = self._note_fallback
        self._target = target_of(model) if pass_batcher is None else WhisperTarget(model, pass_batcher)
        self._original, self._speculation = model, speculation  # the caller's model has the locks and statistics
        self._on_window, self._on_round = on_window, on_round
        self._rows: list[int] = list(range(recordings))  # the recording of each row that is decoded now
        self._again: list[int] | None = None  # recordings to decode again; None: this window was not decoded yet

    def begin_window(self, progress: Tensor) -> None:
        """Begin a window.

        Args:
            progress: (B, 2), for each of B recordings the current frame and the number of frames.
        """
        if not self.prompts:  # before the first window, the model only detects the language
            self.meter.end_detection()
        self._rows, self._again = (progress[:, 0] < progress[:, 1]).nonzero()[:, 0].tolist(), None
        if self._on_window is not None:
            self._on_window(progress)

    def _note_fallback(self, sequence: Any, outputs: Any, row: int, *further: Any, **named: Any) -> Any:
        """Replace transformers' function, which returns whether a row is decoded again, and note the row."""
        again, skip = self._need_fallback(sequence, outputs, row, *further, **named)
        if again and self._again is not None:
            self._again.append(self._rows[row])
        return again, skip

    def __call__(self, model: Any, input_ids: Tensor, generation_config: GenerationConfig, **inputs: Any) -> Any:
        """Decode one window at one temperature.

        Args:
            model: The copy of the model on which `generate` was called.
            input_ids: (b, P), prompts of P tokens of the b rows that are decoded.
            generation_config: The window's generation config, with its temperature.
            inputs: Further inputs of `generate`.

        Returns:
            The output that `generate` expects of a `custom_generate`: ids or a dict.
        """
        again = self._again is not None
        if self._again is not None:
            self._rows = self._again
        self._again = []
        if not self.prompts:
            self.prompts = input_ids.tolist()
        self.meter.begin(self._rows, model.config.max_target_positions - input_ids.shape[1], again)
        output = self._run(input_ids, generation_config, inputs, self._encoder.seconds)
        if output is None:
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
            inputs |= {"encoder_outputs": self._encoder.whole(), CACHE_ARGUMENT: cache}
            self.meter.restart()
            output = self._run(input_ids, generation_config, inputs, None)
        self.meter.end()
        return output

    def _run(self, input_ids: Tensor, config: GenerationConfig, inputs: Mapping[str, Any], read: float | None) -> Any:
        """Run the rounds of one window.

        Args:
            input_ids: (b, P), prompts.
            inputs: Further inputs of `generate`.
            read: How many seconds of the window the encoder read; None: all.

        Returns:
            The output; None if the encoder read only a part of the window, and the text does not end or repeats itself.
        """
        run = self._speculation.begin(self._target, self._original, input_ids, config, **inputs)
        tokens, checked = list[int](), 0
        for round_ in run.rounds:
            self.meter.count(round_)
            if self._on_round is not None:
                self._on_round(replace(round_, rows=[self._rows[row] for row in round_.rows]))
            tokens += [token for token in round_.tokens[0] if token < self._first_timestamp]
            if read is not None and len(tokens) >= checked + RUNAWAY_CHECK_TOKENS:
                checked = len(tokens)
                if is_runaway(tokens, read, self._original.config.vocab_size):
                    return None
        if read is not None and not has_end_token(tokens, config):
            return None
        return run.output(config)


def is_runaway(tokens: Sequence[int], seconds: float, vocab_size: int) -> bool:
    """Return whether a text has too many tokens for `seconds` of sound, or repeats itself by its compression ratio."""
    if len(tokens) > MAX_TOKENS_PER_SECOND * seconds + EXTRA_TOKENS:
        return True
    size = int(math.log2(vocab_size) / 8) + 1
    return compression_ratio(b"".join(token.to_bytes(size, "little") for token in tokens)) > MAX_COMPRESSION_RATIO


def compression_ratio(content: bytes) -> float:
    """Return the ratio of the sizes before and after zlib: high for a text that repeats itself, 0 for an empty text."""
    return len(content) / len(zlib.compress(content))


def has_end_token(tokens: Sequence[int], config: Any) -> bool:
    """Return whether a text ends with an end-of-text token, that is, was not cut off at the maximum length."""
    end = config.eos_token_id
    return bool(tokens) and tokens[-1] in (end if isinstance(end, (list, tuple)) else [end])
