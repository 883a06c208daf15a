"""Answers questions about images: the checked request, the decoding rounds, and the `Description` of each answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from mmdec.core.steps import Steps
from mmdec.core.summary import format_result, rounds_line
from mmdec.drafters.wrapper import ForwardingDrafter
from mmdec.generation.generate import RoundText
from mmdec.generation.speculation import Speculation
from mmdec.pretrained.vlm import LoadedVlm
from mmdec.targets.media import VisionReport
from mmdec.tasks.confidence import Calibration, Evidence, estimate_confidence, read_calibrations, token_evidence
from mmdec.tasks.decoding import decode_inputs
from mmdec.tasks.generate_options import RESERVED, check_generate_options, sets_length
from mmdec.tasks.loading import load_speculation
from mmdec.tasks.usage import Usage, renumber_rows
from mmdec.types import Draft, Drafter, Plan, Round
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
    """What all questions of one call share: model, drafter and rule, options of `generate`, and calibrations."""

    vlm: LoadedVlm
    speculation: Speculation
    options: Mapping[str, Any]
    on_text: OnText | None = None  # called with each accepted piece of text; only in a call with one question
    calibrations: Mapping[str, Calibration] = field(default_factory=lambda: {})

    @classmethod
    def from_options(cls, vlm: LoadedVlm, options: DescribeOptions, questions: int = 1) -> DescriptionRequest:
        """Make a request, and check everything that can be checked before an image is read.

        Args:
            vlm: The model.
            options: Those of the call; its `on_round` is called with each round and its text.
            questions: Number of questions.

        Raises:
            InputError: If the drafter does not fit the model, or for options of `generate` that `describe` sets itself.
        """
        check_generate_options(options.generate_options, vlm.model, RESERVED_HERE, "mmdec.generate")
        speculation = load_speculation(options, options.drafter, vlm, questions, checked=vlm.checked)
        return cls(vlm, speculation, options.generate_options, options.on_text, read_calibrations(vlm.directory))

    def confidence(self, evidence: Evidence, usage: Usage) -> float:
        """Return the probability that an answer is right.

        Args:
            evidence: The values from which it is computed.
            usage: The counts of the answer.
        """
        confidence = estimate_confidence(evidence, self.calibrations, ANSWER)
        return usage.limit_confidence(confidence, sets_length(self.options))


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


def answer_steps(
    request: DescriptionRequest,
    inputs: Mapping[str, Any],
    pictures: Sequence[Sequence[np.ndarray]],
    read_seconds: float,
    indices: Sequence[int] = (0,),
    usage: Sequence[Usage] | None = None,
) -> Steps[list[Description]]:
    """Answer one question, or several whose prompts are read in one pass, as a generator of passes.

    The caller holds the locks of the model and of the drafter's networks.

    Args:
        request: What all questions of the call share.
        inputs: The questions, as inputs of `generate`.
        pictures: The pictures of each question, (H, W, 3) uint8.
        read_seconds: Seconds that it took to make the inputs.
        indices: Index in the call of each question.
        usage: One for each question, which counts its rounds; None: new ones.

    Returns:
        A list with the `Description` of each question.

    Raises:
        InputError: For an option that the model rejects.
    """
    vlm, speculation = request.vlm, request.speculation
    usage = [Usage() for _ in pictures] if usage is None else usage
    drafter, recorder = speculation.drafter_for(vlm.model), None
    if drafter is not None and not speculation.networks:
        recorder = CompressionRecorder(drafter, len(pictures))
        speculation = speculation.with_drafter(recorder)
    counts = [len(group) for group in pictures]
    vision_shares = [count / sum(counts) if any(counts) else 1 / len(counts) for count in counts]
    distances = list[list[float]]([[] for _ in pictures])  # of each question's pictures from familiar ones
    reporter = _RoundReporter(request, indices)

    def on_round(round_: Round) -> None:
        nonlocal distances
        if isinstance(round_.report, VisionReport):
            for entry, share in zip(usage, vision_shares, strict=True):
                # the seconds of the prompts include those of the vision tower
                entry.seconds["prompt"] -= round_.report.seconds / len(usage)
                entry.seconds["vision"] += round_.report.seconds * share
            if round_.report.summaries is not None and vlm.familiar is not None:
                distances = distances_of(vlm.familiar, round_.report.summaries, counts)
        reporter.report(round_)

    rest = yield from decode_inputs(vlm.model, vlm.tokenizer, speculation, request.options, inputs, usage, on_round)
    descriptions = list[Description]()
    for row, entry in enumerate(usage):
        evidence = token_evidence(entry.logprobs) | picture_evidence(pictures[row], distances[row])
        description = _description(request, entry, evidence, read_seconds / len(usage), rest)
        if recorder is not None:
            weights = _as_list(recorder.visual_weights[row])
            description = replace(description, compressor=recorder.compressor[row], visual_weights=weights)
        descriptions.append(description)
    return descriptions


@final
class _RoundReporter:
    """Reports rounds and their text to the callbacks of a call.

    Args:
        request: What all questions of the call share.
        indices: Index in the call of each question of the batch.
    """

    def __init__(self, request: DescriptionRequest, indices: Sequence[int]) -> None:
        self._on_text, self._on_round = request.on_text, request.speculation.options.on_round
        self._indices = indices
        self._add_text = RoundText(request.vlm.tokenizer, len(indices))
        self._has_text = False  # whether `on_text` was called

    def report(self, round_: Round) -> None:
        """Add the text to a round, and report it."""
        if self._on_text is None and self._on_round is None:
            return
        round_ = self._add_text(round_)
        if self._on_text is not None and (text := round_.text[0] if self._has_text else round_.text[0].lstrip()):
            self._has_text = True
            self._on_text(text)
        if self._on_round is not None:
            self._on_round(renumber_rows(round_, self._indices))


def _description(
    request: DescriptionRequest, usage: Usage, evidence: Evidence, read_seconds: float, rest: float
) -> Description:
    """Return the answer to one question.

    Args:
        usage: Counts and times of its rounds.
        evidence: The values from which its confidence is computed.
        read_seconds: Its share of the seconds that it took to make the inputs.
        rest: Its share of the seconds outside all stages.
    """
    seconds = {"read": read_seconds, **{stage: usage.seconds[stage] for stage in STAGES}}
    return Description(
        text=request.vlm.tokenizer.decode(usage.tokens, skip_special_tokens=True).strip(),
        tokens=usage.tokens,
        rounds=usage.rounds,
        tokens_per_round=usage.tokens_per_round,
        timings={**seconds, "total": sum(seconds.values()) + rest},
        drafted=usage.drafted,
        accepted=usage.accepted,
        lossless=request.speculation.options.lossless,
        confidence=request.confidence(evidence, usage),
        finish_reason=usage.finish_reason,
        note=usage.note,
        evidence=evidence,
    )


def _as_list(weights: Tensor | None) -> list[float] | None:
    return None if weights is None else [float(value) for value in weights.to(torch.float32).flatten().tolist()]
