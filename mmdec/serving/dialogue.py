"""Dialogues of clients, whole in each request: read and checked, so that a model can continue them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from jinja2 import TemplateError

from mmdec.checks.arguments import format_value
from mmdec.core.timing import Stopwatch
from mmdec.errors import InputError
from mmdec.io.images import ImageSource, read_image
from mmdec.pretrained.vlm import LoadedVlm
from mmdec.vision.questions import Question, VlmMessage, checked_inputs, render_chat

# maximum pixels of a picture from an untrusted client; a larger JPEG is decoded at a smaller size
MAX_PIXELS = 8_000_000


@final
@dataclass(frozen=True)
class Dialogue:
    """A dialogue about pictures that was read and checked, so that the model can continue it."""

    question: Question  # the whole dialogue as text, with all of its pictures
    inputs: Mapping[str, Any]  # the inputs of `generate`
    tokens: int  # number of prompt tokens, image tokens included
    seconds: float  # that reading took

    @classmethod
    def from_messages(
        cls, vlm: LoadedVlm, messages: Sequence[VlmMessage], images: Sequence[ImageSource] = ()
    ) -> Dialogue:
        """Read and check a dialogue.

        Args:
            messages: In the format of chat templates, the content of each as a list of parts.
            images: In the order of the image parts.

        Raises:
            InputError: If the template or the processor rejects the dialogue, or it exceeds the model's maximum length.
        """
        stopwatch = Stopwatch(vlm.model.device)
        pictures = tuple(read_image(image, max_pixels=MAX_PIXELS) for image in images)
        question = Question("", pictures, _render_dialogue(vlm, messages))
        inputs = checked_inputs(vlm, question, "Shorten it, or send fewer or smaller pictures.")
        return cls(question, inputs, int(inputs["attention_mask"].sum()), stopwatch.lap())


def _render_dialogue(vlm: LoadedVlm, messages: Sequence[VlmMessage]) -> str:
    """Write a dialogue as text by the chat template.

    Raises:
        InputError: If the template rejects it or leaves out a text.
    """
    texts = [part["text"] for message in messages for part in message["content"] if part["type"] == "text"]
    try:
        text = render_chat(vlm, messages)
    except TemplateError as error:
        raise InputError(
            f"`messages` must be what the model's chat template takes, but it says: {error}. Change roles or order."
        ) from error
    decoded = vlm.plain.restore(text)
    lost = next((text for text in texts if text.strip() not in decoded), None)
    if lost is not None:
        raise InputError(
            f"`messages` must be what the model's chat template writes, but it drops {format_value(lost)}. "
            "Leave these messages out."
        )
    return text
