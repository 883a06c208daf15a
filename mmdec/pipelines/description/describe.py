"""`mmdec.describe`: a vision-language model answers questions about images with speculative decoding.

The text is that of `model.generate` on the inputs that the model's own processor and chat template make. This module
turns images into inputs and tokens into descriptions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from transformers import PreTrainedModel, ProcessorMixin
from typing_extensions import TypedDict, Unpack

from mmdec.checks.arguments import check_callable, check_threads, check_whole, naming_options, show
from mmdec.decode.budget import Nodes
from mmdec.decode.statistics import DecodingStatistics
from mmdec.decode.verify import RuleName
from mmdec.decode.watch import Stopwatch
from mmdec.generation.drafter_choice import DraftedBy
from mmdec.generation.speculation import speculate
from mmdec.hub.vlm import DEFAULT_MODEL, LoadedVlm
from mmdec.images import ImageSource, read_image
from mmdec.pipelines.confidence import check_min_confidence, read_calibrations, too_unsure
from mmdec.pipelines.description.describe_batch import Listeners, OnRound, OnText, describe_batch
from mmdec.pipelines.description.description import Description
from mmdec.pipelines.description.load import AUTO, Model, as_drafter, as_vlm
from mmdec.pipelines.description.prompts import Question, check_accepted, render, tensors, too_long, user_message
from mmdec.pipelines.description.request import DescriptionRequest
from mmdec.pipelines.inputs import BatchError
from mmdec.pipelines.threads import with_threads
from mmdec.targets.registry import target_of
from mmdec.types import InputError

__all__ = ["DescribeOptions", "describe"]

PROMPT = "Describe this image."
MAX_BATCH = 4096  # questions answered together at most
MAX_IMAGES = 256  # images of one question at most
Picture = ImageSource | os.PathLike[str]
Pictures = Picture | tuple[Picture, ...]  # all images of one question


class DescribeOptions(TypedDict, total=False, extra_items=Any):
    """The keyword arguments of `describe`; all other options go to transformers' `generate`."""

    model: Model
    processor: ProcessorMixin | None
    drafter: DraftedBy
    batch_size: int
    rule: RuleName | None
    num_speculative_tokens: Nodes
    seed: int | None
    device: str | torch.device | None
    dtype: torch.dtype | str | None
    threads: int | None
    on_text: OnText | None
    on_round: OnRound | None
    statistics: DecodingStatistics | None
    min_confidence: float | None


@overload
def describe(image: Pictures, prompt: str = ..., **options: Unpack[DescribeOptions]) -> Description: ...


@overload
def describe(
    image: list[Pictures] | list[Picture] | list[tuple[Picture, ...]],
    prompt: str | list[str] = ...,
    **options: Unpack[DescribeOptions],
) -> list[Description]: ...


