"""The base class of decoder-only targets: they read a prompt, score drafts, and keep accepted tokens in the cache.

A subclass defines how a prompt is read and how the model is called. With rotary positions on several axes (M-RoPE), a
node's position on each axis is its index in the text plus an offset, which depends on the prompt's images and is the
same for all nodes of a batch row. The offsets are stored in the session, not on the model object. They are also stored
on a chat's cache: the next turn has only new text and cannot recompute them from earlier images.
"""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from mmdec.compat import CACHE_ARGUMENT
from mmdec.core.tree import root_only
from mmdec.errors import InputError
from mmdec.kernels.tokenwise import KEY_BLOCK
from mmdec.targets.attention import tree_masks
from mmdec.targets.families import ARGUMENTS
from mmdec.targets.float32_copy import DraftReader
from mmdec.targets.hf_target import FIRST_LAYER_INPUTS, HfTarget, check_layers, record_states, soft_inputs
from mmdec.targets.kv_cache import GrowingLayer, KVPool, RowLayout, check_cache, empty_cache, keep_path, stock_layer
from mmdec.targets.ragged import is_compiled, packed_linear
from mmdec.targets.recurrent_cache import (
    STATE_CACHE,
    RecurrentCache,
    StepwiseModel,
    attention_layers,
    cached_length,
    copy_inference_states,
    has_states,
)
from mmdec.targets.shared_batch import SharedBatch
from mmdec.targets.tokenwise import tokenwise_copy
from mmdec.targets.windows import Gaps, Windows, full_cache, full_length_layer
from mmdec.types import Context, Draft, MediaContext, Needs, PrefillOutput, Scores, Verdict

Mask = Tensor | dict[str, Tensor | None] | None  # a model's mask argument: one mask, or layer type -> mask
DECODER_INPUTS = {*ARGUMENTS, "use_cache"}  # names of the inputs that `prefill` accepts; others raise InputError
ROPE_ATTRIBUTE = "mmdec_rope"  # name of the attribute under which a chat's cache holds its M-RoPE offsets


