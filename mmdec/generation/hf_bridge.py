"""What `generate` of transformers hands over where its own loop would begin, and what it wants back.

The calls are in `speculation.py`. Here the processors, criteria and outputs of transformers become those of the core.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast, final

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from mmdec.decode.listeners import BatchCollector, ScoreRecorder
from mmdec.decode.sampling import Criterion, ListenerProcessor, Processor, Stop, Suppression, WholeBatch
from mmdec.decode.tree import int_list
from mmdec.targets.hf_target import HfTarget, Output
from mmdec.types import InputError

BATCH_BOUND = (  # these hold a value for each row of the batch, or ask for a row's index in it
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


def setting(config: GenerationConfig, name: str) -> Any:
    """A field of the configuration; transformers gives them no types."""
    return getattr(config, name)


def check(target: HfTarget, config: GenerationConfig, synced_gpus: bool | None) -> None:
    """Raise InputError for options under which drafts cannot be verified."""
    if (beams := setting(config, "num_beams")) != 1:
        raise InputError(
            f"`num_beams` must be 1, but is {beams}. Drafts are verified for greedy decoding and sampling; "
            "leave `custom_generate` out for beams."
        )
    for name in target.refused_outputs:
        if setting(config, name):
            raise InputError(f"`{name}` must be left out, but is True. Rounds hold tokens and timings alone.")
    for name in ("penalty_alpha", "dola_layers", "prompt_lookup_num_tokens", "assistant_early_exit"):
        if getattr(config, name, None):
            raise InputError(
                f"`{name}` must be left out, but is {getattr(config, name)!r}. It asks for another decoding loop; "
                "leave `custom_generate` out for it."
            )
    if synced_gpus:
        raise InputError("`synced_gpus` must be False, but is True. Each process decodes on its own.")


def pad_token(config: GenerationConfig) -> int:
    """With which `generate` pads shorter rows."""
    token = config._pad_token_tensor  # type: ignore[attr-defined] # `generate` sets it before it hands over
    return 0 if token is None else int(token)


def stop(criteria: Any, config: GenerationConfig) -> Stop:
    """The maximum length and the EOS tokens as numbers. Other criteria are called after each token."""
    limit, eos, others = 2**31, set[int](), list[Criterion]()
    for criterion in criteria:
        if isinstance(criterion, MaxLengthCriteria):
            limit = min(limit, math.ceil(criterion.max_length))
        elif isinstance(criterion, EosTokenCriteria):
            eos |= set(int_list(criterion.eos_token_id.flatten()))
        else:
            others.append(criterion)
    if limit == 2**31 and setting(config, "max_length") is not None:
        limit = int(setting(config, "max_length"))
    return Stop(limit, frozenset(eos), tuple(others))


@final
class Results:
    """A run's logits processors, with recorders for the scores and logits that the caller wants."""

    def __init__(
        self, target: HfTarget, prompt: Tensor, processors: Iterable[Processor], config: GenerationConfig
    ) -> None:
        """prompt (B, P)."""
        batch, start = prompt.shape
        wanted = bool(setting(config, "return_dict_in_generate"))
        self.scores = ScoreRecorder(batch, start) if wanted and setting(config, "output_scores") else None
        self.logits = ScoreRecorder(batch, start) if wanted and setting(config, "output_logits") else None
        self.processors: list[Processor] = [] if self.logits is None else [ListenerProcessor(self.logits)]
        for processor in processors:
            if isinstance(processor, target.batch_processors):
                self.processors.append(ListenerProcessor(BatchCollector(processor, batch, start)))
            elif batch > 1 and isinstance(cast(object, processor), BATCH_BOUND):
                self.processors.append(WholeBatch(processor, batch))
            else:
                self.processors.append(_suppression(processor, target.vocab_size, prompt.device) or processor)
        if self.scores is not None:
            self.processors.append(ListenerProcessor(self.scores))

    def output(
        self,
        target: HfTarget,
        inputs: Mapping[str, Any],
        sequences: Tensor,
        lengths: list[int],
        config: GenerationConfig,
    ) -> Output:
        """transformers' output object for sequences (B, L) with `lengths` new tokens in each row.

        Scores after a row's end are zeros.
        """
        scores = None if self.scores is None else self.scores.steps(lengths)
        logits = None if self.logits is None else self.logits.steps(lengths)
        return target.output(inputs, sequences, lengths, config, scores, logits)


def _suppression(processor: Any, vocab_size: int, device: torch.device) -> Suppression | None:
    """transformers' processor as one that is applied to all nodes of a draft at once; None for those of other kinds."""
    kind = type(cast(object, processor))  # a subclass may do something else
    if kind is SuppressTokensLogitsProcessor:
        tokens, only_at = processor.suppress_tokens, None
    elif kind is SuppressTokensAtBeginLogitsProcessor:
        tokens, only_at = processor.begin_suppress_tokens, int(processor.begin_index)
    else:
        return None
    if (tokens.is_floating_point() and len(tokens)) or bool((tokens >= vocab_size).any()):
        return None  # unusual tokens: the processor itself handles them
    tokens = tokens.to(device, torch.long)
    return Suppression(tokens[tokens >= 0], only_at)  # negative ones name no token
