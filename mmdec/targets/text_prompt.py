"""A language model's prompt as `generate` prepares it, checked and normalised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from mmdec.targets.cache import check_cache, shallow_copy
from mmdec.targets.families import ARGUMENTS
from mmdec.targets.row_layout import RowLayout
from mmdec.types import InputError

READ = {*ARGUMENTS, "use_cache"}  # the inputs that are read


@dataclass(frozen=True)
class TextPrompt:
    """The inputs of a prompt's pass, normalised."""

    ids: Tensor  # (B, P)
    fresh: Tensor  # (B, F) the ids that the cache does not hold
    mask: Tensor  # (B, C) bool over all columns, cached and new
    mask_given: Tensor | None  # the mask for the model; None if nothing is masked
    positions: Tensor  # (B, C)
    cache: DynamicCache | None
    past: int  # columns in the cache
    holes: bool  # whether a row has padding after its first token

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> TextPrompt:
        unknown = sorted(name for name, value in inputs.items() if name not in READ and value is not None)
        ids = inputs.get("input_ids")
        if unknown or not isinstance(ids, Tensor):
            raise InputError(
                "`inputs` must hold `input_ids` and may hold `attention_mask`, `position_ids` and `past_key_values`, "
                f"but holds {unknown or sorted(inputs)}. Leave the others out."
            )
        cache: Any = inputs.get("past_key_values")
        if isinstance(cache, EncoderDecoderCache):
            raise InputError("`past_key_values` must be a DynamicCache, but is an EncoderDecoderCache. Leave it out.")
        if cache is not None:
            check_cache(cache)
        past = 0 if cache is None else cache.get_seq_length()
        given_mask = inputs.get("attention_mask")
        if past and given_mask is None:
            raise InputError(
                f"`attention_mask` must be given with `past_key_values`, which holds {past} columns, but is None: it "
                "says whether the ids are the whole text or what is new. Pass the mask of the whole text."
            )
        cache_rows = (
            len(cast(Tensor, cast(DynamicLayer, cache.layers[0]).keys)) if cache is not None and past else len(ids)
        )
        if cache_rows != len(ids):
            raise InputError(
                f"`past_key_values` must hold the batch's {len(ids)} rows, but has {cache_rows}. Give each row its own."
            )
        # as in `generate`: a mask as long as the ids means that they are the whole text, else they are its new part
        mask = torch.ones_like(ids) if given_mask is None else given_mask
        if mask.ndim != 2 or len(mask) != len(ids):
            shape = tuple(mask.shape)
            raise InputError(f"`attention_mask` must be (B, P), but is {shape}. Pass the tokenizer's own.")
        mask = mask.bool()
        fresh = ids[:, past:] if mask.shape[1] == ids.shape[1] else ids
        if fresh.shape[1] == 0 or past + fresh.shape[1] != mask.shape[1]:
            raise InputError(
                f"`attention_mask` must cover cached and new tokens, but has {mask.shape[1]} columns for {past} cached "
                f"and {fresh.shape[1]} new ones. Pass the whole text and its mask."
            )
        if not bool(mask[:, -1].all()):
            raise InputError("`attention_mask` must be 1 at the end of every row, but is 0. Pad on the left.")
        counted = mask.long().cumsum(-1)
        positions = (counted - 1).masked_fill(~mask, 0)
        given_positions = inputs.get("position_ids")
        if given_positions is not None:
            fits = given_positions.ndim == 2 and len(given_positions) in (1, len(ids))
            if not fits or given_positions.shape[1] not in (fresh.shape[1], mask.shape[1]):
                shape = tuple(given_positions.shape)
                raise InputError(f"`position_ids` must be (B, {mask.shape[1]}), but is {shape}. Leave it out.")
            positions = torch.cat(
                [positions[:, : mask.shape[1] - given_positions.shape[1]], given_positions.expand(len(ids), -1)], 1
            )
        starts = mask.long().argmax(1)
        holes = bool((counted[:, -1] + starts != mask.shape[1]).any())
        return cls(ids, fresh, mask, None if bool(mask.all()) else given_mask, positions, cache, past, holes)

    def run_cache(self, config: PreTrainedConfig) -> DynamicCache:
        """The run's cache: the given one if the batch has one row without holes, else a copy that leaves it
        unchanged."""
        layers = [] if self.cache is None else cast(list[DynamicLayer], self.cache.layers)
        lengths = {layer.get_seq_length() for layer in layers}
        if self.past and (len(lengths) > 1 or len(layers) != len(DynamicCache(config=config).layers)):
            raise InputError(
                f"`past_key_values` must be this model's own, but holds {len(layers)} layers of "
                f"{sorted(lengths)} columns. Begin with an empty cache."
            )
        shared = len(self.ids) > 1 or self.holes
        if self.cache is None or (shared and not self.past):
            return DynamicCache(config=config)
        return shallow_copy(self.cache) if shared else self.cache

    def rows(self) -> RowLayout:
        """The layout of the rows once their holes are closed."""
        return RowLayout.of_prompt(self.mask, self.positions)
