"""Models of transformers that see or hear, as targets: one class for all whose text has one position an axis.

The prompt's pass is the model's own: `generate` prepares the inputs of its first step (features, token types, masks),
and the model merges them into the text. A draft's pass has tokens alone, and reads the cache that the prompt left.
Models with positions of several axes are in `vlm.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from mmdec.targets.decoder import READ, DecoderTarget, Mask, Prompt, TextPrompt
from mmdec.targets.families import check_decoder, check_proof
from mmdec.targets.hf_target import recording
from mmdec.targets.text import text_scorer
from mmdec.types import InputError, Scores

# tests/exactness/test_media.py tries each with a small random model
SEEING = """
    AyaVision Cohere2Vision DeepseekVL Gemma3 GotOcr2 Idefics2 Idefics3 InternVL Janus LightOnOcr Llama4 LlavaOnevision
    Mistral3 Ovis2 PaliGemma SmolVLM VideoLlava VipLlava
"""
HEARING = "AudioFlamingo3 GlmAsr GraniteSpeech MusicFlamingo Qwen2Audio Qwen3ASR Voxtral"
FAMILIES = f"{SEEING} {HEARING}"
CLASSES = frozenset(f"{name}ForConditionalGeneration" for name in FAMILIES.split())
TYPES = ("token_type_ids", "mm_token_type_ids")  # a number for each token of the prompt
TOKENS = ("image_token_id", "video_token_id", "audio_token_id")


@final
class MediaTarget(DecoderTarget):
    """A model that reads images, video or sound among its tokens. The attention may be "sdpa" or "eager"."""

    reads_images: ClassVar[bool] = True

    @staticmethod
    def takes(model: PreTrainedModel) -> bool:
        """Whether this is a model of a tested family."""
        return any(kind.__name__ in CLASSES and "transformers." in kind.__module__ for kind in type(model).__mro__)

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises InputError if drafts of its language model could not be scored or rolled back."""
        text = model.config.get_text_config(decoder=True)
        check_decoder(type(model).__name__, text)
        if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
            check_proof(cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]), text, text_scorer)
        super().__init__(model)

    def _read(self, inputs: Mapping[str, Any]) -> Prompt:
        media = {name: value for name, value in inputs.items() if name not in READ and value is not None}
        text = TextPrompt.of({name: value for name, value in inputs.items() if name in READ})
        tokens = [getattr(self.model.config, name, None) for name in TOKENS]
        listed = torch.tensor([token for token in tokens if isinstance(token, int)], device=text.ids.device)
        pictures = torch.isin(text.ids, listed)
        width = text.fresh.shape[1]
        return Prompt(text, text.positions[None, :, -width:], None, pictures[:, -width:], pictures, {"media": media})

    def _embeds(self, prompt: Prompt) -> Tensor:
        raise InputError(
            f"`drafter` must not read the embeddings of pictures or sound for {type(self.model).__name__}, but does. "
            "Use one that reads the model's states."
        )

    def _run(
        self,
        ids: Tensor,
        mask: Mask,
        positions: Tensor,
        cache: Any,
        layers: tuple[int, ...],
        extra: Mapping[str, Any],
        last: bool,
    ) -> Scores:
        model: Any = self.model
        given: dict[str, Any] = {"attention_mask": mask, "position_ids": positions[0], "use_cache": cache is not None}
        media: Mapping[str, Any] = extra.get("media") or {}
        given = self._prepared(ids, given, cache, extra)
        decoder = cast(nn.Module, model.get_decoder())
        with recording(decoder, self.layers, [layer for layer in layers if layer >= 0]) as recorded:
            given["output_hidden_states"] = -1 in layers
            try:
                out = model(**given)
            except (IndexError, RuntimeError, TypeError, ValueError) as error:
                if not media:
                    raise
                names = ", ".join(sorted(media))
                raise InputError(
                    f"`inputs` must be as {type(model).__name__} reads them, but {names} do not fit the text: "
                    f"{' '.join(str(error).split())[:200]}. Pass the output of the model's own processor."
                ) from error
        logits = out.logits[:, -1:] if last else out.logits
        return Scores(logits, {layer: out.hidden_states[-1] if layer < 0 else recorded[layer] for layer in layers})

    def _prepared(self, ids: Tensor, given: dict[str, Any], cache: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of a pass, as `generate` prepares them: for its first step over a prompt, else for a later one."""
        more = {name: value for name, value in extra.items() if name != "media"} | dict(extra.get("media") or {})
        for name in TYPES:  # a finished text is longer than its prompt
            if isinstance(more.get(name), Tensor):
                more[name] = pad(more[name], (0, max(0, ids.shape[1] - more[name].shape[1])))
        prepared: dict[str, Any] = cast(Any, self.model).prepare_inputs_for_generation(
            ids, past_key_values=cache, is_first_iteration="media" in extra, **given, **more
        )
        return {name: value for name, value in prepared.items() if value is not None}


def media_families() -> str:
    """The supported families, for errors."""
    return ", ".join(FAMILIES.split())
