"""Runs transformers' own loop, without drafts, if only that loop gives the right result.

A caller's processor or criterion may read all rows at once; activations quantised over a whole batch change with each
row that ends. Callers that ask for rounds get one for each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast, final

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from mmdec.decode.loop import Round
from mmdec.decode.tree import bool_list
from mmdec.decode.watch import Stopwatch


@final
class StockRun:
    """Iterating `rounds` runs the loop. All rounds arrive after the run, because the loop cannot be interrupted."""

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
        """The inputs as `generate` passes them. seed: of torch's generator during this run; None: not seeded."""
        self.rows = len(input_ids)
        self._model, self._ids, self._config, self._seed = model, input_ids, config, seed
        self._processors, self._criteria, self._inputs = processors, criteria, inputs
        self._result: Any = None
        self.rounds = self._run()

    @property
    def sequences(self) -> Tensor:
        """Prompts and new tokens (B, L); complete once all rounds are done."""
        return self._result if isinstance(self._result, Tensor) else self._result.sequences

    def output(self, config: GenerationConfig) -> Any:
        """What `generate` returns, once all rounds are done."""
        return self._result

    def _run(self) -> Iterator[Round]:
        record = _Record(self._criteria, self._ids, self._model.device)
        random: Any = torch.random  # untyped
        gpus = [self._ids.device] if self._ids.device.type == "cuda" else []
        with torch.no_grad(), random.fork_rng(gpus, enabled=self._seed is not None):
            if self._seed is not None:
                random.manual_seed(self._seed)
            self._result = self._model._sample(  # type: ignore[operator] # mixed in
                self._ids,
                logits_processor=LogitsProcessorList([record.logits, *self._processors]),
                stopping_criteria=record,
                generation_config=self._config,
                **self._inputs,
            )
        yield from record.rounds


@final
class _Record(StoppingCriteriaList):
    """The run's stopping criteria; records each call as a round."""

    def __init__(self, criteria: Any, ids: Tensor, device: torch.device) -> None:
        super().__init__(criteria)  # type: ignore[misc] # a list of whatever
        self.rounds: list[Round] = []
        self._live = list(range(len(ids)))
        # without an EOS token the loop keeps writing in rows that have ended
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self._ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        self._raw: Tensor = torch.empty(0)
        self._stopwatch = Stopwatch(device)

    def logits(self, ids: Tensor, scores: Tensor) -> Tensor:
        """A processor that runs first and records the raw logits (B, V)."""
        self._raw = scores.log_softmax(-1)
        return scores

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        done: Tensor = cast(Any, super()).__call__(input_ids, scores, **kwargs)
        self._ended = self._ended | done
        ended = bool_list(self._ended)
        over = [ended[row] if self._pads else all(ended) for row in self._live]
        tokens = input_ids[:, -1:]
        logprobs = self._raw.gather(1, tokens)[self._live]
        self.rounds.append(
            Round(
                index=len(self.rounds),
                rows=self._live,
                tokens=tokens[self._live].tolist(),
                drafted=[0] * len(over),
                accepted=[0] * len(over),
                done=over,
                target=self._stopwatch.lap(),
                logprobs=logprobs,
            )
        )
        self._live = [row for row, last in zip(self._live, over, strict=True) if not last]
        return done