def describe(
    image: Any,
    prompt: str | list[str] = PROMPT,
    *,
    model: Model = DEFAULT_MODEL,
    processor: ProcessorMixin | None = None,
    drafter: DraftedBy = AUTO,
    batch_size: int = 8,
    rule: RuleName | None = None,
    num_speculative_tokens: Nodes = None,
    seed: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    threads: int | None = None,
    on_text: OnText | None = None,
    on_round: OnRound | None = None,
    statistics: DecodingStatistics | None = None,
    min_confidence: float | None = None,
    **options: Any,
) -> Description | list[Description]:
    """Ask a vision-language model about images: exactly the answer of `model.generate`, in fewer passes of the model.

    image: a path, a file's bytes, a PIL image or a uint8 array (H, W, 3). A tuple holds all images of one question (it
        may be empty). A list holds one such entry for each of several questions.
    prompt: the question; with a list of images either one question for all or a list of as many. The images stand where
        the prompt has the model's image token ("<image>", "<|image_pad|>"), else before it.
    model: the shipped "vlm-scenes", a directory or hub id of a LLaVA or a Qwen-VL, or a loaded model (then give its
        `processor`).
    processor: the processor of a loaded model; None otherwise.
    drafter: a drafter with weights for this model ("eagle", "msd", ...: a folder of that name inside the model's
        folder, or beside it as <model>-eagle), "lookup", "recycling" or another registered name, a drafter's folder or
        hub id,
        "vlm-scenes/eagle" for a shipped one, a dotted path "package.module:Class", a smaller model, an
        `mmdec.types.Drafter`, or None for plain decoding. Default "auto": the first drafter with weights that is found,
        else "lookup".
    batch_size: questions answered together. Default 8.
    rule, num_speculative_tokens, seed, statistics: as for `mmdec.generate`.
    device: where a model given by name runs. Default None: a GPU if there is one, else the CPU.
    dtype: precision of a model given by name. Default None: float32.
    threads: as for `translate_speech`.
    on_text: called with each accepted piece of the answer; for one question only. An exception from it ends the call.
    on_round: called with each `Round` and its text; for one question only. An exception from it ends the call.
    min_confidence: in [0, 1]: refuse answers whose `confidence` is lower. Default None: refuse none.
    options: arguments of `generate`: max_new_tokens (512 if the model names none), do_sample, temperature and so on.
    Returns: a `Description`, or for a list of images a list of them in the same order.
    Raises: InputError if an argument or an image is refused, or a prompt exceeds the model's positions; BatchError for
        a list with such members; it holds the results of the others.
    """
    batch_size = check_whole("batch_size", batch_size, 1, MAX_BATCH, "Leave it out for 8.")
    check_threads(threads)
    least = check_min_confidence(min_confidence)
    single = not isinstance(image, list)
    listeners = _listeners(on_text, on_round, single)
    questions = _questions(image, prompt)
    vlm = as_vlm(model, processor, device, dtype)
    request = request_of(vlm, drafter, rule, num_speculative_tokens, seed, statistics, options, least)
    with with_threads(threads, vlm.model), naming_options(DescribeOptions.__annotations__):
        errors: dict[int, InputError] = {}
        read = _read(request, questions, errors)
        descriptions = _in_batches(request, read, errors, batch_size, listeners)
    _refuse(descriptions, errors, least, read)
    if not single:
        return _listed(descriptions, errors, len(questions))
    for error in errors.values():
        raise error
    return descriptions[0]


def _refuse(
    descriptions: dict[int, Description],
    errors: dict[int, InputError],
    least: float | None,
    questions: Mapping[int, Question],
) -> None:
    """Move answers below `min_confidence` to `errors`."""
    for index, description in list(descriptions.items()):
        refusal = too_unsure(description.confidence, least, questions[index].argument)
        if refusal is not None:
            errors[index] = refusal
            del descriptions[index]


def _listed(descriptions: Mapping[int, Description], errors: dict[int, InputError], count: int) -> list[Description]:
    """All descriptions in the order of the questions. Raises BatchError if some were refused."""
    if errors:
        raise BatchError([descriptions.get(index) for index in range(count)], dict(sorted(errors.items())), "images")
    return [descriptions[index] for index in range(count)]


def _listeners(on_text: OnText | None, on_round: OnRound | None, single: bool) -> Listeners:
    """Check both callbacks. Raises InputError if there are several questions."""
    check_callable("on_text", on_text, "a function of a piece of text")
    check_callable("on_round", on_round, "a function of a round")
    for name, function in (("on_text", on_text), ("on_round", on_round)):
        if function is not None and not single:
            raise InputError(
                f"`{name}` must be None for a list of images, but is given. Call `describe` for each of them."
            )
    return Listeners(on_text, on_round)


def request_of(
    vlm: LoadedVlm,
    drafter: DraftedBy,
    rule: RuleName | None,
    nodes: Nodes,
    seed: int | None,
    statistics: DecodingStatistics | None,
    options: Mapping[str, Any],
    least: float | None = None,
) -> DescriptionRequest:
    """Check all options that can be checked before an image is read, and collect them.

    vlm: the model and its processor. drafter, rule, nodes, seed, statistics, options: as for `describe`.
    least: the checked `min_confidence`, in [0, 1] or None.
    Raises: InputError if the drafter does not fit the model or an option is refused.
    """
    chosen = as_drafter(vlm, drafter)
    loaded = speculate(chosen, rule, nodes, seed, statistics=statistics).drafter_for(vlm.model)
    name = "" if loaded is None else loaded.name
    # each run checks this again; checking once here first saves much of the time of a short answer
    if name not in vlm.checked:
        target = target_of(vlm.model)
        if loaded is not None:
            loaded.check(target)
        vlm.checked.add(name)
    # a smaller model gets locked while it runs, too
    network = chosen if isinstance(chosen, PreTrainedModel) else loaded
    calibrations = read_calibrations(vlm.directory)
    return DescriptionRequest(vlm, network, rule, nodes, seed, statistics, options, least, calibrations)


