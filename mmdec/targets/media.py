"""Targets for transformers' models that read images, video or sound: one class, which inspects each model's interface.

The prompt's pass is the model's own, with its images, sound and DeepStack; a draft's pass has tokens alone, and reads
the cache that the prompt left. A run leaves nothing on the model object.

Images and videos are encoded once for a run and assigned to the placeholders in its token ids. The vision tower runs in
`generate` before this loop begins, or here if `generate` was given no pixels. The run stores the outputs, so later
passes do not run the tower again. Sound goes to the model as it is given.

Positions on three axes (M-RoPE) are time, height and width of visual tokens; text has the same on all three.
transformers' models store the derived `rope_deltas` on themselves, where another run overwrites it. Here positions are
computed for each run and kept in its session.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from mmdec.checks.devices import PASSED_ON
from mmdec.decode.watch import Watch
from mmdec.targets.decoder import ATTRIBUTE, READ, DecoderTarget, Mask, Prompt, RopeOffsets, TextPrompt
from mmdec.targets.families import check_decoder, check_proof
from mmdec.targets.text import text_scorer
from mmdec.types import CACHE, InputError

# tests/exactness/test_vision.py and test_media.py try each with a small random model
SEEING = """
    AyaVision Cohere2Vision DeepseekVL Gemma3 Gemma4 Glm4v Glm4vMoe GlmOcr GotOcr2 Idefics2 Idefics3 InternVL Janus
    Kimi_K25 LightOnOcr Llama4 Llava LlavaNext LlavaOnevision Mistral3 Ovis2 PaliGemma Qwen2VL Qwen2_5_VL Qwen3VL
    Qwen3VLMoe SmolVLM Qwen2_5OmniThinker VideoLlava VipLlava
"""
HEARING = "AudioFlamingo3 GlmAsr GraniteSpeech MusicFlamingo Qwen2Audio Qwen3ASR Voxtral"
FAMILIES = f"{SEEING} {HEARING}"
REFUSED = {  # class -> why
    "Blip2ForConditionalGeneration": "its `generate` takes the language model's part",
    "MllamaForConditionalGeneration": "it reads pictures by cross attention, whose columns no draft may touch",
    "Phi4MultimodalForCausalLM": "its rope changes with the text's length, and pictures and sound have adapters",
    "Qwen2_5OmniForConditionalGeneration": "it speaks, too; its `thinker` is taken alone",
    "Qwen3_5ForConditionalGeneration": "its language model has recurrent states beside positions of three axes",
}
CLASSES = frozenset(f"{name}ForConditionalGeneration" for name in FAMILIES.split())
TYPES = ("token_type_ids", "mm_token_type_ids")  # a number for each token of the prompt
TOKENS = ("image_token_id", "video_token_id", "audio_token_id")
PIXELS = {"pixel_values": "image", "pixel_values_images": "image", "pixel_values_videos": "video"}
KINDS = ("image", "video")
GRIDS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")  # positions of three axes depend on them
# the same for Qwen2.5-Omni: argument of its position function -> input of the model
ALSO = {"second_per_grids": "video_second_per_grid", "use_audio_in_video": "use_audio_in_video"}
SOUNDS = ("feature_attention_mask", "audio_feature_lengths")  # inputs that hold the number of frames of each sound
TENSORS = (*PIXELS, "image_sizes", "image_grid_thw", "video_grid_thw", "mm_token_type_ids")
ENCODED = "mm_encoder_outputs"  # the input that holds the vision tower's outputs, by kind
# what a model raises for inputs that do not fit
MALFORMED = (ArithmeticError, AttributeError, LookupError, RuntimeError, StopIteration, TypeError, ValueError)
HELD = "vision_inputs"  # the key under which `hold_back` passes a run's VisionInputs to `prefill`


@dataclass(frozen=True)
class Encoded:
    """The vision tower's output for T visual tokens: all images of the batch, or all videos."""

    features: Tensor  # (T, H), projected to the language model's width
    lengths: list[int]  # number of visual tokens of each image or video
    output: Any  # the same in the form in which the language model reads it
    deep: list[Tensor] = field(default_factory=list)  # (T, H) that DeepStack adds to each of the first layers
    summaries: Tensor | None = None  # (images, 2 * width): mean and deviation of the tower's last states over patches

    @classmethod
    def of(cls, output: Any) -> Encoded:
        given = (
            output.last_hidden_state if output.pooler_output is None else output.pooler_output
        )  # Llama 4 projects later
        parts = [part.reshape(-1, part.shape[-1]) for part in given]
        deep = [torch.cat(list(layer)) for layer in output.get("deepstack_features") or ()]
        return cls(torch.cat(parts), [len(part) for part in parts], output, deep, _summaries(output, len(parts)))

    def pick(self, tokens: Tensor) -> Any:
        """Return the output for the visual tokens with these indices (T',) int64, as the language model reads it."""
        features = self.features[tokens][None]  # as one image, since models only concatenate the images' features
        listed = [*features] if isinstance(self.output.pooler_output, (list, tuple)) else features
        deep = [[layer[tokens]] for layer in self.deep]
        picked: Any = BaseModelOutputWithPooling(last_hidden_state=cast(Any, features), pooler_output=cast(Any, listed))
        picked.deepstack_features = deep
        return picked


