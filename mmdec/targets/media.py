"""Targets for transformers' models that read images, video or sound: one class, which inspects each model's interface.

The pass over the prompt is the model's own, with images, sound and DeepStack. A draft has only text tokens, so its pass
needs only the cache. Nothing is stored on the model object.

Images and videos are encoded once in a `generate` call, and assigned to the placeholders among the token ids. The
vision tower runs in `model.generate` before the decoding loop begins, or in this module if `split_inputs` kept the
pixels from `generate`. Sound features go to the model unchanged.

Positions on three axes (M-RoPE) are time, height and width of visual tokens; a text token has the same position on all
three. transformers' models store the resulting `rope_deltas` on the model object, where another call overwrites them.
Here positions are computed for each `generate` call and stored in its session.
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
from mmdec.checks.files import error_line
from mmdec.compat import CACHE_ARGUMENT
from mmdec.core.timing import Stopwatch
from mmdec.errors import InputError
from mmdec.targets.decoder import DECODER_INPUTS, ROPE_ATTRIBUTE, DecoderTarget, Mask, Prompt, RopeOffsets, TextPrompt
from mmdec.targets.families import MEDIA_CLASSES, check_decoder, check_proof
from mmdec.targets.text import text_scorer
from mmdec.types import MediaContext

# inputs that hold a type number for each token of the prompt
TOKEN_TYPE_INPUTS = ("token_type_ids", "mm_token_type_ids")
PLACEHOLDER_IDS = ("image_token_id", "video_token_id", "audio_token_id")
PIXELS = {"pixel_values": "image", "pixel_values_images": "image", "pixel_values_videos": "video"}
VISUAL_KINDS = ("image", "video")
ROPE_INPUTS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")  # inputs on which M-RoPE positions depend
# Qwen2.5-Omni's inputs on which M-RoPE positions depend: argument of `get_rope_index` -> name of the input
OMNI_ROPE_INPUTS = {"second_per_grids": "video_second_per_grid", "use_audio_in_video": "use_audio_in_video"}
# inputs that hold the number of frames of each sound
SOUND_LENGTH_INPUTS = ("feature_attention_mask", "audio_feature_lengths")
TENSORS = (*PIXELS, "image_sizes", "image_grid_thw", "video_grid_thw", "mm_token_type_ids")
# name of the input that holds the vision tower's outputs: "image" or "video" -> output
VISION_OUTPUTS_KEY = "mm_encoder_outputs"
# exceptions that a model may raise for inputs that do not fit it
MALFORMED_INPUT_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
VISION_INPUTS_KEY = "vision_inputs"  # key of the `VisionInputs` among the inputs of `prefill`


@dataclass(frozen=True)
class VisionReport:
    """What the pass over a prompt tells of the vision tower, as `PrefillOutput.report` and `Round.report`."""

    seconds: float  # seconds in the tower, which the prompt's pass includes; 0 if the caller ran the tower
    # (images, 2 * width): mean and standard deviation of each image's states; None: not known
    summaries: Tensor | None


@dataclass(frozen=True)
class VisionOutput:
    """The vision tower's output for T visual tokens: all images of the batch, or all videos."""

    features: Tensor  # (T, H), projected to the language model's width
    lengths: list[int]  # number of visual tokens of each image or video
    output: Any  # the same features, as the output object that the language model reads
    deep: list[Tensor] = field(default_factory=list)  # [i]: (T, H), what DeepStack adds after layer i
    summaries: Tensor | None = None  # (images, 2 * width): mean and deviation of the tower's last states over patches

    @classmethod
    def from_model_output(cls, output: Any) -> VisionOutput:
        # Llama 4 has no `pooler_output`
        states = output.last_hidden_state if output.pooler_output is None else output.pooler_output
        parts = [part.reshape(-1, part.shape[-1]) for part in states]
        deep = [torch.cat(list(layer)) for layer in output.get("deepstack_features") or ()]
        return cls(torch.cat(parts), [len(part) for part in parts], output, deep, _summaries(output, len(parts)))

    def pick(self, tokens: Tensor) -> Any:
        """Return the vision tower's output for some of its visual tokens.

        Args:
            tokens: Indices (T',) int64 of the tokens.
        """
        # given as the features of one image, because models only concatenate the features of all images
        features = self.features[tokens][None]
        parts = [*features] if isinstance(self.output.pooler_output, (list, tuple)) else features
        deep = [[layer[tokens]] for layer in self.deep]
        picked: Any = BaseModelOutputWithPooling(last_hidden_state=cast(Any, features), pooler_output=cast(Any, parts))
        picked.deepstack_features = deep
        return picked


