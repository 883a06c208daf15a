"""A conversation about pictures, turn by turn over one cache: `mmdec.Chat`.

Each answer is that of `model.generate` on the whole dialogue so far over the same cache. Earlier turns are not
read again, and a drafter's memory goes on with it.
"""

from __future__ import annotations

import threading
from typing import Any, final

import torch
from torch import Tensor
from transformers import DynamicCache
from typing_extensions import Unpack

from mmdec.checks.arguments import check_callable, check_threads, naming_options
from mmdec.hub.vlm import DEFAULT_MODEL
from mmdec.images import to_pil
from mmdec.pipelines.confidence import Evidence, check_min_confidence, too_unsure
from mmdec.pipelines.description.describe import DescribeOptions, Pictures, read_question, request_of
from mmdec.pipelines.description.describe_batch import Listeners, OnText, describe_batch
from mmdec.pipelines.description.description import Description
from mmdec.pipelines.description.load import AUTO, as_vlm
from mmdec.pipelines.description.prompts import (
    Message,
    Question,
    check_accepted,
    render,
    tensors,
    too_long,
    user_message,
)
from mmdec.pipelines.threads import with_threads
from mmdec.runtime import Stopwatch
from mmdec.types import InputError

LACKING = ("batch_size", "on_text", "on_round")  # options of `describe` that mean nothing here


@final
class Chat:
    """A dialogue with a model: `chat.ask("What is this?", "menu.png")`, then `chat.ask("And what is cheapest?")`.

    Options are those of `mmdec.describe`. An object is one dialogue; if several threads ask, they wait for each other.
    """

    def __init__(self, **options: Unpack[DescribeOptions]) -> None:
        """Raises InputError for what cannot work."""
        remaining: dict[str, Any] = {**options}
        for name in LACKING:
            if name in remaining:
                raise InputError(f"`{name}` must be left out, but is given: a chat asks one question at a time.")
        self._threads = check_threads(remaining.pop("threads", None))
        least = check_min_confidence(remaining.pop("min_confidence", None))
        named = (remaining.pop("model", DEFAULT_MODEL), remaining.pop("processor", None))
        vlm = as_vlm(*named, remaining.pop("device", None), remaining.pop("dtype", None))
        names = ("rule", "num_speculative_tokens", "seed", "statistics")
        rule, nodes, seed, statistics = (remaining.pop(name, None) for name in names)
        drafter = remaining.pop("drafter", AUTO)
        self._request = request_of(vlm, drafter, rule, nodes, seed, statistics, remaining, least)
        self._messages: list[Message] = []  # the model's answers among them
        self._pictures: list[Any] = []  # of the whole dialogue, (H, W, 3) uint8
        self._seen: Evidence = {}  # an answer may be about any of them: the last one's evidence
        self._ids = torch.empty(1, 0, dtype=torch.long, device=vlm.model.device)  # without the last answer's end
        self._cache: DynamicCache | None = None  # of all ids but perhaps the last; None: to be made anew
        self._lock = threading.Lock()

    @property
    def messages(self) -> list[Message]:
        """The dialogue as the chat template reads it, up to the last answer."""
        return [{**message, "content": list(message["content"])} for message in self._messages]

    @property
    def tokens(self) -> list[int]:
        """The dialogue's tokens, image tokens included, up to the last answer's end."""
        return self._ids[0].tolist()

    def ask(self, prompt: str, image: Pictures = (), *, on_text: OnText | None = None) -> Description:
        """The next answer. image: none, one, or a tuple of several that come with this question.

        If a question is refused or an answer is interrupted, the dialogue stays as it was before the question.
        """
        check_callable("on_text", on_text, "a function of a piece of text")
        with self._lock, with_threads(self._threads, self._request.vlm.model):
            stopwatch = Stopwatch(self._request.vlm.model.device)
            question = read_question(image, prompt)
            message = user_message(self._request.vlm, question)
            inputs = self._inputs(question, message)
            cache = DynamicCache(config=self._request.vlm.model.config) if self._cache is None else self._cache
            inputs["past_key_values"] = cache
            remedy = "Shorten it, or begin a new chat: the dialogue so far counts."
            for error in too_long(self._request.vlm, inputs, remedy).values():
                raise error
            self._cache = None  # until the answer is whole
            listeners = Listeners(on_text)
            with naming_options(DescribeOptions.__annotations__.keys() - {*LACKING}):
                (answer,) = describe_batch(
                    self._request,
                    inputs,
                    [question.pictures],
                    stopwatch.lap(),
                    listeners,
                    self._seen,
                    len(self._pictures),
                )
            refusal = too_unsure(answer.confidence, self._request.min_confidence, question.argument)
            if refusal is not None:
                raise refusal
            self._cache = cache
            self._ids = self._so_far(inputs["input_ids"], answer.tokens)
            reply = {"role": "assistant", "content": [{"type": "text", "text": answer.text}]}
            self._messages += [message, reply]
            self._pictures += question.pictures
            self._seen = answer.evidence
            return answer

    def _inputs(self, question: Question, message: Message) -> dict[str, Any]:
        """The whole dialogue's ids, with this turn's pictures; with all of them where no cache holds the others."""
        vlm = self._request.vlm
        text = render(vlm, [message]) if not self._messages else self._turn(message)
        try:
            inputs = tensors(vlm, [text], [question], begins=not self._messages)
        except Exception:
            check_accepted(vlm, question)  # says what is wrong with the pictures
            raise
        ids: Tensor = torch.cat([self._ids, inputs["input_ids"]], 1)
        inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "mm_token_type_ids" in inputs:
            token = vlm.tokenizer.convert_tokens_to_ids(vlm.image_token)
            inputs["mm_token_type_ids"] = (ids == token).long()
        if self._cache is None and self._pictures:
            pictures = [to_pil(pixels) for pixels in (*self._pictures, *question.pictures)]
            again = vlm.processor.image_processor(images=pictures, return_tensors="pt")
            inputs |= dict(again.to(vlm.model.device, vlm.model.dtype))
        return inputs

    def _turn(self, message: Message) -> str:
        """What the chat template writes after the last answer: its end, the question, and where the model goes on."""
        mark = "(answer)"
        while any(mark in part.get("text", "") for part in message["content"]):
            mark += ")"
        last = {"role": "assistant", "content": [{"type": "text", "text": mark}]}
        text = render(self._request.vlm, [*self._messages[:-1], last, message])
        return text.rpartition(mark)[2]

    def _so_far(self, ids: Tensor, answer: list[int]) -> Tensor:
        """The dialogue's ids (1, L) with an answer, whose end the template writes."""
        config: Any = self._request.vlm.model.generation_config
        given = self._request.options.get("eos_token_id")
        end: Any = config.eos_token_id if given is None else given
        ends = end if isinstance(end, list | tuple) else [end]
        continued = answer[:-1] if answer[-1] in ends else answer
        return torch.cat([ids, ids.new_tensor([continued])], 1)