@dataclass(frozen=True)
class TextPrompt:
    """A language model's prompt, checked and normalised: token ids, mask, position ids and cache."""

    ids: Tensor  # (B, P) token ids
    new_ids: Tensor  # (B, F) the new ids, which the cache does not hold
    mask: Tensor  # (B, C) bool over cached and new tokens; False at padding
    mask_given: Tensor | None  # the mask to pass to the model; None if nothing is masked
    positions: Tensor  # (B, C) position ids of cached and new tokens
    cache: DynamicCache | None
    past: int  # number of tokens per batch row in the caller's cache, padding included
    has_inner_padding: bool  # whether a batch row has padding after its first token

    @classmethod
    def from_inputs(cls, inputs: Mapping[str, Any]) -> TextPrompt:
        """Check and normalise the inputs of `prefill`.

        Raises:
            InputError: For unknown inputs, a mask or position ids of another shape, or a cache of other rows.
        """
        unknown = sorted(name for name, value in inputs.items() if name not in DECODER_INPUTS and value is not None)
        ids = inputs.get("input_ids")
        if unknown or not isinstance(ids, Tensor):
            raise InputError(
                f"`inputs` must hold `input_ids` and may hold `attention_mask`, `position_ids` and `{CACHE_ARGUMENT}`, "
                f"but holds {unknown or sorted(inputs)}. Leave the others out."
            )
        cache: Any = inputs.get(CACHE_ARGUMENT)
        if cache is not None:
            _check_given(cache)
        past = 0 if cache is None else cached_length(cache)
        given_mask = inputs.get("attention_mask")
        if past and given_mask is None:
            raise InputError(
                f"`attention_mask` must come with `{CACHE_ARGUMENT}`, which holds {past} columns, but is None: it "
                "shows whether the ids are the whole text or only its new part. Pass the mask of the whole text."
            )
        cache_rows = len(attention_layers(cache)[0].keys) if cache is not None and past else len(ids)
        if cache_rows != len(ids):
            raise InputError(
                f"`{CACHE_ARGUMENT}` must hold the batch's {len(ids)} rows, but has {cache_rows}. Pass one row "
                "of the cache for each."
            )
        # as in `generate`: if mask and ids have the same length, the ids are the whole text, else only its new tokens
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
        token_counts = mask.long().cumsum(-1)
        positions = (token_counts - 1).masked_fill(~mask, 0)
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
        has_inner_padding = bool((token_counts[:, -1] + starts != mask.shape[1]).any())
        return cls(
            ids, fresh, mask, None if bool(mask.all()) else given_mask, positions, cache, past, has_inner_padding
        )

    def run_cache(self, config: PreTrainedConfig) -> DynamicCache:
        """Return the cache to decode with.

        It is the caller's cache if there is one, and only one batch row, without padding between its tokens; else a
        copy or a new cache. Layers with sliding windows keep all tokens, too.
        """
        cache = self.cache
        if cache is not None and (cache.layers or has_states(config)):
            kinds = [
                [isinstance(layer, LinearAttentionLayer) for layer in candidate.layers]
                for candidate in (cache, DynamicCache(config=config))
            ]
            if kinds[0] != kinds[1] and any(kinds[0] + kinds[1]):
                raise InputError(
                    f"`{CACHE_ARGUMENT}` must have recurrent states in the same layers as the model, but does not. "
                    "Make it with `DynamicCache(config=model.config)`."
                )
        if cache is not None and self.past:
            fresh_layers = cast(list[Any], DynamicCache(config=config).layers)
            lengths = {layer.get_seq_length() for layer in attention_layers(cache)}
            sizes = [getattr(layer, "sliding_window", None) for layer in fresh_layers]
            alike = len(cache.layers) == len(fresh_layers) and all(
                getattr(layer, "sliding_window", size) == size for layer, size in zip(cache.layers, sizes, strict=True)
            )
            if len(lengths) > 1 or not alike:
                raise InputError(
                    f"`{CACHE_ARGUMENT}` must have been filled by this model, but holds {len(cache.layers)} layers of "
                    f"{sorted(lengths)} columns. Begin with an empty cache."
                )
        shared = len(self.ids) > 1 or self.has_inner_padding
        # A new cache. If the caller gave an empty cache, but there are several rows, padding between tokens or no
        # attention layers, `fill_cache` fills the caller's cache at the end.
        if cache is None or ((shared or not attention_layers(full_cache(config))) and not self.past):
            return full_cache(config)
        layers = [full_length_layer(layer) for layer in cache.layers]
        if not shared:
            cache.layers[:] = layers
            return cache
        # this copy shares the tensors of the caller's cache; the next pass does not write to them
        copied = empty_cache()
        copied.layers += [
            stock_layer(layer.keys, layer.values)
            if type(layer) in (DynamicLayer, GrowingLayer)
            else copy.deepcopy(layer)
            for layer in layers
        ]
        return copied

    def rows(self) -> RowLayout:
        """Return which cache columns hold which row's tokens, as if padding between a row's tokens were removed."""
        return RowLayout.of_prompt(self.mask, self.positions)


def _check_given(cache: Any) -> None:
    """Raise InputError for a caller's cache from which rejected drafts cannot be removed."""
    if isinstance(cache, EncoderDecoderCache):
        raise InputError(f"`{CACHE_ARGUMENT}` must be a DynamicCache, but is an EncoderDecoderCache. Leave it out.")
    check_cache(cache)


@dataclass(frozen=True)
class RopeOffsets:
    """What a chat's next turn adds to a token's index in the text to get its position on each axis of M-RoPE."""

    offsets: Tensor  # (3 axes, B)
    columns: int  # number of cached tokens (with padding); the offsets are those of the tokens after them


def store_rope_offsets(cache: DynamicCache, offsets: Tensor, columns: int) -> None:
    """Store M-RoPE offsets (3, B) on a chat's cache for its next turn.

    Args:
        columns: Number of cached tokens per row.
    """
    setattr(cache, ROPE_ATTRIBUTE, RopeOffsets(offsets, columns))