@dataclass
class VisionInputs:
    """The images and videos of one `generate` call: the caller's inputs and, once computed, the tower's outputs."""

    inputs: Mapping[str, Any]  # the caller's pixels, grids and the like, by name
    rows: int  # number of prompts; the batch has more rows if each prompt gets several sequences
    encoded: dict[str, VisionOutput] | None = None
    # M-RoPE position ids (3, B, F) of the prompt's F new tokens, and offsets (3, B) of later tokens; None: not computed
    positions: tuple[Tensor, Tensor] | None = None
    seconds: float = 0.0  # seconds spent in the vision tower; 0 if `generate` ran it

    @classmethod
    def from_inputs(cls, states: Mapping[str, Any], rows: int) -> VisionInputs:
        """Check the inputs for images and videos.

        Args:
            states: The processor's outputs.
            rows: Number of prompts.

        Raises:
            InputError: If the pixels are malformed.
        """
        for name in TENSORS:
            value = states.get(name)
            if value is not None and not isinstance(value, Tensor):
                raise InputError(
                    f"`{name}` must be a tensor, but is of type {type(value).__name__}. Pass the output of the model's "
                    "own processor."
                )
        for name, kind in PIXELS.items():
            pixels = states.get(name)
            if pixels is not None and not (pixels.is_floating_point() and bool(pixels.isfinite().all())):
                bad = "some that are not finite" if pixels.is_floating_point() else str(pixels.dtype)
                raise InputError(
                    f"`{name}` must hold finite floating-point numbers, but holds {bad}. Pass {kind}s through the "
                    "model's own processor."
                )
        return cls(states, rows)

    def encode(self, model: Any) -> dict[str, VisionOutput]:
        """Return the features of all images and videos: "image" or "video" -> features.

        The vision tower runs only at the first call.

        Args:
            model: The model without its LM head.
        """
        if self.encoded is None:
            stopwatch = Stopwatch(model.device)
            outputs = self.inputs.get(VISION_OUTPUTS_KEY) or {}
            self.encoded = {
                kind: VisionOutput.from_model_output(outputs[kind])
                for kind in VISUAL_KINDS
                if outputs.get(kind) is not None
            }
            for pixels in PIXELS:
                if pixels in self.inputs:
                    with stopwatch.stage("tower"):
                        self.encoded[PIXELS[pixels]] = VisionOutput.from_model_output(self._tower(model, pixels))
            self.seconds += stopwatch.seconds.get("tower", 0.0)
        return self.encoded

    def _tower(self, model: Any, pixels: str) -> Any:
        call = getattr(model, f"get_{PIXELS[pixels]}_features", None)
        if call is None:
            remedy = " Pass a video's frames as images." if PIXELS[pixels] == "video" else ""
            reads = " and ".join(f"{modality}s" for modality in model.input_modalities if modality != "text")
            raise InputError(f"`{pixels}` must be left out for {type(model).__name__}, which reads {reads}.{remedy}")
        named = {name: self.inputs[name] for name in inspect.signature(call).parameters if name in self.inputs}
        try:
            return call(**named, return_dict=True)
        except PASSED_ON:
            raise
        except MALFORMED_INPUT_ERRORS as error:
            shapes = {name: tuple(value.shape) for name, value in named.items() if isinstance(value, Tensor)}
            raise InputError(
                f"`{pixels}` must be as {type(model).__name__} reads it, but is {shapes}: "
                f"{str(error)[:200] or type(error).__name__}. Pass the output of the model's own processor."
            ) from error

    def assign_features(self, model: Any, kind: str, ids: Tensor, fresh: int) -> tuple[Any, Tensor | None]:
        """Assign visual features to the placeholders among the last `fresh` tokens of each batch row.

        The features may cover all placeholders of `ids`, or only the placeholders among the last `fresh` tokens.

        Args:
            model: The model without its LM head.
            kind: "image" or "video".
            ids: (B, P).

        Returns:
            The tower's output for the placeholders among the last `fresh` tokens, None if there are none; and mean and
            deviation of each image's states (images, 2 * width), None if not known.

        Raises:
            InputError: If the number of features is neither of these two numbers of placeholders.
        """
        token = int(getattr(model.config, f"{kind}_token_id", None) or -1)
        holders = ids == token
        fresh_holders = holders[:, -fresh:]
        encoded = self.encode(model).get(kind)
        copies = len(ids) // self.rows
        count = 0 if encoded is None else len(encoded.features)
        for holder_mask in (holders[::copies], fresh_holders[::copies]):
            if encoded is not None and count == int(holder_mask.sum()) and _fits_rows(holder_mask, encoded.lengths):
                indices = holder_mask.flatten().cumsum(0).view(holder_mask.shape) - 1
                tokens = indices.repeat_interleave(copies, 0)[:, -fresh:][fresh_holders]
                if not len(tokens):
                    return None, None
                takes_all = len(tokens) == count and copies == 1
                return (encoded.output, encoded.summaries) if takes_all else (encoded.pick(tokens), None)
        if encoded is None and not bool(fresh_holders.any()):
            return None, None
        images = 0 if encoded is None else len(encoded.lengths)
        rows = fresh_holders[::copies].sum(1).tolist()
        raise InputError(
            f"`input_ids` must hold one placeholder (token {token}) for each visual token of the {kind}s in its row, "
            f"but holds {rows[0] if len(rows) == 1 else rows} for {count} visual tokens of {images} {kind}"
            f"{'s' * (images != 1)}. Name as many {kind}s in the text as you pass, and use the model's own processor."
        )


