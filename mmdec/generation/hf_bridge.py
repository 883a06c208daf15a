"""Translates between `generate` of transformers and the decoding core: processors, criteria and outputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast, final

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EosTokenCriteria,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StopStringCriteria,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from mmdec.core.sampling import (
    Criterion,
    DraftWarp,
    ListenerProcessor,
    Processor,
    StepLogits,
    Stop,
    Suppression,
    WholeBatch,
    WholeBatchCriterion,
)
from mmdec.core.tree import int_list
from mmdec.errors import InputError
from mmdec.generation.recorders import BatchCollector, ScoreRecorder
from mmdec.targets.hf_target import GenerateOutput, HfTarget

# A caller sets this attribute to True on a processor, criterion or function whose result for a row depends only on that
# row: then drafts are possible in a batch.
ROW_WISE = "mmdec_row_wise"
BATCH_BOUND = (  # transformers' processors that work only on the whole batch: they hold a value for each row
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
# transformers' processors that read the logits of one node, but neither its text nor which tokens these are
WARPERS = (
    TemperatureLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
)
# transformers' criteria whose result for a batch row depends only on that row, so that drafts are possible in a batch
ROW_WISE_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)
# transformers' processors that look up their tokens only in their calls
CHECKED_LATE = (SequenceBiasLogitsProcessor, ForcedEOSTokenLogitsProcessor)
BEAMS_REMEDY = "Drafts are verified for greedy decoding and sampling. Pass 1, or call `model.generate` without mmdec."
OTHER_LOOPS = (
    "penalty_alpha",
    "dola_layers",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
    "force_words_ids",
    "constraints",
)


def return_prepared(
    model: Any, input_ids: Tensor, generation_config: GenerationConfig, **inputs: Any
) -> tuple[Tensor, GenerationConfig, dict[str, Any]]:
    """A custom loop for `generate` that decodes nothing.

    Returns:
        What transformers has prepared: token ids (B, P), settings, and further arguments of a custom loop.

    Raises:
        Exception: What transformers would raise for tokens that the model does not have, but only while it decodes.
    """
    try_late_checks(model, input_ids, inputs.get("logits_processor", ()))
    return input_ids, generation_config, inputs


def try_late_checks(model: Any, input_ids: Tensor, processors: Iterable[Any]) -> None:
    """Let processors look up their tokens once, so that tokens that the model does not have are noticed now."""
    for processor in processors:
        if isinstance(processor, CHECKED_LATE):
            vocab_size = model.config.get_text_config(decoder=True).vocab_size
            scores = torch.zeros(len(input_ids), vocab_size, device=input_ids.device)
            copy.copy(processor)(cast(Any, input_ids), cast(Any, scores))
            scores[:, getattr(processor, "eos_token_id", [])]  # forced only at the maximum length


def setting(config: GenerationConfig, name: str) -> Any:
    """Return a field of the configuration, typed as `Any` for the type checker."""
    return getattr(config, name)


def check_config(target: HfTarget, config: GenerationConfig, synced_gpus: bool | None) -> None:
    """Raise InputError for options under which drafts cannot be verified."""
    if (beams := setting(config, "num_beams")) != 1:
        raise InputError(f"`num_beams` must be 1, but is {beams}. {BEAMS_REMEDY}{_pipeline_note(target)}")
    for name in target.refused_outputs:
        if setting(config, name):
            raise InputError(f"`{name}` must be left out, but is True. Rounds hold only tokens and timings.")
    for name in OTHER_LOOPS:
        if getattr(config, name, None):
            raise InputError(
                f"`{name}` must be left out, but is {getattr(config, name)!r}. It asks for another decoding loop; "
                "call `model.generate` without mmdec for it."
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


def function_fallback_reasons(processors: Iterable[Any], criteria: Iterable[Any], batch: int) -> list[str]:
    """Return why only transformers' own loop can decode with these processors and criteria.

    transformers' processors and criteria treat each batch row by itself. Those of a caller, subclasses included, may
    read other rows or count calls, unless they set `mmdec_row_wise = True`.

    Args:
        batch: Number of rows.

    Returns:
        Sentences without a full stop; empty if drafts are possible.
    """
    criteria = list(criteria)
    foreign = [processor for processor in processors if not _is_row_wise(processor, _is_stock(processor))]
    foreign += [stop for stop in criteria if not _is_row_wise(stop, type(stop) in ROW_WISE_CRITERIA)]
    reasons: list[str] = []
    if foreign:
        names = ", ".join(
            dict.fromkeys(
                getattr(function, "__name__", type(function).__name__) for function in map(_function, foreign)
            )
        )
        reasons.append(
            f"{names} may read other rows of the batch or count its calls (set `{ROW_WISE} = True` on it to have "
            "drafts, if a row's result depends only on that row and its index)"
        )
    ends = any(type(stop) not in (EosTokenCriteria, MaxLengthCriteria) for stop in criteria)
    if batch > 1 and ends and not any(hasattr(stop, "eos_token_id") for stop in criteria):
        reasons.append(
            "`eos_token_id` is None, so that a row continues after a stopping criterion until all rows have one"
        )
    return reasons


def keeps_state(options: Mapping[str, Any]) -> bool:
    """Return whether a function of the caller's may keep a state, so that inputs go one after another.

    The functions are the logits processors, the stopping criteria, and `prefix_allowed_tokens_fn`.

    Args:
        options: Those of `generate`.
    """
    processors, criteria = (options.get(name) or () for name in ("logits_processor", "stopping_criteria"))
    allowed = options.get("prefix_allowed_tokens_fn")
    if allowed is not None:  # as `generate` wraps it
        processors = [*processors, PrefixConstrainedLogitsProcessor(allowed, 1)]
    return bool(function_fallback_reasons(processors, criteria, batch=2))


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


def draft_warp(processors: Iterable[Any]) -> DraftWarp:
    """Return how the target's distribution follows from its logits, for logits of a drafter.

    Processors that hold state, belong to the caller or are slow for many nodes are left out: that changes which drafts
    are accepted, but not the output's distribution.

    Args:
        processors: Those of `generate`.
    """
    by_token: list[Any] = []
    warpers: list[Any] = []
    top_k: int | None = None
    for processor in processors:
        kind = type(cast(object, processor))
        if kind is TopKLogitsWarper:
            top_k = processor.top_k if top_k is None else min(top_k, processor.top_k)
        elif kind in WARPERS:
            warpers.append(processor)
        elif kind is SuppressTokensLogitsProcessor or (
            # a tensor holds one length for each row of the batch
            kind is RepetitionPenaltyLogitsProcessor and not isinstance(processor.prompt_ignore_length, Tensor)
        ):
            by_token.append(processor)
    return DraftWarp(by_token, top_k, warpers)


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
        returns_object = bool(setting(config, "return_dict_in_generate"))
        self.scores = ScoreRecorder(batch, start) if returns_object and setting(config, "output_scores") else None
        self.logits = ScoreRecorder(batch, start) if returns_object and setting(config, "output_logits") else None
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
    ) -> GenerateOutput:
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
