"""Measures answers about pictures: `mmdec.describe`, the public call, beside transformers' loops on the same inputs.

mmdec's costs are those that `mmdec.describe` returns. transformers' loops run through `model.generate`, on the tensors
that `describe` would give it. A call's seconds divide into features (pixels and text become tensors), encoder (the
vision encoder) and decoder: all the rest up to the text. Both sides open the pictures' files; the total holds that too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, final

from mmdec.evaluation.quality.harness import Harness, Measurement, Method, counted, quiet
from mmdec.hub.vlm import LoadedVlm
from mmdec.pipelines.description.answer import MAX_NEW_TOKENS, Description
from mmdec.pipelines.description.describe import describe, read_question
from mmdec.pipelines.description.prompts import render, tensors, user_message
from mmdec.runtime import Stopwatch, timed_passes
from mmdec.training.corpora.image_text_questions import IMAGE, ImageQuestion


@final
class DescriptionHarness(Harness[ImageQuestion]):
    """A LoadedVlm, and the maximum number of new tokens of an answer."""

    what: ClassVar[str] = "question"

    def __init__(self, vlm: LoadedVlm, max_new_tokens: int | None = None) -> None:
        self.vlm, self.model = vlm, vlm.model
        config: Any = self.model.generation_config
        longest = max_new_tokens or config.max_new_tokens or MAX_NEW_TOKENS
        self.options: dict[str, Any] = {"do_sample": False, "num_beams": 1, "max_new_tokens": longest}

    def prompt(self, question: ImageQuestion) -> str:
        """As this model marks its pictures."""
        return question.question.replace(IMAGE, self.vlm.image_token)

    def describe(self, questions: Sequence[ImageQuestion], method: Method) -> list[Description]:
        """mmdec's answers to one batch. Raises InputError, and BatchError where some of a batch are refused."""
        images: list[Any] = [question.images for question in questions]
        prompts = [self.prompt(question) for question in questions]
        options: dict[str, Any] = {**self.options, **method.options}
        return describe(images, prompts, model=self.vlm, batch_size=len(questions), **options)

    def measure(self, inputs: Sequence[ImageQuestion], method: Method) -> Measurement:
        """Answer questions as one batch."""
        with quiet(), counted(self.model.get_decoder()) as passes:
            return (
                self._describe(inputs, method, passes)
                if method.loop == "mmdec"
                else self._generate(inputs, method, passes)
            )

    def _describe(self, questions: Sequence[ImageQuestion], method: Method, passes: list[int]) -> Measurement:
        stopwatch = Stopwatch(self.model.device)
        answers = self.describe(questions, method)
        total = stopwatch.lap()
        seconds = {
            stage: sum(answer.timings[stage] for answer in answers) for stage in ("read", "vision", "drafter", "total")
        }
        rounds = [answer.rounds - 1 for answer in answers]
        return Measurement(
            tokens=[answer.tokens for answer in answers],
            texts=[answer.text for answer in answers],
            features=seconds["read"],
            encoder=seconds["vision"],
            decoder=seconds["total"] - seconds["read"] - seconds["vision"],
            drafter=seconds["drafter"],
            total=total,
            passes=len(passes),
            windows=1,
            rounds=sum(rounds),
            drafted_tokens=sum(
                round(answer.tokens_per_round * count) for answer, count in zip(answers, rounds, strict=True)
            ),
        )

    def _generate(self, questions: Sequence[ImageQuestion], method: Method, passes: list[int]) -> Measurement:
        vlm, device, vision = self.vlm, self.model.device, list[float]()
        total, stopwatch = Stopwatch(device), Stopwatch(device)
        read = [read_question(question.images, self.prompt(question)) for question in questions]
        stopwatch.lap()
        inputs = tensors(vlm, [render(vlm, [user_message(vlm, question)]) for question in read], read)
        features = stopwatch.lap()
        with timed_passes(self.model.get_encoder("image"), device, lambda seconds, *_: vision.append(seconds)):
            generated: Any = self.model.generate(  # type: ignore[operator] # torch types what it finds in a module as a tensor
                **inputs, **self.options, **method.options
            )
        rows = [_cut(row, self.model) for row in generated[:, inputs["input_ids"].shape[1] :].tolist()]
        texts = [vlm.tokenizer.decode(row, skip_special_tokens=True).strip() for row in rows]
        rest = stopwatch.lap()
        return Measurement(
            tokens=rows,
            texts=texts,
            features=features,
            encoder=sum(vision),
            decoder=rest - sum(vision),
            drafter=0.0,
            total=total.lap(),
            passes=len(passes),
            windows=1,
        )


def _cut(row: list[int], model: Any) -> list[int]:
    """A row without the padding after its end."""
    ends = model.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends}
    return next((row[: index + 1] for index, token in enumerate(row) if token in ends), row)
