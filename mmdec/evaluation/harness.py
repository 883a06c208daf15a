"""One Whisper, several methods to decode with it, and what each call cost: measured alike for all.

mmdec is measured through `mmdec.transcribe`, the call that people make, and by what it returns. transformers' own loops
are measured through `model.generate`, with the features and the arguments that `transcribe` gives it. A call's seconds
fall into reading (checks of the samples), features (log-mels), encoder (its passes, an assistant's encoder included)
and decoder: all the rest up to the text, that is passes, drafting, verification, processors and transformers' own
preparations. Nothing here knows references or statistics.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, final

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from mmdec.audio import SAMPLE_RATE
from mmdec.generation.speculation import Nodes
from mmdec.hub.medusa import WEIGHTS
from mmdec.hub.whisper import HEADS, LoadedWhisper
from mmdec.pipelines.inputs import Audio, read
from mmdec.pipelines.transcription.request import TranscriptionRequest
from mmdec.pipelines.transcription.transcribe import DraftedBy, transcribe
from mmdec.runtime import Stopwatch, timed_passes
from mmdec.types import InputError, MmdecError

PLAN = re.compile(r"(\d+)(?:x(\d+))?")
GREEDY = "greedy"


@dataclass(frozen=True)
class Method:
    """How to decode: by which call, and its options beside those of the harness."""

    name: str
    call: Literal["transcribe", "generate"]
    options: Mapping[str, Any] = field(default_factory=dict)
    networks: Sequence[PreTrainedModel] = ()  # beside the model

    @classmethod
    def greedy(cls) -> Method:
        """transformers' own loop."""
        return cls(GREEDY, "generate")

    @classmethod
    def drafted(cls, name: str, drafter: DraftedBy, nodes: Nodes = None) -> Method:
        """mmdec's loop; nodes as for `mmdec.speculate`."""
        return cls(name, "transcribe", {"drafter": drafter, "num_speculative_tokens": nodes})


@dataclass(frozen=True)
class Measurement:
    """What one call gave and cost; times in seconds, of the whole batch."""

    tokens: list[list[int]]  # of each recording, without prompt and padding
    texts: list[str]
    features: float
    encoder: float
    decoder: float  # the drafter included
    drafter: float  # 0 where transformers drafts, which does not say
    total: float  # wall clock, from samples in memory to texts
    passes: int = 0  # of the model's decoder
    windows: int = 0  # passes of its encoder
    rounds: int = 0  # those of all recordings after the prompts' passes, in mmdec's loop
    drafted_tokens: int = 0  # that these rounds gave, bonus or correction included

    @property
    def tokens_per_round(self) -> float:
        """Of mmdec's loop, a recording's; 1 where there was no round after the prompt's pass."""
        return self.drafted_tokens / self.rounds if self.rounds else 1.0


Measurements = Mapping[str, Sequence[Sequence[Measurement]]]  # method -> each group of recordings -> its repeats


