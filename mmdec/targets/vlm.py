"""Vision-language models of transformers as targets: LLaVA 1.5, LLaVA-NeXT, and kinds with positions of three axes.

The prompt's pass is the model's own, with images and DeepStack; a draft's pass is that of its language model. A video
is a list of images for LLaVA, `pixel_values_videos` for Qwen. A run leaves nothing on the model object.

Images are encoded once for a run and assigned to the placeholders in its token ids. The vision tower runs in `generate`
before this loop begins, or here if `generate` was given no pixels. The run stores the outputs, so later passes do not
run the tower again.

Positions on three axes (M-RoPE) are time, height and width of visual tokens; text has the same on all three.
transformers' models store the derived `rope_deltas` on themselves, where another run overwrites it. Here positions are
computed for each run and kept in its session.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from mmdec.decode.watch import Watch
from mmdec.targets.decoder import ATTRIBUTE, DecoderTarget, Mask, Prompt, RopeOffsets, TextPrompt
from mmdec.targets.families import check_decoder, check_proof
from mmdec.targets.hf_target import recording
from mmdec.targets.text import text_scorer
from mmdec.types import InputError, Scores

KINDS = ("image", "video")
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
# sizes in pixels of each image or video, or the size of its patch grid
SIZES = ("image_sizes", "image_grid_thw", "video_grid_thw")
NAMES = (*PIXELS.values(), *SIZES, "second_per_grid_ts", "mm_token_type_ids", "mm_encoder_outputs")
PLAIN = ("LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration")
AXES = (
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "GlmOcrForConditionalGeneration",
)
HELD = "vision_inputs"  # the key under which `hold_back` passes a run's VisionInputs to `prefill`


@dataclass(frozen=True)
class Encoded:
    """The vision tower's output for T visual tokens: all images of the batch, or all videos."""

    features: Tensor  # (T, H), projected
    lengths: list[int]  # visual tokens of each image
    deep: list[Tensor] = field(default_factory=list)  # DeepStack: (T, H) for each of the first layers
    summaries: Tensor | None = None  # (images, 2V): the tower's last states, mean and deviation over an image's patches

    @classmethod
    def of(cls, output: Any) -> Encoded:
        parts = list(output.pooler_output)
        deep = output.get("deepstack_features") or ()
        lengths = [len(part) for part in parts]
        return cls(
            torch.cat(parts), lengths, [torch.cat(list(layer)) for layer in deep], _summaries(output, len(parts))
        )

    def pick(self, tokens: Tensor) -> Encoded:
        """The features of these visual tokens (T',) int64."""
        return Encoded(self.features[tokens], [len(tokens)], [layer[tokens] for layer in self.deep])

    def output(self) -> SimpleNamespace:
        """The features in the format of a model's `mm_encoder_outputs`."""
        return SimpleNamespace(pooler_output=[self.features], deepstack_features=[[layer] for layer in self.deep])