@dataclass
class DecoderSession:
    """The state of one `generate` call: its key-value cache, and where each batch row's tokens are in it."""

    cache: Cache
    store: KVPool | RecurrentCache
    rows: RowLayout
    layers: tuple[int, ...]  # layers whose hidden states the drafter reads
    offsets: Tensor | None = None  # (3, B): position on each M-RoPE axis minus index in the text, if any
    gaps: Gaps | None = None  # padding between a batch row's tokens, which sliding windows count, if any
    stepwise: StepwiseModel | None = None  # the model copy that reads drafts if layers are recurrent, else None
    # the model copy that reads drafts in half precision on a CPU; if None, the model itself reads them
    tokenwise: PreTrainedModel | None = None
    reader: DraftReader | None = None  # finds the model that reads drafts in float32 on a CPU, else None
    shareable: bool = False  # whether the rows may move to a `SharedBatch`: nobody else reads the cache
    batch: SharedBatch | None = None  # the batch that holds the rows; if None, `cache` and `store` hold them
    slots: list[int] = field(default_factory=list[int])  # [row]: the row's slot in `batch`

    def detach_rows(self) -> DecoderSession:
        """Return the rows as another session. This session must not use them afterwards."""
        return replace(self, shareable=False, rows=copy.copy(self.rows))

    def append(self, other: DecoderSession) -> None:
        """Append the rows of another session of the same model."""
        self.store.append(cast(Any, other.store))
        self.rows.append(other.rows)
        if self.offsets is not None and other.offsets is not None:
            self.offsets = torch.cat([self.offsets, other.offsets], 1)

    def remove_row(self, row: int) -> None:
        """Remove a row. The last row takes its place."""
        self.rows.remove(row)
        if self.rows.ends:
            self.store.remove(row, self.rows.width)
        if self.offsets is not None:
            offsets = self.offsets.clone()
            offsets[:, row] = offsets[:, -1]
            self.offsets = offsets[:, :-1]


@dataclass(frozen=True)
class Prompt:
    """A prompt, prepared for the pass over its F new tokens."""

    text: TextPrompt
    positions: Tensor  # (1 or 3 axes, B, F) position ids
    offsets: Tensor | None = None  # (3 axes, B): position minus index in the text, after the prompt; None for one axis
    extra: Mapping[str, Any] = field(default_factory=dict)  # further inputs of the model
    media: MediaContext | None = None  # the prompt's images, video and sound; None if the model reads only text
    report: object = None  # `PrefillOutput.report`


