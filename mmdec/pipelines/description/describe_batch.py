"""Decodes one batch of questions, round by round, and turns tokens into descriptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmdec.decode.guard import ForwardingDrafter
from mmdec.decode.loop import Round
from mmdec.decode.watch import Stopwatch
from mmdec.hub.vlm import FamiliarPictures
from mmdec.pipelines.confidence import Evidence, confidence, evidence
from mmdec.pipelines.description.description import Description
from mmdec.pipelines.description.picture_evidence import picture_evidence
from mmdec.pipelines.description.request import DescriptionRequest
from mmdec.types import Draft, Drafter, Plan

OnText = Callable[[str], None]
OnRound = Callable[[Round], None]
ANSWER = "answer"  # the kind of decoding in confidence.json


@dataclass(frozen=True)
class Listeners:
    """The callbacks of a call with one question."""

    on_text: OnText | None = None  # called with each accepted piece of text
    on_round: OnRound | None = None  # called with each round, text included


@dataclass
class Usage:
    """The rounds of one question, and its share of the batch's seconds."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # log-probabilities of the answer's tokens
    rounds: int = 0  # including the prompt's pass
    later: int = 0  # tokens after the prompt's pass
    drafted: int = 0
    accepted: int = 0
    vision: float = 0.0
    prompt: float = 0.0
    decoder: float = 0.0
    drafter: float = 0.0
    core: float = 0.0

    def count(self, round_: Round, index: int, drafts: bool) -> None:
        """Add a round. index: the question's position among the rows of the round. drafts: whether there is a
        drafter."""
        share = len(round_.rows)
        self.rounds += 1
        self.tokens += round_.tokens[index]
        if round_.logprobs is not None:
            self.logprobs += round_.logprobs[index, : len(round_.tokens[index])].tolist()
        self.drafted += round_.drafted[index]
        self.accepted += round_.accepted[index]
        if round_.index:
            self.later += len(round_.tokens[index])
            self.decoder += round_.target / share
        else:
            self.prompt += (round_.target - round_.vision) / share
        if drafts:  # without a drafter this is only the clock's overhead
            self.drafter += round_.drafter / share
        self.core += round_.core / share

    def seconds(self) -> dict[str, float]:
        """Stage -> seconds."""
        return {name: getattr(self, name) for name in ("vision", "prompt", "decoder", "drafter", "core")}

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens per round after the prompt's pass; 1 without such rounds, as in `Generation`."""
        return self.later / (self.rounds - 1) if self.rounds > 1 else 1.0


@final
class Observed(ForwardingDrafter):
    """Wraps a drafter for one run and keeps its `info` on how each row's image was compressed, if it has any."""

    def __init__(self, drafter: Drafter, rows: int) -> None:
        super().__init__(drafter)
        self.compressor: list[str | None] = [None] * rows
        self.kept: list[Tensor | None] = [None] * rows
        self._rows = list(range(rows))

    def propose(self, memory: Any, roots: Tensor, plan: Plan) -> Draft:
        draft = super().propose(memory, roots, plan)
        for row, info in zip(self._rows, getattr(memory, "info", ()) or (), strict=False):
            self.compressor[row], self.kept[row] = info.compressor, info.kept
        return draft

    def select(self, memory: Any, live: Tensor) -> None:
        super().select(memory, live)
        self._rows = [self._rows[index] for index in live.tolist()]


def describe_batch(
    request: DescriptionRequest,
    inputs: Mapping[str, Any],
    pictures: Sequence[Sequence[np.ndarray]],
    read: float,
    listeners: Listeners = Listeners(),
    earlier: Evidence | None = None,
    count: int = 0,
) -> list[Description]:
    """Answer a batch of questions.

    listeners, earlier, count: of a batch of one; evidence of `count` pictures that a chat showed before.
    """
    vlm = request.vlm
    device = vlm.model.device
    usage, counts = [Usage() for _ in pictures], [len(group) for group in pictures]
    distances: list[list[float]] = [[] for _ in pictures]
    drafter, observed = request.drafter, None
    if drafter is not None and not isinstance(drafter, PreTrainedModel):
        drafter = observed = Observed(drafter, len(pictures))
    stopwatch, writer = Stopwatch(device), None if listeners.on_text is None else _TextWriter(listeners.on_text)
    for round_ in request.rounds(inputs, drafter, writer is not None or listeners.on_round is not None):
        for index, row in enumerate(round_.rows):
            usage[row].count(round_, index, request.drafter is not None)
            usage[row].vision += round_.vision * (counts[row] / sum(counts) if sum(counts) else 1 / len(usage))
        if round_.summaries is not None and vlm.familiar is not None:
            distances = _distances(vlm.familiar, round_.summaries, counts)
        if writer is not None:
            writer.add(round_.text[0])
        if listeners.on_round is not None:
            listeners.on_round(round_)
    told = [
        evidence(entry.logprobs) | picture_evidence(group, far, earlier, count)
        for entry, group, far in zip(usage, pictures, distances, strict=True)
    ]
    parts = [entry.seconds() for entry in usage]
    rest = max(stopwatch.lap() - sum(sum(part.values()) for part in parts), 0.0) / len(usage)
    return [
        Description(
            text=vlm.tokenizer.decode(entry.tokens, skip_special_tokens=True).strip(),
            tokens=entry.tokens,
            rounds=entry.rounds,
            tokens_per_round=entry.tokens_per_round,
            timings={
                "read": read / len(usage),
                **seconds,
                "total": read / len(usage) + sum(seconds.values()) + rest,
            },
            drafted=entry.drafted,
            accepted=entry.accepted,
            lossless=request.lossless,
            confidence=confidence(seen, request.calibrations, ANSWER),
            evidence=seen,
            compressor=None if observed is None else observed.compressor[row],
            kept=None if observed is None else _plain(observed.kept[row]),
        )
        for row, (entry, seconds, seen) in enumerate(zip(usage, parts, told, strict=True))
    ]


def _distances(familiar: FamiliarPictures, summaries: Tensor, counts: Sequence[int]) -> list[list[float]]:
    """Of each question's pictures. A chat whose cache was lost reads those of earlier turns again, before these."""
    new = familiar.distance(summaries[len(summaries) - sum(counts) :]).tolist()
    ends = list(accumulate(counts))
    return [new[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _plain(weights: Tensor | None) -> list[float] | None:
    return None if weights is None else [float(value) for value in weights.to(torch.float32).flatten().tolist()]


@final
class _TextWriter:
    """Passes text on as it arrives, without a leading space."""

    def __init__(self, on_text: OnText) -> None:
        self.on_text, self.begun = on_text, False

    def add(self, text: str) -> None:
        text = text if self.begun else text.lstrip()
        if text:
            self.begun = True
            self.on_text(text)
