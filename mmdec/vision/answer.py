"""Answers questions about images: the checked request, the decoding rounds, and the `Description` of each answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from mmdec.core.loop import Round
from mmdec.core.steps import Steps, timed, watch
from mmdec.core.summary import format_result, rounds_line
from mmdec.core.timing import Stopwatch
from mmdec.drafters.wrapper import ForwardingDrafter
from mmdec.generation.generate import RoundText, prepare_run
from mmdec.generation.speculation import Speculation
from mmdec.pretrained.vlm import LoadedVlm
from mmdec.tasks.confidence import Calibration, Evidence, estimate_confidence, read_calibrations, token_evidence
from mmdec.tasks.generate_options import RESERVED, check_reserved, sets_length, with_length
from mmdec.tasks.loading import load_speculation
from mmdec.tasks.usage import Usage
from mmdec.types import Draft, Drafter, Plan
from mmdec.vision.options import DescribeOptions, OnText
from mmdec.vision.picture_evidence import distances_of, picture_evidence

ANSWER = "answer"  # the kind of decoding in confidence.json
STAGES = ("vision", "prompt", "decoder", "drafter", "core")
RESERVED_HERE = {  # option of `generate` -> argument of `describe` that sets it, or "" if there is none
    **RESERVED,
    "attention_mask": "prompt",
    "image_grid_thw": "image",
    "input_ids": "prompt",
    "inputs": "prompt",
    "inputs_embeds": "",
    "output_logits": "",
    "output_scores": "",
    **dict.fromkeys(("cache", "past_key_values"), "Chat"),
    "pixel_values": "image",
    "position_ids": "",
    "streamer": "on_text",
}


@dataclass(frozen=True)
class Description:
    """The answer to one question.

    Args:
        timings: Stage -> seconds: `read` (the processor makes tensors of pixels and text), `vision` (the vision
            encoder), `prompt` (the rest of the pass over the prompt), `decoder` (all later passes), `drafter`, `core`
            (verification, cache) and `total`, which includes other time. The time of what questions share is divided
            among them: vision by numbers of images, everything else equally.
    """

    text: str
    tokens: list[int] = field(repr=False)  # ids as `generate` returns them, the end token included, without padding
    rounds: int  # number of the model's passes for this question, the pass over the prompt included
    tokens_per_round: float  # mean over the rounds after the prompt's pass; correction, bonus and end tokens count
    timings: Mapping[str, float] = field(repr=False)
    drafted: int = 0  # number of tokens that the drafter proposed
    accepted: int = 0  # number of drafted tokens that were accepted
    lossless: bool = True  # whether the text equals plain decoding; False for a lossy rule
    finish_reason: str = "stop"  # "length" if the answer was cut at the maximum length
    note: str = ""  # that the answer was cut, and what to do
    compressor: str | None = None  # name of the drafter's image compressor; None: it compressed no image
    confidence: float = 0.0  # probability in [0, 1] that the answer is right, see `mmdec.tasks.confidence`
    # the values from which the confidence was computed
    evidence: Mapping[str, float] = field(default_factory=lambda: {}, repr=False)
    # in [0, 1]: the compressor's weight of each visual token; None: no image was compressed
    visual_weights: list[float] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """Write three lines: the text, the number of rounds, the time."""
        return format_result(self.text, rounds_line(self.rounds, self.tokens_per_round, self.lossless), self.timings)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields except `evidence`, as lists, numbers and text."""
        content = asdict(self) | {"timings": dict(self.timings)}
        del content["evidence"]
        return content


@final
@dataclass(frozen=True)
class DescriptionRequest:
    """What all questions of one call share: model, decoding loop, options of `generate`, and calibrations."""

    vlm: LoadedVlm
    speculation: Speculation
    options: Mapping[str, Any]
    on_text: OnText | None = None  # called with each accepted piece of text; only in a call with one question
    calibrations: Mapping[str, Calibration] = field(default_factory=lambda: {})

    @classmethod
    def of(cls, vlm: LoadedVlm, options: DescribeOptions, questions: int = 1) -> DescriptionRequest:
        """Make a request, and check everything that can be checked before an image is read.

        Args:
            vlm: The model.
            options: Those of the call; its `on_round` is called with each round and its text.
            questions: Number of questions.

        Raises:
            InputError: If the drafter does not fit the model, or for options of `generate` that `describe` sets itself.
        """
        speculation = load_speculation(options, options.drafter, vlm, questions, checked=vlm.checked)
        check_reserved(options.generate, RESERVED_HERE, "mmdec.generate")
        return cls(vlm, speculation, options.generate, options.on_text, read_calibrations(vlm.directory))

    def generate_options(self) -> dict[str, Any]:
        """Return the options of `generate`."""
        options = with_length(self.options, self.vlm.model)
        if "stop_strings" in options:
            options["tokenizer"] = self.vlm.tokenizer
        return options

    def listener(self, indices: Sequence[int] = (0,)) -> Callable[[Round], None]:
        """Return a function that passes the rounds of questions to the caller's `on_round` and `on_text`.

        Args:
            indices: Index in the call of each question.
        """
        on_round, add_text = self.speculation.options.on_round, RoundText(self.vlm.tokenizer, len(indices))
        writer = None if self.on_text is None else _TextWriter(self.on_text)

        def report(round_: Round) -> None:
            if writer is None and on_round is None:
                return
            round_ = add_text(round_)
            if writer is not None:
                writer.add(round_.text[0])
            if on_round is not None:
                on_round(replace(round_, rows=[indices[row] for row in round_.rows]))

        return report


