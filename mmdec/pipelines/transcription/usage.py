"""What one call of Whisper's `generate` cost: rounds and seconds, for each recording of the batch.

`UsageMeter` is the `custom_generate` of the call. transformers' long-form code calls it once for each window and
temperature; it runs the rounds and counts them. Two things happen outside of it. The encoder runs before it is called:
its passes are timed where they happen. And transformers drops recordings that have ended, and decodes some of a window
again at another temperature, without saying which: the first is told by its `monitor_progress`, the second is found
out by comparing the features that the encoder is given.

A limit: features do not tell equal recordings of one batch apart. They come to differ only after they were sampled, at
a temperature above 0. If then one of them alone is decoded again, the first of them is taken for it. Their rounds,
seconds and confidence may be exchanged; their texts are right, and so is what the batch cost.
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
from mmdec.generation.speculation import Speculation
from mmdec.pipelines.confidence import evidence
from mmdec.runtime import Stopwatch, timed_passes
from mmdec.targets.registry import target_of


def first_time(model: WhisperForConditionalGeneration) -> int:
    """The number of the first time token; those from it on say when, and nothing of how sure the text is."""
    settings: Any = model.generation_config
    mark: int | None = getattr(settings, "no_timestamps_token_id", None)
    return int(model.config.vocab_size) if mark is None else mark + 1


@dataclass
class Usage:
    """One recording's share of a batch, in seconds, and its rounds."""

    rounds: int = 0  # the prompts' passes included
    windows: int = 0  # prompts' passes: one for each window and temperature
    tokens: int = 0  # of the other rounds, correction or bonus included
    encoder: float = 0.0
    decoder: float = 0.0
    drafter: float = 0.0
    logprobs: list[float] = field(default_factory=list)  # of the text's tokens of earlier windows
    window: list[float] = field(default_factory=list)  # of this one, decoded last

    @property
    def evidence(self) -> dict[str, float]:
        """Of confidence."""
        return evidence(self.logprobs + self.window)

    @property
    def tokens_per_round(self) -> float:
        """Of the rounds after the prompts' passes; 1 where there are none, as in `Generation`."""
        later = self.rounds - self.windows
        return self.tokens / later if later else 1.0


@final
class UsageMeter:
    """For one call: `generate(..., custom_generate=meter, monitor_progress=meter.window)` inside `meter.running()`."""

    def __init__(
        self,
        model: WhisperForConditionalGeneration,
        speculation: Speculation,
        recordings: int,
        on_window: Callable[[Tensor], None] | None = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        """recordings: how many are in the batch. on_window: called with what `window` is called with. on_round: called
        with every round."""
        self.usage = [Usage() for _ in range(recordings)]
        self.prompts: list[list[int]] = []  # (B, P) of the first window
        self._model, self._speculation, self._on_window = model, speculation, on_window
        self._on_round = on_round
        self.networks = speculation.networks  # the drafter's own
        self._first_time = first_time(model)
        self._stopwatch = Stopwatch(model.device)
        self._recordings: Sequence[int] = range(recordings)  # indices in the batch of the rows that are decoded now
        self._begins = True  # a window that has not been decoded yet
        self._rounds: dict[int, float] = {}  # of this call by recording, a round divided among those that took part
        self._encoder = 0.0  # seconds that are not shared out yet
        self._encoded: Tensor = torch.empty(0)  # (b, mels, T) features that the encoder was given last
        self._decoded: Tensor = torch.empty(0)  # those of the rows of the last call

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time the encoder's passes for as long as `generate` runs."""
        with timed_passes(self._model.get_encoder(), self._model.device, self._encoder_pass):
            self._stopwatch.lap()
            yield

    def window(self, progress: Tensor) -> None:
        """Called before each window. progress (B, 2): the frame that each recording is at, and how many it has."""
        if not self.prompts:  # so far the language was detected, where it had to be
            self._share(decoder=self._stopwatch.lap() - self._encoder)
        self._recordings = (progress[:, 0] < progress[:, 1]).nonzero()[:, 0].tolist()
        self._begins = True
        if self._on_window is not None:
            self._on_window(progress)

    def __call__(
        self, model: Any, input_ids: Tensor, generation_config: GenerationConfig, **inputs: Any
    ) -> Any:  # what Speculation gives
        """Decode one window at one temperature; input_ids (b, P) of the rows that take part."""
        begins = self._begins
        self._recordings = self._taking_part()
        for index in self._recordings:
            if begins:  # what was decoded again at another temperature counts as it came last
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
        """Indices of this call's rows: all of a new window, or those of the last call that are decoded again."""
        last, self._decoded = self._decoded, self._encoded
        if self._begins:
            self._begins = False
            return self._recordings
        recordings = iter(zip(self._recordings, last, strict=True))  # rows keep their order
        return [next(index for index, before in recordings if torch.equal(before, row)) for row in self._encoded]

    def _count(self, round_: Round) -> float:
        """Enter a round for the rows that took part. Returns the drafter's seconds."""
        drafts = self._speculation.drafter_for(self._model) is not None
        seconds = round_.drafter if drafts else 0.0  # without a drafter it is what reading a clock takes
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
        """Give each recording that takes part its share: of the encoder's seconds alike, of the decoder's by rounds."""
        rounds = sum(self._rounds.values())
        for index in self._recordings:
            self.usage[index].encoder += self._encoder / len(self._recordings)
            part = self._rounds.get(index, 0.0) / rounds if rounds else 1 / len(self._recordings)
            self.usage[index].decoder += decoder * part
        self._encoder = 0.0

    def _encoder_pass(self, seconds: float, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._encoder += seconds
        self._encoded = args[0] if args else kwargs["input_features"]
