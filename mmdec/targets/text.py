"""Decoder-only language models of transformers as targets: Llama, Qwen2, and others that are built alike."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from mmdec.decode.tree import single
from mmdec.targets.attention import TREE_ATTENTION
from mmdec.targets.cache import Store, check_cache, twin
from mmdec.targets.rows import Rows
from mmdec.types import Context, Draft, InputError, Needs, Scores, Verdict

ATTENTION = ("sdpa", "eager", TREE_ATTENTION)
ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "past_key_values", "logits_to_keep")
READ = {*ARGUMENTS, "use_cache"}  # what `generate` prepares


@dataclass
class TextSession:
    """One run: its cache and its rows."""

    store: Store
    rows: Rows
    layers: tuple[int, ...]


@final
class TextTarget:
    """Scores token trees with a causal language model, which is left as it is and may serve many at once.

    Layers are counted from 0; -1 is the last one, final norm included. The attention implementation may be "sdpa",
    "eager" or "mmdec_tree".
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises InputError for a model whose drafts could not be scored or taken back."""
        check_model(model)
        config = model.config.get_text_config(decoder=True)
        self.model = model
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.layers: int = config.num_hidden_layers
        self.name: str = config._name_or_path or f"{type(model).__name__}-{model.num_parameters()}"

    @property
    def device(self) -> torch.device:
        return self.model.device

    @torch.no_grad()
    def prefill(self, inputs: Mapping[str, Any], needs: Needs) -> tuple[TextSession, Context, Draft, Scores]:
        """inputs: input_ids (B, P); optional attention_mask (B, P), padded on the left; position_ids (B, P);
        past_key_values, a DynamicCache, empty or with the first columns. The very pass that `generate` begins with.

        In a batch of one a given cache is filled as `generate` would fill it; that of a larger batch is only read.
        """
        prompt = _Prompt.of(inputs)
        self._check_needs(needs, prompt.past)
        cache = prompt.cache
        if cache is None or (len(prompt.ids) > 1 and not prompt.past):
            cache = DynamicCache(config=self.model.config)
        elif len(prompt.ids) > 1:
            cache = twin(cache)
        out = self.model(
            input_ids=prompt.fresh,
            attention_mask=inputs.get("attention_mask"),
            position_ids=prompt.positions[:, -prompt.fresh.shape[1] :],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            output_hidden_states=bool(needs.layers),
        )
        session = TextSession(Store(cache), prompt.rows(), needs.layers)
        if prompt.holes:
            columns = [row.nonzero()[:, 0].tolist() for row in prompt.mask]
            session.store.commit(columns, session.rows.starts, session.rows.width)
        features = self._features(out, needs.layers)
        columns = prompt.ids.shape[1]
        context = Context(
            tokens=prompt.ids,
            mask=prompt.mask[:, -columns:],
            positions=prompt.positions[None, :, -columns:],
            next_position=prompt.positions[:, -1] + 1,
            features=features,
            embeds=self.model.get_input_embeddings()(prompt.ids) if needs.embeds else None,
        )
        last = {layer: states[:, -1:] for layer, states in features.items()}
        return session, context, single(prompt.ids[:, -1]), Scores(out.logits[:, -1:], last)

    @torch.no_grad()
    def score(self, session: TextSession, draft: Draft) -> Scores:
        """One pass over the draft's tree; its columns wait in the cache for `commit`."""
        rows, device = session.rows, draft.tokens.device
        tree, positions = rows.see(draft.parents.tolist(), device, self.model.dtype)
        extra = {"tree": tree} if self.model.config._attn_implementation == TREE_ATTENTION else {}
        out = self.model(
            input_ids=draft.tokens,
            attention_mask=None if tree is None else tree.additive,
            position_ids=torch.tensor(positions, device=device),
            past_key_values=session.store.cache,
            use_cache=True,
            output_hidden_states=bool(session.layers),
            **extra,
        )
        rows.tree = draft.tokens.shape[1]
        return Scores(out.logits, self._features(out, session.layers))

    @torch.no_grad()
    def commit(self, session: TextSession, verdict: Verdict) -> None:
        """Keep the accepted path's columns; after the prompt's pass there is nothing to keep or drop."""
        if session.rows.tree:
            columns, begins = session.rows.commit(verdict.path.tolist())
            session.store.commit(columns, begins, session.rows.width)

    @torch.no_grad()
    def select(self, session: TextSession, live: Tensor) -> None:
        """Rows live (K,) int64 go on, in that order."""
        session.rows.select(live.tolist())
        session.store.select(live, session.rows.width)

    def _features(self, out: Any, layers: tuple[int, ...]) -> dict[int, Tensor]:
        return {layer: out.hidden_states[layer if layer < 0 else layer + 1] for layer in layers}

    def _check_needs(self, needs: Needs, past: int) -> None:
        wrong = [layer for layer in needs.layers if not -1 <= layer < self.layers - 1]
        if wrong:
            raise InputError(
                f"`layers` must lie in 0 .. {self.layers - 2} or be -1 (the last, normed), but holds {wrong[0]}. "
                "Use a drafter made for this model."
            )
        if needs.memory:
            raise InputError("`memory` must be False for a text model, but is True. It has no encoder to read.")
        if past and (needs.layers or needs.embeds):
            raise InputError(
                f"`past_key_values` must be empty for a drafter that reads hidden states, but holds {past} columns. "
                "Leave it out."
            )


