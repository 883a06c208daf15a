"""The base class of encoder-decoder targets.

Such targets read a prompt and an encoder's states, score drafts with a growing cache, and make `generate`'s output
objects.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig
from transformers.generation.utils import GenerateEncoderDecoderOutput
from transformers.modeling_outputs import BaseModelOutput

from mmdec.compat import CACHE_ARGUMENT
from mmdec.core.tree import root_only
from mmdec.errors import InputError
from mmdec.kernels.tree_attention import TreeMask
from mmdec.targets.hf_target import HfTarget, check_attention, check_layers, output_states
from mmdec.targets.kv_cache import KVPool, RowLayout, check_cache, keep_path
from mmdec.types import Context, Draft, EncoderContext, Needs, PrefillOutput, Scores, Verdict

INPUT_FEATURES = "_mmdec_input_features"  # attribute of the encoder's output that holds what the encoder has read
SOURCE = "source_ids"  # key of the encoder's token ids among the inputs of `prefill`
ENCODED_INPUTS = {"input_ids", "encoder_outputs", "attention_mask", "decoder_attention_mask", CACHE_ARGUMENT, SOURCE}
# `prefill` ignores these inputs
IGNORED_INPUTS = {"use_cache", "logits_to_keep", "output_attentions", "output_hidden_states"}


@dataclass(frozen=True)
class EncodedPrompt:
    """A decoder's prompt and the encoder's output, checked and normalised."""

    ids: Tensor  # (B, P) the decoder's token ids
    encoded: Any  # the encoder's output; its first element is the hidden states (B, S, H)
    encoder_mask: Tensor | None  # (B, T) mask of the encoder's inputs
    mask: Tensor  # (B, P) bool, False at padding of `ids`
    mask_given: Tensor | None  # (B, P) the caller's mask of `ids`, or None if there was none
    positions: Tensor  # (B, P) position ids of `ids`
    has_inner_padding: bool  # whether a batch row has padding after its first token

    @classmethod
    def from_inputs(cls, inputs: Mapping[str, Any], max_columns: int | None, columns: bool) -> EncodedPrompt:
        """Check and normalise a prompt's inputs.

        Args:
            max_columns: Maximum length P of `input_ids`; None: unlimited.
            columns: Whether position ids count padding, too.

        Raises:
            InputError: For wrong inputs.
        """
        unknown = sorted(
            name for name, value in inputs.items() if name not in ENCODED_INPUTS | IGNORED_INPUTS and value is not None
        )
        ids, encoded = inputs.get("input_ids"), inputs.get("encoder_outputs")
        if unknown or not isinstance(ids, Tensor) or encoded is None:
            raise InputError(
                "`inputs` must hold the decoder's `input_ids` and `encoder_outputs` and may hold `attention_mask` and "
                f"`decoder_attention_mask`, but holds {unknown or sorted(inputs)}. Leave the others out, or call "
                "`model.generate(inputs, custom_generate=mmdec.speculate(...))`."
            )
        cache = inputs.get(CACHE_ARGUMENT)
        if cache is not None:
            check_cache(cache)
            if cache.get_seq_length():
                raise InputError(
                    f"`{CACHE_ARGUMENT}` must be empty, but holds {cache.get_seq_length()} columns. Leave it out."
                )
        width = ids.shape[1]
        if max_columns is not None and width > max_columns:
            raise InputError(
                f"`input_ids` must have at most {max_columns} columns, but has {width}. Shorten the prompt."
            )
        prompt_mask = inputs.get("decoder_attention_mask")
        if prompt_mask is not None and (prompt_mask.shape != ids.shape or not bool(prompt_mask[:, -1].all())):
            raise InputError(
                f"`decoder_attention_mask` must be {tuple(ids.shape)} with 1 at the end of every row, but is "
                f"{tuple(prompt_mask.shape)}. Pad on the left."
            )
        mask = torch.ones_like(ids, dtype=torch.bool) if prompt_mask is None else prompt_mask.bool()
        positions = torch.arange(width, device=ids.device).expand(len(ids), -1)
        if prompt_mask is not None and not columns:
            positions = (mask.long().cumsum(-1) - 1).masked_fill(~mask, 0)
        has_inner_padding = bool((mask[:, :-1] & ~mask[:, 1:]).any())
        return cls(ids, encoded, inputs.get("attention_mask"), mask, prompt_mask, positions, has_inner_padding)


@dataclass
class EncodedSession:
    """The state of one `generate` call of a model with an encoder."""

    cache: EncoderDecoderCache
    encoded: BaseModelOutput  # the encoder's states (B, S, H), and for some models their mask
    encoder_mask: Tensor | None  # (B, T) of the encoder's inputs
    layers: tuple[int, ...]  # layers whose hidden states the drafter reads
    prompt: Tensor  # (B, P) position ids of the prompt in the cache, once padding between tokens is removed
    rows: RowLayout
    reader: Any  # runs the decoder over drafts; `EncodedTarget._make_reader` makes it
    store: KVPool = field(init=False)  # the cache's keys and values; made when the cache holds the prompt


class EncodedTarget(HfTarget):
    """Scores token trees with the decoder of an encoder-decoder model; several `generate` calls may share it.

    Layers are counted from 0. Layer -1 stands for the last hidden states, after the final norm. The attention
    implementation may be "sdpa" or "eager".

    Args:
        layers: Number of decoder layers.
        positions: Maximum number of its tokens; None: unlimited.

    Raises:
        InputError: If the model's attention implementation cannot take tree masks.
    """

    reads_encoder: ClassVar[bool] = True
    counts_padding: ClassVar[bool] = True  # whether a token's position id is its index in the row, padding counted
    # whether a drafter may read the last layer's output before the final norm
    exposes_last_layer: ClassVar[bool] = True

    def __init__(self, model: Any, layers: int, positions: int | None) -> None:
        config: Any = model.config.get_text_config(decoder=True)
        check_attention(config)
        self.model, self.layers, self.positions = model, layers, positions
        output = model.get_output_embeddings()  # if quantised, its weight may not be a tensor
        self.vocab_size: int = getattr(output, "out_features", None) or output.weight.shape[0]
        self.hidden_size: int = config.hidden_size

    @abstractmethod
    def _make_reader(self, prompt: EncodedPrompt, cache: EncoderDecoderCache, layers: tuple[int, ...]) -> Any:
        """Make the object that runs the decoder over the drafts of one `generate` call.

        Args:
            cache: Still empty.
            layers: Layers whose hidden states the drafter reads.
        """

    @abstractmethod
    def _run_prompt(self, prompt: EncodedPrompt, session: EncodedSession) -> Scores:
        """Run the decoder over the prompt, and fill the session's cache.

        Returns:
            The scores; only the logits after the last prompt token are needed.
        """

    @abstractmethod
    def _run_draft(
        self, session: EncodedSession, tokens: Tensor, tree: TreeMask | None, positions: Tensor, cache: Any
    ) -> Scores:
        """Run the decoder over the tokens (B, N) of a draft.

        Args:
            tree: The mask that says which tokens each node attends to, or None if nothing is hidden.
            positions: (1, B, N) position ids.

        Returns:
            The decoder's output.
        """

    @abstractmethod
    def _run_finished_text(self, text: EncodedPrompt, cache: Any, config: GenerationConfig, **flags: bool) -> Any:
        """Run the decoder over a finished text, prompt and new tokens, and fill an empty cache.

        It has attentions and hidden states if `flags` ask for them.

        Returns:
            The decoder's output.
        """

    @torch.no_grad()
    def prefill(self, inputs: Mapping[str, Any], needs: Needs) -> PrefillOutput[EncodedSession]:
        """Run the decoder over its prompt.

        Args:
            inputs: input_ids (B, P); encoder_outputs, whose first element is (B, S, H); optional attention_mask (B, T)
                of the encoder; optional decoder_attention_mask (B, P), padded on the left; optional cache, which must
                be empty. It is filled while decoding if there is one row without padding between its tokens, else by
                `output`.
            needs: What the drafter reads.

        Raises:
            InputError: For wrong inputs.
        """
        check_layers(needs, self.layers - (not self.exposes_last_layer))
        prompt = EncodedPrompt.from_inputs(inputs, self.positions, self.counts_padding)
        ids, mask, positions = prompt.ids, prompt.mask, prompt.positions
        # the caller's cache can be filled while decoding only if there is one row, without padding between its tokens
        is_single = len(ids) == 1 and not prompt.has_inner_padding
        cache = (inputs.get(CACHE_ARGUMENT) if is_single else None) or EncoderDecoderCache(
            DynamicCache(), DynamicCache()
        )
        rows, closed = RowLayout.of_prompt(mask, positions), positions.clone()
        for row, row_mask in enumerate(mask if prompt.has_inner_padding else ()):
            closed[row, rows.starts[row] : rows.ends[row]] = positions[row, row_mask]
        reader = self._make_reader(prompt, cache, needs.layers)
        encoded = encoder_output(prompt.encoded)
        session = EncodedSession(cache, encoded, prompt.encoder_mask, needs.layers, closed, rows, reader)
        scores = self._run_prompt(prompt, session)
        session.store = KVPool(cache)
        if prompt.has_inner_padding:
            session.store.commit([row.nonzero()[:, 0].tolist() for row in mask], rows.starts, rows.width)
        last = positions[:, -1]
        context = Context(
            tokens=ids,
            mask=mask,
            positions=positions[None],
            next_position=last + 1,
            features=scores.features,
            embeds=self.model.get_input_embeddings()(ids) if needs.embeds else None,
            encoder=EncoderContext(encoded[0], getattr(prompt.encoded, INPUT_FEATURES, None))
            if needs.encoder
            else None,
            source=_source(inputs.get(SOURCE), len(ids)),
            room=None if self.positions is None else self.positions - 1 - last,
        )
        ends = {layer: features[:, -1:] for layer, features in scores.features.items()}
        return PrefillOutput(session, context, root_only(ids[:, -1]), Scores(scores.logits[:, -1:], ends))

    @torch.no_grad()
    def score(self, session: EncodedSession, draft: Draft) -> Scores:
        rows, device = session.rows, draft.tokens.device
        tree, positions = self._mask_and_positions(session, draft)
        scores = self._run_draft(session, draft.tokens, tree, torch.tensor([positions], device=device), session.cache)
        rows.record_draft(draft.tokens.shape[1])
        return scores

    def _is_tokenwise(self, session: EncodedSession) -> bool:
        """Return whether the session's reader computes attention tokenwise (`mmdec.kernels.tokenwise`)."""
        return False

    def _mask_and_positions(self, session: EncodedSession, draft: Draft) -> tuple[TreeMask | None, list[list[int]]]:
        """Return the mask of a draft's pass and its nodes' position ids, as `RowLayout.mask_and_positions` does."""
        tokenwise = self._is_tokenwise(session)
        if tokenwise:
            session.store.show_multiple()
        return session.rows.mask_and_positions(draft, self.model.dtype, tokenwise=tokenwise)

    @torch.no_grad()
    def commit(self, session: EncodedSession, verdict: Verdict) -> None:
        keep_path(session.rows, session.store, verdict.path)

    @torch.no_grad()
    def select(self, session: EncodedSession, live: Tensor) -> None:
        """Keep only the batch rows with the indices `live` (K,) int64, in that order, also of the encoder's output."""
        session.rows.select(live.tolist())
        session.store.select(live, session.rows.width)
        live = live.to(session.prompt.device)
        session.encoded, session.prompt = encoder_output(session.encoded, live), session.prompt[live]
        mask = session.encoder_mask
        session.encoder_mask = None if mask is None else mask[live]

    def prepare_inputs(self, ids: Tensor, config: GenerationConfig, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the inputs unchanged, because `ids` (B, P) are always the whole text."""
        return inputs

    def must_fill_cache(self, inputs: Mapping[str, Any], config: GenerationConfig) -> bool:
        """Return False, so that `fill_cache` is not called: `output` fills a cache that the caller reads."""
        return False

    def fill_cache(self, inputs: Mapping[str, Any], sequences: Tensor) -> None:
        """Do nothing: `output` fills the caller's cache."""

    @torch.no_grad()
    def output(
        self,
        inputs: Mapping[str, Any],
        sequences: Tensor,
        lengths: Sequence[int],
        config: GenerationConfig,
        scores: tuple[Tensor, ...] | None = None,
        logits: tuple[Tensor, ...] | None = None,
    ) -> GenerateEncoderDecoderOutput:
        """Make transformers' output object.

        Attentions and hidden states, and the keys and values of a caller's cache that is still empty, come from one
        more pass over the whole text. In this pass, padding after a row's end is attended to, as in transformers' own
        loop.

        Args:
            sequences: (B, L).
            lengths: Each row's number of new tokens.
            scores, logits: (B, V) for each new token.
        """
        cache = inputs.get(CACHE_ARGUMENT)
        flags = {name: True for name in ("output_attentions", "output_hidden_states") if getattr(config, name)}
        # with several rows or padding between tokens, decoding has filled another cache; the caller's is still empty
        empty = cache if cache is not None and not cache.get_seq_length() else None
        states: dict[str, Any] = {}
        if flags or empty is not None:
            text, mask = sequences[:, :-1], inputs.get("decoder_attention_mask")
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(len(mask), text.shape[1] - mask.shape[1])], 1)
            filled = EncoderDecoderCache(DynamicCache(), DynamicCache()) if empty is None else empty
            text_inputs = {**inputs, "input_ids": text, "decoder_attention_mask": mask, CACHE_ARGUMENT: None}
            decoded = self._run_finished_text(
                EncodedPrompt.from_inputs(text_inputs, None, self.counts_padding), filled, config, **flags
            )
            prompt = sequences.shape[1] - max(lengths)
            states = output_states(decoded, inputs["encoder_outputs"], prompt, text.shape[1], config)
        return GenerateEncoderDecoderOutput(
            sequences=cast(torch.LongTensor, sequences),
            scores=cast(Any, scores),
            logits=cast(Any, logits),
            **{CACHE_ARGUMENT: cache},
            **states,
        )


def encoder_output(states: Any, rows: Tensor | None = None) -> BaseModelOutput:
    """Return an encoder's output (states, and for some models a mask) for some batch rows.

    Args:
        rows: Indices (K,) int64 of the rows, or None for all.
    """
    kind = type(states) if isinstance(states, BaseModelOutput) else BaseModelOutput
    parts = {"last_hidden_state": states[0], "attention_mask": getattr(states, "attention_mask", None)}
    return kind(**{name: part if rows is None else part[rows] for name, part in parts.items() if part is not None})


def _source(encoder_inputs: tuple[Tensor, Tensor | None] | None, rows: int) -> list[list[int]] | None:
    """Return each batch row's encoder input ids without padding; None if they are not known.

    Args:
        encoder_inputs: Ids and mask of the encoder's inputs.
        rows: Number of rows of the batch; with `num_return_sequences`, several rows belong to each input.
    """
    if encoder_inputs is None:
        return None
    ids, mask = encoder_inputs
    is_text = torch.ones_like(ids) if mask is None else mask
    texts = [row[row_mask.bool()].tolist() for row, row_mask in zip(ids, is_text, strict=True)]
    return [text for text in texts for _ in range(rows // len(texts))]
