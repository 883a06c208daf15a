"""`mmdec.describe`: a vision-language model answers questions about images with speculative decoding.

The text equals that of `model.generate` on the inputs of the model's own processor and chat template. `questions` makes
these inputs, and `answer` decodes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any, overload

import torch
from transformers import PreTrainedModel, ProcessorMixin

from mmdec.checks.arguments import suggesting_options
from mmdec.core.budget import DraftSize
from mmdec.core.scheduler import decode_together
from mmdec.core.statistics import DecodingStatistics
from mmdec.core.steps import Steps, pass_stop_iteration
from mmdec.core.timing import Stopwatch
from mmdec.core.verify import Relaxation, RuleName
from mmdec.drafters.built_in import AUTO
from mmdec.drafters.registry import auto_names, drafter_entry
from mmdec.generation.drafter_choice import DrafterChoice
from mmdec.generation.drafter_source import DraftInput
from mmdec.generation.model_lock import reading
from mmdec.hub.find import drafter_folder
from mmdec.pretrained import DEFAULT_VLM
from mmdec.pretrained.vlm import LoadedVlm, load_vlm
from mmdec.tasks.batch import InputBatch, InputGroup, InputGroups
from mmdec.tasks.generate_options import with_length
from mmdec.tasks.loading import ArgumentKind, ModelOptions, model_of_call
from mmdec.tasks.options import option_names, with_options_of
from mmdec.tasks.threads import with_threads
from mmdec.types import Round
from mmdec.vision.answer import Description, DescriptionRequest, answer_steps
from mmdec.vision.options import DescribeOptions, Model, OnDescription, OnText
from mmdec.vision.questions import (
    DEFAULT_PROMPT,
    Picture,
    Pictures,
    Prompt,
    Question,
    batch_inputs,
    pair_questions,
    read_question,
    render_chat,
    user_message,
)

NETWORK = ArgumentKind(PreTrainedModel, "a loaded model of transformers", "AutoModelForImageTextToText")


@overload
def describe(
    image: Pictures,
    prompt: Prompt = DEFAULT_PROMPT,
    *,
    model: Model = DEFAULT_VLM,
    processor: ProcessorMixin | None = None,
    drafter: DrafterChoice = AUTO,
    batch_size: int = 8,
    rule: RuleName | Relaxation | None = None,
    num_speculative_tokens: DraftSize = None,
    seed: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    threads: int | None = None,
    on_text: OnText | None = None,
    on_description: OnDescription | None = None,
    on_round: Callable[[Round], None] | None = None,
    statistics: DecodingStatistics | None = None,
    min_confidence: float | None = None,
    **options: Any,
) -> Description: ...


@overload
def describe(
    image: list[Pictures] | list[Picture] | list[tuple[Picture, ...]],
    prompt: Prompt | list[str] | list[tuple[str, ...]] | list[Prompt] = ...,
    **options: Any,
) -> list[Description]: ...


@with_options_of(DescribeOptions)
def describe(
    image: Any, prompt: Prompt | list[str] | list[tuple[str, ...]] | list[Prompt] = DEFAULT_PROMPT, **options: Any
) -> Description | list[Description]:
    """Ask a vision-language model about images: exactly the answer of `model.generate`, in fewer passes of the model.

    Args:
        image: A path, a file's bytes, a PIL image or a uint8 array (H, W, 3). A tuple holds all images of one question
            (it may be empty). A list holds one such value for each of several questions.
        prompt: The question; for a list of images, one question for all, or a list of questions of the same length. A
            tuple of texts has an image between each two: ("Is", "larger than", "?") about two images, or ("", "",
            "Which?") to begin with both. Else all images stand before the question. Special tokens in it ("<image>")
            are text.
        model: The shipped "vlm-scenes", a folder or Hugging Face id of a LLaVA or a Qwen-VL, or a loaded model (then
            give its `processor`).
        processor: The processor of a loaded model; None otherwise.
        drafter: The name of a drafter with weights for this model ("eagle", "msd", ...: a folder of that name inside
            the model's folder, or <model>-eagle beside the model's folder), "lookup", "recycling" or another registered
            name, a drafter's folder or Hugging Face id, "vlm-scenes/eagle" for a shipped one, a dotted path
            "package.module:Class", a smaller model, an `mmdec.types.Drafter`, or None for plain decoding. Default
            "auto": the first drafter with weights in or beside the model's folder, else one shipped for the model's
            weights, else "lookup".
        batch_size: Maximum number of questions that are answered at the same time; they share the model's passes, and
            the next ones begin when these have ended, or if answers are sampled, as soon as one has. Default 8.
        rule, num_speculative_tokens, seed, statistics: Verification rule, draft size, random seed, and acceptance rates
            measured in earlier calls, as for `mmdec.generate`. Question i of a list is sampled with `seed + i`.
        device: Where a model given by name runs. Default None: a GPU if there is one, else the CPU.
        dtype: Precision of a model given by name. Default None: float32.
        threads: torch's CPU threads for this call. Default None: the number that the user has set for torch, else a
            number chosen from the model's size and the number of idle CPUs.
        on_text: Called with each accepted piece of the answer; for one question only. An exception from it ends the
            call.
        on_description: Called with each question's index and `Description`, in the order of the questions, as soon as
            it and all earlier ones are answered.
        on_round: Called with each decoding round (a `Round`) and its text; its `rows` are indices of the questions in
            the call. An exception from it ends the call.
        min_confidence: In [0, 1]: reject answers whose `confidence` is lower. Default None: reject none.
        options: Arguments of `generate`: max_new_tokens (512 if the model's generation config has none), do_sample,
            temperature and so on.

    Returns:
        A `Description`; for a list of images, a list of `Description`s in the same order.

    Raises:
        InputError: If an argument or an image is rejected, or a prompt exceeds the model's maximum length.
        BatchError: If some questions of a list are rejected; it holds the results of the others.
    """
    chosen = DescribeOptions.from_keywords(options)
    batch = InputBatch(pair_questions(image, prompt), not isinstance(image, list), "images")
    batch.check_listener(
        "on_text", chosen.on_text, "a function of a piece of text", "Call `describe` for each of them."
    )
    vlm = as_vlm(chosen)
    with suggesting_options(option_names(DescribeOptions)):
        request = DescriptionRequest.from_options(vlm, chosen, len(batch))

    with pass_stop_iteration(), with_threads(chosen.threads, vlm.model):
        generate = with_length(request.options, vlm.model)
        groups = InputGroups.from_indices(
            vlm.model, request.speculation, generate, range(len(batch)), chosen.batch_size
        )
        names = dict[int, str]()  # index -> the argument that an error about the answer names
        # a group is read when there is room for it, not before
        decodings = filter(None, (_prepare_group(request, batch, group, names) for group in groups.groups))
        with (
            reading(vlm.model, *request.speculation.networks),
            closing(decode_together(decodings, groups.rows, refill=groups.refill)) as finished,
        ):
            for answered, descriptions in finished:
                batch.add(dict(zip(answered, descriptions, strict=True)), chosen.on_description)
        return batch.finish(chosen.min_confidence, names)


def as_vlm(options: ModelOptions) -> LoadedVlm:
    """Return the model of a call, which is loaded if it is given by name.

    Raises:
        InputError: If it cannot be loaded, or does not fit `processor`, `device` or `dtype`.
    """
    return model_of_call(options, LoadedVlm, load_vlm, NETWORK)


def _prepare_group(
    request: DescriptionRequest, batch: InputBatch[tuple[Any, object]], group: InputGroup, names: dict[int, str]
) -> tuple[list[int], Steps[list[Description]], int] | None:
    """Read some questions, and prepare to answer them.

    Args:
        request: What all questions of the call share.
        batch: (images, prompt) of each question; the errors of those that are rejected are added to it.
        group: The questions.
        names: Index -> the argument that an error about the answer names; added to.

    Returns:
        The indices of the questions that are not rejected, the steps of their answers, and the group's number of rows;
        None if all are rejected.
    """
    questions = dict[int, Question]()
    for index in group.indices:
        with batch.collecting_error(index):
            question = read_question(*batch.inputs[index])
            questions[index] = replace(question, text=render_chat(request.vlm, [user_message(question)]))
    stopwatch = Stopwatch(request.vlm.model.device)
    questions, inputs = batch_inputs(request.vlm, questions, batch.errors)
    if not questions:
        return None
    indices = [*questions]
    names |= {index: question.argument for index, question in questions.items()}
    pictures = [question.pictures for question in questions.values()]
    request = replace(request, speculation=group.speculation.for_inputs([DraftInput(index) for index in indices]))
    steps = answer_steps(request, inputs, pictures, read_seconds=stopwatch.lap(), indices=indices)
    return indices, steps, len(group.indices)


def available_drafters(vlm: LoadedVlm) -> dict[str, str]:
    """List the drafters with weights that belong to this model, in the order in which "auto" prefers them.

    Returns:
        Name -> description in one line.
    """
    if vlm.directory is None:
        return {}
    names = [name for name in auto_names() if drafter_folder(vlm.directory, name) is not None]
    entries = {name: drafter_entry(name) for name in names}
    return {name: entry.note for name, entry in entries.items() if entry is not None}
