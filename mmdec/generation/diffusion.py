"""`mmdec.diffusion_generate`: the call for masked diffusion models, which reveal a canvas of mask tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmdec.checks.arguments import check_choice, check_instance, check_switch, check_whole, format_value
from mmdec.core.canvas import MAX_CANVASES, POLICIES, CanvasPass, Policy, make_policy, reveal_block
from mmdec.core.summary import pluralise
from mmdec.core.tree import int_list
from mmdec.errors import InputError
from mmdec.generation.inputs import prompt_inputs
from mmdec.generation.model_lock import reading
from mmdec.targets.masked_diffusion import CanvasLayout, Visibility, check_canvas_model, open_session

MAX_BLOCK = 4096  # maximum positions of a block
MAX_NEW_TOKENS = 1 << 20
# fields of published configurations that hold the length of a block
BLOCK_LENGTH_FIELDS = ("block_length", "block_size", "bd_size")
CANVAS_OPTIONS = ("max_new_tokens", "eos_token_id", "pad_token_id")  # the options of `model.generate` that are used


@dataclass(frozen=True)
class CanvasOptions:
    """How a masked diffusion model is decoded. Policy and layout define the text; `drafts` and `cache` do not.

    Raises:
        InputError: If a value is wrong.
    """

    # which positions a step reveals: "threshold", "top_k", "entropy_bound", "schedule", or a `Policy`
    policy: str | Policy = "threshold"
    drafts: int = 1  # canvases that a pass scores (FreeDave); 1: the policy alone
    # what the model was trained to see: its own and earlier blocks ("block"), or everything ("full")
    visible: Visibility = "block"
    block_length: int | None = None  # positions of a block; None: from the model's configuration, else 32
    mask_token_id: int | None = None  # None: from the model's configuration
    shifted: bool = False  # whether the logits at a position predict the next one (Dream, Fast-dLLM v2)
    aligned: Literal["prompt", "start"] = "prompt"  # blocks are counted from the prompt's end, or from position 0
    cache: bool = True  # keep the keys and values of complete blocks, if `visible` is "block"

    def __post_init__(self) -> None:
        make_policy(self.policy)
        check_whole("drafts", self.drafts, 1, MAX_CANVASES, "It is the number of canvases that a pass scores.")
        check_choice("visible", self.visible, get_args(Visibility), "Choose what the model was trained with.")
        check_choice("aligned", self.aligned, ("prompt", "start"), "Choose what the model was trained with.")
        if self.block_length is not None:
            check_whole("block_length", self.block_length, 1, MAX_BLOCK, "It is the number of positions of a block.")
        if self.mask_token_id is not None:
            check_whole("mask_token_id", self.mask_token_id, 0, 2**31, "Give the tokenizer's `mask_token_id`.")
        check_switch("shifted", self.shifted)
        check_switch("cache", self.cache)

    def layout(self, model: PreTrainedModel) -> CanvasLayout:
        """Complete the layout from the model's configuration.

        Raises:
            InputError: If there is no mask token, or not in the vocabulary.
        """
        config: Any = model.config
        mask = self.mask_token_id
        if mask is None:
            mask = getattr(config, "mask_token_id", None)
        if mask is None:
            raise InputError(
                f"`mask_token_id` must be given, because the configuration of {type(model).__name__} has none. Give "
                "the tokenizer's: CanvasOptions(mask_token_id=tokenizer.mask_token_id)."
            )
        check_whole("mask_token_id", mask, 0, config.vocab_size - 1, "It must be a token of the model.")
        length = self.block_length
        for name in BLOCK_LENGTH_FIELDS:
            length = getattr(config, name, None) if length is None else length
        length = (
            32 if length is None else check_whole("block_length", length, 1, MAX_BLOCK, "Use that of the training.")
        )
        return CanvasLayout(self.visible, length, mask, self.shifted, self.aligned, self.cache)


CanvasChoice = str | Policy | CanvasOptions  # type of the argument `canvas`


@dataclass(frozen=True)
class CanvasGeneration:
    """The result of `diffusion_generate`: the texts, and what each pass of the model gained."""

    sequences: Tensor  # (B, L) prompts and new tokens; shorter rows are padded on the right
    passes: list[list[CanvasPass]]  # of each row
    new_tokens: list[int]  # of each row, its end token included
    finish_reasons: list[str] = field(default_factory=lambda: [])  # of each row: "length" if it was cut, else "stop"
    lossless: bool = True  # drafts never change a policy's text

    @property
    def tokens_per_pass(self) -> float:
        """The mean number of new tokens for each pass of the model."""
        return sum(self.new_tokens) / max(sum(map(len, self.passes)), 1)

    def __str__(self) -> str:
        """Return a line: number of tokens, number of passes."""
        tokens = pluralise(sum(self.new_tokens), "new token")
        passes = pluralise(sum(map(len, self.passes)), "pass", "passes")
        return f"{tokens}, {passes}, {self.tokens_per_pass:.2f} tokens per pass"


def canvas_options(choice: object) -> CanvasOptions:
    """Return the options of a call from its argument `canvas`: a policy's name, a policy, or the options.

    Raises:
        InputError: If it is none of these.
    """
    if isinstance(choice, (str, Policy)):
        return CanvasOptions(make_policy(choice))
    rule = f"one of {', '.join(POLICIES)}, a `Policy` or `CanvasOptions`"
    return check_instance("canvas", choice, CanvasOptions, rule)


@torch.inference_mode()
def diffusion_generate(
    model: PreTrainedModel,
    inputs: Tensor | Mapping[str, Any],
    canvas: CanvasChoice = "threshold",
    **options: Any,
) -> CanvasGeneration:
    """Decode with a masked diffusion model, which reveals a canvas of mask tokens, several in each pass.

    The rows of a batch are decoded one after another. A row's tokens do not depend on the others.

    Args:
        model: A loaded model of transformers, of Qwen2's, Qwen3's or Llama's shape.
        inputs: Token ids (B, P) int64, or a tokenizer's output with padding on the left.
        canvas: Which positions a step reveals: a policy's name ("threshold", "top_k", "entropy_bound", "schedule"), a
            `mmdec.core.canvas.Policy`, or `CanvasOptions`, which also say how the model was trained.
        options: `max_new_tokens`, `eos_token_id` and `pad_token_id`, which default to the model's.

    Returns:
        A `CanvasGeneration`: the sequences (B, L), and what each pass gained.

    Raises:
        InputError: If an argument is wrong, or the model cannot run under a mask that is not causal.

    References:
        FreeDave (drafts), arXiv 2510.00294; for the policies' papers see `mmdec.core.canvas`.
    """
    settings = canvas_options(canvas)
    check_canvas_model(model)
    foreign = sorted(name for name in options if name not in CANVAS_OPTIONS)
    if foreign:
        raise InputError(
            f"`{foreign[0]}` must be left out, but is {format_value(options[foreign[0]])}: `diffusion_generate` takes "
            f"{', '.join(CANVAS_OPTIONS)}. `canvas` decides which tokens a pass reveals."
        )
    layout, policy = settings.layout(model), make_policy(settings.policy)
    named = prompt_inputs(model, inputs)
    ids, prompts = named["input_ids"], _prompts(named, layout.mask_token)
    config: Any = model.generation_config
    max_new_tokens = options.get("max_new_tokens", config.max_new_tokens)
    remedy = "Give the number of tokens to reveal."
    max_new_tokens = check_whole("max_new_tokens", max_new_tokens, 1, MAX_NEW_TOKENS, remedy)
    ends = _end_tokens(options.get("eos_token_id", config.eos_token_id))
    pad = options.get("pad_token_id", config.pad_token_id)
    if pad is None:
        pad = next((end for end in ends if end >= 0), 0)
    pad = check_whole("pad_token_id", pad, 0, 2**31, "Give a token's id.")
    texts, passes, counts, reasons = list[Tensor](), list[list[CanvasPass]](), list[int](), list[str]()
    with reading(model):
        revealed = [
            _reveal_text(model, layout, policy, settings.drafts, prompt, max_new_tokens, ends) for prompt in prompts
        ]
    for prompt, (text, canvas_passes) in zip(prompts, revealed, strict=True):
        new = int_list(text[len(prompt) :])
        ended = next((index + 1 for index, token in enumerate(new[:max_new_tokens]) if token in ends), None)
        counts.append(max_new_tokens if ended is None else ended)
        reasons.append("length" if ended is None else "stop")
        texts.append(text[len(prompt) : len(prompt) + counts[-1]])
        passes.append(canvas_passes)
    rows = torch.full((len(texts), max(counts)), pad, dtype=ids.dtype, device=ids.device)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    return CanvasGeneration(torch.cat([ids, rows], 1), passes, counts, reasons)


def _reveal_text(
    model: PreTrainedModel,
    layout: CanvasLayout,
    policy: Policy,
    drafts: int,
    prompt: Tensor,
    max_new_tokens: int,
    ends: Sequence[int],
) -> tuple[Tensor, list[CanvasPass]]:
    """Reveal blocks until one holds an end token, or there are `max_new_tokens` new tokens."""
    in_first_block = len(prompt) % layout.block_length if layout.aligned == "start" else 0
    blocks = -(-(max_new_tokens + in_first_block) // layout.block_length)
    session, passes = open_session(model, layout, prompt, blocks), list[CanvasPass]()
    for block in range(blocks):
        passes += reveal_block(session, layout.mask_token, policy, drafts, block)
        if not set(ends).isdisjoint(int_list(session.text[len(prompt) :])):
            break
    return session.text, passes


def _prompts(named: Mapping[str, Any], mask_token: int) -> list[Tensor]:
    """Return the prompt of each row without its padding.

    Raises:
        InputError: If a row is empty or holds the mask token, which would be revealed as if it belonged to the answer.
    """
    ids, mask = named["input_ids"], named.get("attention_mask")
    foreign = sorted(name for name in named if name not in ("input_ids", "attention_mask", "token_type_ids"))
    if foreign:
        raise InputError(f"`inputs` must hold token ids and their mask, but holds `{foreign[0]}`. Leave it out.")
    if mask is None:
        mask = torch.ones_like(ids)
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        raise InputError(
            f"`attention_mask` must be {tuple(ids.shape)}, but is {format_value(mask)}. Pass the tokenizer's own."
        )
    prompts = [row[row_mask.bool()] for row, row_mask in zip(ids, mask, strict=True)]
    for row, prompt in enumerate(prompts):
        if not len(prompt) or bool((prompt == mask_token).any()):
            fault = f"holds the mask token {mask_token}" if len(prompt) else "is empty"
            raise InputError(f"`inputs` must hold known tokens in each row, but row {row} {fault}. Give its text.")
    return prompts


def _end_tokens(value: object) -> list[int]:
    token_ids = cast(Sequence[object], value if isinstance(value, (list, tuple)) else [value])
    values = [token for token in token_ids if token is not None]
    return [check_whole("eos_token_id", token, -1, 2**31, "Give a token's id.") for token in values]