@dataclass
class VisionInputs:
    """The images and videos of a run. `encoded` is filled by the first pass that needs it."""

    inputs: Mapping[str, Any]  # the inputs in NAMES that are not None
    rows: int  # number of prompts; the batch has more rows if each has several sequences
    encoded: dict[str, Encoded] | None = None
    # positions (3, B, F) of the prompt and offsets (3, B), once computed
    positions: tuple[Tensor, Tensor] | None = None
    seconds: float = 0.0  # time in the vision tower; 0 if `generate` ran it

    @classmethod
    def of(cls, inputs: Mapping[str, Any], rows: int) -> VisionInputs:
        """Read the images from a processor's output or from `generate`'s inputs. rows: number of rows of token ids.

        Raises: InputError if the pixels are malformed.
        """
        tensors = {name: inputs[name] for name in NAMES if inputs.get(name) is not None}
        for name in (*PIXELS.values(), *SIZES, "mm_token_type_ids"):
            value = tensors.get(name)
            if value is not None and not isinstance(value, Tensor):
                raise InputError(
                    f"`{name}` must be a tensor, but is of type {type(value).__name__}. Pass the output of the model's "
                    "own processor."
                )
        for kind, name in PIXELS.items():
            pixels = tensors.get(name)
            if pixels is not None and not (pixels.is_floating_point() and bool(pixels.isfinite().all())):
                raise InputError(
                    f"`{name}` must hold finite floating-point numbers, but holds {_bad(pixels)}. Pass {kind}s through "
                    "the model's own processor."
                )
        return cls(tensors, rows)

    @property
    def raw(self) -> Mapping[str, Any] | None:
        """The inputs for another model; None if `generate` did not pass the pixels on."""
        return None if "mm_encoder_outputs" in self.inputs else self.inputs

    def encode(self, model: Any) -> dict[str, Encoded]:
        """The features of all images and videos, by kind. The tower runs once for a run. model: the part without the LM
        head."""
        if self.encoded is None:
            watch = Watch(model.device)
            outputs = self.inputs.get("mm_encoder_outputs") or {}
            self.encoded = {kind: Encoded.of(outputs[kind]) for kind in KINDS if outputs.get(kind) is not None}
            for kind in KINDS:
                if PIXELS[kind] in self.inputs:
                    self.encoded[kind] = Encoded.of(self._tower(model, kind))
                    watch.lap("target")
            self.seconds += watch.seconds["target"]
        return self.encoded

    def _tower(self, model: Any, kind: str) -> Any:
        sizes = {name: value for name, value in self.inputs.items() if name in SIZES}
        call = model.get_image_features
        if kind == "video":
            if "video" not in model.input_modalities:
                raise InputError(
                    f"`pixel_values_videos` must be left out for {type(model).__name__}, which reads images. Pass a "
                    "video's frames as images."
                )
            call = model.get_video_features
        names = ("video_grid_thw",) if kind == "video" else ("image_sizes", "image_grid_thw")
        kind_sizes = {name: value for name, value in sizes.items() if name in names}
        try:
            return call(self.inputs[PIXELS[kind]], **kind_sizes, return_dict=True)
        except (InputError, MemoryError, torch.OutOfMemoryError):
            raise
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            shapes = {
                name: tuple(value.shape) for name, value in (("pixels", self.inputs[PIXELS[kind]]), *kind_sizes.items())
            }
            raise InputError(
                f"`{PIXELS[kind]}` must be as {type(model).__name__} reads it, but is {shapes}: "
                f"{str(error)[:200] or type(error).__name__}. Pass the output of the model's own processor."
            ) from error

    def deal(self, model: Any, kind: str, ids: Tensor, fresh: int) -> tuple[Encoded | None, Tensor]:
        """Assign features to the placeholders in the last `fresh` columns of ids (B, P).

        The run's features may cover all placeholders of ids, or only those in these columns.
        Returns: the features of these placeholders, and a mask (B, fresh) bool that is True at them.
        Raises: InputError if the number of features fits neither.
        """
        token = int(getattr(model.config, f"{kind}_token_id", -1))
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
                    return None, fresh_holders
                return encoded if len(tokens) == count and copies == 1 else encoded.pick(tokens), fresh_holders
        if encoded is None and not bool(fresh_holders.any()):
            return None, fresh_holders
        images = 0 if encoded is None else len(encoded.lengths)
        rows = fresh_holders[::copies].sum(1).tolist()
        raise InputError(
            f"`input_ids` must hold one placeholder (token {token}) for each visual token of the {kind}s in its row, "
            f"but holds {rows[0] if len(rows) == 1 else rows} for {count} visual tokens of {images} {kind}"
            f"{'s' * (images != 1)}. Name as many {kind}s in the text as you pass, and use the model's own processor."
        )


def _uncut(holders: Tensor, lengths: list[int]) -> bool:
    """Whether each image lies within one row of placeholders (B, P)."""
    return set(accumulate(holders.sum(1).tolist())) <= {0, *accumulate(lengths)}


def _summaries(output: Any, images: int) -> Tensor | None:
    """Mean and deviation (images, 2V) of states (images, patches, V), as LLaVA 1.5 has them; None for other towers."""
    states = output.get("last_hidden_state")
    if states is None or states.dim() != 3 or len(states) != images:
        return None
    return torch.cat([states.mean(1), states.std(1, unbiased=False)], 1)


def _bad(pixels: Tensor) -> str:
    return str(pixels.dtype) if not pixels.is_floating_point() else "some that are not finite"


def longest(config: Any) -> int | None:
    """The maximum number of positions by a language model's configuration; None if it has no such field.

    It is the size of its position table, or the length to which its rotary positions are extended.
    """
    most = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    factor = rope.get("factor")
    if type(most) is not int or not isinstance(factor, int | float):
        return most if type(most) is int else None
    return max(most, int(factor * (rope.get("original_max_position_embeddings") or most)))