def read_question(images: Any, prompt: object) -> Question:
    """Read the images of one question and check its prompt. Raises InputError."""
    sources = images if isinstance(images, tuple) else (images,)
    if len(sources) > MAX_IMAGES:
        raise InputError(f"`image` must have at most {MAX_IMAGES} images, but has {len(sources)}. Ask about fewer.")
    if not isinstance(prompt, str) or not prompt.strip():
        raise InputError(f"`prompt` must be text, but is {show(prompt)}. Ask a question.")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise InputError("`prompt` must be text, but holds half a character (a surrogate). Decode it again.") from None
    return Question(prompt, tuple(read_image(source) for source in sources))


def _questions(image: Any, prompt: str | list[str]) -> list[tuple[Any, object]]:
    """The (images, prompt) pair of each question; no image is read yet."""
    if not isinstance(image, list):
        return [(image, prompt)]
    if not isinstance(prompt, list):
        return [(picture, prompt) for picture in image]
    if len(prompt) != len(image):
        raise InputError(
            f"`prompt` must be one, or one for each of {len(image)} images, but has {len(prompt)}. Add or drop some."
        )
    return list(zip(image, prompt, strict=True))


def _read(
    request: DescriptionRequest, sources: Sequence[tuple[Any, object]], errors: dict[int, InputError]
) -> dict[int, Question]:
    """Read the questions, keyed by index. Questions that are refused add their error to `errors`."""
    questions: dict[int, Question] = {}
    for index, (images, prompt) in enumerate(sources):
        try:
            question = read_question(images, prompt)
            text = render(request.vlm, [user_message(request.vlm, question)])
            questions[index] = replace(question, text=text)
        except InputError as error:
            errors[index] = error
    return questions


def _in_batches(
    request: DescriptionRequest,
    questions: Mapping[int, Question],
    errors: dict[int, InputError],
    batch_size: int,
    listeners: Listeners,
) -> dict[int, Description]:
    descriptions: dict[int, Description] = {}
    indices = list(questions)
    for start in range(0, len(indices), batch_size):
        batch = indices[start : start + batch_size]
        stopwatch = Stopwatch(request.vlm.model.device)
        inputs, batch = _tensors(request, questions, batch, errors)
        if batch:
            pictures = [questions[index].pictures for index in batch]
            described = describe_batch(request, inputs, pictures, stopwatch.lap(), listeners)
            descriptions |= zip(batch, described, strict=True)
    return descriptions


def _tensors(
    request: DescriptionRequest,
    questions: Mapping[int, Question],
    batch: Sequence[int],
    errors: dict[int, InputError],
) -> tuple[dict[str, Any], Sequence[int]]:
    """Model inputs of a batch, and the indices of the questions that the processor accepts; others add to `errors`."""
    vlm, chosen = request.vlm, [questions[index] for index in batch]
    try:
        inputs = tensors(vlm, [question.text for question in chosen], chosen)
    except MemoryError:
        raise
    except Exception as error:  # some question of the batch is at fault; find out which
        refused = dict[int, InputError]()
        for index in batch:
            try:
                check_accepted(vlm, questions[index])
            except InputError as reason:
                refused[index] = reason
        if not refused:
            raise InputError(
                f"`image` must be what the model's processor takes, but it refuses these together "
                f"({type(error).__name__}: {' '.join(str(error).split())[:300]}). Use batch_size=1."
            ) from error
    else:
        remedy = "Shorten it, or ask about fewer or smaller pictures."
        refused = {batch[row]: error for row, error in too_long(vlm, inputs, remedy).items()}
        if not refused:
            return inputs, batch
    errors |= refused
    remaining = [index for index in batch if index not in refused]
    return _tensors(request, questions, remaining, errors) if remaining else ({}, remaining)
