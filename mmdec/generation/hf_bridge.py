"""Translates between `generate` of transformers and the decoding core: processors, criteria and outputs.

`StockRun` decodes with transformers' own loop, without drafts, if only that loop gives the right result. For example, a
caller's processor or criterion may read all rows at once, or activations may be quantised with one scale for the whole
batch, so that a row's activations depend on which other rows have ended.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast, final

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from mmdec.compat import CACHE_ARGUMENT
from mmdec.core.loop import Round
from mmdec.core.sampling import (
    Criterion,
    ListenerProcessor,
    Processor,
    StepLogits,
    Stop,
    Suppression,
    WholeBatch,
    WholeBatchCriterion,
)
from mmdec.core.steps import Compute, DecodingSteps
from mmdec.core.timing import Stopwatch
from mmdec.core.tree import bool_list, int_list
from mmdec.errors import InputError
from mmdec.generation.recorders import BatchCollector, ScoreRecorder
from mmdec.targets.hf_target import HfTarget, Output

# A caller sets this attribute to True on a processor, criterion or function whose result for a row depends only on that
# row: then drafts are possible in a batch.
ROW_WISE = "mmdec_row_wise"
BATCH_BOUND = (  # transformers' processors that work only on the whole batch: they hold a value for each row
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
# transformers' criteria whose result for a batch row depends only on that row, so that drafts are possible in a batch
ROW_WISE_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)
OTHER_LOOPS = (
    "penalty_alpha",
    "dola_layers",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
    "force_words_ids",
    "constraints",
)


def setting(config: GenerationConfig, name: str) -> Any:
    """Return a field of the configuration, typed as `Any` for the type checker."""
    return getattr(config, name)


def check_config(target: HfTarget, config: GenerationConfig, synced_gpus: bool | None) -> None:
    """Raise InputError for options under which drafts cannot be verified."""
    if (beams := setting(config, "num_beams")) != 1:
        raise InputError(
            f"`num_beams` must be 1, but is {beams}. Drafts are verified for greedy decoding and sampling. Set it to "
            f"1, or leave `custom_generate` out for beams.{_pipeline_note(target)}"
        )
    for name in target.refused_outputs:
        if setting(config, name):
            raise InputError(f"`{name}` must be left out, but is True. Rounds hold only tokens and timings.")
    for name in OTHER_LOOPS:
        if getattr(config, name, None):
            raise InputError(
                f"`{name}` must be left out, but is {getattr(config, name)!r}. It asks for another decoding loop; "
                "leave `custom_generate` out for it."
            )
    if synced_gpus:
        raise InputError("`synced_gpus` must be False, but is True. Each process decodes on its own.")


def _pipeline_note(target: HfTarget) -> str:
    """Return where beams come from that the caller has not asked for."""
    if target.model.main_input_name == "input_ids":
        return ""
    return (
        ' transformers\' pipeline("automatic-speech-recognition") sets num_beams=5 by itself: pass it generate_kwargs='
        '{"num_beams": 1, "custom_generate": mmdec.speculate(...)}.'
    )


def pad_token(config: GenerationConfig) -> int:
    """Return the id of the token with which `generate` pads rows that have ended."""
    token = config._pad_token_tensor  # type: ignore[attr-defined] # `generate` has set it
    return 0 if token is None else int(token)


def fallback_reasons(processors: Iterable[Any], criteria: Iterable[Any], batch: int) -> list[str]:
    """Return why only transformers' own loop can decode with these processors and criteria.

    transformers' processors and criteria treat each batch row by itself. Those of a caller, subclasses included, may
    read other rows or count calls, unless they set `mmdec_row_wise = True`.

    Args:
        batch: Number of rows.

    Returns:
        Sentences without a full stop; empty if drafts are possible.
    """
    criteria = list(criteria)
    foreign = [each for each in processors if not _is_row_wise(each, _is_stock(each))]
    foreign += [each for each in criteria if not _is_row_wise(each, type(each) in ROW_WISE_CRITERIA)]
    faults: list[str] = []
    if foreign:
        names = ", ".join(
            dict.fromkeys(getattr(own, "__name__", type(own).__name__) for own in map(_function, foreign))
        )
        faults.append(
            f"{names} may read other rows of the batch or count its calls (set `{ROW_WISE} = True` on it to have "
            "drafts, if a row's result depends only on that row and its index)"
        )
    ends = any(type(each) not in (EosTokenCriteria, MaxLengthCriteria) for each in criteria)
    if batch > 1 and ends and not any(hasattr(each, "eos_token_id") for each in criteria):
        faults.append(
            "`eos_token_id` is None, so that a row goes on after a stopping criterion until all rows have one"
        )
    return faults


def _is_stock(processor: Any) -> bool:
    kind = type(cast(object, processor))
    return kind.__module__ == LogitsProcessorList.__module__ and kind is not LogitsProcessorList


def _function(processor: Any) -> Any:
    """Return the caller's function inside transformers' processor for `prefix_allowed_tokens_fn`, else `processor`."""
    return (
        vars(processor)["_prefix_allowed_tokens_fn"]
        if type(processor) is PrefixConstrainedLogitsProcessor
        else processor
    )


def _is_row_wise(processor: Any, by_default: bool) -> bool:
    function = _function(processor)
    return (by_default and function is processor) or bool(getattr(function, ROW_WISE, False))


def stop_conditions(criteria: Iterable[Any], config: GenerationConfig, batch: int) -> Stop:
    """Return the conditions that end a batch row as one `Stop` object.

    They are the maximum length, the EOS token ids, and all other stopping criteria, which are called after each token.

    Args:
        batch: Number of rows.
    """
    limit, eos, stopping = 2**31, set[int](), list[Criterion]()
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            limit = min(limit, math.ceil(criterion.max_length))
        elif type(criterion) is EosTokenCriteria:
            eos |= set(int_list(criterion.eos_token_id.flatten()))
        else:
            needs_batch = batch > 1 and type(criterion) not in ROW_WISE_CRITERIA
            stopping.append(WholeBatchCriterion(criterion, batch) if needs_batch else criterion)
    if limit == 2**31 and setting(config, "max_length") is not None:
        limit = int(setting(config, "max_length"))
    return Stop(limit, frozenset(eos), tuple(stopping))


class _AllowedTokens(WholeBatch):
    """Applies transformers' processor for `prefix_allowed_tokens_fn` to one batch row.

    It calls the caller's function only for this row, with the row's index.
    """

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return PrefixConstrainedLogitsProcessor(lambda _, text: _function(self.processor)(self.row, text), 1)(
            cast(torch.LongTensor, ids), cast(torch.FloatTensor, scores)
        )


@final
class OutputRecorder:
    """The logits processors of one `generate` call, and recorders of the scores and logits that the caller asked for.

    Args:
        target: The adapter of the model.
        prompt: (B, P) token ids.
        processors: The caller's and those of `generate`.
        config: Says which scores and logits to record.
    """

    def __init__(
        self, target: HfTarget, prompt: Tensor, processors: Iterable[Processor], config: GenerationConfig
    ) -> None:
        batch, start = prompt.shape
        wanted = bool(setting(config, "return_dict_in_generate"))
        self.scores = ScoreRecorder(batch, start) if wanted and setting(config, "output_scores") else None
        self.logits = ScoreRecorder(batch, start) if wanted and setting(config, "output_logits") else None
        self.processors: list[Processor] = [] if self.logits is None else [ListenerProcessor(self.logits)]
        for processor in processors:
            kind = type(cast(object, processor))  # the exact class counts, because a subclass may do something else
            if kind in target.batch_processors:
                self.processors.append(ListenerProcessor(BatchCollector(processor, batch, start)))
            elif batch > 1 and kind is PrefixConstrainedLogitsProcessor:
                self.processors.append(_AllowedTokens(processor, batch))
            elif batch > 1 and (kind in BATCH_BOUND or not _is_stock(processor)):
                self.processors.append(WholeBatch(processor, batch))
            else:
                self.processors.append(_suppression(processor, target.vocab_size, prompt.device) or processor)
        if self.scores is not None:
            self.processors.append(ListenerProcessor(self.scores))

    @property
    def steps(self) -> Callable[[int, int], StepLogits] | None:
        """A function: (row index, n) -> processed logits (1, V) of the row's first n new tokens; None if not recorded.

        Stopping criteria read these logits.
        """
        return None if self.scores is None else self.scores.row_steps

    def output(
        self,
        target: HfTarget,
        inputs: Mapping[str, Any],
        sequences: Tensor,
        lengths: list[int],
        config: GenerationConfig,
    ) -> Output:
        """Make transformers' output object.

        Scores after a batch row's end are zeros.

        Args:
            inputs: The model's inputs.
            sequences: (B, L).
            lengths: Each row's number of new tokens.
        """
        scores = None if self.scores is None else self.scores.steps(lengths)
        logits = None if self.logits is None else self.logits.steps(lengths)
        return target.output(inputs, sequences, lengths, config, scores, logits)


def _suppression(processor: Any, vocab_size: int, device: torch.device) -> Suppression | None:
    """Return a `Suppression` that does the same as a processor of transformers, but for all nodes of a draft at once.

    Returns:
        None for processors that do more than forbid fixed tokens.
    """
    kind = type(cast(object, processor))  # the exact class counts, because a subclass may do something else
    if kind is SuppressTokensLogitsProcessor:
        tokens, only_at = processor.suppress_tokens, None
    elif kind is SuppressTokensAtBeginLogitsProcessor:
        tokens, only_at = processor.begin_suppress_tokens, int(processor.begin_index)
    else:
        return None
    if (tokens.is_floating_point() and len(tokens)) or bool((tokens >= vocab_size).any()):
        return None  # some ids are beyond the vocabulary: keep the original processor, which raises an error for them
    tokens = tokens.to(device, torch.long)
    return Suppression(tokens[tokens >= 0], only_at)  # negative ids mean no token


@final
class StockRun:
    """Decodes with transformers' own loop, without drafts.

    Iterating over `rounds` starts the loop. All rounds come only when the loop has ended, because it cannot be
    interrupted.

    Args:
        model, input_ids, config, processors, criteria, inputs: What `model.generate` passes to its decoding loop.
        seed: Seed of torch's global generator while the loop runs; None: it is not seeded.
    """

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
        self.rows = len(input_ids)
        if setting(config, "prefill_chunk_size") is not None and inputs.get(CACHE_ARGUMENT) is None:
            # transformers' loop cannot read a prompt in chunks without a cache; chunks only save memory
            config = copy.copy(config)
            config.prefill_chunk_size = None
        self._model, self._ids, self._config, self._seed = model, input_ids, config, seed
        self._processors, self._criteria, self._inputs = processors, criteria, inputs
        self._result: Any = None
        self.rounds = self._run()

    @property
    def steps(self) -> DecodingSteps:
        """The loop as one computation, for a scheduler."""
        rounds: Any = yield Compute(self._model.device, lambda: list(self.rounds))
        yield from rounds.value

    @property
    def sequences(self) -> Tensor:
        """The prompts with their new tokens (B, L); complete once all rounds were iterated."""
        return self._result if isinstance(self._result, Tensor) else self._result.sequences

    def output(self, config: GenerationConfig) -> Any:
        """Return what `model.generate` returns. Call it once all rounds were iterated."""
        return self._result

    def _run(self) -> Iterator[Round]:
        record = _RoundRecorder(self._criteria, self._ids, self._model.device)
        random: Any = torch.random  # typed as `Any`, because `torch.random` has no types
        gpus = [self._ids.device] if self._ids.device.type == "cuda" else []
        with torch.no_grad(), random.fork_rng(gpus, enabled=self._seed is not None):
            if self._seed is not None:
                random.manual_seed(self._seed)
            self._result = self._model._sample(  # type: ignore[operator] # from a mixin
                self._ids,
                logits_processor=LogitsProcessorList([record.logits, *self._processors]),
                stopping_criteria=record,
                generation_config=self._config,
                **self._inputs,
            )
        yield from record.rounds


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
        self._longest = min((one.max_length for one in criteria if type(one) is MaxLengthCriteria), default=2**31)
        self._eos = [one.eos_token_id for one in criteria if type(one) is EosTokenCriteria]
        self._ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        self._raw: Tensor = torch.empty(0)
        self._stopwatch = Stopwatch(device)

    def logits(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Record the raw logits `scores` (B, V), and return them unchanged.

        transformers calls this as the first logits processor.
        """
        self._raw = scores.log_softmax(-1)
        return scores

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        done: Tensor = cast(Any, super()).__call__(input_ids, scores, **kwargs)
        self._ended = self._ended | done
        ended = bool_list(self._ended)
        over = [ended[row] if self._pads else all(ended) for row in self._live]
        tokens = input_ids[:, -1:]
        whole = [any(bool(torch.isin(token, eos.to(token.device)).any()) for eos in self._eos) for token in tokens]
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
                cut=[
                    ended and input_ids.shape[1] >= self._longest and not whole[row]
                    for row, ended in zip(self._live, over, strict=True)
                ],
            )
        )
        self._live = [row for row, last in zip(self._live, over, strict=True) if not last]
        return done
