"""Answers dialogues that are given whole, as clients of a server send them: messages with pictures, several at once.

`describe` asks one question each, `Chat` keeps a dialogue and its cache. Here every turn comes with the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from jinja2 import TemplateError
from typing_extensions import Unpack

from mmdec.checks.arguments import naming_options, show
from mmdec.decode.watch import Stopwatch
from mmdec.generation.run import DecodingOptions
from mmdec.hub.vlm import LoadedVlm
from mmdec.images import ImageSource, read_image
from mmdec.pipelines.description.answer import Description, DescriptionRequest, describe_batch
from mmdec.pipelines.description.describe import AUTO, DescribeOptions, as_drafter
from mmdec.pipelines.description.prompts import Message, Question, check_accepted, render, tensors, too_long
from mmdec.pipelines.threads import with_threads
from mmdec.types import InputError

MAX_PIXELS = 8_000_000  # of a picture: strangers send it. A larger JPEG is read at a part of its sides
DECODING = ("rule", "num_speculative_tokens", "seed", "statistics", "on_round")


@final
@dataclass(frozen=True)
class Dialogue:
    """A dialogue that the model can continue: its text, its pictures, and how many tokens both take."""

    question: Question
    tokens: int

    @classmethod
    def of(cls, vlm: LoadedVlm, messages: Sequence[Message], images: Sequence[ImageSource] = ()) -> Dialogue:
        """Read a dialogue. Raises InputError if the template or the processor refuses it, or it exceeds the model's
        positions.

        messages: in the format of chat templates, each with a list of parts. images: in the order of the messages'
            image parts.
        """
        pictures = tuple(read_image(image, max_pixels=MAX_PIXELS) for image in images)
        question = Question("", pictures, _written(vlm, messages))
        try:
            inputs = tensors(vlm, [question.text], [question])
        except Exception:
            check_accepted(vlm, question)  # raises a clearer error if the pictures are at fault
            raise
        for error in too_long(vlm, inputs, "Shorten it, or send fewer or smaller pictures.").values():
            raise error
        return cls(question, int(inputs["attention_mask"].sum()))


def _written(vlm: LoadedVlm, messages: Sequence[Message]) -> str:
    """The dialogue as the chat template writes it. Raises InputError for one that it does not take whole."""
    said = [part["text"] for message in messages for part in message["content"] if part["type"] == "text"]
    if any(vlm.image_token in text for text in said):
        raise InputError(f"`messages` must have no {vlm.image_token!r} in a text, but have one. Send the picture.")
    try:
        text = render(vlm, messages)
    except TemplateError as error:
        raise InputError(f"`messages` must be what the model's chat template takes, but it says: {error}.") from error
    lost = next((each for each in said if each.strip() not in text), None)
    if lost is not None:
        raise InputError(f"`messages` must be what the model's chat template writes, but it drops {show(lost)}.")
    return text


def answer(vlm: LoadedVlm, dialogues: Sequence[Dialogue], **options: Unpack[DescribeOptions]) -> list[Description]:
    """Continue several dialogues as one batch: exactly the answers of `model.generate`.

    options: as for `describe`, except model, processor, batch_size and on_text.
    Returns: a `Description` for each dialogue, in order. Raises: InputError if an option is refused.
    """
    given: dict[str, Any] = {**options}
    threads = given.pop("threads", None)
    drafter = as_drafter(vlm, given.pop("drafter", AUTO))
    decoding = DecodingOptions(drafter, **{name: given.pop(name) for name in DECODING if name in given})
    request = DescriptionRequest.of(vlm, decoding, given)
    with with_threads(threads, vlm.model), naming_options(DescribeOptions.__annotations__):
        stopwatch = Stopwatch(vlm.model.device)
        questions = [dialogue.question for dialogue in dialogues]
        inputs: Mapping[str, Any] = tensors(vlm, [question.text for question in questions], questions)
        return describe_batch(request, inputs, [question.pictures for question in questions], stopwatch.lap())