def rope_positions(model: Any, text: TextPrompt, vision: VisionInputs, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """Positions (3, B, F) of the new columns, and the offsets (3, B) of later columns.

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
    """Positions (3, B, C) computed from the whole text; None if only a part of it or of its images is given."""
    if text.ids.shape[1] != text.mask.shape[1]:
        return None
    tokens = [getattr(model.config, f"{kind}_token_id") for kind in KINDS]
    if not any(bool((text.ids == token).any()) for token in tokens):
        return text.positions.expand(3, -1, -1)
    if text.past and not _covers(model, text.ids, vision):
        return None
    return _index(model, text.ids, text.mask, vision)


def _covers(model: Any, ids: Tensor, vision: VisionInputs) -> bool:
    """Whether the grids belong to all placeholders in ids (B, P), not only to the new ones."""
    merged = model.config.vision_config.spatial_merge_size**2
    copies = len(ids) // vision.rows
    for kind in KINDS:
        grids = vision.inputs.get(f"{kind}_grid_thw")
        count = 0 if grids is None else int(grids.prod(-1).sum()) // merged
        if count != int((ids[::copies] == getattr(model.config, f"{kind}_token_id")).sum()):
            return False
    return True


def _fresh(model: Any, text: TextPrompt, vision: VisionInputs) -> Tensor:
    """Positions (3, B, F) of the new columns, computed as if the text began with them."""
    width = text.fresh.shape[1]
    mask = text.mask[:, -width:]
    if any(f"{kind}_grid_thw" in vision.inputs for kind in KINDS):
        return _index(model, text.fresh, mask, vision)
    return (mask.long().cumsum(1) - 1).clamp(min=0).expand(3, -1, -1)


def _index(model: Any, ids: Tensor, mask: Tensor, vision: VisionInputs) -> Tensor:
    """The model's own positions (3, B, P) for ids (B, P)."""
    types = vision.inputs.get("mm_token_type_ids")
    copies = len(ids) // vision.rows
    if types is None or types.shape[0] != vision.rows or types.shape[1] < ids.shape[1]:
        shape = None if types is None else tuple(types.shape)
        raise InputError(
            f"`mm_token_type_ids` must be {(vision.rows, ids.shape[1])} beside images or videos, but is {shape}: it "
            "says which tokens are visual. Pass all that the model's processor gives."
        )
    names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    options = {name: vision.inputs[name] for name in names if name in vision.inputs}
    try:
        positions, _ = model.get_rope_index(
            ids[::copies],
            mm_token_type_ids=types[:, -ids.shape[1] :],
            attention_mask=mask[::copies].long(),
            **options,
        )
    except (IndexError, RuntimeError, StopIteration, TypeError, ValueError) as error:
        grids = {name: tuple(value.shape) for name, value in options.items() if isinstance(value, Tensor)}
        raise InputError(
            f"`image_grid_thw` and `video_grid_thw` must have a row for each image and video of `mm_token_type_ids`, "
            f"but are {grids or None}. Name as many in the text as you pass, and use the model's own processor."
        ) from error
    return positions.repeat_interleave(copies, 1)


def _remembered(text: TextPrompt) -> Tensor:
    """The offsets (3, B) that the previous run stored on the cache."""
    stored: RopeOffsets | None = getattr(text.cache, ATTRIBUTE, None)
    if stored is None or stored.columns > text.past or stored.offsets.shape[1] != len(text.ids):
        raise InputError(
            f"`past_key_values` must come from a run of mmdec, or the whole chat with all of its images must be given "
            f"to `mmdec.generate`, but it holds {text.past} columns whose images are not known. Pass `input_ids`, "
            "`mm_token_type_ids`, `pixel_values` and the grids of the whole chat."
        )
    return stored.offsets


@final
class VlmTarget(DecoderTarget):
    """A vision-language model. The language model's attention may be "sdpa", "eager" or "mmdec_tree"."""

    reads_images: ClassVar[bool] = True

    @staticmethod
    def takes(model: PreTrainedModel) -> bool:
        """Whether this is a model of one of these families."""
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
        """Split a call's inputs. Returns: those that `generate` gets and prepares, and those that go to `prefill`.

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
        """Inputs as for a language model, plus one object with the run's images and the vision tower's outputs."""
        prepared = dict(super().prepare_inputs(ids, config, inputs))
        vision = prepared.get(HELD) or VisionInputs.of(prepared, len(ids))
        return {name: value for name, value in prepared.items() if name not in NAMES} | {HELD: vision}

    def prompt_positions(self, inputs: Mapping[str, Any]) -> list[int]:
        """The positions of each row's prompt. With three axes an image takes as many as its longer side has tokens."""
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
        pictures = torch.zeros_like(text.ids, dtype=torch.bool)
        summaries = None
        for kind in KINDS:
            encoded, kind_mask = vision.deal(self._base, kind, text.ids, text.fresh.shape[1])
            visual |= kind_mask
            pictures |= text.ids == int(getattr(self.model.config, f"{kind}_token_id", -1))
            if encoded is not None:
                extra[kind] = encoded.output()
                summaries = encoded.summaries
        positions, offsets = text.positions[None, :, -text.fresh.shape[1] :], None
        if self._axes:
            if vision.positions is None:
                vision.positions = rope_positions(self._base, text, vision, given_positions)
            positions, offsets = vision.positions
        extra_inputs = {"mm_encoder_outputs": extra or None}
        return Prompt(text, positions, offsets, visual, pictures, extra_inputs, vision.seconds, summaries, vision.raw)

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
        mask: Mask,
        positions: Tensor,
        cache: Any,
        layers: tuple[int, ...],
        extra: Mapping[str, Any],
        last: bool,
    ) -> Scores:
        with recording(self._base.language_model, self.layers, [layer for layer in layers if layer >= 0]) as recorded:
            out = self._base(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions if self._axes else positions[0],
                past_key_values=cache,
                use_cache=cache is not None,
                **extra,
            )
        states = out.last_hidden_state
        logits = self._head(states[:, -1:] if last else states)
        return Scores(logits, {layer: states if layer < 0 else recorded[layer] for layer in layers})
