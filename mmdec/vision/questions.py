"""Reads questions about pictures, and turns them into inputs of `generate`.

A question is text and pictures. The model's chat template writes the prompt, its processor makes the tensors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from mmdec.checks.arguments import format_value
from mmdec.checks.devices import PASSED_ON
from mmdec.checks.files import error_line
from mmdec.errors import InputError, without_frames
from mmdec.io.images import ImageSource, read_image, to_pil
from mmdec.pretrained.vlm import LoadedVlm
from mmdec.tasks.generate_options import length_errors

DEFAULT_PROMPT = "Describe this image."
MAX_IMAGES = 256  # maximum number of images of one question
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


def pair_questions(image: Any, prompt: Any) -> list[tuple[Any, object]]:
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


def batch_inputs(
    vlm: LoadedVlm, questions: Mapping[int, Question], errors: dict[int, InputError]
) -> tuple[dict[int, Question], dict[str, Any]]:
    """Make the inputs of `generate` for those questions of a batch that the model takes.

    Args:
        vlm: The model.
        questions: Index -> question, with its text by `render_chat`.
        errors: Index -> error; the questions that are refused are added.

    Returns:
        The accepted questions, and their inputs; both are empty if none is accepted.
    """
    accepted = dict(questions)
    while accepted:
        batch = [*accepted.values()]
        try:
            inputs = model_inputs(vlm, [question.text for question in batch], batch)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            refused = _image_errors(vlm, accepted, error)
        else:
            indices, remedy = [*accepted], "Shorten it, or ask about fewer or smaller pictures."
            refused = {indices[row]: error for row, error in prompt_errors(vlm, inputs, remedy).items()}
            if not refused:
                return accepted, inputs
        errors |= refused
        accepted = {index: question for index, question in accepted.items() if index not in refused}
    return {}, {}


def _image_errors(vlm: LoadedVlm, questions: Mapping[int, Question], error: Exception) -> dict[int, InputError]:
    """Find out which questions of a batch the processor refuses.

    Args:
        error: What the processor raised for the batch.

    Returns:
        Index -> error.

    Raises:
        InputError: If it refuses none of them alone.
    """
    refused = dict[int, InputError]()
    for index, question in questions.items():
        try:
            check_images(vlm, question)
        except InputError as reason:
            refused[index] = without_frames(reason)
    if refused:
        return refused
    if isinstance(error, InputError):
        raise error
    raise InputError(
        f"`image` must be what the model's processor takes, but it refuses these together "
        f"({error_line(error)}). Use `batch_size=1`."
    ) from error


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
            f"({error_line(error)}). Crop or scale the image."
        ) from error


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
