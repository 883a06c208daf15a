"""Encoder-decoders of transformers as targets: T5, BART, Marian, NLLB, Moonshine, Speech2Text, SeamlessM4T and others.

Their decoders take a token's index in the cache as its position. With drafts this is wrong: rows of a batch grow by
different numbers of tokens, and sibling nodes share a position. So mmdec calls the model through a copy that shares all
weights (`PositionedCopy`). In the copy, one module gets the true positions: the position embeddings (BART, Marian,
NLLB, Speech2Text, SeamlessM4T) or the bias by distance (T5). Moonshine's decoder takes positions as inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache, GenerationConfig, PreTrainedModel

from mmdec.compat import CACHE_ARGUMENT
from mmdec.errors import InputError
from mmdec.kernels.tree_attention import TreeMask
from mmdec.targets.encoded import SOURCE, EncodedPrompt, EncodedSession, EncodedTarget, encoder_output
from mmdec.targets.families import ENCODER_DECODER_CLASSES
from mmdec.targets.hf_target import record_states, shallow_copy
from mmdec.targets.kv_cache import RowLayout
from mmdec.types import Scores

# position embeddings are computed and stored for multiples of this number of positions, to save calls
POSITIONS_PER_STEP = 64


@final
class _PositionOverride(nn.Module):
    """Replaces a decoder's module of position embeddings.

    It embeds `positions`, which `PositionedCopy` sets before each pass, and ignores the positions that the decoder
    counts. It stores the embeddings of the first positions.
    """

    def __init__(self, stock: nn.Module, pad: int | None) -> None:
        super().__init__()
        # the module that this one replaces; in a tuple, so that torch does not register it as a submodule
        self.stock: tuple[Any, ...] = (stock,)
        self.pad = pad
        self.positions = self.tokens = torch.empty(0, dtype=torch.long)  # (B, N), of the tokens in the next pass
        self.table: Tensor = torch.empty(0)
        self.padding: Tensor | None = None  # (H,) the padding token's position embedding, if it is a special one

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the position embeddings (B, N, H) of `self.positions`. args, kwargs: the decoder's arguments."""
        needed = int(self.positions.max()) + 1
        if len(self.table) < needed:
            table_size = getattr(self.stock[0], "num_embeddings", None)
            count = -(-needed // POSITIONS_PER_STEP) * POSITIONS_PER_STEP
            count = count if table_size is None else min(count, table_size - getattr(self.stock[0], "offset", 0))
            other = 0 if self.pad != 0 else 1
            self.table = self._look_up(count, other, args, kwargs)
            if self.pad is not None:
                padding = self._look_up(1, self.pad, args, kwargs)[0]
                self.padding = None if torch.equal(padding, self.table[0]) else padding
        embedded = self.table[self.positions]
        if self.padding is not None:
            embedded = torch.where((self.tokens == self.pad)[..., None], self.padding, embedded)
        return embedded

    def _look_up(self, count: int, token: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the replaced module's embeddings (count, H) of the first `count` positions.

        Args:
            token: The token id at all these positions.
            args, kwargs: What the decoder passes; they show which arguments the module takes.
        """

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
class PositionedCopy:
    """A copy of a model for one `generate` call, which uses the positions that `place` sets.

    It shares the model's weights: only the modules on the path to the position embeddings or to T5's bias are copied.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        decoder = cast(nn.Module, cast(Any, model).get_decoder())
        self.by_inputs = "decoder_position_ids" in inspect.signature(model.forward).parameters
        self._placed: _PositionOverride | None = None
        self._distances = dict[Any, Tensor]()  # T5's attention module -> its bias (distances, heads)
        self._positions: Tensor = torch.empty(0)  # (B, N) positions of the draft's nodes
        self._columns: Tensor = torch.empty(0)  # (B, S + N) positions of the cached tokens and the nodes
        root = next(name for name, part in model.named_modules() if part is decoder)
        self.model = cast(PreTrainedModel, shallow_copy(model))
        stock = getattr(decoder, "embed_positions", None)
        if stock is not None:
            self._placed = _PositionOverride(stock, getattr(model.config, "pad_token_id", None))
            self._copy(root)._modules["embed_positions"] = self._placed
        for name, part in decoder.named_modules():
            if getattr(part, "has_relative_attention_bias", False):
                copied = self._copy(f"{root}.{name}")
                copied.__dict__["compute_bias"] = partial(self._bias, part)

    def _copy(self, path: str) -> nn.Module:
        """Copy each module along a dotted path such as "model.decoder", to change them in this copy of the model only.

        Returns:
            The copy of the last module.
        """
        part = cast(nn.Module, self.model)
        for name in path.split("."):
            child = cast(nn.Module, part._modules[name])
            part._modules[name] = part = shallow_copy(child)
        return part

    def place(self, tokens: Tensor, positions: Tensor, rows: RowLayout, prompt: Tensor) -> None:
        """Set the positions (B, N) of the tokens (B, N) in the next pass.

        Args:
            rows: Which cache columns hold which row's tokens.
            prompt: (B, P), positions of the prompt's tokens.
        """
        if self._placed is not None:
            self._placed.tokens, self._placed.positions = tokens, positions
        shifts = torch.tensor(rows.shifts, device=tokens.device)[:, None]
        before = torch.arange(rows.width, device=tokens.device) + shifts
        width = min(prompt.shape[1], rows.width)
        before[:, :width] = prompt[:, :width]
        self._positions, self._columns = positions, torch.cat([before, positions], 1)

    def _bias(self, stock: Any, *lengths: Any, **options: Any) -> Tensor:
        """Compute T5's bias (B, heads, N, S + N) from each node's distance to each cached token and node.

        Args:
            stock: The model's attention module that computes the bias.
        """
        table, needed = self._distances.get(stock), int(self._positions.max()) + 1
        if table is None or len(table) < needed:
            farthest = -(-needed // POSITIONS_PER_STEP) * POSITIONS_PER_STEP - 1
            # the bias (1, heads, 1, farthest + 1) of the last query to all keys: one number for each head and distance
            row = stock.compute_bias(1, farthest + 1, past_seen_tokens=farthest)
            table = self._distances[stock] = row[0, :, 0].flip(1).t().contiguous()
        # how many positions each key is before the query; later keys are hidden by the mask
        behind = (self._positions[:, :, None] - self._columns[:, None]).clamp(min=0)
        return table[behind].permute(0, 3, 1, 2)


@final
class EncoderDecoderTarget(EncodedTarget):
    """Scores token trees with the decoder of an encoder-decoder model. The model is not changed.

    Raises:
        InputError: If the model's attention implementation cannot take tree masks.
    """

    @staticmethod
    def supports(model: PreTrainedModel) -> bool:
        """Return whether the model is an encoder-decoder of a family that tests cover."""
        return any(
            kind.__name__ in ENCODER_DECODER_CLASSES and "transformers." in kind.__module__
            for kind in type(model).__mro__
        )

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config.get_text_config(decoder=True)
        self.decoder: Any = cast(Any, model).get_decoder()
        table = getattr(self.decoder, "embed_positions", None)
        table_size = getattr(table, "num_embeddings", None)
        positions = None if table_size is None else table_size - getattr(table, "offset", 0)
        layers = getattr(config, "decoder_layers", None)
        super().__init__(model, layers or getattr(config, "num_decoder_layers", config.num_hidden_layers), positions)

    def split_inputs(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Choose which inputs go to `generate`, and which directly to `prefill`.

        Returns:
            All inputs, for `generate`; and for `prefill` the encoder's token ids and mask, which some drafters copy, if
            encoder and decoder have the same vocabulary.

        Raises:
            InputError: For a wrong mask.
        """
        ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        main = str(self.model.main_input_name)
        source = inputs[main]
        if mask is not None and (len(mask) != len(source) or (main == "input_ids" and mask.shape != source.shape)):
            raise InputError(
                f"`attention_mask` must be as `{main}`, {tuple(source.shape)}, but is {tuple(mask.shape)}. Pass the "
                "processor's own."
            )
        shared = isinstance(ids, Tensor) and self._shares_tokens()
        return dict(inputs), {SOURCE: (ids, mask)} if shared else {}

    def _shares_tokens(self) -> bool:
        """Return whether encoder and decoder share their token embeddings, so that an id means the same in both."""
        source = getattr(cast(Any, self.model).get_encoder(), "embed_tokens", None)
        embedding = getattr(self.decoder, "embed_tokens", None)
        return source is not None and embedding is not None and source.weight.data_ptr() == embedding.weight.data_ptr()

    def _make_reader(
        self, prompt: EncodedPrompt, cache: EncoderDecoderCache, layers: tuple[int, ...]
    ) -> PositionedCopy:
        return PositionedCopy(self.model)

    def _run_prompt(self, prompt: EncodedPrompt, session: EncodedSession) -> Scores:
        return self._forward_with_features(self.model, session, prompt.ids, prompt.mask_given, session.cache)

    def _run_draft(
        self, session: EncodedSession, tokens: Tensor, tree: TreeMask | None, positions: Tensor, cache: Any
    ) -> Scores:
        twin: PositionedCopy = session.reader
        twin.place(tokens, positions[0], session.rows, session.prompt)
        more = {"decoder_position_ids": positions[0]} if twin.by_inputs else {}
        return self._forward_with_features(
            twin.model, session, tokens, None if tree is None else tree.additive, cache, **more
        )

    def _run_finished_text(self, text: EncodedPrompt, cache: Any, config: GenerationConfig, **flags: bool) -> Any:
        out = self._forward(self.model, text, text.ids, text.mask_given, cache, **flags)
        hidden, maps = out.get("decoder_hidden_states"), out.get("decoder_attentions")
        return SimpleNamespace(attentions=maps, cross_attentions=out.get("cross_attentions"), hidden_states=hidden)

    def _forward_with_features(
        self,
        model: PreTrainedModel,
        session: EncodedSession,
        tokens: Tensor,
        mask: Tensor | None,
        cache: Any,
        **more: Any,
    ) -> Scores:
        layers, decoder = session.layers, cast(nn.Module, cast(Any, model).get_decoder())
        with record_states(decoder, self.layers, [layer for layer in layers if layer >= 0]) as recorded:
            out = self._forward(model, session, tokens, mask, cache, output_hidden_states=-1 in layers, **more)
        hidden = out.get("decoder_hidden_states")
        return Scores(out.logits, {layer: hidden[-1] if layer < 0 else recorded[layer] for layer in layers})

    def _forward(
        self,
        model: Any,
        encoder: EncodedPrompt | EncodedSession,
        tokens: Tensor,
        mask: Tensor | None,
        cache: Any,
        **more: Any,
    ) -> Any:
        return model(
            decoder_input_ids=tokens,
            decoder_attention_mask=mask,
            encoder_outputs=encoder_output(encoder.encoded),
            attention_mask=encoder.encoder_mask,
            use_cache=True,
            **{CACHE_ARGUMENT: cache},
            **more,
        )
