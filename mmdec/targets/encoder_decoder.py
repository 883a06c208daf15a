"""Encoder-decoders of transformers as targets: T5, BART, Marian, NLLB, Moonshine, Speech2Text, SeamlessM4T and kin.

Their decoders count positions by columns of the cache, so that the rows of a batch could not grow by different numbers
of tokens, and the nodes of a tree could not share a depth. A run therefore calls the model through a copy that shares
all weights (`Twin`), in which the parts that know positions take them from the run: the table of position embeddings
(BART, Marian, NLLB, Speech2Text, SeamlessM4T), or the bias by distance (T5). Moonshine's decoder takes them as inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, PreTrainedModel
from transformers.generation.utils import GenerateEncoderDecoderOutput
from transformers.modeling_outputs import BaseModelOutput

from mmdec.decode.tree import single
from mmdec.targets.cache import KVPool, RowLayout, check_cache, keep_path
from mmdec.targets.hf_target import (
    HfTarget,
    check_attention,
    check_layers,
    model_name,
    output_states,
    recording,
    shallow,
)
from mmdec.types import Context, Draft, InputError, Needs, Scores, Verdict

# tests/exactness/test_encoder_decoders.py tries each with a small random model
FAMILIES = """
    Bart BigBirdPegasus Blenderbot BlenderbotSmall M2M100 MBart MT5 Marian Moonshine Mvp PLBart Pegasus SeamlessM4T
    SeamlessM4Tv2 Speech2Text T5 UMT5
