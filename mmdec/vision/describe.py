"""`mmdec.describe`: a vision-language model answers questions about images with speculative decoding.

The text equals that of `model.generate` on the inputs of the model's own processor and chat template. This module turns
questions into these inputs: the chat template writes the text, the processor makes the tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, cast, overload

import numpy as np
import torch
from transformers import PreTrainedModel, ProcessorMixin

from mmdec.checks.arguments import format_value, suggesting_options
from mmdec.checks.devices import PASSED_ON, check_dtype
from mmdec.core.budget import DraftSize
from mmdec.core.scheduler import decode_together
from mmdec.core.statistics import DecodingStatistics
from mmdec.core.steps import Steps, pass_stop_iteration
from mmdec.core.timing import Stopwatch
from mmdec.core.verify import Relaxation, RuleName
from mmdec.drafters.built_in import AUTO
from mmdec.drafters.registry import auto_names, drafter_entry
from mmdec.errors import InputError, without_frames
from mmdec.generation.drafter_choice import DrafterChoice
from mmdec.generation.drafter_source import DraftInput
from mmdec.generation.model_lock import reading
from mmdec.hub.find import drafter_folder
from mmdec.io.images import ImageSource, read_image, to_pil
from mmdec.pretrained.vlm import DEFAULT_MODEL, LoadedVlm, load_vlm
from mmdec.targets.hf_target import source_folder
from mmdec.tasks.batch import InputBatch, InputGroup, InputGroups
from mmdec.tasks.generate_options import length_errors
from mmdec.tasks.loading import ArgumentKind, ModelOptions, check_parts, check_placement, is_model_name
from mmdec.tasks.options import option_names, with_options_of
from mmdec.tasks.threads import with_threads
from mmdec.types import Round
from mmdec.vision.answer import Description, DescriptionRequest, answer_steps
from mmdec.vision.options import DescribeOptions, Model, OnDescription, OnText

__all__ = ["DEFAULT_MODEL", "DescribeOptions", "available_drafters", "describe", "load_vlm"]

DEFAULT_PROMPT = "Describe this image."
MAX_IMAGES = 256  # maximum number of images of one question
NETWORK = ArgumentKind(PreTrainedModel, "a loaded model of transformers", "AutoModelForImageTextToText")
Picture = ImageSource | os.PathLike[str]
Pictures = Picture | tuple[Picture, ...]  # all images of one question
Prompt = str | tuple[str, ...]
VlmMessage = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """One question about some images. Images are (H, W, 3) uint8, in the order in which the prompt has them."""

    prompt: str | tuple[str, ...]  # a tuple: the texts before, between and after the images
    pictures: tuple[np.ndarray, ...] = ()
    # the prompt as the chat template writes it, special tokens of the caller hidden; "" if it was not applied yet
    text: str = ""

    @property
    def argument(self) -> str:
        """The name of the argument that an error about the whole question mentions."""
        return "image" if self.pictures else "prompt"


def user_message(question: Question) -> VlmMessage:
    """Make the user's message in the format of chat templates.

    Images stand between the texts of a tuple, else all before the text.
    """
    image, prompt = {"type": "image"}, question.prompt
    if isinstance(prompt, str):
        return {"role": "user", "content": [image] * len(question.pictures) + [{"type": "text", "text": prompt}]}
    content = list[dict[str, str]]()
    for index, text in enumerate(prompt):
        if index > 0:
            content.append(image)
        if text.strip() or len(prompt) == 1:
            content.append({"type": "text", "text": text})
    return {"role": "user", "content": content}


def render_chat(vlm: LoadedVlm, messages: Sequence[VlmMessage]) -> str:
    """Write a dialogue as text by the chat template, up to where the model continues.

    Special tokens in the messages are hidden: `model_inputs` reads them as text.

    Raises:
        InputError: If the template leaves out an image.
    """
    hidden = [_hidden(vlm, message) for message in messages]
    text: str = vlm.processor.apply_chat_template(hidden, add_generation_prompt=True, tokenize=False)
    images = [part for message in messages for part in message["content"] if part["type"] == "image"]
    if text.count(vlm.image_token) != len(images):
        raise InputError(
            f"`model` must place each of the {len(images)} images in its text, but its chat template writes "
            f"{text.count(vlm.image_token)} {vlm.image_token!r}. Fix `processor.chat_template`."
        )
    return text


def _hidden(vlm: LoadedVlm, message: VlmMessage) -> VlmMessage:
    texts = iter(vlm.plain.hide([part["text"] for part in message["content"] if part["type"] == "text"]))
    content = [{**part, "text": next(texts)} if part["type"] == "text" else part for part in message["content"]]
    return {**message, "content": content}


def model_inputs(
    vlm: LoadedVlm, texts: Sequence[str], questions: Sequence[Question], begins: bool = True
) -> dict[str, Any]:
    """Make the inputs of `generate` for a batch, padded on the left, on the model's device and in its precision.

    Args:
        texts: Prompts written by `render_chat`.
        questions: Their images.
        begins: Whether the texts begin a dialogue; then the tokenizer's start token is added if the template did not
            write it.

    Raises:
        Exception: Any that the processor raises for images that it rejects.
    """
    pictures = [[to_pil(pixels) for pixels in question.pictures] for question in questions]
    begin = vlm.tokenizer.bos_token
    # type Any, because each class of processors has other options
    processor: Any = vlm.plain.processor if vlm.plain.hides(texts) else vlm.processor
    inputs = processor(
        images=pictures if any(pictures) else None,
        text=list(texts),
        padding=True,
        padding_side="left",
        return_tensors="pt",
        add_special_tokens=begins and not (begin and texts[0].startswith(begin)),
    )
    inputs.pop("labels", None)  # PaliGemma's processor adds labels, which only training needs
    return dict(inputs.to(vlm.model.device, vlm.model.dtype))


def prompt_errors(vlm: LoadedVlm, inputs: Mapping[str, Any], remedy: str) -> dict[int, InputError]:
    """Return an error for each prompt that is longer than the model's maximum.

    Args:
        vlm: The model.
        inputs: From `model_inputs`.
        remedy: Last sentence of the message.

    Returns:
        Row -> error.
    """
    rule = "`prompt` must take at most the model's {most} positions, its pictures and the chat template included"
    return length_errors(vlm.model, inputs, rule, remedy)


def checked_inputs(vlm: LoadedVlm, question: Question, remedy: str) -> dict[str, Any]:
    """Make the inputs of `generate` for one question, and check their length.

    Args:
        vlm: The model.
        question: With its text by `render_chat`.
        remedy: What to do if the prompt is too long; last sentence of the message.

    Raises:
        InputError: If the processor rejects the images, or the prompt is longer than the model's maximum.
    """
    try:
        inputs = model_inputs(vlm, [question.text], [question])
    except Exception:
        check_images(vlm, question)  # raises a clearer error if the images are the cause
        raise
    for error in prompt_errors(vlm, inputs, remedy).values():
        raise error
    return inputs


def check_images(vlm: LoadedVlm, question: Question) -> None:
    """Raise InputError if the processor rejects a question's images, for instance for an extreme aspect ratio."""
    try:
        model_inputs(vlm, [render_chat(vlm, [user_message(question)])], [question])
    except PASSED_ON:
        raise
    except Exception as error:  # all exceptions, because processors raise errors of many types
        sizes = ", ".join(f"{pixels.shape[1]} x {pixels.shape[0]}" for pixels in question.pictures)
        refused = f"{sizes} pixels" if sizes else "a question without one"
        raise InputError(
            f"`image` must be one that the model's processor takes, but it refuses {refused} "
            f"({type(error).__name__}: {' '.join(str(error).split())[:300].rstrip('.')}). Crop or scale the image."
        ) from error