@dataclass(frozen=True)
class _Prompt:
    """The arguments of a prompt's pass, brought into one form."""

    ids: Tensor  # (B, P)
    fresh: Tensor  # (B, F) those that the cache does not hold
    mask: Tensor  # (B, C) bool, over all columns: cached and fresh
    positions: Tensor  # (B, C)
    cache: DynamicCache | None
    past: int  # columns in the cache
    holes: bool  # whether a row has padding after its first token

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> _Prompt:
        unknown = sorted(name for name, value in inputs.items() if name not in READ and value is not None)
        ids = inputs.get("input_ids")
        if unknown or not isinstance(ids, Tensor):
            raise InputError(
                "`inputs` must hold `input_ids` and may hold `attention_mask`, `position_ids` and `past_key_values`, "
                f"but holds {unknown or sorted(inputs)}. Leave the others out."
            )
        cache: DynamicCache | None = inputs.get("past_key_values")
        if cache is not None:
            check_cache(cache)
        past = 0 if cache is None else cache.get_seq_length()
        given = inputs.get("attention_mask")
        # As `generate` has it: ids are the whole text if the mask is as long, else only what is new.
        mask = torch.ones(len(ids), past + ids.shape[1], device=ids.device) if given is None else given
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
        own = inputs.get("position_ids")
        if own is not None:
            if own.ndim != 2 or own.shape[1] not in (fresh.shape[1], mask.shape[1]):
                shape = tuple(own.shape)
                raise InputError(f"`position_ids` must be (B, {mask.shape[1]}), but is {shape}. Leave it out.")
            positions = torch.cat([positions[:, : mask.shape[1] - own.shape[1]], own.expand(len(ids), -1)], 1)
        starts = mask.long().argmax(1)
        holes = bool((counted[:, -1] + starts != mask.shape[1]).any())
        return cls(ids, fresh, mask, positions, cache, past, holes)

    def rows(self) -> Rows:
        """Where the rows lie once their holes are closed."""
        starts = self.mask.long().argmax(1).tolist()
        ends = [start + count for start, count in zip(starts, self.mask.sum(1).tolist(), strict=True)]
        last = self.positions[:, -1].tolist()
        return Rows(starts, ends, [position + 1 - end for position, end in zip(last, ends, strict=True)])


def check_model(model: PreTrainedModel) -> None:
    """Raise InputError unless the model is a causal language model that scores trees and takes them back."""
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise InputError(f"`model` must be a model of transformers, but is {kind}. Load it with AutoModelForCausalLM.")
    config = model.config
    # Of decoders alone: encoders that may be turned into decoders have the switch, and see the future without it.
    switched = getattr(config, "is_decoder", None) is not None
    text = config.get_text_config(decoder=True)
    takes = inspect.signature(model.forward).parameters
    missing = [name for name in ARGUMENTS if name not in takes]
    apart = config.is_encoder_decoder or text is not config or switched
    if apart or missing or not model.can_generate() or model._is_stateful:
        raise InputError(
            f"`model` must be a decoder-only language model with a key-value cache, but is {kind}. "
            "Models of the Llama and Qwen2 families are supported."
        )
    foreign = sorted({type(layer).__name__ for layer in DynamicCache(config=config).layers} - {DynamicLayer.__name__})
    if foreign:
        raise InputError(
            f"`model` must attend to all earlier tokens in every layer, but {kind} keeps {', '.join(foreign)}: drafts "
            "cannot be taken back. Choose a model without sliding windows or recurrent layers."
        )
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo: by columns, unknown to its cache
        raise InputError(
            f"`model` must attend to all earlier tokens in every layer, but {kind} has local layers, whose window no "
            "draft fits in. Choose a model without them."
        )
    if getattr(config, "alibi", False):
        raise InputError(
            f"`model` must take positions as `position_ids`, but {kind} adds ALiBi by column, where drafts "
            "have none of their own. Choose a model with rotary or learned positions."
        )
    attention = config._attn_implementation
    if attention not in ATTENTION:
        raise InputError(
            f"`attn_implementation` must be one of {', '.join(ATTENTION)}, but is {attention}, which takes no tree. "
            'Call `model.set_attn_implementation("sdpa")`.'
        )
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {one.get("rope_type") for one in (rope, *rope.values()) if isinstance(one, dict)}
    growing = [kind for kind in ("dynamic", "longrope") if kind in kinds]
    if growing:
        raise InputError(
            f"`rope_type` must not depend on the text's length, but is {growing[0]}: a draft would change it early. "
            "Choose a model with another one."
        )