"""
ENDS = ("ForConditionalGeneration", "MTModel", "ForTextToText", "ForSpeechToText")
CLASSES = frozenset(name + end for name in FAMILIES.split() for end in ENDS)
SOURCE = "source_ids"  # the key under which `hold_back` passes the encoder's token ids to `prefill`
TABLE = 64  # granularity of the number of position embeddings that are looked up at once


@final
class _Placed(nn.Module):
    """Stands for a decoder's position embeddings: gives those of `positions`, whatever the decoder counts."""

    def __init__(self, stock: nn.Module, pad: int | None) -> None:
        super().__init__()
        self.stock: tuple[Any, ...] = (stock,)  # a tuple, so that it is not registered
        self.pad = pad
        self.positions = self.tokens = torch.empty(0, dtype=torch.long)  # (B, N)
        self.table: Tensor = torch.empty(0)
        self.padding: Tensor | None = None  # the embedding of the padding token, if it is another one at every position

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The position embeddings (B, N, H) of the run's nodes. args, kwargs: as the decoder calls its own."""
        needed = int(self.positions.max()) + 1
        if len(self.table) < needed:
            most = getattr(self.stock[0], "num_embeddings", None)
            count = -(-needed // TABLE) * TABLE
            count = count if most is None else min(count, most - getattr(self.stock[0], "offset", 0))
            other = 0 if self.pad != 0 else 1
            self.table = self._look_up(count, other, args, kwargs)
            if self.pad is not None:
                padding = self._look_up(1, self.pad, args, kwargs)[0]
                self.padding = None if torch.equal(padding, self.table[0]) else padding
        found = self.table[self.positions]
        if self.padding is not None:
            found = torch.where((self.tokens == self.pad)[..., None], self.padding, found)
        return found

    def _look_up(self, count: int, token: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The embeddings (count, H) of the first positions of a row of this token."""

        def first(value: Any) -> Any:
            if isinstance(value, (tuple, list)):
                return torch.Size((1, count))
            if isinstance(value, Tensor) and value.ndim == 3:
                return value.new_zeros(1, count, value.shape[2])
            if isinstance(value, Tensor) and value.ndim == 2:
                return value.new_full((1, count), token)
            if isinstance(value, Tensor):
                return torch.arange(count, device=value.device)
            return 0 if isinstance(value, int) else value

        embeddings = self.stock[0](*map(first, args), **{name: first(value) for name, value in kwargs.items()})
        return embeddings.reshape(count, -1)


@final
class Twin:
    """A copy of a model, for one run, that shares its weights and takes positions from the run."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Copies the modules on the way to those that know positions."""
        decoder = cast(nn.Module, cast(Any, model).get_decoder())
        self.by_inputs = "decoder_position_ids" in inspect.signature(model.forward).parameters
        self._placed: _Placed | None = None
        self._distances = dict[Any, Tensor]()  # attention -> (distances, heads) its bias
        self._positions: Tensor = torch.empty(0)  # (B, N) of the pass's nodes
        self._columns: Tensor = torch.empty(0)  # (B, S + N) of all columns
        root = next(name for name, part in model.named_modules() if part is decoder)
        self.model = cast(PreTrainedModel, shallow(model))
        stock = getattr(decoder, "embed_positions", None)
        if stock is not None:
            self._placed = _Placed(stock, getattr(model.config, "pad_token_id", None))
            self._copy(root)._modules["embed_positions"] = self._placed
        for name, part in decoder.named_modules():
            if getattr(part, "has_relative_attention_bias", False):
                same = self._copy(f"{root}.{name}")
                same.__dict__["compute_bias"] = partial(self._bias, part)

    def _copy(self, path: str) -> nn.Module:
        """Copy the modules on this path, and return the last."""
        part = cast(nn.Module, self.model)
        for name in path.split("."):
            child = cast(nn.Module, part._modules[name])
            part._modules[name] = part = shallow(child)
        return part

    def place(self, tokens: Tensor, positions: Tensor, rows: RowLayout, prompt: Tensor) -> None:
        """Set the positions (B, N) of a pass over tokens (B, N), which follow the columns of `rows`.

        prompt: positions (B, P) of their first columns.
        """
        if self._placed is not None:
            self._placed.tokens, self._placed.positions = tokens, positions
        shifts = torch.tensor(rows.shifts, device=tokens.device)[:, None]
        before = torch.arange(rows.width, device=tokens.device) + shifts
        width = min(prompt.shape[1], rows.width)
        before[:, :width] = prompt[:, :width]
        self._positions, self._columns = positions, torch.cat([before, positions], 1)

    def _bias(self, stock: Any, *lengths: Any, **options: Any) -> Tensor:
        """The bias (B, heads, N, S + N) by the distances of the run's columns from its nodes. stock: the attention."""
        table, needed = self._distances.get(stock), int(self._positions.max()) + 1
        if table is None or len(table) < needed:
            farthest = -(-needed // TABLE) * TABLE - 1
            row = stock.compute_bias(1, farthest + 1, past_seen_tokens=farthest)  # (1, heads, 1, distances + 1)
            table = self._distances[stock] = row[0, :, 0].flip(1).t().contiguous()
        behind = (self._positions[:, :, None] - self._columns[:, None]).clamp(min=0)  # columns ahead are masked
        return table[behind].permute(0, 3, 1, 2)


@dataclass
class Session:
    """The state of one run: its cache, its rows, and the encoder's output for them."""

    cache: EncoderDecoderCache
    store: KVPool
    rows: RowLayout
    encoded: BaseModelOutput  # the encoder's states (B, S, H), and for some its mask
    mask: Tensor | None  # (B, T) of the encoder's inputs
    layers: tuple[int, ...]
    twin: Twin
    prompt: Tensor  # (B, P) positions of the first columns, once padding inside the prompt is removed


@final
class EncoderDecoderTarget(HfTarget):
    """Scores token trees with the decoder of an encoder-decoder, which is not changed; several runs may share it.

    Layers are counted from 0; -1 is the last one, final norm included. The attention implementation may be "sdpa" or
    "eager".
    """

    reads_encoder: ClassVar[bool] = True

    @staticmethod
    def takes(model: PreTrainedModel) -> bool:
        """Whether this is an encoder-decoder of a tested family."""
        return any(kind.__name__ in CLASSES and "transformers." in kind.__module__ for kind in type(model).__mro__)

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises InputError if the model's attention implementation cannot take tree masks."""
        config: Any = model.config.get_text_config(decoder=True)
        check_attention(config)
        self.model = model
        self.decoder: Any = cast(Any, model).get_decoder()
        self.vocab_size: int = cast(Any, model.get_output_embeddings()).weight.shape[0]
        self.hidden_size: int = config.hidden_size
        self.layers: int = getattr(config, "decoder_layers", None) or getattr(
            config, "num_decoder_layers", config.num_hidden_layers
        )
        table = getattr(self.decoder, "embed_positions", None)
        held = getattr(table, "num_embeddings", None)
        self.positions: int | None = None if held is None else held - getattr(table, "offset", 0)

    @property
    def name(self) -> str:
        """Names the model's source and a digest of its weights."""
        return model_name(self.model)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    def hold_back(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split a call's inputs: the source's token ids go to `generate`, and to `prefill` for drafters that copy."""
        ids = inputs.get("input_ids")
        shared = isinstance(ids, Tensor) and self._shares_tokens()
        return dict(inputs), {SOURCE: (ids, inputs.get("attention_mask"))} if shared else {}

    def _shares_tokens(self) -> bool:
        """Whether a token of the source is the same token in the target's text."""
        source = getattr(cast(Any, self.model).get_encoder(), "embed_tokens", None)
        own = getattr(self.decoder, "embed_tokens", None)
        return source is not None and own is not None and source.weight.data_ptr() == own.weight.data_ptr()

    @torch.no_grad()
    def prefill(self, inputs: Mapping[str, Any], needs: Needs) -> tuple[Session, Context, Draft, Scores]:
        """Run the decoder's prompt.

        inputs: input_ids (B, P); encoder_outputs, whose first part is (B, S, H); optional attention_mask (B, T) of the
            encoder; optional decoder_attention_mask (B, P), padded on the left; optional past_key_values, which must be
            empty and is filled at batch 1.
        """
        check_layers(needs, self.layers)
        ids, mask = _prompt(inputs, self.positions)
        holes = bool((mask[:, :-1] & ~mask[:, 1:]).any())
        given = inputs.get("past_key_values") if len(ids) == 1 and not holes else None
        cache = given or EncoderDecoderCache(DynamicCache(), DynamicCache())
        encoded, encoder_mask = _encoded(inputs["encoder_outputs"]), inputs.get("attention_mask")
        passed = inputs.get("decoder_attention_mask")
        scores = self._run(self.model, ids, passed, encoded, encoder_mask, cache, needs.layers)
        columns = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
        rows = RowLayout.of_prompt(mask, columns)
        closed = columns.clone()
        for row, seen in enumerate(mask):
            closed[row, rows.starts[row] : rows.ends[row]] = columns[row, seen]
        session = Session(cache, KVPool(cache), rows, encoded, encoder_mask, needs.layers, Twin(self.model), closed)
        if holes:
            session.store.commit([row.nonzero()[:, 0].tolist() for row in mask], rows.starts, rows.width)
        last = columns[:, -1]
        context = Context(
            tokens=ids,
            mask=mask,
            positions=columns[None],
            next_position=last + 1,
            features=scores.features,
            embeds=self.model.get_input_embeddings()(ids) if needs.embeds else None,
            memory=encoded[0] if needs.memory else None,
            room=None if self.positions is None else self.positions - 1 - last,
            source=_source(inputs.get(SOURCE), len(ids)),
        )
        ends = {layer: features[:, -1:] for layer, features in scores.features.items()}
        return session, context, single(ids[:, -1]), Scores(scores.logits[:, -1:], ends)

    @torch.no_grad()
    def score(self, session: Session, draft: Draft) -> Scores:
        """Run the decoder over the draft's tree. Its columns stay in the cache until `commit`."""
        rows, device = session.rows, draft.tokens.device
        tree, placed = rows.see(draft.parents.tolist(), device, self.model.dtype)
        positions = torch.tensor(placed, device=device)
        session.twin.place(draft.tokens, positions, rows, session.prompt)
        more = {"decoder_position_ids": positions} if session.twin.by_inputs else {}
        mask = None if tree is None else tree.additive
        parts = session.encoded, session.mask, session.cache, session.layers
        scores = self._run(session.twin.model, draft.tokens, mask, *parts, **more)
        rows.wait(draft.tokens.shape[1])
        return scores

    @torch.no_grad()
    def commit(self, session: Session, verdict: Verdict) -> None:
        """Keep the accepted path's columns and drop the others. After the prompt's pass nothing changes."""
        keep_path(session.rows, session.store, verdict.path)

    @torch.no_grad()
    def select(self, session: Session, live: Tensor) -> None:
        """Keep only the rows whose indices are in `live` (K,) int64, in that order, also of the encoder's output."""
        session.rows.select(live.tolist())
        session.store.select(live, session.rows.width)
        session.encoded, session.prompt = _encoded(session.encoded, live), session.prompt[live]
        session.mask = None if session.mask is None else session.mask[live]

    def prepare_inputs(self, ids: Tensor, config: GenerationConfig, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs unchanged: ids (B, P) are always the whole text."""
        return inputs

    def keeps_cache(self, inputs: Mapping[str, Any], config: GenerationConfig) -> bool:
        """False: `output` fills a cache that the caller reads."""
        return False

    def extend(self, inputs: Mapping[str, Any], sequences: Tensor) -> None:
        """Nothing to do: see `keeps_cache`."""

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
        """Make transformers' output object for sequences (B, L) with `lengths` new tokens in each row.

        Attentions, hidden states and a batch's cache are computed by one more pass over the whole text.
        """
        cache = inputs.get("past_key_values")
        flags = {name: True for name in ("output_attentions", "output_hidden_states") if getattr(config, name)}
        empty = cache if cache is not None and not cache.get_seq_length() else None
        states: dict[str, Any] = {}
        if flags or empty is not None:
            text, mask, encoded = sequences[:, :-1], inputs.get("decoder_attention_mask"), inputs["encoder_outputs"]
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(len(mask), text.shape[1] - mask.shape[1])], 1)
            filled = EncoderDecoderCache(DynamicCache(), DynamicCache()) if empty is None else empty
            whole = _encoded(encoded), inputs.get("attention_mask")
            out = self._call(self.model, text, mask, *whole, filled, **flags)
            decoded = SimpleNamespace(
                attentions=out.get("decoder_attentions"),
                cross_attentions=out.get("cross_attentions"),
                hidden_states=out.get("decoder_hidden_states"),
            )
            states = output_states(decoded, encoded, sequences.shape[1] - max(lengths), text.shape[1], config)
        return GenerateEncoderDecoderOutput(
            sequences=cast(torch.LongTensor, sequences),
            scores=cast(Any, scores),
            logits=cast(Any, logits),
            past_key_values=cache,
            **states,
        )

    def _run(
        self,
        model: PreTrainedModel,
        tokens: Tensor,
        mask: Tensor | None,
        encoded: BaseModelOutput,
        encoder_mask: Tensor | None,
        cache: Any,
        layers: tuple[int, ...],
        **more: Any,
    ) -> Scores:
        decoder = cast(nn.Module, cast(Any, model).get_decoder())
        with recording(decoder, self.layers, [layer for layer in layers if layer >= 0]) as recorded:
            more["output_hidden_states"] = -1 in layers
            out = self._call(model, tokens, mask, encoded, encoder_mask, cache, **more)
        hidden = out.get("decoder_hidden_states")
        return Scores(out.logits, {layer: hidden[-1] if layer < 0 else recorded[layer] for layer in layers})

    def _call(
        self,
        model: PreTrainedModel,
        tokens: Tensor,
        mask: Tensor | None,
        encoded: BaseModelOutput,
        encoder_mask: Tensor | None,
        cache: Any,
        **more: Any,
    ) -> Any:
        return model(
            decoder_input_ids=tokens,
            decoder_attention_mask=mask,
            encoder_outputs=encoded,
            attention_mask=encoder_mask,
            past_key_values=cache,
            use_cache=True,
            **more,
        )


def _encoded(given: Any, rows: Tensor | None = None) -> BaseModelOutput:
    """An encoder's output for some rows (K,) int64, or all: its states, and for some models its own mask."""
    kind = type(given) if isinstance(given, BaseModelOutput) else BaseModelOutput
    parts = {"last_hidden_state": given[0], "attention_mask": getattr(given, "attention_mask", None)}
    return kind(**{name: part if rows is None else part[rows] for name, part in parts.items() if part is not None})


READ = {"input_ids", "encoder_outputs", "attention_mask", "decoder_attention_mask", "past_key_values", SOURCE}
LET_BE = {"use_cache", "logits_to_keep", "output_attentions", "output_hidden_states"}


def _prompt(inputs: Mapping[str, Any], most: int | None) -> tuple[Tensor, Tensor]:
    """The decoder's token ids (B, P), and a mask (B, P) bool that is False at padding, checked."""
    unknown = sorted(name for name, value in inputs.items() if name not in READ | LET_BE and value is not None)
    ids = inputs.get("input_ids")
    if unknown or not isinstance(ids, Tensor) or inputs.get("encoder_outputs") is None:
        raise InputError(
            "`inputs` must hold the decoder's `input_ids` and `encoder_outputs` and may hold `attention_mask` and "
            f"`decoder_attention_mask`, but holds {unknown or sorted(inputs)}. Leave the others out."
        )
    if most is not None and ids.shape[1] > most:
        raise InputError(f"`input_ids` must have at most {most} columns, but has {ids.shape[1]}. Shorten the prompt.")
    cache = inputs.get("past_key_values")
    if cache is not None:
        check_cache(cache)
        if cache.get_seq_length():
            raise InputError(
                f"`past_key_values` must be empty, but holds {cache.get_seq_length()} columns. Leave it out."
            )
    given = inputs.get("decoder_attention_mask")
    if given is None:
        return ids, torch.ones_like(ids, dtype=torch.bool)
    if given.shape != ids.shape or not bool(given[:, -1].all()):
        raise InputError(
            f"`decoder_attention_mask` must be {tuple(ids.shape)} with 1 at the end of every row, but is "
            f"{tuple(given.shape)}. Pad on the left."
        )
    return ids, given.bool()


def _source(held: tuple[Tensor, Tensor | None] | None, rows: int) -> list[list[int]] | None:
    """The encoder's tokens of each of so many rows, without padding; None if they are not known."""
    if held is None:
        return None
    ids, mask = held
    kept = torch.ones_like(ids) if mask is None else mask
    texts = [row[seen.bool()].tolist() for row, seen in zip(ids, kept, strict=True)]
    return [text for text in texts for _ in range(rows // len(texts))]


def encoder_decoders() -> str:
    """The supported families, for errors."""
    return ", ".join(FAMILIES.split())
