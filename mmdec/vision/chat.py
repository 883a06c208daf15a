"""`mmdec.Chat`: a dialogue about images that keeps its key-value cache from turn to turn.

Each answer equals that of `model.generate` on the whole dialogue so far with the same cache. Earlier turns are not
computed again, and the drafter's state continues with the cache.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor
from transformers import DynamicCache

from mmdec.checks.arguments import check_callable, suggesting_options
from mmdec.compat import CACHE_ARGUMENT
from mmdec.core.scheduler import decode_together
from mmdec.core.steps import pass_stop_iteration
from mmdec.core.timing import Stopwatch
from mmdec.errors import InputError
from mmdec.generation.model_lock import reading
from mmdec.io.images import to_pil
from mmdec.tasks.confidence import Evidence, confidence_error
from mmdec.tasks.options import option_names
from mmdec.tasks.threads import with_threads
from mmdec.tasks.usage import Usage
from mmdec.vision.answer import Description, DescriptionRequest, answer_steps
from mmdec.vision.describe import as_vlm
from mmdec.vision.options import DescribeOptions, OnText
from mmdec.vision.picture_evidence import with_earlier_pictures
from mmdec.vision.questions import (
    Pictures,
    Prompt,
    Question,
    VlmMessage,
    check_images,
    model_inputs,
    prompt_errors,
    read_question,
    render_chat,
    user_message,
)

UNSUPPORTED_OPTIONS = {  # option of `describe` that `Chat` refuses -> the reason, and what to do
    "batch_size": "A chat asks one question at a time.",
    "on_text": "Each answer has its own. Give it to `ask`.",
    "on_description": "`ask` returns the answer.",
    "on_round": "Give `on_text` to `ask` to follow an answer.",
}


@final
class Chat:
    """A dialogue with a vision-language model. Holds its messages, pictures and key-value cache.

        chat = mmdec.Chat()
        chat.ask("What is this?", "menu.png")
        chat.ask("And what is cheapest?")

    One object is one dialogue. If several threads call `ask`, they wait for each other.

    Args:
        options: The keyword options of `mmdec.describe`, except batch_size, on_text, on_description and on_round.

    Raises:
        InputError: If an option is rejected.
    """

    def __init__(self, **options: Any) -> None:
        for name, reason in UNSUPPORTED_OPTIONS.items():
            if name in options:
                raise InputError(f"`{name}` must be left out for a chat, but is given. {reason}")
        chosen = DescribeOptions.from_keywords(options)
        self._threads, self._min_confidence = chosen.threads, chosen.min_confidence
        vlm = as_vlm(chosen)
        with suggesting_options(option_names(DescribeOptions) - {*UNSUPPORTED_OPTIONS}):
            self._request = DescriptionRequest.from_options(vlm, chosen)
        self._messages: list[VlmMessage] = []  # all questions and answers so far
        self._pictures: list[Any] = []  # all pictures of the dialogue, (H, W, 3) uint8
        self._evidence: Evidence = {}  # evidence of the last answer, which covers all pictures so far
        # the ids of all tokens of the dialogue so far, without the end token of the last answer
        self._ids = torch.empty(1, 0, dtype=torch.long, device=vlm.model.device)
        # The key-value cache of `_ids`; it may lack the last token. None: there is no valid cache, so the next answer
        # computes it again.
        self._cache: DynamicCache | None = None
        self._lock = threading.Lock()

    @property
    def messages(self) -> list[VlmMessage]:
        """The messages up to the last answer, in the format of chat templates."""
        return [{**message, "content": list(message["content"])} for message in self._messages]

    @property
    def tokens(self) -> list[int]:
        """The token ids of the dialogue, image tokens included, without the last answer's end token."""
        return self._ids[0].tolist()

    def ask(self, prompt: Prompt, image: Pictures = (), *, on_text: OnText | None = None) -> Description:
        """Ask the next question and return the model's answer.

        If the question is refused or the answer is interrupted, the dialogue stays as it was before.

        Args:
            prompt: The question, or a tuple of texts with an image between each two, as for `describe`.
            image: The images that come with this question, as for `describe`: one, or a tuple. Default (): no image.
            on_text: Called with each accepted piece of the answer. An exception from it ends the call.

        Returns:
            The `Description` of the answer.

        Raises:
            InputError: If the question is refused, the dialogue exceeds the model's positions, or the answer's
                confidence is below the chat's `min_confidence`.
        """
        check_callable("on_text", on_text, "a function of a piece of text")
        with pass_stop_iteration(), self._lock, with_threads(self._threads, self._request.vlm.model):
            stopwatch = Stopwatch(self._request.vlm.model.device)
            question = read_question(image, prompt)
            message = user_message(question)
            inputs = self._inputs(question, message)
            cache = DynamicCache(config=self._request.vlm.model.config) if self._cache is None else self._cache
            inputs[CACHE_ARGUMENT] = cache
            remedy = "Shorten it, or begin a new chat: the dialogue so far counts."
            for error in prompt_errors(self._request.vlm, inputs, remedy).values():
                raise error
            self._cache = None  # no cache while an answer is computed: after an interruption it would be incomplete
            request, usage = replace(self._request, on_text=on_text), Usage()
            steps = answer_steps(request, inputs, [question.pictures], stopwatch.lap(), usage=[usage])
            with reading(request.vlm.model, *request.speculation.networks):
                ((_, (answer,)),) = decode_together([(None, steps, 1)], max_rows=1)
            evidence = with_earlier_pictures(
                answer.evidence, len(question.pictures), self._evidence, len(self._pictures)
            )
            answer = replace(answer, evidence=evidence, confidence=request.confidence(evidence, usage))
            refusal = confidence_error(answer.confidence, self._min_confidence, question.argument)
            if refusal is not None:
                raise refusal
            self._cache = cache
            self._ids = self._append_answer(inputs["input_ids"], answer.tokens)
            reply = {"role": "assistant", "content": [{"type": "text", "text": answer.text}]}
            self._messages += [message, reply]
            self._pictures += question.pictures
            self._evidence = answer.evidence
            return answer

    def _inputs(self, question: Question, message: VlmMessage) -> dict[str, Any]:
        """Make the model's inputs: token ids of the whole dialogue, and the images of this turn.

        Without a cache, they have the images of all turns.

        Args:
            question: This turn's question with its images.
            message: The same question in the format of chat templates.
        """
        vlm = self._request.vlm
        text = render_chat(vlm, [message]) if not self._messages else self._turn(message)
        try:
            inputs = model_inputs(vlm, [text], [question], begins=not self._messages)
        except Exception:
            check_images(vlm, question)  # raises a clearer error if the images are the cause
            raise
        ids: Tensor = torch.cat([self._ids, inputs["input_ids"]], 1)
        inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in inputs:
                inputs[name] = (ids == vlm.model.config.image_token_id).long()
        if self._cache is None and self._pictures:
            pictures = [to_pil(pixels) for pixels in (*self._pictures, *question.pictures)]
            pixels = vlm.processor.image_processor(images=pictures, return_tensors="pt")
            inputs |= dict(pixels.to(vlm.model.device, vlm.model.dtype))
        return inputs

    def _turn(self, message: VlmMessage) -> str:
        """Return the text that the chat template adds for this turn.

        It contains the end of the last answer, the new question, and the beginning of the next answer.

        Args:
            message: The question, in the format of chat templates.
        """
        mark = "(answer)"
        while any(mark in part.get("text", "") for part in message["content"]):
            mark += ")"
        last = {"role": "assistant", "content": [{"type": "text", "text": mark}]}
        text = render_chat(self._request.vlm, [*self._messages[:-1], last, message])
        return text.rpartition(mark)[2]

    def _append_answer(self, ids: Tensor, answer: list[int]) -> Tensor:
        """Append an answer's tokens to the dialogue's ids (1, L).

        The answer's end token is left out, because the chat template writes it in the next turn.
        """
        config: Any = self._request.vlm.model.generation_config
        option = self._request.options.get("eos_token_id")
        end: Any = config.eos_token_id if option is None else option
        ends = end if isinstance(end, list | tuple) else [end]
        continued = answer[:-1] if answer[-1] in ends else answer
        return torch.cat([ids, ids.new_tensor([continued])], 1)
