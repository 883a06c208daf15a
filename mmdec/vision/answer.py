"""Answers one batch of questions about images: the checked request, the decoding rounds, and the `Description` of each
answer.

The confidence of an answer also depends on two measures of the pictures, because token probabilities do not show two
kinds of failure: a model may be sure about an empty picture, or about a picture unlike its training pictures.
`structure` is computed from the pixels. One colour, a gradient or noise is equally rough in all squares of a picture.
In a scene, a page or a photograph the squares differ: edges are rare and close to each other (Field, "What is the goal
of sensory coding?", 1994). `distance` is computed by the model's own vision encoder, if the model's folder has
statistics of its training pictures (`mmdec.pretrained.vlm`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from mmdec.core.loop import Round
from mmdec.core.summary import format_result, rounds_line
from mmdec.core.timing import Stopwatch
from mmdec.drafters.wrapper import ForwardingDrafter
from mmdec.generation.drafter_choice import resolve_drafter
from mmdec.generation.run import Speculation
from mmdec.generation.speculation import rounds_of
from mmdec.io.images import ImageSource, read_image, to_pil
from mmdec.pretrained.image_familiarity import FamiliarPictures
from mmdec.pretrained.vlm import LoadedVlm
from mmdec.targets.media import VisionOutput
from mmdec.tasks.confidence import Calibration, Evidence, estimate_confidence, read_calibrations, token_evidence
from mmdec.tasks.generate_options import RESERVED, check_reserved, sets_length, with_length
from mmdec.tasks.loading import decoding_options, load_speculation
from mmdec.tasks.usage import Usage, renumber_rounds
from mmdec.types import Draft, Drafter, Plan
from mmdec.vision.options import DescribeOptions, OnText

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
    # names of the key-value cache, since transformers 5.24 and before
    **dict.fromkeys(("cache", "past_key_values"), "Chat"),
    "pixel_values": "image",
    "position_ids": "",
    "streamer": "on_text",
}
STRUCTURE, DISTANCE = "structure", "distance"  # names of the evidence in confidence.json
REDUCED_SIDE = 128  # pixels: `structure` is computed on pictures that were reduced to sides of 128 to 255
MAX_SAMPLED_SIDE = 1024  # pixels: of larger pictures only every n-th row and column is read, which saves time
SQUARE_SIDE = 8  # side in pixels of the squares that `structure` compares
FAINT_EDGE = 2.0  # in grey levels: smaller differences between pixels are rounding, not edges
# maximum value of `structure`: a page of text has a lower value than a single sign, but is as good a picture
MAX_STRUCTURE = 0.1
STRUCTURE_OFFSET = 0.003  # added to `structure` before its logarithm is taken
MIN_DISTANCE = 1e-3  # minimum of the distance before its logarithm is taken
SUMMARY_BATCH_SIZE = 32  # maximum number of pictures in one pass of the vision encoder


@dataclass(frozen=True)
class Description:
    """The answer to one question.

    Args:
        timings: Stage -> seconds: `read` (the processor makes tensors of pixels and text), `vision` (the vision
            encoder), `prompt` (the rest of the pass over the prompt), `decoder` (all later passes), `drafter`, `core`
            (verification, cache) and `total`, which includes other time. The time of a batch is divided among its
            questions: vision by numbers of images, each round equally among its rows, everything else equally.
    """

    text: str
    tokens: list[int] = field(repr=False)  # ids as `generate` returns them, the end token included, without padding
    rounds: int  # number of the model's passes for this question, the pass over the prompt included
    tokens_per_round: float  # mean over the rounds after the prompt's pass; correction, bonus and end tokens count
    timings: Mapping[str, float] = field(repr=False)
    drafted: int = 0  # number of tokens that the drafter proposed
    accepted: int = 0  # number of drafted tokens that were accepted
    lossless: bool = True  # whether the text equals plain decoding; False for typical acceptance
    finish_reason: str = "stop"  # "length" if the answer was cut at the maximum length
    note: str = ""  # that the answer was cut, and what to do
    compressor: str | None = None  # name of the drafter's image compressor; None: it compressed no image
    confidence: float = 0.0  # probability in [0, 1] that the answer is right, see `mmdec.tasks.confidence`
    # the values from which the confidence was computed
    evidence: Mapping[str, float] = field(default_factory=lambda: {}, repr=False)
    # in [0, 1]: the compressor's weight of each visual token; None: no image was compressed
    kept: list[float] | None = field(default=None, repr=False)

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
    on_text: OnText | None = None  # called with each accepted piece of text; only for batches of one question
    calibrations: Mapping[str, Calibration] = field(default_factory=lambda: {})

    @classmethod
    def of(cls, vlm: LoadedVlm, options: DescribeOptions) -> DescriptionRequest:
        """Make a request, and check everything that can be checked before an image is read.

        Args:
            vlm: The model.
            options: Those of the call; its `on_round` is called with each round and its text.

        Raises:
            InputError: If the drafter does not fit the model, or for options of `generate` that `describe` sets itself.
        """
        decoding = decoding_options(options, resolve_drafter(options.drafter, vlm))
        speculation = load_speculation(decoding, vlm.model, vlm.checked)
        check_reserved(options.generate, RESERVED_HERE, "mmdec.generate")
        return cls(vlm, speculation, options.generate, options.on_text, read_calibrations(vlm.directory))

    def rounds(self, inputs: Mapping[str, Any], speculation: Speculation) -> Iterator[Round]:
        """Decode one batch, and yield each round.

        Args:
            inputs: The inputs of `generate`.
            speculation: The request's decoding loop, or a copy with a wrapped drafter.
        """
        options = with_length(self.options, self.vlm.model)
        if self.on_text or speculation.options.on_round or "stop_strings" in options:
            options["tokenizer"] = self.vlm.tokenizer
        return rounds_of(self.vlm.model, inputs, speculation, options)


@final
class CompressionRecorder(ForwardingDrafter):
    """Wraps a drafter for one call of `generate`, and records how it compressed the image of each row.

    The drafter's state must have a field `info`; for other drafters nothing is recorded.
    """

    def __init__(self, drafter: Drafter, rows: int) -> None:
        super().__init__(drafter)
        self.compressor: list[str | None] = [None] * rows
        self.kept: list[Tensor | None] = [None] * rows
        self._rows = list(range(rows))

    def propose(self, state: Any, roots: Tensor, plan: Plan) -> Draft:
        draft = super().propose(state, roots, plan)
        for row, info in zip(self._rows, getattr(state, "info", ()) or (), strict=False):
            self.compressor[row], self.kept[row] = info.compressor, info.kept
        return draft

    def select(self, state: Any, live: Tensor) -> None:
        super().select(state, live)
        self._rows = [self._rows[index] for index in live.tolist()]


def describe_batch(
    request: DescriptionRequest,
    inputs: Mapping[str, Any],
    pictures: Sequence[Sequence[np.ndarray]],
    read_seconds: float,
    earlier: Evidence | None = None,
    count: int = 0,
    indices: Sequence[int] | None = None,
) -> list[Description]:
    """Answer a batch of questions.

    Args:
        request: What all questions of the call share.
        inputs: The batch, as inputs of `generate`.
        pictures: The pictures of each question, (H, W, 3) uint8.
        read_seconds: Seconds that it took to make the inputs.
        earlier: For a chat: the evidence from the pictures of earlier turns.
        count: Number of these pictures.
        indices: Index of each question in the call, for `on_round`. Default None: its index in the batch.

    Returns:
        A `Description` of each question.
    """
    vlm, speculation = request.vlm, request.speculation
    on_round = renumber_rounds(speculation.options.on_round, range(len(pictures)) if indices is None else indices)
    usage, counts = [Usage() for _ in pictures], [len(group) for group in pictures]
    distances: list[list[float]] = [[] for _ in pictures]
    drafter, recorder = speculation.drafter_for(vlm.model), None
    if drafter is not None and not speculation.networks:
        recorder = CompressionRecorder(drafter, len(pictures))
        speculation = Speculation(replace(speculation.options, drafter=recorder))
    stopwatch, writer = Stopwatch(vlm.model.device), None if request.on_text is None else _TextWriter(request.on_text)
    for round_ in request.rounds(inputs, speculation):
        for index, row in enumerate(round_.rows):
            usage[row].clock(round_, index, drafter is not None)
            share = counts[row] / sum(counts) if sum(counts) else 1 / len(usage)
            usage[row].seconds["vision"] += round_.vision * share
        if round_.summaries is not None and vlm.familiar is not None:
            distances = _distances(vlm.familiar, round_.summaries, counts)
        if writer is not None:
            writer.add(round_.text[0])
        if on_round is not None:
            on_round(round_)
    parts = [{stage: entry.seconds[stage] for stage in STAGES} for entry in usage]
    read_seconds /= len(usage)
    rest = max(stopwatch.lap() - sum(sum(part.values()) for part in parts), 0.0) / len(usage)
    return [
        Description(
            text=vlm.tokenizer.decode(entry.tokens, skip_special_tokens=True).strip(),
            tokens=entry.tokens,
            rounds=entry.rounds,
            tokens_per_round=entry.tokens_per_round,
            timings={"read": read_seconds, **seconds, "total": read_seconds + sum(seconds.values()) + rest},
            drafted=entry.drafted,
            accepted=entry.accepted,
            lossless=speculation.options.lossless,
            confidence=entry.limit_confidence(
                estimate_confidence(evidence, request.calibrations, ANSWER), sets_length(request.options)
            ),
            finish_reason=entry.finish_reason,
            note=entry.note,
            evidence=evidence,
            compressor=None if recorder is None else recorder.compressor[row],
            kept=None if recorder is None else _as_list(recorder.kept[row]),
        )
        for row, (entry, seconds) in enumerate(zip(usage, parts, strict=True))
        for evidence in [
            token_evidence(entry.logprobs) | picture_evidence(pictures[row], distances[row], earlier, count)
        ]
    ]


def _distances(familiar: FamiliarPictures, summaries: Tensor, counts: Sequence[int]) -> list[list[float]]:
    """Measure how different the pictures of each question are from the training pictures.

    Args:
        familiar: Statistics of the training pictures.
        summaries: (N, F), the vision encoder's features of each picture.
        counts: Number of pictures of each question. If a chat had to compute its cache again, `summaries` begins with
            pictures of earlier turns, which are skipped.

    Returns:
        For each question a list of distances, one for each picture.
    """
    new = familiar.distance(summaries[len(summaries) - sum(counts) :]).tolist()
    ends = list(accumulate(counts))
    return [new[end - count : end] for end, count in zip(ends, counts, strict=True)]


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


def picture_evidence(
    pictures: Sequence[np.ndarray], distances: Sequence[float] = (), earlier: Evidence | None = None, count: int = 0
) -> dict[str, float]:
    """Compute the evidence from a question's pictures: the mean logarithms of `structure` and of `distance`.

    Args:
        pictures: (H, W, 3) uint8 each.
        distances: One for each picture, or empty if unknown.
        earlier: The evidence from the pictures of earlier turns of a chat; the question may be about these pictures.
        count: Number of these pictures.

    Returns:
        Name of the evidence -> value; {} without pictures.
    """
    logarithms = {
        STRUCTURE: [math.log(min(structure(pixels), MAX_STRUCTURE) + STRUCTURE_OFFSET) for pixels in pictures]
    }
    if len(distances) == len(pictures):
        logarithms[DISTANCE] = [math.log(max(distance, MIN_DISTANCE)) for distance in distances]
    means: dict[str, float] = {}
    for name, values in logarithms.items():
        if count and earlier is not None and name in earlier:
            values = [*values, *[earlier[name]] * count]
        if values:
            means[name] = sum(values) / len(values)
    return means


@torch.inference_mode()
def picture_summaries(vlm: LoadedVlm, sources: Sequence[ImageSource]) -> Tensor | None:
    """Compute the features of N pictures from which `FamiliarPictures` measures the distance to the training pictures.

    Args:
        vlm: The model, whose vision encoder computes the features.
        sources: The pictures, as paths, bytes or arrays.

    Returns:
        (N, F); None if the vision encoder's output does not show which states belong to which picture.
    """
    processor: Any = vlm.processor
    model: Any = vlm.model
    summaries: list[Tensor] = []
    for start in range(0, len(sources), SUMMARY_BATCH_SIZE):
        pictures = [to_pil(read_image(source)) for source in sources[start : start + SUMMARY_BATCH_SIZE]]
        pixels = processor.image_processor(images=pictures, return_tensors="pt").to(model.device, model.dtype)
        summary = VisionOutput.of(model.get_image_features(**pixels, return_dict=True)).summaries
        if summary is None:
            return None
        summaries.append(summary.float().cpu())
    return torch.cat(summaries)


def structure(pixels: np.ndarray) -> float:
    """Measure how unevenly edges are spread over a picture (H, W, 3).

    The measure is 0 if all squares of the picture are equally rough, and nearly 1 if one square has all edges.
    Brightness does not change the measure. Contrast changes it only for very faint pictures.
    """
    high, wide = (max(side // MAX_SAMPLED_SIDE, 1) for side in pixels.shape[:2])
    sampled = to_pil(pixels[::high, ::wide])
    reduced = sampled.reduce((max(sampled.width // REDUCED_SIDE, 1), max(sampled.height // REDUCED_SIDE, 1)))
    levels = np.asarray(reduced, np.float32)  # (h, w, 3), pixel values of the reduced picture
    across, down = np.diff(levels, axis=1, append=levels[:, -1:]), np.diff(levels, axis=0, append=levels[-1:])
    squares = _means((across**2 + down**2).mean(2))
    average, effective = float(np.sqrt(squares).mean()), math.sqrt(float(squares.mean()))
    return max(1 - (average + FAINT_EDGE) / (effective + FAINT_EDGE), 0.0)


def _means(values: np.ndarray) -> np.ndarray:
    """Average values (h, w) over squares of `SQUARE_SIDE` pixels; incomplete squares at the edges are left out.

    In smaller images the squares are smaller.
    """
    high, wide = (min(SQUARE_SIDE, side) for side in values.shape)
    rows, columns = values.shape[0] // high, values.shape[1] // wide
    return values[: rows * high, : columns * wide].reshape(rows, high, columns, wide).mean((1, 3))
