"""Decoder-only language models of transformers as targets: Llama, Qwen2, and similar ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, cast, final

from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from mmdec.compat import CACHE_ARGUMENT
from mmdec.errors import InputError
from mmdec.targets.decoder import DecoderTarget, Mask, Prompt, TextPrompt
from mmdec.targets.families import check_text_model, is_decoder_only, list_media_families
from mmdec.targets.recurrent_cache import cache_arguments, cached_length
from mmdec.targets.ropes import growing_ropes

# beginnings of argument names that only models of images, video or sound have
MEDIA_INPUTS = re.compile("pixel_|image|video|mm_|audio|input_features")
OUTPUT_KINDS = ("hidden_states", "attentions")


@final
class TextTarget(DecoderTarget):
    """Scores token trees with a causal language model.

    Its attention implementation may be "sdpa", "eager" or "mmdec_tree".

    Args:
        model: A loaded language model.
        checked: True skips the check that the model can score drafts and roll them back.

    Raises:
        InputError: If the model fails this check.
    """

    refused_outputs: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def supports(model: PreTrainedModel) -> bool:
        """Return whether this is a decoder-only language model with a key-value cache."""
        return is_decoder_only(model)

    def __init__(self, model: PreTrainedModel, *, checked: bool = False) -> None:
        if not checked:
            check_text_model(model, text_scorer)
        super().__init__(model)

    def _prepare_prompt(self, inputs: Mapping[str, Any]) -> Prompt:
        media_names = [name for name, value in inputs.items() if value is not None and MEDIA_INPUTS.match(name)]
        if media_names:
            raise InputError(
                f"`{media_names[0]}` must be left out, because mmdec does not support pictures and sound of "
                f"{type(self.model).__name__}. Call `model.generate` without mmdec to use them. {list_media_families()}"
            )
        text = TextPrompt.from_inputs(inputs)
        return Prompt(text, text.positions[None, :, -text.new_ids.shape[1] :])

    def fallback_reasons(self, config: GenerationConfig, inputs: Mapping[str, Any]) -> list[str]:
        kinds, cache, reasons = requested_outputs(config), inputs.get(CACHE_ARGUMENT), list[str]()
        cached = cached_length(cache) if isinstance(cache, DynamicCache) else 0  # other caches raise an error later
        reasons += [f"`output_{kind}` is not given with drafts, whose passes have several tokens" for kind in kinds]
        mask, longest = inputs.get("attention_mask"), cast(Any, config).max_length
        columns = (inputs["input_ids"] if mask is None else mask).shape[1]
        end = columns + longest - inputs["input_ids"].shape[1]
        shortest = columns if mask is None else int(mask.sum(1).max())
        for rope in growing_ropes(self.model.config):
            if rope.changes_within(shortest, cached, end):
                reasons.append(f"`rope_type` {rope.kind} changes at {rope.length} columns, which the text may reach")
        return reasons

    def _forward(self, ids: Tensor, mask: Mask, positions: Tensor, cache: Any, extra: Mapping[str, Any]) -> Any:
        placed = cache_arguments(self.model, cache, positions[0])
        return self.model(input_ids=ids, attention_mask=mask, **placed, use_cache=cache is not None, **extra)


def attention_name(model: PreTrainedModel) -> str:
    """Return the name of the model's present implementation of attention."""
    return str(cast(Any, model.config)._attn_implementation)


def text_scorer(model: PreTrainedModel) -> TextTarget:
    """Make a target without checks, for a small model in the test of unknown classes: checks would call that test."""
    return TextTarget(model, checked=True)


def requested_outputs(config: GenerationConfig) -> list[str]:
    """Return which of "hidden_states" and "attentions" the output of `generate` must contain."""
    return [kind for kind in OUTPUT_KINDS if config.return_dict_in_generate and getattr(config, f"output_{kind}")]
