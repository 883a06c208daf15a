"""Decoder-only language models of transformers as targets: Llama, Qwen2, and others that are built alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from mmdec.decode.tree import single
from mmdec.targets.attention import TREE_ATTENTION
from mmdec.targets.cache import KVPool, check_cache, shallow_copy
from mmdec.targets.families import check_model, is_decoder_only
from mmdec.targets.model_source import model_name
from mmdec.targets.row_layout import RowLayout
from mmdec.targets.text_prompt import TextPrompt
from mmdec.types import Context, Draft, InputError, Needs, Scores, Verdict


@dataclass
class TextSession:
    """One run: its cache and its rows."""

    store: KVPool
    rows: RowLayout
    layers: tuple[int, ...]


@final
class TextTarget:
    """Scores token trees with a causal language model, which is left as it is and may serve many at once.

    Layers are counted from 0; -1 is the last one, final norm included. The attention implementation may be "sdpa",
    "eager" or "mmdec_tree".
    """

    one_run: ClassVar[bool] = True
    reads_encoder: ClassVar[bool] = False
    refused_outputs: ClassVar[tuple[str, ...]] = ("output_attentions", "output_hidden_states")
    batch_processors: ClassVar[tuple[type, ...]] = ()

    @staticmethod
    def takes(model: PreTrainedModel) -> bool:
        """Whether it is a decoder-only language model with a key-value cache."""
        return is_decoder_only(model)

    def __init__(self, model: PreTrainedModel, *, checked: bool = False) -> None:
        """Raises InputError for a model whose drafts could not be scored or taken back. checked: by the caller."""
        if not checked:
            check_model(model, _scorer)
        config = model.config.get_text_config(decoder=True)
        self.model = model
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.layers: int = config.num_hidden_layers
        # Rotations have no end, a table of positions has; what else a configuration may mean counts as a table.
        turned = getattr(config, "rope_parameters", None) is not None
        self.positions: int | None = None if turned else getattr(config, "max_position_embeddings", None)

    @property
    def name(self) -> str:
        """Where the model is from, and a digest of its weights."""
        return model_name(self.model)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @torch.no_grad()
    def prefill(self, inputs: Mapping[str, Any], needs: Needs) -> tuple[TextSession, Context, Draft, Scores]:
        """inputs: input_ids (B, P); optional attention_mask (B, P), padded on the left; position_ids (B, P);
        past_key_values, a DynamicCache, empty or with the first columns, which needs a mask that says whether the ids
        are the whole text or what is new. The very pass that `generate` begins with.

        In a batch of one without holes a given cache is filled as the run goes; any other is only read: see `extend`.
        """
        prompt = TextPrompt.of(inputs)
        self._check_needs(needs, prompt.past)
        cache = prompt.cache
        shared = len(prompt.ids) > 1 or prompt.holes
        if cache is None or (shared and not prompt.past):
            cache = DynamicCache(config=self.model.config)
        elif shared:
            cache = shallow_copy(cache)
        out = self.model(
            input_ids=prompt.fresh,
            attention_mask=prompt.mask_given,
            position_ids=prompt.positions[:, -prompt.fresh.shape[1] :],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            output_hidden_states=bool(needs.layers),
        )
        session = TextSession(KVPool(cache), prompt.rows(), needs.layers)
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
            room=None if self.positions is None else self.positions - 1 - prompt.positions[:, -1],
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

    @torch.no_grad()
    def extend(self, inputs: Mapping[str, Any], sequences: Tensor) -> None:
        """Leave in the given cache what `generate` leaves there: all columns of a finished text (B, L) but the last,
        padding after a row's end included. One pass over those that the cache lacks; none after a run that filled it.
        """
        cache: DynamicCache = inputs["past_key_values"]
        new = sequences.shape[1] - inputs["input_ids"].shape[1]
        given = inputs.get("attention_mask")
        columns = inputs["input_ids"].shape[1] if given is None else given.shape[1]
        lacking = columns + new - 1 - cache.get_seq_length()
        if lacking <= 0:
            return
        prompt = TextPrompt.of(inputs)
        more = torch.arange(1, new, device=sequences.device)
        positions = torch.cat([prompt.positions, prompt.positions[:, -1:] + more], 1)
        mask = prompt.mask_given
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), new - 1)], 1)
        self.model(
            input_ids=sequences[:, :-1][:, -lacking:],
            attention_mask=mask,
            position_ids=positions[:, -lacking:],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )

    def prepare_inputs(self, ids: Tensor, config: GenerationConfig, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs with the mask that `generate` drops where it is all ones. Beside a cache its length says whether
        ids (B, P) are the whole text or what is new."""
        cache = inputs.get("past_key_values")
        if cache is None or inputs.get("attention_mask") is not None:
            return inputs
        check_cache(cache)
        if not cache.get_seq_length():
            return inputs
        # `generate` notes the length; releases that do not have made the positions of that mask.
        length = getattr(config, "_mask_length", None) or inputs["position_ids"].shape[-1]
        return {**inputs, "attention_mask": ids.new_ones(len(ids), length)}

    def keeps_cache(self, inputs: Mapping[str, Any], config: GenerationConfig) -> bool:
        """Whether the caller reads the cache after the run: one that was given, or one in an output object."""
        cache = inputs.get("past_key_values")
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
        """transformers' output object for sequences (B, L) with `lengths` new tokens in each row."""
        return GenerateDecoderOnlyOutput(
            sequences=cast(torch.LongTensor, sequences),
            scores=cast(Any, scores),
            logits=cast(Any, logits),
            past_key_values=inputs.get("past_key_values"),
        )

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


def _scorer(model: PreTrainedModel) -> TextTarget:
    """For a probe, which finds out what a check would ask."""
    return TextTarget(model, checked=True)
