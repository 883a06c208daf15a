"""Masked diffusion models on transformers' decoders: Qwen2, Qwen3, Llama and similar ones with another attention mask.

A block-causal model (bd3lm, Fast-dLLM v2, SDAR) attends to all of its block and to the blocks before. Complete blocks
are therefore an exact key-value cache; the next block's first pass writes it. A fully bidirectional model (MDLM, LLaDA)
attends to everything, so nothing can be cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast, final

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from mmdec.checks.arguments import check_instance
from mmdec.compat import CACHE_ARGUMENT
from mmdec.core.canvas import CanvasSession
from mmdec.errors import InputError
from mmdec.targets.families import is_decoder_only

Visibility = Literal["block", "full"]


@dataclass(frozen=True)
class CanvasLayout:
    """How a model was trained to see its canvas."""

    visible: Visibility  # "block": its own and earlier blocks; "full": everything
    block_length: int
    mask_token: int
    shifted: bool = False  # whether the logits at a position predict the next one, as in an autoregressive model
    aligned: Literal["prompt", "start"] = "prompt"  # a block begins after the prompt, or at position 0
    cache: bool = True  # whether complete blocks are cached; only "block" can

    def blocks(self, positions: Tensor, prompt: int) -> Tensor:
        """Return the index of the block of each position, for a prompt of this length."""
        offset = -prompt % self.block_length if self.aligned == "prompt" else 0
        return (positions + offset) // self.block_length


def check_canvas_model(model: PreTrainedModel) -> None:
    """Raise InputError unless the model can run under a mask that is not causal."""
    check_instance("model", model, PreTrainedModel, "a loaded model of transformers", "Load it first.")
    kind = type(model).__name__
    if kind.startswith("DiffusionGemma"):
        raise InputError(
            f"`model` must score each canvas by itself, but is {kind}: each step reads the logits of the step "
            "before, and its entropy bound samples. Call `model.generate`."
        )
    layers = {type(layer) for layer in DynamicCache(config=model.config).layers} if is_decoder_only(model) else set()
    if layers != {DynamicLayer}:
        raise InputError(
            "`model` must be a decoder-only language model that attends to all tokens in every layer, to reveal a "
            f"canvas, but is {kind}. Choose a diffusion model of Qwen2's, Qwen3's or Llama's shape."
        )
    if model.config._attn_implementation not in ("sdpa", "eager", "mmdec_tree"):
        raise InputError(
            '`attn_implementation` must be "sdpa" or "eager" for a mask that is not causal, but is '
            f'{model.config._attn_implementation}. Call `model.set_attn_implementation("sdpa")`.'
        )


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask (1, 1, N, S) that transformers' layers add to their scores, from what (N, S) is visible."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[None, None]


def open_session(model: PreTrainedModel, layout: CanvasLayout, prompt: Tensor, blocks: int) -> CanvasSession:
    """Begin a text.

    Args:
        model: Passed `check_canvas_model`.
        layout: How the model was trained.
        prompt: (P,) token ids.
        blocks: Number of blocks that will be revealed at most; a model that sees everything sees their masks.
    """
    if layout.visible == "full":
        return _FullSession(model, layout, prompt, blocks)
    return _BlockSession(model, layout, prompt)


class _Session:
    """What both kinds of sessions have: the complete `text`, and the `canvas`, which is the next block."""

    def __init__(self, model: PreTrainedModel, layout: CanvasLayout, prompt: Tensor) -> None:
        self.model, self.layout, self.prompt_length = model, layout, len(prompt)
        given_tokens = 0 if layout.aligned == "prompt" else len(prompt) % layout.block_length
        self.text = prompt[: len(prompt) - given_tokens]
        self.canvas = self.masks(layout.block_length)
        self.canvas[:given_tokens] = prompt[len(prompt) - given_tokens :]

    def masks(self, length: int) -> Tensor:
        return torch.full((length,), self.layout.mask_token, dtype=torch.int64, device=self.model.device)

    def commit(self, block: Tensor) -> None:
        self.text = torch.cat([self.text, block])
        self.canvas = self.masks(self.layout.block_length)

    def run(
        self, ids: Tensor, positions: Tensor, visible: Tensor, wanted: Tensor, cache: DynamicCache | None
    ) -> Tensor:
        """Run the model under a mask of one's own.

        Args:
            ids: (K, N).
            positions: (N,).
            visible: (N, S) or (1, S) bool, which of the S cached and new columns each token attends to.
            wanted: Indices of the tokens whose logits are wanted.

        Returns:
            (K, number of wanted tokens, V).
        """
        mask = additive(visible, self.model.dtype).expand(len(ids), 1, -1, -1)
        placed: dict[str, Any] = {CACHE_ARGUMENT: cache, "position_ids": positions[None].expand(len(ids), -1)}
        model = cast(Any, self.model)
        out = model(input_ids=ids, attention_mask=mask, use_cache=cache is not None, logits_to_keep=wanted, **placed)
        return out.logits


@final
class _BlockSession(_Session):
    """A text of a block-causal model. The canvases of a pass are siblings: they see the text and themselves.

    State: `cached`, the number of cached tokens of the text; `edge`, the logits (1, V) after it, if they are shifted.
    """

    def __init__(self, model: PreTrainedModel, layout: CanvasLayout, prompt: Tensor) -> None:
        super().__init__(model, layout, prompt)
        self.cache = DynamicCache(config=model.config) if layout.cache else None
        self.cached, self.edge = 0, None

    def score(self, canvases: Tensor) -> Tensor:
        count, width = canvases.shape
        device, start, cached = canvases.device, len(self.text), self.cached
        added = self.text[cached:]
        columns = torch.arange(start, device=device)
        siblings = torch.arange(start, start + width, device=device).repeat(count)
        positions = torch.cat([columns, siblings])
        owners = torch.arange(count, device=device).repeat_interleave(width)
        owners = torch.cat([torch.full_like(columns, -1), owners])  # -1: the text, which all canvases see
        blocks = self.layout.blocks(positions, self.prompt_length)
        visible = (blocks <= blocks[cached:, None]) & ((owners == -1) | (owners == owners[cached:, None]))
        edge = int(self.layout.shifted and len(added) > 0)
        wanted = torch.arange(len(added) - edge, len(added) + count * width, device=device)
        ids = torch.cat([added, canvases.flatten()])[None]
        logits = self.run(ids, positions[cached:], visible, wanted, self.cache)[0]
        if self.cache is not None:
            self.cache.crop(-count * width)  # the canvases
            self.cached = start
        if edge:
            self.edge, logits = logits[:1], logits[1:]
        logits = logits.view(count, width, -1)
        if not self.layout.shifted:
            return logits
        # the first position of a text has no logits before it: its token is given
        first = logits[:, :1] if self.edge is None else self.edge[None].expand(count, 1, -1)
        return torch.cat([first, logits[:, :-1]], 1)


@final
class _FullSession(_Session):
    """A text of a bidirectional model. Each canvas is a batch row, with the text before it and mask tokens after."""

    def __init__(self, model: PreTrainedModel, layout: CanvasLayout, prompt: Tensor, blocks: int) -> None:
        super().__init__(model, layout, prompt)
        self.end = len(self.text) + blocks * layout.block_length

    def score(self, canvases: Tensor) -> Tensor:
        count, width = canvases.shape
        start = len(self.text)
        hidden = self.masks(self.end - start - width)
        rows = torch.cat([self.text.expand(count, -1), canvases, hidden.expand(count, -1)], 1)
        positions = torch.arange(self.end, device=rows.device)
        wanted = (positions[start : start + width] - int(self.layout.shifted)).clamp_min(0)
        visible = torch.ones(1, self.end, dtype=torch.bool, device=rows.device)  # for all positions
        return self.run(rows, positions, visible, wanted, None)
