"""What one call of Whisper's `generate` spent: rounds and seconds, for each recording of the batch.

transformers' own code goes over the recordings window by window, drops rows that are through, and decodes some of them
again at other temperatures; it does not say whose turn it is. The tally listens: it is told when a window begins, and
knows rows that are decoded again by their features.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from transformers import GenerationConfig, WhisperForConditionalGeneration

from mmdec.decode.loop import Round
from mmdec.generation.speculation import Speculation


@dataclass
class Spent:
    """One recording's share, in seconds, and its rounds."""

    rounds: int = 0
    later: int = 0  # rounds after the prompts' passes
    tokens: int = 0  # that those gave
    encoder: float = 0.0
    decoder: float = 0.0
    drafter: float = 0.0

    @property
    def tokens_per_round(self) -> float:
        """1 where the prompt's pass gave all there was, as in `Generation`."""
        return self.tokens / self.later if self.later else 1.0


@final
class Tally:
    """For one call: `generate(..., custom_generate=tally, monitor_progress=tally.window)` inside `listening()`."""

    def __init__(
        self,
        model: WhisperForConditionalGeneration,
        speculation: Speculation,
        rows: int,
        on_window: Callable[[Tensor], None] | None = None,
    ) -> None:
        """speculation: its `on_round` must be this tally's `round`: see `of`."""
        self.spent = [Spent() for _ in range(rows)]
        self.prompts: list[list[int]] = []  # of each recording's first window
        self._model, self._speculation, self._on_window = model, speculation, on_window
        self._live = list(range(rows))
        self._fresh = True  # a window has begun since the last call
        self._parts: dict[int, float] = {}  # rounds of this call by recording, a round divided among those in it
        self._decoding = False
        self._encoder = self._decoder = self._drafter = 0.0  # seconds that have no owner yet
        self._features: Tensor | None = None  # (b, mels, T) that the encoder saw last
        self._seen: list[Tensor] = []  # those of the last call's rows

    @classmethod
    def of(
        cls,
        model: WhisperForConditionalGeneration,
        rows: int,
        speculation: Callable[[Callable[[Round], None]], Speculation],
        on_window: Callable[[Tensor], None] | None = None,
    ) -> Tally:
        """speculation: makes the loop from its `on_round`. Raises InputError as `mmdec.speculate` does."""
        heard: list[Tally] = []
        tally = cls(model, speculation(lambda one: heard[0].round(one)), rows, on_window)
        heard.append(tally)
        return tally

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Time the encoder's and the decoder's passes of this thread."""
        encoder, decoder = self._model.get_encoder(), self._model.get_decoder()
        with self._timed(encoder, self._encoded), self._timed(decoder, self._decoded):
            yield

    def window(self, progress: Tensor) -> None:
        """progress (B, 2): the frame that each recording is at, and how many it has. Called before each window."""
        self._live = (progress[:, 0] < progress[:, 1]).nonzero()[:, 0].tolist()
        self._fresh = True
        if self._on_window is not None:
            self._on_window(progress)

    def round(self, one: Round) -> None:
        """Count a round for the recordings that took part in it."""
        seconds = 0.0 if self._speculation.drafter is None else one.drafter  # else it is what looking at a clock takes
        self._drafter += seconds
        for row, tokens in zip(one.rows, one.tokens, strict=True):
            spent = self.spent[self._live[row]]
            spent.rounds += 1
            spent.drafter += seconds / len(one.rows)
            self._parts[self._live[row]] = self._parts.get(self._live[row], 0.0) + 1 / len(one.rows)
            if one.index:
                spent.later += 1
                spent.tokens += len(tokens)

    def __call__(
        self, model: Any, input_ids: Tensor, generation_config: GenerationConfig, **inputs: Any
    ) -> Any:  # what Speculation gives
        """One window, at one temperature; input_ids (b, P) for those rows that are live."""
        self._begin(len(input_ids))
        if not self.prompts:
            self.prompts = input_ids.tolist()
        before = self._decoder
        encoder, self._encoder, self._drafter = self._encoder, 0.0, 0.0
        self._decoding = True
        start = self._now()
        try:
            return self._speculation(model, input_ids, generation_config, **inputs)
        finally:
            self._decoding = False
            decoder, rounds = self._now() - start - self._encoder - self._drafter, sum(self._parts.values())
            for row in self._live:
                self.spent[row].encoder += (encoder + self._encoder) / len(self._live)
                part = self._parts.get(row, 0.0) / rounds if rounds else 1 / len(self._live)
                self.spent[row].decoder += before / len(self._live) + decoder * part
            self._encoder = self._decoder = 0.0

    def _begin(self, rows: int) -> None:
        """Whose rows these are: all that the window has, or those that are decoded again."""
        features = self._features
        assert features is not None
        if not self._fresh:
            again, place = list[int](), 0
            for row in features:
                while not torch.equal(self._seen[place], row):
                    place += 1
                again.append(self._live[place])
                place += 1
            self._live = again
        assert len(self._live) == rows
        self._seen, self._fresh, self._parts = list(features), False, {}

    def _encoded(self, seconds: float, features: Tensor) -> None:
        self._encoder += seconds
        self._features = features

    def _decoded(self, seconds: float, tokens: Tensor | None) -> None:
        if not self._decoding:  # else it lies within what `__call__` times
            self._decoder += seconds

    def _now(self) -> float:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        return time.perf_counter()

    @contextmanager
    def _timed(self, module: torch.nn.Module, report: Callable[[float, Any], None]) -> Iterator[None]:
        thread, starts = threading.get_ident(), list[float]()

        def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if threading.get_ident() == thread:
                starts.append(self._now())

        def after(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _out: Any) -> None:
            if threading.get_ident() == thread:
                report(self._now() - starts.pop(), args[0] if args else kwargs.get("input_features"))

        hooks = (
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
