"""Decoder-only language models of transformers as targets: Llama, Qwen2, and similar ones.

Passes over trees do not return hidden states and attentions. If a call asks for them, the model reads the finished text
again in two passes: the first reads the prompt, as in transformers' loop, the second all new tokens. The outputs of the
second are then split into decoding steps of one token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from mmdec.ops.tree_attention import TreeMask
from mmdec.targets.alibi import drafting, has_alibi
from mmdec.targets.decoder import DecoderTarget, Mask, Prompt, TextPrompt
from mmdec.targets.families import SEEING, check_model, is_decoder_only
from mmdec.targets.ropes import growing_ropes
from mmdec.targets.states import cache_arguments, cached_columns
from mmdec.targets.windows import Window, Windows
from mmdec.types import CACHE, InputError, Scores

# beginnings of argument names that only models of images, video or sound have
MEDIA = re.compile("pixel_|image|video|mm_|audio|input_features")
KINDS = ("hidden_states", "attentions")
FLAGS = tuple(f"output_{kind}" for kind in KINDS)
Steps = tuple[tuple[Tensor, ...], ...]  # for each decoding step, one tensor for each layer


@final
class TextTarget(DecoderTarget):
    """Scores token trees with a causal language model, whose attention implementation may be "sdpa", "eager" or
    "mmdec_tree"."""

    refused_outputs: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def takes(model: PreTrainedModel) -> bool:
        """Return whether this is a decoder-only language model with a key-value cache."""
        return is_decoder_only(model)

    def __init__(self, model: PreTrainedModel, *, checked: bool = False) -> None:
        """model: a loaded language model. checked: True skips the check that the model can score drafts and roll them
        back.

        Raises: InputError if the model fails this check.
        """
        if not checked:
            check_model(model, text_scorer)
        super().__init__(model)
        self.alibi = has_alibi(model)
        if self.alibi:
            self.positions = getattr(model.config, "max_seq_len", None)  # of ALiBi models, only MPT has a maximum

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
        """Return the inputs of `prefill`, without the flags for hidden states and attentions. `output` computes
        both."""
        given = {name: value for name, value in inputs.items() if name not in FLAGS}
        return super().prepare_inputs(ids, config, given)

    def stock_alone(self, config: GenerationConfig, inputs: Mapping[str, Any]) -> list[str]:
        """Return the reasons why only transformers' own loop can decode this call, as sentences without a full stop;
        empty if mmdec's loop can decode it. inputs: prepared by `model.generate`."""
        kinds, cache, reasons = wanted(config), inputs.get(CACHE), list[str]()
        cached = cached_columns(cache) if isinstance(cache, DynamicCache) else 0  # other caches raise an error later
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
        """Make transformers' output object, with hidden states and attentions if `config` asks for them.

        sequences: (B, L). lengths: each batch row's number of new tokens. scores, logits: (B, V) for each new token;
            None: not recorded.
        """
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
    """Make a target without checks, for a small model in the test of unknown classes: checks would call that test."""
    return TextTarget(model, checked=True)


def wanted(config: GenerationConfig) -> list[str]:
    """Return which of "hidden_states" and "attentions" the output of `generate` must contain."""
    return [kind for kind in KINDS if config.return_dict_in_generate and getattr(config, f"output_{kind}")]


@torch.no_grad()
def step_outputs(
    model: PreTrainedModel, sequences: Tensor, mask: Tensor | None, positions: Tensor, kinds: list[str]
) -> dict[str, Steps]:
    """Run the model over a finished text again, to compute hidden states and attentions.

    sequences: (B, L), prompts and new tokens. mask, positions: (B, P), of the prompts; mask None: nothing is masked.
    kinds: "hidden_states", "attentions" or both.
    Returns: for each of `kinds`, a tuple of steps, of which the first is the prompt; a step is a tuple of one tensor
        for each layer, as `model.generate` returns it.
    """
    columns, windows = positions.shape[1], Windows.of(model.config)
    flags, cache = {f"output_{kind}": True for kind in kinds}, DynamicCache(config=model.config)
    first = _pass(model, sequences[:, :columns], mask, positions, cache, flags)
    steps = sequences.shape[1] - columns - 1
    found: dict[str, list[tuple[Tensor, ...]]] = {kind: [getattr(first, kind)] for kind in kinds}
    if steps > 0:
        following = positions[:, -1:] + torch.arange(1, steps + 1, device=positions.device)
        seen = None if mask is None else torch.cat([mask, mask.new_ones(len(mask), steps)], 1)
        rest = _pass(model, sequences[:, columns:-1], seen, following, cache, flags)
        for step in range(steps):
            if "hidden_states" in found:
                found["hidden_states"].append(tuple(states[:, step : step + 1] for states in rest.hidden_states))
            if "attentions" in found:
                maps = enumerate(rest.attentions)
                found["attentions"].append(
                    tuple(_row(map_, step, columns, _window(model, windows, layer)) for layer, map_ in maps)
                )
    return {kind: tuple(each) for kind, each in found.items()}


def _pass(
    model: PreTrainedModel, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any, flags: dict[str, bool]
) -> Any:
    return model(
        input_ids=ids,
        attention_mask=mask,
        **cache_arguments(model, cache, positions),
        use_cache=True,
        logits_to_keep=1,
        return_dict=True,
        **flags,
    )


def _window(model: PreTrainedModel, windows: Windows | None, layer: int) -> int | None:
    """Return how many tokens a decoding step attends to in a layer, its own token included; None: all."""
    if windows is None:
        return None
    window = windows.layers[layer] if windows.kinds is None else windows.kinds[model.config.layer_types[layer]]
    return None if window is None else window.size


def _row(attention: Tensor | None, step: int, columns: int, window: int | None) -> Any:
    """Return the attention map (B, H, 1, S') of one step. attention: (B, H, N, S), maps of all N steps. columns: number
    of prompt tokens. window: number of tokens that a step attends to; None: all."""
    if attention is None:  # attention implementations other than "eager" return no maps
        return None
    past = columns + step if window is None else min(columns + step, window - 1)
    end = attention.shape[3] - attention.shape[2] + step + 1
    return attention[:, :, step : step + 1, end - past - 1 : end]