@dataclass
class VisionInputs:
    """The images and videos of a run. `encoded` is filled by the first pass that needs it."""

    inputs: Mapping[str, Any]  # the pixels, grids and the like that the caller gave
    rows: int  # number of prompts; the batch has more rows if each has several sequences
    encoded: dict[str, Encoded] | None = None
    # positions (3, B, F) of the prompt and offsets (3, B), once computed
    positions: tuple[Tensor, Tensor] | None = None
    seconds: float = 0.0  # seconds spent in the vision tower; 0 if `generate` ran it

    @classmethod
    def of(cls, given: Mapping[str, Any], rows: int) -> VisionInputs:
        """Check inputs of images and videos, a processor's or `generate`'s. rows: number of rows of token ids.

        Raises: InputError if the pixels are malformed.
        """
        for name in TENSORS:
            value = given.get(name)
            if value is not None and not isinstance(value, Tensor):
                raise InputError(
                    f"`{name}` must be a tensor, but is of type {type(value).__name__}. Pass the output of the model's "
                    "own processor."
                )
        for name, kind in PIXELS.items():
            pixels = given.get(name)
            if pixels is not None and not (pixels.is_floating_point() and bool(pixels.isfinite().all())):
                bad = "some that are not finite" if pixels.is_floating_point() else str(pixels.dtype)
                raise InputError(
                    f"`{name}` must hold finite floating-point numbers, but holds {bad}. Pass {kind}s through the "
                    "model's own processor."
                )
        return cls(given, rows)

    def encode(self, model: Any) -> dict[str, Encoded]:
        """Return the features of all images and videos, by kind. The vision tower runs only at the first call. model:
        the part without the LM head."""
        if self.encoded is None:
            watch = Watch(model.device)
            outputs = self.inputs.get(ENCODED) or {}
            self.encoded = {kind: Encoded.of(outputs[kind]) for kind in KINDS if outputs.get(kind) is not None}
            for pixels in PIXELS:
                if pixels in self.inputs:
                    self.encoded[PIXELS[pixels]] = Encoded.of(self._tower(model, pixels))
                    watch.lap("target")
            self.seconds += watch.seconds["target"]
        return self.encoded

    def _tower(self, model: Any, pixels: str) -> Any:
        call = getattr(model, f"get_{PIXELS[pixels]}_features", None)
        if call is None:
            remedy = " Pass a video's frames as images." if PIXELS[pixels] == "video" else ""
            reads = " and ".join(f"{each}s" for each in model.input_modalities if each != "text")
            raise InputError(f"`{pixels}` must be left out for {type(model).__name__}, which reads {reads}.{remedy}")
        named = {name: self.inputs[name] for name in inspect.signature(call).parameters if name in self.inputs}
        try:
            return call(**named, return_dict=True)
        except PASSED_ON:
            raise
        except MALFORMED as error:
            shapes = {name: tuple(value.shape) for name, value in named.items() if isinstance(value, Tensor)}
            raise InputError(
                f"`{pixels}` must be as {type(model).__name__} reads it, but is {shapes}: "
                f"{str(error)[:200] or type(error).__name__}. Pass the output of the model's own processor."
            ) from error

    def deal(self, model: Any, kind: str, ids: Tensor, fresh: int) -> tuple[Any, Tensor | None]:
        """Assign features to the placeholders in the last `fresh` columns of ids (B, P).

        The run's features may cover all placeholders of ids, or only those in these columns.
        Returns: the tower's output for these placeholders, and the images' summaries; both may be None.
        Raises: InputError if the number of features fits neither.
        """
        token = int(getattr(model.config, f"{kind}_token_id", None) or -1)
        holders = ids == token
        fresh_holders = holders[:, -fresh:]
        encoded = self.encode(model).get(kind)
        copies = len(ids) // self.rows
        count = 0 if encoded is None else len(encoded.features)
        for holder_mask in (holders[::copies], fresh_holders[::copies]):
            if encoded is not None and count == int(holder_mask.sum()) and _uncut(holder_mask, encoded.lengths):
                indices = holder_mask.flatten().cumsum(0).view(holder_mask.shape) - 1
                tokens = indices.repeat_interleave(copies, 0)[:, -fresh:][fresh_holders]
                if not len(tokens):
                    return None, None
                whole = len(tokens) == count and copies == 1
                return (encoded.output, encoded.summaries) if whole else (encoded.pick(tokens), None)
        if encoded is None and not bool(fresh_holders.any()):
            return None, None
        images = 0 if encoded is None else len(encoded.lengths)
        rows = fresh_holders[::copies].sum(1).tolist()
        raise InputError(
            f"`input_ids` must hold one placeholder (token {token}) for each visual token of the {kind}s in its row, "
            f"but holds {rows[0] if len(rows) == 1 else rows} for {count} visual tokens of {images} {kind}"
            f"{'s' * (images != 1)}. Name as many {kind}s in the text as you pass, and use the model's own processor."
        )


