"""Vision-language models of transformers as targets: LLaVA 1.5, LLaVA-NeXT, Qwen2-VL, Qwen2.5-VL, Qwen3-VL.

The prompt's pass is the model's own, with images and DeepStack; a draft's pass is that of its language model. A video
is a list of images for LLaVA, `pixel_values_videos` for Qwen. A run leaves nothing on the model object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from mmdec.targets.decoder import DecoderTarget, Prompt
from mmdec.targets.families import check_decoder, check_proof
from mmdec.targets.rope_positions import rope_positions
from mmdec.targets.text import text_scorer
from mmdec.targets.text_prompt import TextPrompt
from mmdec.targets.vision_inputs import KINDS, NAMES, VisionInputs
from mmdec.types import Scores

PLAIN = ("LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration")
AXES = (
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)
HELD = "vision_inputs"  # the name of a run's VisionInputs between `hold_back` and `prefill`


@final
class VlmTarget(DecoderTarget):
    """A vision-language model. The language model's attention may be "sdpa", "eager" or "mmdec_tree"."""

    reads_images: ClassVar[bool] = True

    @staticmethod
    def takes(model: PreTrainedModel) -> bool:
        """Whether this is one of the five kinds."""
        return any(kind.__name__ in (*PLAIN, *AXES) for kind in type(model).__mro__)

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises InputError if drafts of its language model could not be scored or rolled back."""
        self._axes = any(kind.__name__ in AXES for kind in type(model).__mro__)
        text = model.config.get_text_config(decoder=True)
        check_decoder(type(model).__name__, text)
        if not self._axes:  # the configuration may name any language model
            check_proof(cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]), text, text_scorer)
        super().__init__(model)
        self._base = cast(Any, model).model
        self._head = cast(nn.Module, model.get_output_embeddings())

    def hold_back(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split a call's inputs: those that `generate` prepares, and those given to `prefill` directly.

        The latter are the pixels, so that the vision tower runs within the run and is timed, and positions of three
        axes, which `generate` would leave on the model.
        """
        ids: Tensor = inputs["input_ids"]
        named = {name: value for name, value in inputs.items() if name not in NAMES}
        held: dict[str, Any] = {HELD: VisionInputs.of(inputs, len(ids))}
        if self._axes:
            held["position_ids"] = named.get("position_ids")
            mask = named.get("attention_mask")
            named["position_ids"] = torch.zeros_like(ids if mask is None else mask, dtype=torch.long)
        return named, held

    def prepare_inputs(self, ids: Tensor, config: GenerationConfig, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """As for a language model, plus one object that holds the run's images and the vision tower's outputs."""
        prepared = dict(super().prepare_inputs(ids, config, inputs))
        vision = prepared.get(HELD) or VisionInputs.of(prepared, len(ids))
        return {name: value for name, value in prepared.items() if name not in NAMES} | {HELD: vision}

    def prompt_positions(self, inputs: Mapping[str, Any]) -> list[int]:
        """As for a language model. With three axes, an image takes as many positions as its longer side has tokens."""
        if not self._axes:
            return super().prompt_positions(inputs)
        named = {name: value for name, value in inputs.items() if name not in NAMES}
        vision = VisionInputs.of(inputs, len(inputs["input_ids"]))
        positions, _ = rope_positions(self._base, TextPrompt.of(named), vision, None)
        return (1 + positions.amax((0, 2))).tolist()

    def _read(self, inputs: Mapping[str, Any]) -> Prompt:
        ids = inputs.get("input_ids")
        vision = inputs.get(HELD) or VisionInputs.of(inputs, len(ids) if isinstance(ids, Tensor) else 1)
        given_positions = inputs.get("position_ids") if self._axes else None
        own_names = {*NAMES, HELD, *(("position_ids",) if self._axes else ())}
        text = TextPrompt.of({name: value for name, value in inputs.items() if name not in own_names})
        extra, visual = dict[str, Any](), torch.zeros_like(text.fresh, dtype=torch.bool)
        summaries = None
        for kind in KINDS:
            encoded, kind_mask = vision.deal(self._base, kind, text.ids, text.fresh.shape[1])
            visual |= kind_mask
            if encoded is not None:
                extra[kind] = encoded.output()
                summaries = encoded.summaries
        positions, offsets = text.positions[None, :, -text.fresh.shape[1] :], None
        if self._axes:
            if vision.positions is None:
                vision.positions = rope_positions(self._base, text, vision, given_positions)
            positions, offsets = vision.positions
        extra_inputs = {"mm_encoder_outputs": extra or None}
        return Prompt(text, positions, offsets, visual, extra_inputs, vision.seconds, summaries, vision.raw)

    def _embeds(self, prompt: Prompt) -> Tensor:
        """The first layer's inputs; at visual tokens, the projected visual embeddings, placed as the model does."""
        text = prompt.text
        embeds = self.model.get_input_embeddings()(text.fresh)
        for kind, output in (prompt.extra["mm_encoder_outputs"] or {}).items():
            visual = text.fresh == getattr(self.model.config, f"{kind}_token_id")
            features = output.pooler_output[0].to(embeds.device, embeds.dtype)
            embeds = embeds.masked_scatter(visual[..., None], features)
        return embeds

    def _run(
        self,
        ids: Tensor,
        mask: Tensor | None,
        positions: Tensor,
        cache: Any,
        layers: tuple[int, ...],
        extra: Mapping[str, Any],
        last: bool,
    ) -> Scores:
        inner = [layer + 1 for layer in layers if layer >= 0]
        out = self._base(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions if self._axes else positions[0],
            past_key_values=cache,
            use_cache=True,
            **({"output_hidden_states": inner} if inner else {}),
            **extra,
        )
        states = out.last_hidden_state
        logits = self._head(states[:, -1:] if last else states)
        return Scores(logits, {layer: states if layer < 0 else out.hidden_states[layer + 1] for layer in layers})
