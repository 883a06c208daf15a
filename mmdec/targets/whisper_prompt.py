"""The prompt of Whisper's decoder, as `generate` prepares it, checked and brought into one form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmdec.targets.cache import check_cache
from mmdec.targets.row_layout import RowLayout
from mmdec.types import InputError

READ = {"input_ids", "encoder_outputs", "decoder_attention_mask", "past_key_values"}
LET_BE = {"use_cache", "attention_mask", "output_attentions", "output_hidden_states"}  # Whisper masks no features


@dataclass(frozen=True)
class WhisperPrompt:
    """The arguments of a prompt's pass, brought into one form."""

    ids: Tensor  # (B, P)
    states: Tensor  # (B, S, H)
    mask: Tensor  # (B, P) bool
    mask_given: Tensor | None  # where the caller has one
    positions: Tensor  # (B, P)
    holes: bool  # whether a row has padding after its first token

    @classmethod
    def of(cls, inputs: Mapping[str, Any], most: int) -> WhisperPrompt:
        unknown = sorted(name for name, value in inputs.items() if name not in READ | LET_BE and value is not None)
        ids, encoded = inputs.get("input_ids"), inputs.get("encoder_outputs")
        if unknown or not isinstance(ids, Tensor) or encoded is None:
            raise InputError(
                "`inputs` must hold the decoder's `input_ids` and `encoder_outputs` and may hold "
                f"`decoder_attention_mask`, but holds {unknown or sorted(inputs)}. Call `model.generate(features, "
                "custom_generate=mmdec.speculate(...))`, which prepares them."
            )
        cache = inputs.get("past_key_values")
        if cache is not None:
            check_cache(cache)
            if cache.get_seq_length():
                raise InputError(
                    f"`past_key_values` must be empty, but holds {cache.get_seq_length()} columns. Leave it out."
                )
        batch, width = ids.shape
        if width > most:
            raise InputError(f"`input_ids` must have at most {most} columns, but has {width}. Shorten the prompt.")
        given = inputs.get("decoder_attention_mask")
        if given is None:
            mask = torch.ones_like(ids, dtype=torch.bool)
            positions = torch.arange(width, device=ids.device).expand(batch, -1)
            return cls(ids, encoded[0], mask, None, positions, False)
        if given.shape != ids.shape or not bool(given[:, -1].all()):
            raise InputError(
                f"`decoder_attention_mask` must be {tuple(ids.shape)} with 1 at the end of every row, but is "
                f"{tuple(given.shape)}. Pad on the left."
            )
        mask = given.bool()
        counted = mask.long().cumsum(-1)
        holes = bool((counted[:, -1] + mask.long().argmax(1) != width).any())
        return cls(ids, encoded[0], mask, given, (counted - 1).masked_fill(~mask, 0), holes)

    def rows(self) -> RowLayout:
        """Where the rows lie once their holes are closed."""
        return RowLayout.of_prompt(self.mask, self.positions)
