"""Decodes with transformers' own loop, without drafts, if only that loop gives the right result.

For example, a caller's processor or criterion may read all rows at once, or activations may be quantised with one scale
for the whole batch, so that a row's activations depend on which other rows have ended.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from mmdec.compat import CACHE_ARGUMENT
from mmdec.core.steps import Compute, Steps
from mmdec.core.timing import Stopwatch
from mmdec.core.tree import bool_list
from mmdec.generation.decoding_run import DecodingRun
from mmdec.generation.hf_bridge import setting
from mmdec.types import Round


@final
class StockRun(DecodingRun):
    """Decodes with transformers' own loop.

    All rounds come only when the loop has ended, because it cannot be interrupted.

    Args:
        model: The target.
        input_ids: (B, P) int64.
        config: The generation configuration of the call.
        processors: The logits processors that `model.generate` has prepared.
        criteria: Its stopping criteria.
        inputs: Further inputs of the model by name.
        seed: Seed of torch's global generator while the loop runs; None: it is not seeded.
    """

    needs_all_inputs: ClassVar[bool] = True

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        config: GenerationConfig,
        processors: Any,
        criteria: Any,
        inputs: Mapping[str, Any],
        seed: int | None,
    ) -> None:
        if setting(config, "prefill_chunk_size") is not None and inputs.get(CACHE_ARGUMENT) is None:
            # transformers' loop cannot read a prompt in chunks without a cache; chunks only save memory
            config = copy.copy(config)
            config.prefill_chunk_size = None
        self._model, self._ids, self._config, self._seed = model, input_ids, config, seed
        self._processors, self._criteria, self._inputs = processors, criteria, inputs
        self._result: Any = None
        self.steps, self.rows = self._run(), len(input_ids)

    @property
    def sequences(self) -> Tensor:
        return self._result if isinstance(self._result, Tensor) else self._result.sequences

    def output(self, config: GenerationConfig) -> Any:
        return self._result

    def _run(self) -> Steps[Any]:
        result: Any = yield Compute(self._model.device, self._sample)
        yield from result.value

    def _sample(self) -> list[Round]:
        """Run transformers' loop, and return its rounds."""
        record = _RoundRecorder(self._criteria, self._ids, self._model.device)
        random: Any = torch.random  # typed as `Any`, because `torch.random` has no types
        gpus = [self._ids.device] if self._ids.device.type == "cuda" else []
        with (
            torch.inference_mode(False),  # the caller may go on with the output, which transformers makes so, too
            torch.no_grad(),
            random.fork_rng(gpus, enabled=self._seed is not None),
        ):
            if self._seed is not None:
                random.manual_seed(self._seed)
            self._result = self._model._sample(  # type: ignore[operator] # from a mixin
                self._ids,
                logits_processor=LogitsProcessorList([record.logits, *self._processors]),
                stopping_criteria=record,
                generation_config=self._config,
                **self._inputs,
            )
        return record.rounds


@final
class _RoundRecorder(StoppingCriteriaList):
    """The caller's stopping criteria as a list that also records each call as a `Round`.

    transformers calls it once for each new token.
    """

    def __init__(self, criteria: Any, ids: Tensor, device: torch.device) -> None:
        super().__init__(criteria)  # type: ignore[misc] # any objects
        self.rounds: list[Round] = []
        self._live = list(range(len(ids)))
        # If there is an EOS token, transformers gives padding to rows that have ended. Without one, all rows get
        # further tokens.
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self._longest = min((stop.max_length for stop in criteria if type(stop) is MaxLengthCriteria), default=2**31)
        self._eos = [stop.eos_token_id for stop in criteria if type(stop) is EosTokenCriteria]
        self._ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        self._logprobs: Tensor = torch.empty(0)  # (B, V), of the newest token
        self._stopwatch = Stopwatch(device)

    def logits(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Record the log-probabilities of the raw logits `scores` (B, V), and return the logits unchanged.

        transformers calls this as the first logits processor.
        """
        self._logprobs = scores.log_softmax(-1)
        return scores

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        done: Tensor = cast(Any, super()).__call__(input_ids, scores, **kwargs)
        self._ended = self._ended | done
        ended = bool_list(self._ended)
        is_last = [ended[row] if self._pads else all(ended) for row in self._live]  # whether the row has ended
        tokens = input_ids[:, -1:]
        has_eos = [any(bool(torch.isin(token, eos.to(token.device)).any()) for eos in self._eos) for token in tokens]
        logprobs = self._logprobs.gather(1, tokens)[self._live]
        self.rounds.append(
            Round(
                index=len(self.rounds),
                rows=self._live,
                tokens=tokens[self._live].tolist(),
                drafted=[0] * len(is_last),
                accepted=[0] * len(is_last),
                done=is_last,
                target_seconds=self._stopwatch.lap(),
                logprobs=logprobs,
                is_cut=[
                    last and input_ids.shape[1] >= self._longest and not has_eos[row]
                    for row, last in zip(self._live, is_last, strict=True)
                ],
            )
        )
        self._live = [row for row, last in zip(self._live, is_last, strict=True) if not last]
        return done
