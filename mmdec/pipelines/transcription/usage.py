"""Measures the rounds and seconds of one call of Whisper's `generate`, for each recording of the batch.

`UsageMeter` is the call's `custom_generate`. transformers' long-form code calls it once for each window and
temperature; it runs the rounds and counts them. Two things happen outside of it. First, the encoder runs earlier; hooks
time its passes. Second, transformers drops recordings that have ended, and decodes some again at another temperature,
without saying which: its `monitor_progress` reveals the former, and a comparison of the encoder's features the latter.

Limit: features cannot tell equal recordings of one batch apart. If sampling at a temperature above 0 made them differ
and one is decoded again, the first of them is assumed. Their rounds, seconds and confidence may then be exchanged;
their texts and the batch's total are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from transformers import GenerationConfig, WhisperForConditionalGeneration

from mmdec.decode.loop import Round
from mmdec.decode.watch import Stopwatch, timed_passes
from mmdec.generation.run import Speculation
from mmdec.pipelines.confidence import evidence
from mmdec.targets.registry import target_of


def first_time(model: WhisperForConditionalGeneration) -> int:
    """The id of the first timestamp token. Timestamp tokens do not count for confidence."""
    settings: Any = model.generation_config
    mark: int | None = getattr(settings, "no_timestamps_token_id", None)
    return int(model.config.vocab_size) if mark is None else mark + 1


@dataclass
class Usage:
    """One recording's rounds, and its share of the batch's seconds."""

    rounds: int = 0  # including prompts' passes
    windows: int = 0  # prompts' passes, one per window and temperature
    tokens: int = 0  # tokens of the other rounds, correction or bonus included
    encoder: float = 0.0
    decoder: float = 0.0
    drafter: float = 0.0
    logprobs: list[float] = field(default_factory=list)  # log-probabilities of text tokens of earlier windows
    window: list[float] = field(default_factory=list)  # the same of the current window

    @property
    def evidence(self) -> dict[str, float]:
        """The evidence for the confidence."""
        return evidence(self.logprobs + self.window)

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens per round without prompts' passes; 1 without such rounds, as in `Generation`."""
        later = self.rounds - self.windows
        return self.tokens / later if later else 1.0


@final
class UsageMeter:
    """Runs and counts the rounds of one `generate` call.

    Use `generate(..., custom_generate=meter, monitor_progress=meter.window)` inside `with meter.running():`.
    """

    def __init__(
        self,
        model: WhisperForConditionalGeneration,
        speculation: Speculation,
        recordings: int,
        on_window: Callable[[Tensor], None] | None = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        """recordings: number in the batch. on_window: called with the argument of `window`. on_round: called with each
        round."""
        self.usage = [Usage() for _ in range(recordings)]
        self.prompts: list[list[int]] = []  # (B, P) of the first window
        self._model, self._speculation, self._on_window = model, speculation, on_window
        self._on_round = on_round
        self.networks = speculation.networks  # the drafter's own
        self._first_time = first_time(model)
        self._stopwatch = Stopwatch(model.device)
        self._recordings: Sequence[int] = range(recordings)  # batch indices of the rows that are being decoded
        self._begins = True  # whether the current window was not decoded yet
        self._rounds: dict[int, float] = {}  # recording -> its share of the rounds of this call
        self._encoder = 0.0  # seconds of the encoder that are not divided yet
        self._encoded: Tensor = torch.empty(0)  # (b, mels, T) the encoder's last input
        self._decoded: Tensor = torch.empty(0)  # the features of the last call's rows

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time the encoder's passes while `generate` runs."""
        with timed_passes(self._model.get_encoder(), self._model.device, self._encoder_pass):
            self._stopwatch.lap()
            yield

    def window(self, progress: Tensor) -> None:
        """Start a window. progress: (B, 2), the current frame of each recording and its number of frames."""
        if not self.prompts:  # the encoder has run for language detection only
            self._share(decoder=self._stopwatch.lap() - self._encoder)
        self._recordings = (progress[:, 0] < progress[:, 1]).nonzero()[:, 0].tolist()
        self._begins = True
        if self._on_window is not None:
            self._on_window(progress)

    def __call__(
        self, model: Any, input_ids: Tensor, generation_config: GenerationConfig, **inputs: Any
    ) -> Any:  # what Speculation gives
        """Decode one window at one temperature. input_ids: (b, P) of the rows that take part."""
        begins = self._begins
        self._recordings = self._taking_part()
        for index in self._recordings:
            if begins:  # of several temperatures, the last one counts
                self.usage[index].logprobs += self.usage[index].window
            self.usage[index].window = []
        if not self.prompts:
            self.prompts = input_ids.tolist()
        self._share()
        self._rounds = {}
        self._stopwatch.lap()
        run = self._speculation.begin(target_of(model), model, input_ids, generation_config, **inputs)
        drafter = 0.0
        for round_ in run.rounds:
            drafter += self._count(round_)
            if self._on_round is not None:
                self._on_round(round_)
        output = run.output(generation_config)
        # The check for silence encodes a window a second time, within the rounds.
        self._share(decoder=self._stopwatch.lap() - self._encoder - drafter)
        return output

    def _taking_part(self) -> Sequence[int]:
        """Recordings of this call's rows: all of a new window, or those rows of the last call that are decoded
        again."""
        last, self._decoded = self._decoded, self._encoded
        if self._begins:
            self._begins = False
            return self._recordings
        recordings = iter(zip(self._recordings, last, strict=True))  # rows keep their order
        return [next(index for index, before in recordings if torch.equal(before, row)) for row in self._encoded]

    def _count(self, round_: Round) -> float:
        """Count a round for its rows. Returns the drafter's seconds."""
        drafts = self._speculation.drafter_for(self._model) is not None
        seconds = round_.drafter if drafts else 0.0  # without a drafter this is only the clock's overhead
        logprobs = (
            [[0.0] * len(tokens) for tokens in round_.tokens] if round_.logprobs is None else round_.logprobs.tolist()
        )
        for row, tokens, chosen in zip(round_.rows, round_.tokens, logprobs, strict=True):
            usage = self.usage[self._recordings[row]]
            usage.window += [chance for token, chance in zip(tokens, chosen, strict=False) if token < self._first_time]
            usage.rounds += 1
            usage.drafter += seconds / len(round_.rows)
            self._rounds[self._recordings[row]] = self._rounds.get(self._recordings[row], 0.0) + 1 / len(round_.rows)
            if round_.index:
                usage.tokens += len(tokens)
            else:
                usage.windows += 1
        return seconds

    def _share(self, decoder: float = 0.0) -> None:
        """Divide the seconds among the recordings that took part: the encoder's equally, the decoder's by rounds."""
        rounds = sum(self._rounds.values())
        for index in self._recordings:
            self.usage[index].encoder += self._encoder / len(self._recordings)
            part = self._rounds.get(index, 0.0) / rounds if rounds else 1 / len(self._recordings)
            self.usage[index].decoder += decoder * part
        self._encoder = 0.0

    def _encoder_pass(self, seconds: float, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._encoder += seconds
        self._encoded = args[0] if args else kwargs["input_features"]
