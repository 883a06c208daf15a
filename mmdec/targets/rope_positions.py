"""Positions on three axes (M-RoPE): time, height and width of visual tokens; text has the same on all three.

transformers' models store the derived `rope_deltas` on themselves, where another run overwrites it. Here positions are
computed for each run and kept in its session. The offsets are also stored on the cache that a chat continues, because
the next turn brings only new text and cannot recompute them from earlier images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import DynamicCache

from mmdec.targets.text_prompt import TextPrompt
from mmdec.targets.vision_inputs import KINDS, VisionInputs
from mmdec.types import InputError

ATTRIBUTE = "mmdec_rope"  # attribute of a cache, which copies of the cache keep


@dataclass(frozen=True)
class RopeOffsets:
    """The difference between a chat's positions and its columns after its images."""

    offsets: Tensor  # (3, B)
    columns: int  # columns of the cache from which the offsets hold


def longest(config: Any) -> int | None:
    """The largest number of positions that a language model's configuration may mean; None if it says nothing.

    That is the size of its table, or the length that its rotary positions are extended to.
    """
    most = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    factor = rope.get("factor")
    if type(most) is not int or not isinstance(factor, int | float):
        return most if type(most) is int else None
    return max(most, int(factor * (rope.get("original_max_position_embeddings") or most)))


def rope_positions(model: Any, text: TextPrompt, vision: VisionInputs, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """Positions (3, B, F) of the new columns, and the offsets (3, B) of later columns.

    model: without its LM head. given: positions from the caller or `generate`, (B, C) or (3 or 4, B, C). Those with one
        axis are ignored, since `generate` derives them from state that another run may have left on the model.
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


def remember(cache: DynamicCache, offsets: Tensor, columns: int) -> None:
    """Store the offsets (3, B) on a cache for the next turn. columns: of the cache at the end of this prompt."""
    setattr(cache, ATTRIBUTE, RopeOffsets(offsets, columns))


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