@final
class Harness:
    """A model, and what it is asked for."""

    def __init__(self, whisper: LoadedWhisper, language: str | None = "en", max_new_tokens: int | None = None) -> None:
        """language: of the recordings; None has it detected. A model of one language is not told."""
        self.whisper, self.model = whisper, whisper.model
        multilingual = getattr(self.model.generation_config, "is_multilingual", False)
        self.language = language if multilingual else None
        self.options = {"num_beams": 1, "max_new_tokens": max_new_tokens}

    def read(self, audio: Audio) -> Tensor:
        """A recording as `transcribe` reads it: 16 kHz (T,). Raises InputError for one that it would refuse."""
        return self._request(1).check(read(audio))

    def is_long(self, samples: Tensor) -> bool:
        """Whether samples (T,) fill more than one window: they need transformers' long-form code, and timestamps."""
        return self._request(1).is_long(len(samples))

    def measure(self, recordings: Sequence[Tensor], method: Method) -> Measurement:
        """Recordings (T,) of 16 kHz, decoded together: those within a window apart from longer ones."""
        measure = self._transcribe if method.call == "transcribe" else self._generate
        with _quiet(), _counted(self.model.get_decoder()) as passes, _counted(self.model.get_encoder()) as windows:
            measured = measure(recordings, method)
        return replace(measured, passes=len(passes), windows=len(windows))

    def gate(
        self, methods: Sequence[Method], groups: Sequence[Sequence[Tensor]], say: Callable[[str], None]
    ) -> dict[str, list[bool]]:
        """Whether each method gives each group the tokens of the second method, greedy decoding.

        Raises MmdecError where those of the first differ: then nothing may be timed.
        """
        first, plain = methods[0], methods[1]
        equal: dict[str, list[bool]] = {method.name: [] for method in methods}
        for number, recordings in enumerate(groups):
            wanted = self.measure(recordings, plain).tokens
            for method in methods:
                equal[method.name].append(self.measure(recordings, method).tokens == wanted)
            if not equal[first.name][-1]:
                raise MmdecError(
                    f"`{first.name}` differs from greedy decoding on recording {number}: no timing is reported. Report "
                    "this as a bug."
                )
        for method in methods[2:]:
            say(f"{method.name}: {sum(equal[method.name])} of {len(groups)} as greedy decoding")
        return equal

    def interleave(
        self,
        methods: Sequence[Method],
        groups: Sequence[Sequence[Tensor]],
        repeats: int,
        say: Callable[[str], None],
    ) -> Measurements:
        """All methods in turn, A B C A B C, group by group. The gate was the warm-up."""
        measured: dict[str, list[list[Measurement]]] = {method.name: [[] for _ in groups] for method in methods}
        for repeat in range(repeats):
            for number, recordings in enumerate(groups):
                for method in methods:
                    measured[method.name][number].append(self.measure(recordings, method))
            say(f"repeat {repeat + 1} of {repeats}")
        return measured

    def _transcribe(self, recordings: Sequence[Tensor], method: Method) -> Measurement:
        """By `mmdec.transcribe`; seconds and rounds are what it returns."""
        stopwatch = Stopwatch(self.model.device)
        found = transcribe(
            list(recordings),
            sample_rate=SAMPLE_RATE,
            model=self.whisper,
            language=self.language,
            batch_size=len(recordings),
            **self.options,
            **method.options,
        )
        total = stopwatch.lap()
        spent = {
            stage: sum(one.timings[stage] for one in found) for stage in ("features", "encoder", "drafter", "total")
        }
        later = [one.rounds - one.windows for one in found]
        return Measurement(
            tokens=[one.tokens for one in found],
            texts=[one.text for one in found],
            features=spent["features"],
            encoder=spent["encoder"],
            decoder=spent["total"] - spent["features"] - spent["encoder"],
            drafter=spent["drafter"],
            total=total,
            rounds=sum(later),
            drafted_tokens=sum(
                round(one.tokens_per_round * rounds) for one, rounds in zip(found, later, strict=True) if rounds
            ),
        )

    def _generate(self, recordings: Sequence[Tensor], method: Method) -> Measurement:
        """By `model.generate`, in the batches of `transcribe`."""
        tokens: list[list[int]] = [[] for _ in recordings]
        device, features, rest, encoder = self.model.device, 0.0, 0.0, list[float]()
        whole, stopwatch = Stopwatch(device), Stopwatch(device)
        samples = [read(one, SAMPLE_RATE) for one in recordings]
        call = self._request(len(recordings))
        with ExitStack() as stack:
            for network in (self.model, *method.networks):
                if network.config.is_encoder_decoder:
                    stack.enter_context(
                        timed_passes(network.get_encoder(), device, lambda seconds, *_: encoder.append(seconds))
                    )
            for batch in call.batches(dict(enumerate(map(len, samples))), len(samples)):
                stopwatch.lap()
                inputs = call.features([samples[index] for index in batch])
                features += stopwatch.lap()
                arguments = call.arguments(batch, call.is_long(len(samples[batch[0]])))
                found: Any = self.model.generate(**inputs, **arguments, **method.options)
                for index, segments in zip(batch, found["segments"], strict=True):
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
        return TranscriptionRequest.of(self.whisper, None, self.language, "transcribe", None, self.options, recordings)


@contextmanager
def _counted(module: nn.Module) -> Iterator[list[int]]:
    """One entry for each pass."""
    passes: list[int] = []
    hook = module.register_forward_hook(lambda *_: passes.append(1))
    try:
        yield passes
    finally:
        hook.remove()


@contextmanager
def _quiet() -> Iterator[None]:
    """No advice from transformers: its lines at every step of some loops would be timed, too."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def has_heads(whisper: LoadedWhisper) -> bool:
    """Whether heads lie beside the model."""
    return whisper.directory is not None and (whisper.directory / HEADS / WEIGHTS).is_file()


def parse_plan(plan: str) -> Nodes:
    """ "learned", "8" for a chain of 8 nodes, "16x6" for a tree of 16 nodes at most 6 deep."""
    if plan == "learned":
        return None
    match = PLAN.fullmatch(plan)
    if match is None:
        raise InputError(f"`plan` must be 'learned', nodes of a chain or nodes x depth of a tree, but is {plan!r}.")
    return int(match[1]) if match[2] is None else (int(match[1]), int(match[2]))