class DecoderTarget(HfTarget):
    """Scores token trees with a decoder-only model, which is not changed; several `generate` calls may share it.

    Layers are counted from 0. Layer -1 stands for the last hidden states, after the final norm.
    """

    refused_outputs: ClassVar[tuple[str, ...]] = ("output_attentions", "output_hidden_states")

    def __init__(self, model: PreTrainedModel) -> None:
        config = self._config = model.config.get_text_config(decoder=True)
        self.model = model
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.layers: int = config.num_hidden_layers
        # maximum number of positions: rotary embeddings have none; all others are treated as learned embeddings
        has_rope = getattr(config, "rope_parameters", None) is not None
        self.positions = None if has_rope else getattr(config, "max_position_embeddings", None)
        self.nodes_take_positions = config.model_type == "gpt_neo"
        self.windows = Windows.from_config(config)
        self.needs_chains = has_states(config)
        self.reads_soft_nodes = not self.needs_chains
        self._accepts_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    @abstractmethod
    def _prepare_prompt(self, inputs: Mapping[str, Any]) -> Prompt:
        """Check the inputs of `prefill` and prepare them.

        Raises:
            InputError: If an input is malformed.
        """

    @abstractmethod
    def _forward(self, ids: Tensor, mask: Mask, positions: Tensor, cache: Any, extra: Mapping[str, Any]) -> Any:
        """Run the model over ids (B, N) at position ids (1 or 3, B, N).

        Args:
            cache: None: nothing is cached.
            extra: Further inputs of the model.
        """

    def _forward_with_features(
        self,
        ids: Tensor,
        mask: Mask,
        positions: Tensor,
        cache: Any,
        layers: tuple[int, ...],
        extra: Mapping[str, Any],
        last: bool,
    ) -> Scores:
        """Run the model over ids (B, N); return logits and features.

        Args:
            layers: Layers whose hidden states to return; -2 stands for the first layer's inputs.
            extra: Further inputs.
            last: Whether to compute only the last token's logits.
        """
        inputs = {**extra, "output_hidden_states": True} if -1 in layers else dict(extra)
        if last and self._accepts_logits_to_keep:
            inputs["logits_to_keep"] = 1
        decoder: Any = cast(Any, self.model).get_decoder() if self.reads_images else self.model
        hooked = [layer for layer in layers if layer >= 0 or (layer == FIRST_LAYER_INPUTS and self.reads_images)]
        with record_states(decoder, self.layers, hooked) as recorded:
            out = self._forward(ids, mask, positions, cache, inputs)
        states = {layer: recorded[layer] for layer in hooked}
        if -1 in layers:
            states[-1] = out.hidden_states[-1]
        if FIRST_LAYER_INPUTS in layers and FIRST_LAYER_INPUTS not in states:
            states[FIRST_LAYER_INPUTS] = self.model.get_input_embeddings()(ids)
        return Scores(out.logits[:, -1:] if last else out.logits, states)

    def prompt_positions(self, inputs: Mapping[str, Any]) -> list[int]:
        """Return each batch row's number of prompt positions, without running the model.

        Args:
            inputs: The same as for `prefill`.
        """
        return inputs["attention_mask"].sum(1).tolist()

    def prompt_tokens(self, inputs: Mapping[str, Any]) -> int | None:
        ids = inputs.get("input_ids")
        return ids.numel() if isinstance(ids, Tensor) else None

    def prefill(self, inputs: Mapping[str, Any], needs: Needs) -> PrefillOutput[DecoderSession]:
        """Run the model over the prompt, exactly as `generate` begins.

        Args:
            inputs: input_ids (B, P); optional attention_mask (B, P), padded on the left; position_ids (B, P); the
                cache, a DynamicCache, empty or with the first tokens (then the mask's length must show whether the ids
                are the whole text or only its new tokens). The cache is filled while decoding if there is one batch
                row without padding between its tokens, else by `fill_cache` at the end.
            needs: What the drafter reads.

        Raises:
            InputError: For wrong inputs.
        """
        *_, prefilled = self.prefill_in_pieces(inputs, needs, None)
        assert prefilled is not None  # only the pieces before the last one yield None
        return prefilled

    def prefill_in_pieces(
        self, inputs: Mapping[str, Any], needs: Needs, size: int | None
    ) -> Iterator[PrefillOutput[DecoderSession] | None]:
        """Run `prefill` in pieces, between which other passes may run.

        Args:
            inputs: The same as for `prefill`.
            needs: What the drafter reads.
            size: Maximum number of tokens of a piece; None: the whole prompt. Prompts with pictures or sound, with
                padding between tokens, and those of models with recurrent layers are read whole.

        Yields:
            None after each piece but the last, then what `prefill` returns.
        """
        check_layers(needs, self.layers)
        if needs.encoder:
            raise InputError(
                f"`drafter` must fit {type(self.model).__name__}, but reads an encoder's states, which this model does "
                "not have. Use a drafter for decoder-only models."
            )
        prompt = self._prepare_prompt(inputs)
        text, cache = prompt.text, prompt.text.run_cache(self.model.config)
        stepwise = StepwiseModel(self.model) if self.needs_chains else None
        if stepwise is not None and text.past and text.has_inner_padding:
            raise InputError(
                f"`attention_mask` must be 1 after a row's first token with `{CACHE_ARGUMENT}` of a model with "
                "recurrent layers, but is 0 at some: padding cannot be removed from states. Pass the whole text, "
                "padded only on the left, without the cache."
            )
        target = self if stepwise is None else self._with_model(stepwise.model_after(cache))
        layers = _recorded_layers(needs)
        fresh, reads_at_once = text.new_ids.shape[1], stepwise is not None or prompt.extra or text.has_inner_padding
        piece = fresh if size is None or reads_at_once else size
        features = dict[int, list[Tensor]]()
        logits = torch.empty(0)
        for start in range(0, fresh, piece):
            if start:
                yield None
            end = min(start + piece, fresh)
            mask = text.mask_given
            if mask is not None and end < fresh:
                mask = mask[:, : mask.shape[1] - fresh + end]
            with torch.no_grad():
                scores = target._forward_with_features(
                    text.new_ids[:, start:end],
                    mask,
                    prompt.positions[:, :, start:end],
                    cache,
                    layers,
                    prompt.extra,
                    last=True,
                )
            logits = scores.logits
            for layer, states in scores.features.items():
                features.setdefault(layer, []).append(states)
        scores = Scores(
            logits, {layer: parts[0] if len(parts) == 1 else torch.cat(parts, 1) for layer, parts in features.items()}
        )
        session, context = self._session(prompt, cache, stepwise, needs.layers), self._context(prompt, scores)
        last = {layer: states[:, -1:] for layer, states in context.features.items()}
        yield PrefillOutput(session, context, root_only(text.ids[:, -1]), Scores(scores.logits, last), prompt.report)

    def _session(
        self, prompt: Prompt, cache: DynamicCache, stepwise: StepwiseModel | None, layers: tuple[int, ...]
    ) -> DecoderSession:
        """Return the state of a call whose cache holds the prompt."""
        text = prompt.text
        gaps = Gaps.from_mask(text.mask) if text.has_inner_padding and self.windows is not None else None
        with torch.no_grad():
            store = KVPool(cache) if stepwise is None else RecurrentCache(cache, len(text.ids), stepwise.steps)
        tokenwise = tokenwise_copy(self.model) if stepwise is None else None
        session = DecoderSession(
            cache,
            store,
            text.rows(),
            layers,
            prompt.offsets,
            gaps,
            stepwise,
            tokenwise,
            DraftReader(self.model) if tokenwise is None and stepwise is None else None,
            shareable=not text.past and not getattr(text.cache, "_is_user_defined", False),
        )
        if text.has_inner_padding:
            columns = [row.nonzero()[:, 0].tolist() for row in text.mask]
            session.store.commit(columns, session.rows.starts, session.rows.width)
        if text.cache is not None and prompt.offsets is not None:
            store_rope_offsets(text.cache, prompt.offsets, text.mask.shape[1])
        return session

    @torch.no_grad()
    def run_texts(self, inputs: Mapping[str, Any], needs: Needs) -> Context:
        """Run the model over whole texts, without a cache, to train drafters.

        Args:
            inputs, needs: As for `prefill`.

        Returns:
            What `prefill` would give a drafter, so that networks are trained on the inputs that they get later.
        """
        check_layers(needs, self.layers)
        prompt = self._prepare_prompt(inputs)
        text = prompt.text
        layers = _recorded_layers(needs)
        scores = self._forward_with_features(
            text.new_ids, text.mask_given, prompt.positions, None, layers, prompt.extra, last=True
        )
        return self._context(prompt, scores)

    def run_drafts(self, inputs: Mapping[str, Any], draft: Draft) -> Scores:
        """Run the model over whole prompts, and once over a draft below them, to train soft nodes.

        Args:
            inputs: The same as for `prefill`.
            draft: One tree a row. Gradients flow to `draft.soft`.

        Returns:
            Logits after each node.
        """
        session = self.prefill(inputs, Needs()).session
        # a layer with new keys writes nothing in place
        for layer in attention_layers(cast(DynamicCache, session.cache)):
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        return self._score_tree(session, draft)

    def _context(self, prompt: Prompt, scores: Scores) -> Context:
        text = prompt.text
        following = text.positions[:, -1] + 1
        return Context(
            tokens=text.ids,
            mask=text.mask[:, -text.ids.shape[1] :],
            positions=prompt.positions,
            next_position=following if prompt.offsets is None else (following + prompt.offsets).amax(0),
            features={layer: states for layer, states in scores.features.items() if layer != FIRST_LAYER_INPUTS},
            embeds=scores.features.get(FIRST_LAYER_INPUTS),
            past=text.past,
            media=prompt.media,
            room=None if self.positions is None else self.positions - 1 - text.positions[:, -1],
            nodes_take_positions=self.nodes_take_positions,
            needs_chains=self.needs_chains,
        )

    @torch.no_grad()
    def score(self, session: DecoderSession, draft: Draft) -> Scores:
        if session.batch is not None:
            return session.batch.score(self, [(session, draft)])[0]
        if isinstance(session.store, RecurrentCache):
            return session.store.score(draft, session.rows, partial(self._score_chain, session))
        model = session.tokenwise or (self.model if session.reader is None else session.reader.model())
        return (self if model is self.model else self._with_model(model))._score_tree(session, draft)

    def _score_chain(self, session: DecoderSession, draft: Draft) -> Scores:
        stepwise = cast(StepwiseModel, session.stepwise)
        stepwise.set_chunk_size(draft.tokens.shape[1])
        return self._with_model(stepwise.model)._score_tree(session, draft)

    def _with_model(self, model: PreTrainedModel) -> Self:
        """Return a copy of this target that calls another model object, which shares the model's weights."""
        other = copy.copy(self)
        other.model = model
        return other

    def _score_tree(self, session: DecoderSession, draft: Draft) -> Scores:
        rows, device, windows = session.rows, draft.tokens.device, self.windows
        tokenwise = session.tokenwise is not None
        firsts = windows.first_columns(rows) if windows is not None and session.gaps is None else {}
        if tokenwise:
            firsts = {window: first // KEY_BLOCK * KEY_BLOCK for window, first in firsts.items()}
        plain = session.gaps is None and not any(firsts.values())
        tree, positions_in_text = rows.mask_and_positions(draft, self.model.dtype, plain, tokenwise)
        if isinstance(session.store, RecurrentCache) and session.store.pool is None:
            tree = None  # a model without attention layers needs no mask
        positions = torch.tensor(positions_in_text, device=device)[None]
        if session.offsets is not None:
            positions = positions + session.offsets[:, :, None]
        if windows is not None:
            session.store.set_first_visible([firsts.get(window, 0) if window else 0 for window in windows.layers])
        if tokenwise:
            cast(KVPool, session.store).show_multiple()
        gap_positions = None if session.gaps is None else session.gaps.positions(rows.width)
        computes_padding = tokenwise or session.stepwise is not None or is_compiled(self.model)
        packed = None if computes_padding else packed_linear(draft)
        mask, trees = (None, ()) if tree is None else (tree.additive, (tree,))
        if tree is not None and windows is not None:
            mask, trees = windows.masks(tree, firsts, gap_positions)
        with soft_inputs(self.model, draft.soft), packed or nullcontext(), tree_masks(trees):
            scores = self._forward_with_features(
                draft.tokens, mask, positions, session.cache, session.layers, {}, last=False
            )
        rows.record_draft(draft.tokens.shape[1])
        return scores if packed is None else replace(scores, mean_nodes_per_row=packed.mean_nodes_per_row)

    @torch.no_grad()
    def commit(self, session: DecoderSession, verdict: Verdict) -> None:
        if session.batch is not None:
            session.batch.commit(session, verdict.path)
        else:
            self.keep(session, verdict.path)

    def keep(self, session: DecoderSession, path: Tensor) -> None:
        """Keep the nodes `path` (B, A), padded with -1, of the draft that was scored last."""
        if isinstance(session.store, RecurrentCache):
            session.store.accept(session.rows, path)
        else:
            keep_path(session.rows, session.store, path)

    def shares_passes(self, session: DecoderSession) -> bool:
        return session.batch is not None or (
            session.shareable and session.gaps is None and not self.nodes_take_positions
        )

    @torch.no_grad()
    def score_together(self, parts: Sequence[tuple[DecoderSession, Draft]]) -> list[Scores]:
        batch = next((session.batch for session, _ in parts if session.batch is not None), None)
        return (batch or SharedBatch(parts[0][0])).score(self, parts)

    def release(self, session: DecoderSession) -> None:
        if session.batch is not None:
            session.batch.release(session)

    @torch.no_grad()
    def select(self, session: DecoderSession, live: Tensor) -> None:
        if session.batch is not None:
            session.batch.select(session, live)
            return
        session.rows.select(live.tolist())
        session.store.select(live, session.rows.width)
        if session.offsets is not None:
            session.offsets = session.offsets[:, live]
        if session.gaps is not None:
            session.gaps = session.gaps.select(live)

    @torch.no_grad()
    def fill_cache(self, inputs: Mapping[str, Any], sequences: Tensor) -> None:
        """Fill the caller's cache as `generate` does, with all tokens of the finished sequences (B, L) but the last.

        This takes one pass over the missing tokens, or none if decoding has filled the cache.
        """
        cache: DynamicCache = inputs[CACHE_ARGUMENT]
        copy_inference_states(cache)
        new = sequences.shape[1] - inputs["input_ids"].shape[1]
        given_mask = inputs.get("attention_mask")
        columns = inputs["input_ids"].shape[1] if given_mask is None else given_mask.shape[1]
        missing = columns + new - 1 - cached_length(cache)
        if missing <= 0:
            return
        if self.needs_chains and len(sequences) == 1 and cached_length(cache):
            self._extend_row(inputs, sequences, columns, missing)
            return
        prompt = self._prepare_prompt(inputs)
        positions_in_text = prompt.text.positions[:, -1:] + torch.arange(1, new, device=sequences.device)
        new_positions = (
            positions_in_text[None] if prompt.offsets is None else positions_in_text + prompt.offsets[:, :, None]
        )
        mask = prompt.text.mask_given
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), new - 1)], 1)
        positions = torch.cat([prompt.positions, new_positions], 2)
        target = self._with_model(StepwiseModel(self.model).model_after(cache)) if self.needs_chains else self
        target._forward_with_features(
            sequences[:, :-1][:, -missing:], mask, positions, cache, (), prompt.extra, last=True
        )

    def _extend_row(self, inputs: Mapping[str, Any], sequences: Tensor, columns: int, missing: int) -> None:
        """Run the model over the last `missing` tokens of the only batch row, so that the caller's cache holds them.

        Args:
            columns: Number of tokens of the prompt, cached ones and padding included.
        """
        cache, mask, position_ids = inputs[CACHE_ARGUMENT], inputs.get("attention_mask"), inputs.get("position_ids")
        new = sequences.shape[1] - inputs["input_ids"].shape[1]
        last = int(mask.sum()) if mask is not None else columns
        last = last - 1 if position_ids is None else int(position_ids[0, -1])
        positions = torch.arange(last + new - missing, last + new, device=sequences.device)[None, None]
        if mask is not None:
            mask = None if bool(mask.all()) else torch.cat([mask, mask.new_ones(1, new - 1)], 1)
        target = self._with_model(StepwiseModel(self.model).model_after(cache))
        target._forward_with_features(sequences[:, :-1][:, -missing:], mask, positions, cache, (), {}, last=True)

    def prepare_inputs(self, ids: Tensor, config: GenerationConfig, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make the inputs of `prefill`. If `generate` dropped the attention mask because it is all ones, restore it.

        With a cache, the mask's length shows whether ids (B, P) are the whole text or only its new tokens.
        """
        if STATE_CACHE in inputs:  # models without attention have another name for the cache
            inputs = {**inputs, CACHE_ARGUMENT: inputs[STATE_CACHE]}
            del inputs[STATE_CACHE]
        cache = inputs.get(CACHE_ARGUMENT)
        if cache is None or inputs.get("attention_mask") is not None:
            return inputs
        _check_given(cache)
        if not cached_length(cache):
            return inputs
        # the text's length: `generate` records it; in older releases of transformers, position ids have this length
        length = getattr(config, "_mask_length", None) or inputs["position_ids"].shape[-1]
        return {**inputs, "attention_mask": ids.new_ones(len(ids), length)}

    def must_fill_cache(self, inputs: Mapping[str, Any], config: GenerationConfig) -> bool:
        """Return whether the caller may read the cache afterwards: it passed the cache, or the output contains it."""
        cache = inputs.get(CACHE_ARGUMENT)
        return cache is not None and bool(config.return_dict_in_generate or getattr(cache, "_is_user_defined", False))

    def output(
        self,
        inputs: Mapping[str, Any],
        sequences: Tensor,
        lengths: Sequence[int],
        config: GenerationConfig,
        scores: tuple[Tensor, ...] | None = None,
        logits: tuple[Tensor, ...] | None = None,
    ) -> GenerateDecoderOnlyOutput:
        return GenerateDecoderOnlyOutput(
            sequences=cast(torch.LongTensor, sequences),
            scores=cast(Any, scores),
            logits=cast(Any, logits),
            **{CACHE_ARGUMENT: inputs.get(CACHE_ARGUMENT)},
        )


def _recorded_layers(needs: Needs) -> tuple[int, ...]:
    """Return the layers whose hidden states a drafter reads, `FIRST_LAYER_INPUTS` for the embeddings among them."""
    return (*needs.layers, FIRST_LAYER_INPUTS) if needs.embeds else needs.layers
