"""Turns questions into model inputs: the chat template writes the text, the processor makes the tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmdec.checks.devices import PASSED_ON
from mmdec.hub.vlm import LoadedVlm
from mmdec.images import to_pil
from mmdec.pipelines import call
from mmdec.types import InputError

Message = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """One question about some images, each (H, W, 3) uint8, in the order of their places in the prompt."""

    prompt: str
    pictures: tuple[np.ndarray, ...] = ()
    text: str = ""  # the chat template's output; "" before it is rendered

    @property
    def argument(self) -> str:
        """Return the name that an error about the whole question gives to the argument."""
        return "image" if self.pictures else "prompt"


def user_message(vlm: LoadedVlm, question: Question) -> Message:
    """Make the user's message for the chat template: images at the prompt's image tokens, else all before the text.

    Raises: InputError if the prompt has image tokens, but not one for each image.
    """
    token, count = vlm.image_token, len(question.pictures)
    video = getattr(vlm.processor, "video_token", None)
    if video is not None and video in question.prompt:
        raise InputError(
            f"`prompt` must have no {video!r}, but has one: `describe` takes pictures. Give the frames as a tuple of "
            "pictures, or call `mmdec.generate` with the processor's own inputs."
        )
    parts = question.prompt.split(token)
    if len(parts) > 1 and len(parts) - 1 != count:
        raise InputError(
            f"`prompt` must have one {token!r} for each of the {count} images, or none, but has {len(parts) - 1}. Give "
            "as many images, or leave the marks out."
        )
    content: list[dict[str, str]] = [{"type": "image"}] * count if len(parts) == 1 else []
    for index, part in enumerate(parts):
        if index:
            content.append({"type": "image"})
        if part.strip() or len(parts) == 1:
            content.append({"type": "text", "text": part})
    return {"role": "user", "content": content}


def render(vlm: LoadedVlm, messages: Sequence[Message]) -> str:
    """Render the dialogue up to where the model continues. Raises InputError if the template drops an image."""
    text: str = vlm.processor.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    images = [part for message in messages for part in message["content"] if part["type"] == "image"]
    if text.count(vlm.image_token) != len(images):
        raise InputError(
            f"`model` must place each of the {len(images)} images in its text, but its chat template writes "
            f"{text.count(vlm.image_token)} {vlm.image_token!r}. Mend `processor.chat_template`."
        )
    return text


def tensors(vlm: LoadedVlm, texts: Sequence[str], questions: Sequence[Question], begins: bool = True) -> dict[str, Any]:
    """Make the inputs of `generate` for a batch, padded on the left, on the model's device and in its precision.

    begins: whether the texts begin a dialogue; then the tokenizer's start token is added if the template writes none.

    Raises whatever the processor raises for images that it cannot take.
    """
    pictures = [[to_pil(pixels) for pixels in question.pictures] for question in questions]
    begin = vlm.tokenizer.bos_token
    processor: Any = vlm.processor  # each processor class has its own options
    inputs = processor(
        images=pictures if any(pictures) else None,
        text=list(texts),
        padding=True,
        padding_side="left",
        return_tensors="pt",
        add_special_tokens=begins and not (begin and texts[0].startswith(begin)),
    )
    inputs.pop("labels", None)  # PaliGemma's processor adds them, but only training needs them
    return dict(inputs.to(vlm.model.device, vlm.model.dtype))


def too_long(vlm: LoadedVlm, inputs: Mapping[str, Any], remedy: str) -> dict[int, InputError]:
    """Return the errors, by row, for prompts that exceed the model's positions. inputs: made by `tensors`. remedy: the
    message's last sentence."""
    rule = "`prompt` must take at most the model's {most} positions, its pictures and the chat template included"
    return call.too_long(vlm.model, inputs, rule, remedy)


def check_accepted(vlm: LoadedVlm, question: Question) -> None:
    """Raise InputError if the processor refuses the question's images (for example, sides that are too unequal)."""
    try:
        tensors(vlm, [render(vlm, [user_message(vlm, question)])], [question])
    except PASSED_ON:
        raise
    except Exception as error:  # processors raise various errors
        sizes = ", ".join(f"{pixels.shape[1]} x {pixels.shape[0]}" for pixels in question.pictures)
        refused = f"{sizes} pixels" if sizes else "a question without one"
        raise InputError(
            f"`image` must be one that the model's processor takes, but it refuses {refused} "
            f"({type(error).__name__}: {' '.join(str(error).split())[:300].rstrip('.')}). Crop or scale the image."
        ) from error
