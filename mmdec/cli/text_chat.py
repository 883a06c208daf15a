"""A dialogue with a language model that keeps its key-value cache from turn to turn.

Each answer equals that of `mmdec.generate` on what the model's chat template writes of the whole dialogue. If that
begins with the text of the cache, as it does unless the template rewrites earlier turns, only its new part is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

from transformers import DynamicCache

from mmdec.compat import CACHE_ARGUMENT
from mmdec.generation.generate import generate_rounds
from mmdec.generation.speculation import Speculation
from mmdec.pretrained.language_model import LoadedLanguageModel
from mmdec.targets.recurrent_cache import cached_length
from mmdec.tasks.generate_options import length_errors, with_length
from mmdec.tasks.usage import Usage


@final
class TextChat:
    """A dialogue with a language model. Holds its messages and its key-value cache.

    Args:
        loaded: The model.
        speculation: The drafter, rule and draft size. Turn i is sampled with its seed plus i.
        options: Arguments of `generate`.
        system: The first message, which says how the model should answer; None: there is none.
    """

    def __init__(
        self,
        loaded: LoadedLanguageModel,
        speculation: Speculation,
        options: Mapping[str, Any],
        system: str | None = None,
    ) -> None:
        self.messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self.usage = Usage()  # of the last answer
        self._loaded, self._speculation, self._options = loaded, speculation, options
        self._turns = 0
        self._cache: DynamicCache | None = None  # of the dialogue so far; None: the next turn reads all of it
        self._cached: list[int] = []  # ids of its tokens

    def answer(self, question: str) -> Iterator[str]:
        """Ask the next question.

        If the answer is interrupted, its text so far stays in the dialogue. If there is none, the question is dropped.

        Yields:
            Pieces of the answer, as tokens are accepted.

        Raises:
            InputError: If the chat template refuses the question, or the dialogue exceeds the model's positions.
        """
        loaded, self.usage = self._loaded, Usage()
        messages = [*self.messages, {"role": "user", "content": question}]
        inputs: dict[str, Any] = loaded.chat_inputs(messages)
        rule = "the dialogue must take at most the model's {most} positions"
        for error in length_errors(loaded.model, inputs, rule, "Begin a new chat.").values():
            raise error
        ids: list[int] = inputs["input_ids"][0].tolist()
        cache, self._cache = self._cache, None  # an interrupted turn leaves the cache incomplete
        if cache is None or len(ids) <= len(self._cached) or ids[: len(self._cached)] != self._cached:
            cache = DynamicCache(config=loaded.model.config)
        inputs[CACHE_ARGUMENT] = cache
        seed = self._speculation.options.seed
        speculation = self._speculation.with_seed(None if seed is None else seed + self._turns)
        options = {**with_length(self._options, loaded.model), "tokenizer": loaded.tokenizer}
        text = ""
        try:
            for round_ in generate_rounds(loaded.model, inputs, speculation, options):
                self.usage.add_timed_round(round_, 0, drafts=True)
                if round_.text[0]:
                    text += round_.text[0]
                    yield round_.text[0]
            self._cache, self._cached = cache, [*ids, *self.usage.tokens][: cached_length(cache)]
        finally:
            if text:
                self._turns += 1
                self.messages = [*messages, {"role": "assistant", "content": text}]
