"""What `generate` of transformers hands over where its own loop would begin, and what it wants back.

The doors are in `generation.py`; here its processors, criteria and outputs are put into the core's terms.
"""

from __future__ import annotations

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
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WhisperForConditionalGeneration,
)
from transformers.generation.logits_process import WhisperNoSpeechDetection
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from mmdec.decode.listeners import BatchCollector, ScoreRecorder
from mmdec.decode.sampling import ListenerProcessor, Processor, Stop, WholeBatch
from mmdec.targets.cache import check_cache
from mmdec.targets.text import TextTarget
from mmdec.targets.whisper import WhisperTarget
from mmdec.types import InputError

BATCH_BOUND = (  # these keep something for each row of the batch, or ask for a row's place in it
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
Output = GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput


def target_of(model: PreTrainedModel) -> TextTarget | WhisperTarget:
    """The target for a model of this kind; raises InputError where there is none."""
    if isinstance(model, WhisperForConditionalGeneration):
        return WhisperTarget(model)
    return TextTarget(model)


def check(target: TextTarget | WhisperTarget, config: GenerationConfig, synced_gpus: bool | None) -> None:
    """Refuse what a draft cannot be verified for."""
    if config.num_beams != 1:
        raise InputError(
            f"`num_beams` must be 1, but is {config.num_beams}. Drafts are verified for greedy decoding and sampling; "
            "leave `custom_generate` out for beams."
        )
    for name in ("output_attentions", "output_hidden_states") if isinstance(target, TextTarget) else ():
        if getattr(config, name):
            raise InputError(f"`{name}` must be left out, but is True. Rounds hold tokens and timings alone.")
    for name in ("penalty_alpha", "dola_layers", "prompt_lookup_num_tokens", "assistant_early_exit"):
        if getattr(config, name, None):
            raise InputError(
                f"`{name}` must be left out, but is {getattr(config, name)!r}. It asks for another decoding loop; "
                "leave `custom_generate` out for it."
            )
    if synced_gpus:
        raise InputError("`synced_gpus` must be False, but is True. Each process decodes on its own.")


def prepared(
    target: TextTarget | WhisperTarget, ids: Tensor, config: GenerationConfig, inputs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The inputs with the mask that `generate` has dropped where it was all ones: beside a cache its length says
    whether ids (B, P) are the whole text or what is new."""
    cache = inputs.get("past_key_values")
    if not isinstance(target, TextTarget) or cache is None or inputs.get("attention_mask") is not None:
        return inputs
    check_cache(cache)
    if not cache.get_seq_length():
        return inputs
    # `generate` notes the length; releases that do not have made the positions of that mask.
    length = getattr(config, "_mask_length", None) or inputs["position_ids"].shape[-1]
    return {**inputs, "attention_mask": ids.new_ones(len(ids), length)}


def wants_cache(target: TextTarget | WhisperTarget, config: GenerationConfig, inputs: Mapping[str, Any]) -> bool:
    """Whether somebody will look at the cache after the run: whoever has given it, or asks for an output object."""
    cache = inputs.get("past_key_values") if isinstance(target, TextTarget) else None
    return cache is not None and bool(config.return_dict_in_generate or getattr(cache, "_is_user_defined", False))


def stop(criteria: Any, config: GenerationConfig) -> Stop:
    """The two criteria that every run has as plain numbers; the others are asked token by token."""
    limit, eos, others = 2**31, set[int](), []
    for criterion in criteria:
        if isinstance(criterion, MaxLengthCriteria):
            limit = min(limit, int(criterion.max_length))
        elif isinstance(criterion, EosTokenCriteria):
            eos |= set(criterion.eos_token_id.flatten().tolist())
        else:
            others.append(criterion)
    if limit == 2**31 and config.max_length is not None:
        limit = int(config.max_length)
    return Stop(limit, frozenset(eos), tuple(others))


@final
class Results:
    """A run's processors, among which it listens for what the caller wants returned."""

    def __init__(self, prompt: Tensor, processors: Iterable[Processor], config: GenerationConfig) -> None:
        """prompt (B, P)."""
        batch, start = prompt.shape
        wanted = bool(config.return_dict_in_generate)
        self.scores = ScoreRecorder(batch, start) if wanted and config.output_scores else None
        self.logits = ScoreRecorder(batch, start) if wanted and config.output_logits else None
        self.processors: list[Processor] = [] if self.logits is None else [ListenerProcessor(self.logits)]
        for processor in processors:
            if isinstance(processor, WhisperNoSpeechDetection):  # reads the batch as a whole, and its audio
                self.processors.append(ListenerProcessor(BatchCollector(processor, batch, start)))
            elif batch > 1 and isinstance(processor, BATCH_BOUND):
                self.processors.append(WholeBatch(processor, batch))
            else:
                self.processors.append(processor)
        if self.scores is not None:
            self.processors.append(ListenerProcessor(self.scores))

    def output(
        self,
        target: TextTarget | WhisperTarget,
        inputs: Mapping[str, Any],
        sequences: Tensor,
        lengths: list[int],
        config: GenerationConfig,
    ) -> Output:
        """transformers' output object for sequences (B, L) with `lengths` new tokens in each row.

        Scores after a row's end are zeros. Attentions and hidden states are those of one more pass, over all.
        """
        ids = cast(torch.LongTensor, sequences)
        kept = inputs.get("past_key_values")
        scores = None if self.scores is None else self.scores.steps(lengths)
        logits = None if self.logits is None else self.logits.steps(lengths)
        if isinstance(target, TextTarget):
            return GenerateDecoderOnlyOutput(sequences=ids, scores=scores, logits=logits, past_key_values=kept)  # type: ignore[arg-type]
        found: dict[str, Any] = {"past_key_values": kept}
        prompt, length = sequences.shape[1] - max(lengths), sequences.shape[1] - 1
        encoded = inputs["encoder_outputs"]
        flags = {name: True for name in ("output_attentions", "output_hidden_states") if getattr(config, name)}
        empty = kept if kept is not None and not kept.get_seq_length() else None  # larger batches used their own
        seen: Any = target.reread(inputs, sequences, empty, **flags) if flags or empty is not None else None
        if config.output_attentions:
            found["decoder_attentions"] = _steps(seen.attentions, prompt, length, 2, square=True)
            found["cross_attentions"] = _steps(seen.cross_attentions, prompt, length, 2)
            found["encoder_attentions"] = encoded.get("attentions")
        if config.output_hidden_states:
            found["decoder_hidden_states"] = _steps(seen.hidden_states, prompt, length, 1)
            found["encoder_hidden_states"] = encoded.get("hidden_states")
        return GenerateEncoderDecoderOutput(sequences=ids, scores=scores, logits=logits, **found)  # type: ignore[arg-type]


def _steps(
    layers: tuple[Tensor, ...], prompt: int, length: int, axis: int, square: bool = False
) -> tuple[tuple[Tensor, ...], ...]:
    """Each layer's (..., T, ...) of `length` columns as the plain loop has it: the prompt's, then one tuple for each
    later token. Empty ones where there are no layers: "sdpa" gives no attentions. `square` attentions see no column
    after their own."""
    cuts = [(0, prompt), *((step, step + 1) for step in range(prompt, length))]
    return tuple(
        tuple((layer[..., :end] if square else layer).narrow(axis, begin, end - begin) for layer in layers)
        for begin, end in cuts
    )