@final
class CompressionRecorder(ForwardingDrafter):
    """Wraps a drafter for one call of `generate`, and records how it compressed the image of each row.

    The drafter's state must have a field `info`; for other drafters nothing is recorded.
    """

    def __init__(self, drafter: Drafter, rows: int) -> None:
        super().__init__(drafter)
        self.compressor: list[str | None] = [None] * rows
        self.visual_weights: list[Tensor | None] = [None] * rows
        self._rows = list(range(rows))

    def propose(self, state: Any, roots: Tensor, plan: Plan) -> Draft:
        draft = super().propose(state, roots, plan)
        for row, info in zip(self._rows, getattr(state, "info", ()) or (), strict=False):
            self.compressor[row], self.visual_weights[row] = info.compressor, info.visual_weights
        return draft

    def select(self, state: Any, live: Tensor) -> None:
        super().select(state, live)
        self._rows = [self._rows[index] for index in live.tolist()]


@final
class AnswerDecoder:
    """Decodes the answer to one question, or to several whose prompts are read in one pass.

    Args:
        request: What all questions of the call share.
        inputs: The questions, as inputs of `generate`.
        pictures: The pictures of each question, (H, W, 3) uint8.
        read_seconds: Seconds that it took to make the inputs.
        earlier: For a chat: the evidence from the pictures of earlier turns.
        count: Number of these pictures.

    Raises:
        InputError: For an option that the model rejects.
    """

    def __init__(
        self,
        request: DescriptionRequest,
        inputs: Mapping[str, Any],
        pictures: Sequence[Sequence[np.ndarray]],
        read_seconds: float,
        earlier: Evidence | None = None,
        count: int = 0,
    ) -> None:
        self.usage = [Usage() for _ in pictures]  # one for each question
        self._request, self._pictures, self._read_seconds = request, pictures, read_seconds
        self._earlier, self._count = earlier, count
        self._counts = [len(group) for group in pictures]
        self._distances: list[list[float]] = [[] for _ in pictures]
        model, speculation = request.vlm.model, request.speculation
        stopwatch = Stopwatch(model.device)
        drafter, self._recorder = speculation.drafter_for(model), None
        self._drafts = drafter is not None
        if drafter is not None and not speculation.networks:
            self._recorder = CompressionRecorder(drafter, len(pictures))
            speculation = Speculation(replace(speculation.options, drafter=self._recorder))
        self._run = prepare_run(model, inputs, speculation, request.generate_options())
        self._preparation_seconds = stopwatch.lap()

    def steps(self, on_round: Callable[[Round], None]) -> Steps[list[Description]]:
        """Decode the answers as a generator of passes.

        The caller holds the locks of the model and of the drafter's networks.

        Args:
            on_round: Called with each round.

        Returns:
            A list with the `Description` of each question.
        """

        def add(round_: Round) -> None:
            self._add(round_)
            on_round(round_)

        _, seconds = yield from timed(watch(self._run.steps, add), self._request.vlm.model.device)
        return self._descriptions(seconds)

    def _add(self, round_: Round) -> None:
        for index, row in enumerate(round_.rows):
            self.usage[row].clock(round_, index, self._drafts)
            pictures = sum(self._counts)
            share = self._counts[row] / pictures if pictures else 1 / len(self.usage)
            self.usage[row].seconds["vision"] += round_.vision * share
        familiar = self._request.vlm.familiar
        if round_.summaries is not None and familiar is not None:
            self._distances = distances_of(familiar, round_.summaries, self._counts)

    def _descriptions(self, own_seconds: float) -> list[Description]:
        """Make the `Description` of each question, once all rounds were added.

        Args:
            own_seconds: Seconds that decoding has taken outside the model's passes.
        """
        request, recorder, count = self._request, self._recorder, len(self.usage)
        parts = [{stage: entry.seconds[stage] for stage in STAGES} for entry in self.usage]
        timed_seconds = sum(part["drafter"] + part["core"] for part in parts)
        rest = (self._preparation_seconds + max(own_seconds - timed_seconds, 0.0)) / count
        descriptions = list[Description]()
        for row, (entry, part) in enumerate(zip(self.usage, parts, strict=True)):
            seconds = {"read": self._read_seconds / count, **part}
            evidence = token_evidence(entry.logprobs) | picture_evidence(
                self._pictures[row], self._distances[row], self._earlier, self._count
            )
            confidence = estimate_confidence(evidence, request.calibrations, ANSWER)
            descriptions.append(
                Description(
                    text=request.vlm.tokenizer.decode(entry.tokens, skip_special_tokens=True).strip(),
                    tokens=entry.tokens,
                    rounds=entry.rounds,
                    tokens_per_round=entry.tokens_per_round,
                    timings={**seconds, "total": sum(seconds.values()) + rest},
                    drafted=entry.drafted,
                    accepted=entry.accepted,
                    lossless=request.speculation.options.lossless,
                    confidence=entry.limit_confidence(confidence, sets_length(request.options)),
                    finish_reason=entry.finish_reason,
                    note=entry.note,
                    evidence=evidence,
                    compressor=None if recorder is None else recorder.compressor[row],
                    visual_weights=None if recorder is None else _as_list(recorder.visual_weights[row]),
                )
            )
        return descriptions


def _as_list(weights: Tensor | None) -> list[float] | None:
    return None if weights is None else [float(value) for value in weights.to(torch.float32).flatten().tolist()]


@final
class _TextWriter:
    """Passes text to the callback `on_text` as it arrives, without leading spaces."""

    def __init__(self, on_text: OnText) -> None:
        self.on_text, self.begun = on_text, False

    def add(self, text: str) -> None:
        text = text if self.begun else text.lstrip()
        if text:
            self.begun = True
            self.on_text(text)
