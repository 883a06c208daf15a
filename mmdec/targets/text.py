"""Decoder-only language models of transformers as targets: Llama, Qwen2, and similar ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast, final

from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from mmdec.ops.tree_attention import TreeMask
from mmdec.targets.alibi import drafting, has_alibi
from mmdec.targets.decoder import DecoderTarget, Mask, Prompt, TextPrompt
from mmdec.targets.families import SEEING, check_model, is_decoder_only
from mmdec.targets.ropes import growing_ropes
from mmdec.targets.states import cache_arguments, cached_columns
from mmdec.targets.step_outputs import FLAGS, step_outputs, wanted
from mmdec.targets.windows import Window
from mmdec.types import CACHE, InputError, Scores

# prefixes of arguments that only models of images, video or sound have
MEDIA = re.compile("pixel_|image|video|mm_|audio|input_features")


@final
class TextTarget(DecoderTarget):
    """A causal language model. The attention implementation may be "sdpa", "eager" or "mmdec_tree"."""

    refused_outputs: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def takes(model: PreTrainedModel) -> bool:
        """Return whether this is a decoder-only language model with a key-value cache."""
        return is_decoder_only(model)

    def __init__(self, model: PreTrainedModel, *, checked: bool = False) -> None:
        """model: a loaded language model. checked: whether the caller has already checked it.

        Raises: InputError if drafts could not be scored or rolled back.
        """
        if not checked:
            check_model(model, text_scorer)
        super().__init__(model)
        self.alibi = has_alibi(model)
        if self.alibi:
            self.positions = getattr(model.config, "max_seq_len", None)  # only MPT's bias has a maximum length

    def _read(self, inputs: Mapping[str, Any]) -> Prompt:
        seen = [name for name, value in inputs.items() if value is not None and MEDIA.match(name)]
        if seen:
            raise InputError(
                f"`{seen[0]}` must be left to `model.generate` without mmdec, but is given: pictures and sound of "
                f"{type(self.model).__name__} are not supported, and without them it would answer something else. "
                f"Pictures of {SEEING} are."
            )
        text = TextPrompt.of(inputs)
        return Prompt(text, text.positions[None, :, -text.fresh.shape[1] :])

    def prepare_inputs(self, ids: Tensor, config: GenerationConfig, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make the inputs of `prefill` as `DecoderTarget` does, with the outputs that the configuration asks for."""
        given = {name: value for name, value in inputs.items() if name not in FLAGS}
        return super().prepare_inputs(ids, config, given)

    def stock_alone(self, config: GenerationConfig, inputs: Mapping[str, Any]) -> list[str]:
        """List the reasons why only transformers' own loop can do this call; empty if mmdec's can."""
        kinds, cache, reasons = wanted(config), inputs.get(CACHE), list[str]()
        cached = cached_columns(cache) if isinstance(cache, DynamicCache) else 0  # others are refused later
        if kinds and (self.chains or cached):
            what = "a model with recurrent layers" if self.chains else "a chat that goes on from its cache"
            reasons.append(f"`output_{kinds[0]}` of {what} is not given with drafts")
        mask, longest = inputs.get("attention_mask"), cast(Any, config).max_length
        columns = (inputs["input_ids"] if mask is None else mask).shape[1]
        end = columns + longest - inputs["input_ids"].shape[1]
        shortest = columns if mask is None else int(mask.sum(1).max())
        if self.alibi and mask is not None and bool((mask.diff(dim=1) < 0).any()):
            reasons.append("padding between a row's tokens, which ALiBi may count, is not drafted over")
        for rope in growing_ropes(self.model.config):
            if rope.crossed(shortest, cached, end):
                reasons.append(f"`rope_type` {rope.kind} changes at {rope.length} columns, which the text may reach")
        return reasons

    def output(
        self,
        inputs: Mapping[str, Any],
        sequences: Tensor,
        lengths: Sequence[int],
        config: GenerationConfig,
        scores: tuple[Tensor, ...] | None = None,
        logits: tuple[Tensor, ...] | None = None,
    ) -> GenerateDecoderOnlyOutput:
        """Make the output that `generate` returns, with hidden states and attentions if asked for; see `HfTarget`."""
        found = super().output(inputs, sequences, lengths, config, scores, logits)
        if kinds := wanted(config):
            text = TextPrompt.of({**inputs, CACHE: None})
            outputs: Any = step_outputs(self.model, sequences, text.mask_given, text.positions, kinds)
            for kind in kinds:
                setattr(found, kind, outputs[kind])
        return found

    def _call(self, ids: Tensor, mask: Mask, positions: Tensor, cache: Any, more: Mapping[str, Any]) -> Any:
        placed = cache_arguments(self.model, cache, positions[0])
        return self.model(input_ids=ids, attention_mask=mask, **placed, use_cache=cache is not None, **more)

    def _draft(
        self,
        layers: tuple[int, ...],
        firsts: Mapping[Window, int],
        counted: tuple[Tensor, Tensor] | None,
        tokens: Tensor,
        tree: TreeMask | None,
        positions: Tensor,
        cache: Any,
    ) -> Scores:
        if tree is None or not self.alibi:
            return super()._draft(layers, firsts, counted, tokens, tree, positions, cache)
        with drafting(self.model, tree):
            return self._run(tokens, None, positions, cache, layers, {}, last=False)


def text_scorer(model: PreTrainedModel) -> TextTarget:
    """Make a target without checks: the probe needs it, because a normal target's checks would run the probe again."""
    return TextTarget(model, checked=True)
