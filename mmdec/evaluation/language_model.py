"""Answers prompts with a language model by any decoding method, and measures the calls."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import Tensor

from mmdec.core.statistics import DecodingStatistics
from mmdec.core.timing import Stopwatch
from mmdec.evaluation.harness import Harness, Measurement, Method, count_passes, transformers_errors_only
from mmdec.generation.speculation import DecodingOptions, Speculation
from mmdec.pretrained.language_model import LoadedLanguageModel
from mmdec.types import Round


@final
@dataclass(frozen=True)
class TokenPrompt:
    """A prompt as token ids."""

    task: str  # the kind of prompt
    ids: Tensor  # (1, P) the prompt's P token ids
    new_tokens: int  # maximum number of new tokens of the answer: the model may have no positions for more


@final
class LanguageHarness(Harness[TokenPrompt]):
    """Answers encoded prompts with one language model, and measures the calls.

    Its own statistics hold what mmdec learns from call to call.
    """

    def __init__(self, language: LoadedLanguageModel) -> None:
        self.model = language.model
        self.statistics = DecodingStatistics()

    def measure(self, inputs: Sequence[TokenPrompt], method: Method) -> Measurement:
        """Answer one prompt, in a list, with this method, and measure it."""
        (prompt,) = inputs
        rounds: list[Round] = []
        options: dict[str, Any] = dict(method.options)
        if method.loop == "mmdec":
            decoding = DecodingOptions(**options, statistics=self.statistics, on_round=rounds.append)
            options = {"custom_generate": Speculation(decoding)}
        # typed as `Any`, because type checkers take a module's attributes for tensors
        generate: Any = self.model.generate
        with ExitStack() as stack:
            stack.enter_context(transformers_errors_only())
            passes = stack.enter_context(count_passes(cast(Any, self.model).get_decoder()))
            mask = torch.ones_like(prompt.ids)
            stopwatch = Stopwatch(self.model.device)
            generation = generate(
                prompt.ids, attention_mask=mask, do_sample=False, max_new_tokens=prompt.new_tokens, **options
            )
            wall = stopwatch.lap()
        later = rounds[1:]
        return Measurement(
            tokens=generation[:, prompt.ids.shape[1] :].tolist(),
            texts=[],
            features=0.0,
            encoder=0.0,
            decoder=wall,
            drafter=sum(round_.drafter_seconds for round_ in rounds),
            total=wall,
            passes=len(passes),
            windows=1,  # number of encoder passes; by definition 1 for a model without a speech encoder
            rounds=len(later),
            drafted_tokens=sum(len(tokens) for round_ in later for tokens in round_.tokens),
            accepted=sum(sum(round_.accepted) for round_ in later),
        )