@overload
def describe(
    image: Pictures,
    prompt: Prompt = DEFAULT_PROMPT,
    *,
    model: Model = DEFAULT_MODEL,
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
    chosen = DescribeOptions.of(options)
    batch = InputBatch(_questions(image, prompt), not isinstance(image, list), "images")
    batch.check_listener(
        "on_text", chosen.on_text, "a function of a piece of text", "Call `describe` for each of them."
    )
    vlm = as_vlm(chosen)
    with suggesting_options(option_names(DescribeOptions)):
        request = DescriptionRequest.of(vlm, chosen, len(batch))

    with pass_stop_iteration(), with_threads(chosen.threads, vlm.model):
        names, indices = dict[int, str](), range(len(batch))
        groups = InputGroups.of(vlm.model, request.speculation, request.generate_options(), indices, chosen.batch_size)
        decodings = ((group, _group_steps(request, batch, group, names), len(group.indices)) for group in groups.groups)
        with (
            reading(vlm.model, *request.speculation.networks),
            closing(decode_together(decodings, groups.rows, refill=groups.refill)) as finished,
        ):
            for _, descriptions in finished:
                batch.add(descriptions, chosen.on_description)
        return batch.finish(chosen.min_confidence, names)


def as_vlm(options: ModelOptions) -> LoadedVlm:
    """Return the model of a call, which is loaded if it is given by name.

    Raises:
        InputError: If it cannot be loaded, or does not fit `processor`, `device` or `dtype`.
    """
    dtype, model = check_dtype(options.dtype), options.model
    if is_model_name(options):
        return load_vlm(model, options.device, dtype)
    if not isinstance(model, LoadedVlm):
        check_parts(options, NETWORK)
        model = LoadedVlm(model, cast(ProcessorMixin, options.processor), source_folder(model))
    check_placement(model.model, options.device, options.dtype)
    return model


def read_question(images: Any, prompt: object) -> Question:
    """Read the images of one question, and check its prompt.

    Args:
        images: One image, or a tuple of images.

    Raises:
        InputError: If an image or the prompt is rejected.
    """
    sources = images if isinstance(images, tuple) else (images,)
    if len(sources) > MAX_IMAGES:
        raise InputError(f"`image` must be at most {MAX_IMAGES} images, but is {len(sources)}. Ask about fewer.")
    texts: tuple[object, ...] = prompt if isinstance(prompt, tuple) else (prompt,)
    if not all(isinstance(text, str) for text in texts) or not any(str(text).strip() for text in texts):
        raise InputError(f"`prompt` must be text, or a tuple of texts, but is {format_value(prompt)}. Ask a question.")
    if isinstance(prompt, tuple) and len(prompt) != len(sources) + 1:
        raise InputError(
            f"`prompt` must have the texts before, between and after the images, {len(sources) + 1} for "
            f"{len(sources)}, but has {len(prompt)}. Add or drop some, or give one text."
        )
    try:
        "".join(cast(tuple[str, ...], texts)).encode()
    except UnicodeEncodeError:
        raise InputError("`prompt` must be text, but holds half a character (a surrogate). Decode it again.") from None
    return Question(cast(str | tuple[str, ...], prompt), tuple(read_image(source) for source in sources))


def _questions(image: Any, prompt: Any) -> list[tuple[Any, object]]:
    """Pair images and prompts.

    Returns:
        (images, prompt) of each question; images are not read yet.
    """
    if not isinstance(image, list):
        return [(image, prompt)]
    if not isinstance(prompt, list):
        return [(picture, prompt) for picture in image]
    if len(prompt) != len(image):
        raise InputError(
            f"`prompt` must be one, or one for each of {len(image)} images, but has {len(prompt)}. Add or drop some."
        )
    return list(zip(image, prompt, strict=True))


def _group_steps(
    request: DescriptionRequest, batch: InputBatch[tuple[Any, object]], group: InputGroup, names: dict[int, str]
) -> Steps[dict[int, Description]]:
    """Read some questions, not before there is room for them, and answer them.

    Args:
        request: What all questions of the call share.
        batch: (images, prompt) of each question; the errors of those that are rejected are added to it.
        group: The questions.
        names: Index -> the argument that an error about the answer names; added to.

    Returns:
        Index -> `Description`, of the questions that are not rejected.
    """
    questions = dict[int, Question]()
    for index in group.indices:
        with batch.collecting_error(index):
            question = read_question(*batch.inputs[index])
            questions[index] = replace(question, text=render_chat(request.vlm, [user_message(question)]))
    stopwatch = Stopwatch(request.vlm.model.device)
    inputs, accepted = _tensors(request, questions, [*questions], batch.errors) if questions else ({}, [])
    if not accepted:
        return {}
    names |= {index: questions[index].argument for index in accepted}
    pictures = [questions[index].pictures for index in accepted]
    speculation = group.speculation.for_inputs([DraftInput(index) for index in accepted])
    request = replace(request, speculation=speculation)
    descriptions = yield from answer_steps(request, inputs, pictures, stopwatch.lap(), accepted)
    return dict(zip(accepted, descriptions, strict=True))


def _tensors(
    request: DescriptionRequest,
    questions: Mapping[int, Question],
    batch: Sequence[int],
    errors: dict[int, InputError],
) -> tuple[dict[str, Any], Sequence[int]]:
    """Make the model's inputs for a batch.

    Args:
        questions: Index -> question.
        batch: Indices of the batch's questions.
        errors: Index -> error; questions that the processor rejects are added.

    Returns:
        The inputs, and the indices of the questions that the processor accepts.
    """
    vlm, chosen = request.vlm, [questions[index] for index in batch]
    try:
        inputs = model_inputs(vlm, [question.text for question in chosen], chosen)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # find out which question of the batch causes the error
        refused = dict[int, InputError]()
        for index in batch:
            try:
                check_images(vlm, questions[index])
            except InputError as reason:
                refused[index] = without_frames(reason)
        if not refused and isinstance(error, InputError):
            raise
        if not refused:
            raise InputError(
                f"`image` must be what the model's processor takes, but it refuses these together "
                f"({type(error).__name__}: {' '.join(str(error).split())[:300]}). Use `batch_size=1`."
            ) from error
    else:
        remedy = "Shorten it, or ask about fewer or smaller pictures."
        refused = {batch[row]: error for row, error in prompt_errors(vlm, inputs, remedy).items()}
        if not refused:
            return inputs, batch
    errors |= refused
    remaining = [index for index in batch if index not in refused]
    return _tensors(request, questions, remaining, errors) if remaining else ({}, remaining)


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