def _fits_rows(holders: Tensor, lengths: list[int]) -> bool:
    """Return whether each image's visual tokens fit into one batch row.

    Args:
        holders: (B, P) bool, True at placeholders.
        lengths: Each image's number of visual tokens.
    """
    return set(accumulate(holders.sum(1).tolist())) <= {0, *accumulate(lengths)}


def _summaries(output: Any, images: int) -> Tensor | None:
    """Return mean and standard deviation over patches of the vision tower's last states.

    Args:
        images: Number of images.

    Returns:
        (images, 2 * width); None if the states are not (images, patches, width), as LLaVA 1.5's are.
    """
    states = output.get("last_hidden_state")
    if states is None or states.dim() != 3 or len(states) != images:
        return None
    return torch.cat([states.mean(1), states.std(1, unbiased=False)], 1)


def rope_positions(
    model: Any, text: TextPrompt, vision: VisionInputs, prepared: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the M-RoPE position ids of a prompt.

    Args:
        model: The model without its LM head.
        prepared: Position ids from the caller or `generate`, (B, C) or (3 or 4, B, C); position ids of other shapes are
            ignored, because `generate` may have computed them from state that another call left on the model.

    Returns:
        Position ids (3, B, F) of the F new tokens; and offsets (3, B): what later tokens add to their index in the
        text.

    Raises:
        InputError: If the positions of the images in a given cache are unknown.
    """
    text_positions, width = text.positions, text.new_ids.shape[1]
    usable = prepared is not None and (prepared.ndim == 2 or prepared.shape[0] in (3, 4))
    if usable and prepared is not None:
        positions = prepared.expand(3, *prepared.shape) if prepared.ndim == 2 else prepared[-3:]
        positions = positions.expand(3, len(text.ids), -1)
    else:
        positions = _whole_text_positions(model, text, vision)
    if positions is None:
        before = _stored_offsets(text)
        after = _new_token_positions(model, text, vision)
        text_counts = text.mask[:, : text.past].sum(1)
        positions = after + text_counts[:, None] + before[:, :, None]
    offsets = positions[:, :, -1] - text_positions[:, -1]
    return positions[:, :, -width:], offsets


def _whole_text_positions(model: Any, text: TextPrompt, vision: VisionInputs) -> Tensor | None:
    """Compute position ids (3, B, C) of the whole text; None if only a part of the text or of its images is given."""
    if text.ids.shape[1] != text.mask.shape[1]:
        return None
    tokens = [getattr(model.config, f"{kind}_token_id") for kind in VISUAL_KINDS]
    if not any(bool((text.ids == token).any()) for token in tokens):
        return text.positions.expand(3, -1, -1)
    if text.past and not _covers(model, text.ids, vision):
        return None
    return _rope_index(model, text.ids, text.mask, vision)


def _covers(model: Any, ids: Tensor, vision: VisionInputs) -> bool:
    """Return whether the caller gave the images of all placeholders in ids (B, P).

    A chat's later turn may bring only new images.
    """
    merged = model.config.vision_config.spatial_merge_size**2
    copies = len(ids) // vision.rows
    for kind in VISUAL_KINDS:
        grids = vision.inputs.get(f"{kind}_grid_thw")
        count = 0 if grids is None else int(grids.prod(-1).sum()) // merged
        if count != int((ids[::copies] == getattr(model.config, f"{kind}_token_id")).sum()):
            return False
    return True


def _new_token_positions(model: Any, text: TextPrompt, vision: VisionInputs) -> Tensor:
    """Compute position ids (3, B, F) of the prompt's F new tokens as if no text were before them."""
    width = text.new_ids.shape[1]
    mask = text.mask[:, -width:]
    if any(f"{kind}_grid_thw" in vision.inputs for kind in VISUAL_KINDS):
        return _rope_index(model, text.new_ids, mask, vision)
    return (mask.long().cumsum(1) - 1).clamp(min=0).expand(3, -1, -1)


def _rope_index(model: Any, ids: Tensor, mask: Tensor, vision: VisionInputs) -> Tensor:
    """Compute position ids (3, B, P) of ids (B, P) by the model's `get_rope_index`.

    Raises:
        InputError: If the images do not fit the ids.
    """
    types, parameters = vision.inputs.get("mm_token_type_ids"), inspect.signature(model.get_rope_index).parameters
    copies = len(ids) // vision.rows
    options = {name: vision.inputs[name] for name in ROPE_INPUTS if name in vision.inputs}
    if "mm_token_type_ids" not in parameters:
        options |= {
            name: vision.inputs[input_name]
            for name, input_name in OMNI_ROPE_INPUTS.items()
            if input_name in vision.inputs
        }
        sound_lengths = next((vision.inputs[name] for name in SOUND_LENGTH_INPUTS if name in vision.inputs), None)
        options["audio_seqlens"] = (
            sound_lengths.sum(-1) if sound_lengths is not None and sound_lengths.ndim == 2 else sound_lengths
        )
    elif types is None or types.shape[0] != vision.rows or types.shape[1] < ids.shape[1]:
        shape = None if types is None else tuple(types.shape)
        raise InputError(
            f"`mm_token_type_ids` must be {(vision.rows, ids.shape[1])} with images or videos, but is {shape}: it "
            "marks the visual tokens. Pass the complete output of the model's processor."
        )
    else:
        options["mm_token_type_ids"] = types[:, -ids.shape[1] :]
    try:
        positions, _ = model.get_rope_index(ids[::copies], attention_mask=mask[::copies].long(), **options)
    except PASSED_ON:
        raise
    except MALFORMED_INPUT_ERRORS as error:
        grids = {name: tuple(value.shape) for name, value in options.items() if isinstance(value, Tensor)}
        raise InputError(
            f"`image_grid_thw` and `video_grid_thw` must have a row for each image and video of `mm_token_type_ids`, "
            f"but are {grids or None}. Name as many in the text as you pass, and use the model's own processor."
        ) from error
    return positions.repeat_interleave(copies, 1)


def _stored_offsets(text: TextPrompt) -> Tensor:
    """Return the offsets (3, B) that the chat's previous turn stored on the cache.

    They are what to add to a token's index in the text.
    """
    stored: RopeOffsets | None = getattr(text.cache, ROPE_ATTRIBUTE, None)
    if stored is None or stored.columns > text.past or stored.offsets.shape[1] != len(text.ids):
        raise InputError(
            f"`{CACHE_ARGUMENT}` must come from a run of mmdec, or the whole chat with all of its images must be given "
            f"to `mmdec.generate`, but it holds {text.past} columns whose images are not known. Pass `input_ids`, "
            "`mm_token_type_ids`, `pixel_values` and the grids of the whole chat."
        )
    return stored.offsets


@final
class MediaTarget(DecoderTarget):
    """Scores token trees with a model that reads images, video or sound among its tokens.

    The attention implementation of its language model may be "sdpa", "eager" or "mmdec_tree".

    Raises:
        InputError: If the model's language model cannot score drafts or roll them back.
    """

    reads_images: ClassVar[bool] = True

    @staticmethod
    def supports(model: PreTrainedModel) -> bool:
        """Return whether this is a model of a family that tests cover."""
        return any(
            kind.__name__ in MEDIA_CLASSES and "transformers." in kind.__module__ for kind in type(model).__mro__
        )

    def __init__(self, model: PreTrainedModel) -> None:
        text = model.config.get_text_config(decoder=True)
        check_decoder(type(model).__name__, text)
        if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:  # the configuration may name any language model
            check_proof(cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]), text, text_scorer)
        super().__init__(model)
        self._base: Any = model.base_model
        self._axes = callable(getattr(self._base, "get_rope_index", None))
        towers = (getattr(self._base, f"get_{kind}_features", None) for kind in VISUAL_KINDS)
        tower_arguments = {
            name for tower in towers if tower is not None for name in inspect.signature(tower).parameters
        }
        self._vision = {
            *tower_arguments,
            *PIXELS,
            *ROPE_INPUTS,
            VISION_OUTPUTS_KEY,
            *["mm_token_type_ids"] * self._axes,
        }
        # names of the inputs on which positions may depend
        self._position_inputs = {*self._vision, *OMNI_ROPE_INPUTS.values(), *SOUND_LENGTH_INPUTS}
        self._arguments = {*inspect.signature(model.forward).parameters} - {"inputs_embeds", "labels"}
        prepare, stock_prepare = (
            cast(Any, kind).prepare_inputs_for_generation for kind in (type(model), GenerationMixin)
        )
        self._prepares = prepare is not stock_prepare  # whether the class overrides `prepare_inputs_for_generation`

    def split_inputs(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split the caller's inputs.

        Pixels go to `prefill`, so that the vision tower's time is measured with decoding. So do position ids on three
        axes, because `model.generate` would store them on the model.

        Returns:
            The inputs for `model.generate`, and the inputs that go to `prefill` directly.
        """
        ids: Tensor = inputs["input_ids"]
        generate_inputs = {name: value for name, value in inputs.items() if name not in self._vision}
        prefill_inputs: dict[str, Any] = {VISION_INPUTS_KEY: self._vision_inputs(inputs)}
        if self._axes:
            prefill_inputs["position_ids"] = generate_inputs.get("position_ids")
            mask = generate_inputs.get("attention_mask")
            generate_inputs["position_ids"] = torch.zeros_like(ids if mask is None else mask, dtype=torch.long)
        return generate_inputs, prefill_inputs

    def _vision_inputs(self, inputs: Mapping[str, Any]) -> VisionInputs:
        ids, vision = inputs.get("input_ids"), {name: inputs[name] for name in self._position_inputs if name in inputs}
        vision = {name: value for name, value in vision.items() if value is not None}
        return inputs.get(VISION_INPUTS_KEY) or VisionInputs.from_inputs(
            vision, len(ids) if isinstance(ids, Tensor) else 1
        )

    def prepare_inputs(self, ids: Tensor, config: GenerationConfig, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the inputs of `prefill`: those of a language model, and the images and videos as `VisionInputs`."""
        prepared = dict(super().prepare_inputs(ids, config, inputs))
        vision = self._vision_inputs({**prepared, "input_ids": ids})
        return {name: value for name, value in prepared.items() if name not in self._vision} | {
            VISION_INPUTS_KEY: vision
        }

    def prompt_positions(self, inputs: Mapping[str, Any]) -> list[int]:
        if not self._axes:
            return super().prompt_positions(inputs)
        text_inputs = {name: value for name, value in inputs.items() if name not in self._vision}
        # with M-RoPE, an image takes only as many positions as its longer side has tokens
        positions, _ = rope_positions(
            self._base, TextPrompt.from_inputs(text_inputs), self._vision_inputs(inputs), None
        )
        return (1 + positions.amax((0, 2))).tolist()

    def prompt_tokens(self, inputs: Mapping[str, Any]) -> int | None:
        """Return how many tokens the prompt has; None with pictures or sound, whose encoders take most of the time."""
        values = (*self._vision_inputs(inputs).inputs.values(), *inputs.values())
        has_media = any(isinstance(value, Tensor) and value.is_floating_point() for value in values)
        return None if has_media else super().prompt_tokens(inputs)

    def _prepare_prompt(self, inputs: Mapping[str, Any]) -> Prompt:
        """Encode the media of a prompt, and sort its inputs into text, positions and what `forward` also takes."""
        vision = self._vision_inputs(inputs)
        text_inputs = {
            name: value for name, value in inputs.items() if name not in self._vision and name != VISION_INPUTS_KEY
        }
        given_positions = text_inputs.pop("position_ids", None) if self._axes else None
        media = {
            name: text_inputs.pop(name)
            for name in [*text_inputs]
            if name in self._arguments and name not in DECODER_INPUTS
        }
        media = {name: value for name, value in media.items() if value is not None}
        text = TextPrompt.from_inputs(text_inputs)
        width, outputs, summaries = text.new_ids.shape[1], dict[str, Any](), None
        for kind in VISUAL_KINDS:
            output, summaries_of_kind = vision.assign_features(self._base, kind, text.ids, width)
            if output is not None:
                outputs[kind] = output
            if kind == "image":
                summaries = summaries_of_kind
        tokens = [getattr(self.model.config, name, None) for name in PLACEHOLDER_IDS]
        placeholder_ids = torch.tensor([token for token in tokens if isinstance(token, int)], device=text.ids.device)
        placeholders = torch.isin(text.ids, placeholder_ids)
        positions, offsets = text.positions[None, :, -width:], None
        if self._axes:
            if vision.positions is None:
                vision.positions = rope_positions(self._base, text, vision, given_positions)
            positions, offsets = vision.positions
        extra = {**media, **({VISION_OUTPUTS_KEY: outputs} if outputs else {})}
        images = None if VISION_OUTPUTS_KEY in vision.inputs else {**vision.inputs, **media}
        report = VisionReport(vision.seconds, summaries)
        return Prompt(text, positions, offsets, extra, MediaContext(placeholders, images), report)

    def _forward(self, ids: Tensor, mask: Mask, positions: Tensor, cache: Any, extra: Mapping[str, Any]) -> Any:
        """Call the model with the arguments that its `forward` takes; media that do not fit are an InputError."""
        model: Any = self.model
        media = sorted(
            name
            for name in extra
            if name == VISION_OUTPUTS_KEY or (name in self._arguments and name not in DECODER_INPUTS)
        )
        arguments: dict[str, Any] = {
            "attention_mask": mask,
            "position_ids": positions if self._axes else positions[0],
            CACHE_ARGUMENT: cache,
            "use_cache": cache is not None,
            **extra,
        }
        try:
            # these inputs hold one number for each token of the prompt; the finished text is longer
            for name in TOKEN_TYPE_INPUTS:
                if isinstance(arguments.get(name), Tensor):
                    arguments[name] = pad(arguments[name], (0, max(0, ids.shape[1] - arguments[name].shape[1])))
            if self._prepares:
                arguments = model.prepare_inputs_for_generation(ids, is_first_iteration=bool(media), **arguments)
                ids = arguments.pop("input_ids")
            return model(input_ids=ids, **arguments)
        except PASSED_ON:
            raise
        except MALFORMED_INPUT_ERRORS as error:
            if not media:
                raise
            raise InputError(
                f"`inputs` must be as {type(model).__name__} reads them, but {', '.join(media)} do not fit the text: "
                f"{error_line(error)}. Pass the output of the model's own processor."
            ) from error