def _uncut(holders: Tensor, lengths: list[int]) -> bool:
    """Return whether no image is divided between rows. holders: (B, P) bool, True at placeholders. lengths: number of
    visual tokens of each image."""
    return set(accumulate(holders.sum(1).tolist())) <= {0, *accumulate(lengths)}


def _summaries(output: Any, images: int) -> Tensor | None:
    """Compute mean and deviation, (images, 2 * width), of states (images, patches, width) of LLaVA 1.5's vision tower;
    None for other towers."""
    states = output.get("last_hidden_state")
    if states is None or states.dim() != 3 or len(states) != images:
        return None
    return torch.cat([states.mean(1), states.std(1, unbiased=False)], 1)


def rope_positions(model: Any, text: TextPrompt, vision: VisionInputs, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute positions (3, B, F) of the new columns, and what later columns add to their place in the text, (3, B).

    model: the part without the LM head. given: positions from the caller or `generate`, (B, C) or (3 or 4, B, C). Those
        with one axis are ignored, since `generate` derives them from state that another run may have left on the model.
    Raises: InputError if the positions of a given cache's images are unknown.
    """
    text_positions, width = text.positions, text.fresh.shape[1]
    usable = given is not None and (given.ndim == 2 or given.shape[0] in (3, 4))
    if usable and given is not None:
        positions = given.expand(3, *given.shape) if given.ndim == 2 else given[-3:]
        positions = positions.expand(3, len(text.ids), -1)
    else:
        positions = _computed(model, text, vision)
    if positions is None:
        before = _remembered(text)
        after = _fresh(model, text, vision)
        counted = text.mask[:, : text.past].sum(1)
        positions = after + counted[:, None] + before[:, :, None]
    offsets = positions[:, :, -1] - text_positions[:, -1]
    return positions[:, :, -width:], offsets


def _computed(model: Any, text: TextPrompt, vision: VisionInputs) -> Tensor | None:
    """Compute positions (3, B, C) from the whole text; None if only a part of it or of its images is given."""
    if text.ids.shape[1] != text.mask.shape[1]:
        return None
    tokens = [getattr(model.config, f"{kind}_token_id") for kind in KINDS]
    if not any(bool((text.ids == token).any()) for token in tokens):
        return text.positions.expand(3, -1, -1)
    if text.past and not _covers(model, text.ids, vision):
        return None
    return _index(model, text.ids, text.mask, vision)


def _covers(model: Any, ids: Tensor, vision: VisionInputs) -> bool:
    """Return whether the images' grids belong to all placeholders in ids (B, P), not only to the new ones."""
    merged = model.config.vision_config.spatial_merge_size**2
    copies = len(ids) // vision.rows
    for kind in KINDS:
        grids = vision.inputs.get(f"{kind}_grid_thw")
        count = 0 if grids is None else int(grids.prod(-1).sum()) // merged
        if count != int((ids[::copies] == getattr(model.config, f"{kind}_token_id")).sum()):
            return False
    return True


def _fresh(model: Any, text: TextPrompt, vision: VisionInputs) -> Tensor:
    """Compute positions (3, B, F) of the new columns as if the text began with them."""
    width = text.fresh.shape[1]
    mask = text.mask[:, -width:]
    if any(f"{kind}_grid_thw" in vision.inputs for kind in KINDS):
        return _index(model, text.fresh, mask, vision)
    return (mask.long().cumsum(1) - 1).clamp(min=0).expand(3, -1, -1)


def _index(model: Any, ids: Tensor, mask: Tensor, vision: VisionInputs) -> Tensor:
    """Compute the positions (3, B, P) of ids (B, P) by the model's `get_rope_index`. Raises InputError if the images'
    inputs do not fit the ids."""
    types, known = vision.inputs.get("mm_token_type_ids"), inspect.signature(model.get_rope_index).parameters
    copies = len(ids) // vision.rows
    options = {name: vision.inputs[name] for name in GRIDS if name in vision.inputs}
    if "mm_token_type_ids" not in known:
        options |= {name: vision.inputs[given] for name, given in ALSO.items() if given in vision.inputs}
        heard = next((vision.inputs[name] for name in SOUNDS if name in vision.inputs), None)
        options["audio_seqlens"] = heard.sum(-1) if heard is not None and heard.ndim == 2 else heard
    elif types is None or types.shape[0] != vision.rows or types.shape[1] < ids.shape[1]:
        shape = None if types is None else tuple(types.shape)
        raise InputError(
            f"`mm_token_type_ids` must be {(vision.rows, ids.shape[1])} beside images or videos, but is {shape}: it "
            "says which tokens are visual. Pass all that the model's processor gives."
        )
    else:
        options["mm_token_type_ids"] = types[:, -ids.shape[1] :]
    try:
        positions, _ = model.get_rope_index(ids[::copies], attention_mask=mask[::copies].long(), **options)
    except PASSED_ON:
        raise
    except MALFORMED as error:
        grids = {name: tuple(value.shape) for name, value in options.items() if isinstance(value, Tensor)}
        raise InputError(
            f"`image_grid_thw` and `video_grid_thw` must have a row for each image and video of `mm_token_type_ids`, "
            f"but are {grids or None}. Name as many in the text as you pass, and use the model's own processor."
        ) from error
    return positions.repeat_interleave(copies, 1)


def _remembered(text: TextPrompt) -> Tensor:
    """Read the offsets (3, B) that the previous run stored on the cache as `RopeOffsets`."""
    stored: RopeOffsets | None = getattr(text.cache, ATTRIBUTE, None)
    if stored is None or stored.columns > text.past or stored.offsets.shape[1] != len(text.ids):
        raise InputError(
            f"`{CACHE}` must come from a run of mmdec, or the whole chat with all of its images must be given "
            f"to `mmdec.generate`, but it holds {text.past} columns whose images are not known. Pass `input_ids`, "
            "`mm_token_type_ids`, `pixel_values` and the grids of the whole chat."
        )
    return stored.offsets


@final
class MediaTarget(DecoderTarget):
    """A model that reads images, video or sound among its tokens. The language model's attention may be "sdpa", "eager"
    or "mmdec_tree"."""

    reads_images: ClassVar[bool] = True

    @staticmethod
    def takes(model: PreTrainedModel) -> bool:
        """Return whether this is a model of a tested family."""
        return any(kind.__name__ in CLASSES and "transformers." in kind.__module__ for kind in type(model).__mro__)

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises InputError if drafts of its language model could not be scored or rolled back."""
        text = model.config.get_text_config(decoder=True)
        check_decoder(type(model).__name__, text)
        if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:  # the configuration may name any language model
            check_proof(cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]), text, text_scorer)
        super().__init__(model)
        self._base: Any = model.base_model
        self._axes = callable(getattr(self._base, "get_rope_index", None))
        towers = (getattr(self._base, f"get_{kind}_features", None) for kind in KINDS)
        seen = {name for tower in towers if tower is not None for name in inspect.signature(tower).parameters}
        self._vision = {*seen, *PIXELS, *GRIDS, ENCODED, *["mm_token_type_ids"] * self._axes}
        self._told = {*self._vision, *ALSO.values(), *SOUNDS}  # what positions depend on
        self._arguments = {*inspect.signature(model.forward).parameters} - {"inputs_embeds", "labels"}
        own, stock = (cast(Any, kind).prepare_inputs_for_generation for kind in (type(model), GenerationMixin))
        self._prepares = own is not stock  # the model has a `prepare_inputs_for_generation` of its own

    def hold_back(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split a call's inputs. Returns: the inputs for `generate`, and those that are kept back for `prefill`.

        Kept back are the pixels, so that the vision tower's time is measured with the run, and positions of three axes,
        because `generate` would store them in the model.
        """
        ids: Tensor = inputs["input_ids"]
        named = {name: value for name, value in inputs.items() if name not in self._vision}
        held: dict[str, Any] = {HELD: self._seen(inputs)}
        if self._axes:
            held["position_ids"] = named.get("position_ids")
            mask = named.get("attention_mask")
            named["position_ids"] = torch.zeros_like(ids if mask is None else mask, dtype=torch.long)
        return named, held

    def _seen(self, inputs: Mapping[str, Any]) -> VisionInputs:
        ids, given = inputs.get("input_ids"), {name: inputs[name] for name in self._told if name in inputs}
        given = {name: value for name, value in given.items() if value is not None}
        return inputs.get(HELD) or VisionInputs.of(given, len(ids) if isinstance(ids, Tensor) else 1)

    def prepare_inputs(self, ids: Tensor, config: GenerationConfig, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Prepare inputs as for a language model, and one more: the run's `VisionInputs`."""
        prepared = dict(super().prepare_inputs(ids, config, inputs))
        seen = self._seen({**prepared, "input_ids": ids})
        return {name: value for name, value in prepared.items() if name not in self._vision} | {HELD: seen}

    def prompt_positions(self, inputs: Mapping[str, Any]) -> list[int]:
        """Count the positions of each row's prompt. With three axes, an image takes as many as its longer side has
        tokens."""
        if not self._axes:
            return super().prompt_positions(inputs)
        named = {name: value for name, value in inputs.items() if name not in self._vision}
        positions, _ = rope_positions(self._base, TextPrompt.of(named), self._seen(inputs), None)
        return (1 + positions.amax((0, 2))).tolist()

    def _read(self, inputs: Mapping[str, Any]) -> Prompt:
        vision = self._seen(inputs)
        named = {name: value for name, value in inputs.items() if name not in self._vision and name != HELD}
        given_positions = named.pop("position_ids", None) if self._axes else None
        media = {name: named.pop(name) for name in [*named] if name in self._arguments and name not in READ}
        media = {name: value for name, value in media.items() if value is not None}
        text = TextPrompt.of(named)
        width, outputs, summaries = text.fresh.shape[1], dict[str, Any](), None
        for kind in KINDS:
            output, told = vision.deal(self._base, kind, text.ids, width)
            if output is not None:
                outputs[kind], summaries = output, told
        tokens = [getattr(self.model.config, name, None) for name in TOKENS]
        listed = torch.tensor([token for token in tokens if isinstance(token, int)], device=text.ids.device)
        pictures = torch.isin(text.ids, listed)
        positions, offsets = text.positions[None, :, -width:], None
        if self._axes:
            if vision.positions is None:
                vision.positions = rope_positions(self._base, text, vision, given_positions)
            positions, offsets = vision.positions
        extra = {**media, **({ENCODED: outputs} if outputs else {})}
        images = None if ENCODED in vision.inputs else {**vision.inputs, **media}
        seen = pictures[:, -width:]
        return Prompt(text, positions, offsets, seen, pictures, extra, vision.seconds, summaries, images)

    def _call(self, ids: Tensor, mask: Mask, positions: Tensor, cache: Any, more: Mapping[str, Any]) -> Any:
        model: Any = self.model
        media = sorted(name for name in more if name == ENCODED or (name in self._arguments and name not in READ))
        given: dict[str, Any] = {
            "attention_mask": mask,
            "position_ids": positions if self._axes else positions[0],
            CACHE: cache,
            "use_cache": cache is not None,
            **more,
        }
        try:
            for name in TYPES:  # the caller gave them for the prompt, but a finished text is longer
                if isinstance(given.get(name), Tensor):
                    given[name] = pad(given[name], (0, max(0, ids.shape[1] - given[name].shape[1])))
            if self._prepares:
                given = model.prepare_inputs_for_generation(ids, is_first_iteration=bool(media), **given)
                ids = given.pop("input_ids")
            return model(input_ids=ids, **given)
        except PASSED_ON:
            raise
        except MALFORMED as error:
            if not media:
                raise
            raise InputError(
                f"`inputs` must be as {type(model).__name__} reads them, but {', '.join(media)} do not fit the text: "
                f"{' '.join(str(error).split())[:200]}. Pass the output of the model's own processor."
            ) from error


def media_families() -> str:
    """List the supported families, for errors."""
    return ", ".join(FAMILIES.split())
