"""Scores drafts with Whisper's decoder layers, without the Python overhead of transformers' `forward`.

In a small decoder's pass most time is overhead: `forward` builds masks that exist already, looks up attention
implementations, calls dropout that has no effect, and collects outputs that are not needed. Without this overhead, a
draft takes about as long as a single token in transformers' loop. The operations are those of transformers; the sums in
a matrix product may have another order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import EncoderDecoderCache, WhisperForConditionalGeneration
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.whisper.modeling_whisper import WhisperAttention, WhisperDecoder, WhisperDecoderLayer

from mmdec.compat import CACHE_ARGUMENT
from mmdec.kernels import onednn, tokenwise
from mmdec.kernels.cpu_features import is_intel
from mmdec.kernels.float16_linear import HalfWeights, half_precision_copies
from mmdec.kernels.tree_attention import tree_attention
from mmdec.nn.int8 import Int8Linear, Int8Weights
from mmdec.targets.attention import find_tree
from mmdec.targets.hf_target import HOOK_TABLES, copy_modules, has_hooks, plain_linear
from mmdec.targets.tokenwise import is_half_on_cpu

# minimum elements of a weight that oneDNN multiplies on a CPU, and of keys for which the next two constants hold
MIN_ONEDNN_ELEMENTS = 2**17
# for up to this many queries on a CPU, plain products are faster in cross-attention than torch's attention; on Intel
# CPUs queries x keys, on others keys x queries
MAX_MULTIPLIED_QUERIES, MAX_TRANSPOSED_QUERIES = 12, 6
Map = Callable[[Tensor], Tensor]
KeysValues = tuple[Tensor, Tensor]  # keys and values, each (B, heads, tokens, head size)


@final
class FastDecoder(nn.Module):
    """Replaces the decoder's `forward` once the cache holds the prompt and the encoder's keys and values.

    It holds the decoder's layers with their projections. Make a new object for each `generate` call: hooks that are
    added later are ignored. Modules with hooks or adapters, and those of unknown classes, are called normally. Hooks on
    the decoder itself are called, too.
    """

    def __init__(self, decoder: WhisperDecoder) -> None:
        super().__init__()
        # in a tuple, so that torch does not register the embeddings as submodules of this module
        self.embeddings: tuple[Any, Any] = (decoder.embed_tokens, decoder.embed_positions)
        self.copies = half_precision_copies(decoder)
        copies = self.copies.get(partial(_copy_weights, decoder)) or [{}] * len(decoder.layers)
        self.fast_layers = [_Layer(*pair) for pair in zip(decoder.layers, copies, strict=True)]
        self.norm = _as_function(decoder.layer_norm)
        for name in HOOK_TABLES:
            self.__dict__[name] = decoder.__dict__[name]

    @staticmethod
    def can_replace(decoder: nn.Module) -> bool:
        """Return whether the decoder's layers are transformers' own, without hooks, and use "sdpa"."""
        if type(decoder) is not WhisperDecoder or decoder.training:
            return False
        if decoder.config._attn_implementation != "sdpa":
            return False
        layers: list[Any] = list(decoder.layers)
        if any(type(layer) is not WhisperDecoderLayer for layer in layers):
            return False
        attentions = [part for layer in layers for part in (layer.self_attn, layer.encoder_attn)]
        stock = all(type(part) is WhisperAttention for part in attentions)
        return stock and all(map(_has_stock_forward, (decoder, *layers, *attentions)))

    def store_encoder_states(self, states: Tensor, cache: EncoderDecoderCache) -> None:
        """Compute keys and values of the encoder's states (B, S, H), and store them in an empty cache.

        This saves time, because transformers' pass would copy keys and values once more (30 MB for the shipped
        Whisper).
        """
        cross_cache = cache.cross_attention_cache
        for index, layer in enumerate(self.fast_layers):
            if index == len(cross_cache.layers):
                cross_cache.layers.append(DynamicLayer())
            # contiguous in memory for each head: later passes read them faster, which saves more than this copy costs
            keys, values = layer.cross_attention.pair(states)
            values = values.contiguous()
            turned = is_intel() and keys.device.type == "cpu" and keys.dtype == torch.float32
            keys = keys.transpose(2, 3).contiguous().transpose(2, 3) if turned else keys.contiguous()
            cache_layer = cast(DynamicLayer, cross_cache.layers[index])
            cache_layer.lazy_initialization(keys, values)
            cache_layer.keys, cache_layer.values = keys, values
            cache.is_updated[index] = True

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        **options: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Run the decoder over N tokens per batch row.

        Args:
            input_ids, position_ids: (B, N).
            attention_mask: (B, 1, N, S + N), additive, or None if nothing is hidden.
            options: transformers' other arguments, among them the cache.

        Returns:
            An output object with last_hidden_state (B, N, H).
        """
        cache: EncoderDecoderCache = options[CACHE_ARGUMENT]
        states = self.run_shares([PassShare(input_ids, position_ids, attention_mask, cache)])
        named: Any = {CACHE_ARGUMENT: cache}
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=states, **named)

    def run_shares(self, shares: Sequence[PassShare]) -> Tensor:
        """Run the decoder over drafts of several recordings.

        Each draft attends to the cache of its recording. Everything else is computed for all tokens at once, so that
        weights are read only once.

        Returns:
            Hidden states (B, sum of all N, H), joined over the drafts.
        """
        self.copies.passes += 1
        tokens, positions = self.embeddings
        x = torch.cat([tokens(share.ids) + positions(share.ids, position_ids=share.positions) for share in shares], 1)
        for index, layer in enumerate(self.fast_layers):
            x = layer(x, index, shares)
        return self.norm(x)


@final
@dataclass(frozen=True)
class PassShare:
    """One recording's share of a common pass: its draft, and the cache that the draft attends to."""

    ids: Tensor  # (B, N), the draft's tokens
    positions: Tensor  # (B, N), position ids of these tokens
    mask: Tensor | None  # (B, 1, N, S + N), additive; None: nothing is hidden
    cache: EncoderDecoderCache

    def append_to_cache(self, index: int, keys: Tensor, values: Tensor) -> KeysValues:
        """Append the keys and values (B, heads, N, D) of this draft to the cache of decoder layer `index`.

        Returns:
            The keys and values of all tokens.
        """
        layer: Any = self.cache.self_attention_cache.layers[index]
        return layer.update(keys, values)

    def encoder_pair(self, index: int) -> KeysValues:
        """Return layer `index`'s keys and values of the encoder's states, which cross-attention reads."""
        layer: Any = self.cache.cross_attention_cache.layers[index]
        return layer.keys, layer.values


class _Layer:
    """One decoder layer, with its projections as plain functions, which are looked up once, when the object is made.

    Args:
        layer: transformers' decoder layer.
        copies: Name -> copy of a weight in a form that is read faster, from `_copy_weights`; may be empty.
    """

    def __init__(self, layer: Any, copies: Mapping[str, Map]) -> None:
        self.self_attention = _Attention(layer.self_attn, _attend)
        cross_attend = _cross_attend_tokenwise if is_half_on_cpu(layer) else _cross_attend
        self.cross_attention = _Attention(layer.encoder_attn, cross_attend, many=True)
        self.self_attention.mixed = copies.get("self qkv")
        self.self_attention.out = copies.get("self out", self.self_attention.out)
        self.cross_attention.query = copies.get("cross query", self.cross_attention.query)
        self.cross_attention.out = copies.get("cross out", self.cross_attention.out)
        self.self_norm, self.cross_norm = (
            _as_function(layer.self_attn_layer_norm),
            _as_function(layer.encoder_attn_layer_norm),
        )
        self.widen, self.narrow = (copies.get(name, _as_function(getattr(layer, name))) for name in ("fc1", "fc2"))
        self.norm, self.activation = _as_function(layer.final_layer_norm), cast(Map, layer.activation_fn)

    def __call__(self, x: Tensor, index: int, shares: Sequence[PassShare]) -> Tensor:
        """Run the layer over x (B, N, H), the concatenated tokens of all shares.

        Args:
            x: Hidden states.
            index: The layer's index.
            shares: The recordings' shares of the pass.
        """
        sizes = [share.ids.shape[1] for share in shares]
        queries, *new_pair = self.self_attention.trio(self.self_norm(x))
        parts = zip(shares, *(part.split(sizes, 2) for part in new_pair), strict=True)
        pairs = [share.append_to_cache(index, keys, values) for share, keys, values in parts]
        x = x + self.self_attention(queries, pairs, [share.mask for share in shares], sizes)
        queries = self.cross_attention.heads(self.cross_attention.query(self.cross_norm(x)))
        pairs = [share.encoder_pair(index) for share in shares]
        x = x + self.cross_attention(queries, pairs, [None] * len(shares), sizes)
        return x + self.narrow(self.activation(self.widen(self.norm(x))))


class _Attention:
    """The self-attention or the cross-attention of a decoder layer, with its projections as plain functions.

    Queries are scaled before the product with keys, as in transformers' layer.

    Args:
        attention: transformers' module.
        attend: Called with (queries, keys, values, mask).
        many: True for cross-attention, whose keys and values are computed from all states of a window at once.
    """

    def __init__(self, attention: Any, attend: Callable[..., Tensor], many: bool = False) -> None:
        self.attend, self.scaling, self.size = attend, attention.scaling, attention.head_dim
        self.query, self.out = _as_function(attention.q_proj), _as_function(attention.out_proj)
        self.keys, self.values = _as_function(attention.k_proj, many), _as_function(attention.v_proj, many)
        # computes queries, keys and values in one matrix product; None if that is not possible
        self.mixed: Map | None = None

    def __call__(
        self, queries: Tensor, pairs: Sequence[KeysValues], masks: Sequence[Tensor | None], sizes: Sequence[int]
    ) -> Tensor:
        parts = zip((queries * self.scaling).split(sizes, 2), pairs, masks, strict=True)
        outs = [self.attend(part, *pair, mask) for part, pair, mask in parts]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, 2)
        return self.out(out.transpose(1, 2).flatten(2))

    def trio(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values, each (B, heads, N, D), of hidden states x (B, N, H)."""
        if self.mixed is None:
            return self.heads(self.query(x)), *self.pair(x)
        return self.mixed(x).unflatten(2, (3, -1, self.size)).permute(2, 0, 3, 1, 4).unbind()

    def pair(self, x: Tensor) -> KeysValues:
        return self.heads(self.keys(x)), self.heads(self.values(x))

    def heads(self, x: Tensor) -> Tensor:
        """Split x (B, N, H) into heads (B, heads, N, D)."""
        return x.unflatten(2, (-1, self.size)).transpose(1, 2)


def _copy_weights(decoder: Any) -> list[dict[str, Map]] | None:
    """Copy the weights of the decoder's layers to a form that is read faster: half precision.

    Layers in 8 bits are small already. Only their queries, keys and values are joined to one product.

    Returns:
        For each layer: name -> copy. None if half precision would change a weight, or if a projection is not torch's
        own linear layer without hooks.
    """
    copies = list[dict[str, Map]]()
    for layer in decoder.layers:
        attention, cross_attention = layer.self_attn, layer.encoder_attn
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        if all(type(part) is Int8Linear and _has_stock_forward(part) for part in parts):
            copies.append({"self qkv": Int8Weights(*_join(parts), fine=True)})
            continue
        single = {
            "self out": attention.out_proj,
            "cross query": cross_attention.q_proj,
            "cross out": cross_attention.out_proj,
            "fc1": layer.fc1,
            "fc2": layer.fc2,
        }
        if not all(map(plain_linear, (*parts, *single.values()))):
            return None
        halves = {name: HalfWeights(module.weight, module.bias) for name, module in single.items()}
        halves["self qkv"] = HalfWeights(*_join(parts))
        if not all(half.exact for half in halves.values()):
            return None
        copies.append({**halves})
    return copies


def _join(parts: Sequence[nn.Linear]) -> tuple[Tensor, Tensor]:
    """Return weight and bias of one linear layer that computes the outputs of several, one after the other."""
    biases = [part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias for part in parts]
    return torch.cat([part.weight for part in parts]), torch.cat(biases)


def _cross_attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attend to the encoder's states.

    For few queries on a CPU, plain products are faster; on CPUs other than Intel's, keys x queries.

    Args:
        queries: (B, heads, N, D).
        keys, values: (B, heads, S, D).
    """
    max_queries = MAX_MULTIPLIED_QUERIES if is_intel() else MAX_TRANSPOSED_QUERIES
    if queries.shape[2] > max_queries or keys.numel() < MIN_ONEDNN_ELEMENTS or queries.device.type != "cpu":
        return _attend(queries, keys, values, mask)
    if is_intel():
        scores = torch.matmul(queries, keys.transpose(2, 3))
    else:
        scores = torch.matmul(keys, queries.transpose(2, 3)).transpose(2, 3)
    return torch.matmul(scores.softmax(3), values)


def _cross_attend_tokenwise(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    return tokenwise.attention(queries, keys, values, 1.0)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    tree = find_tree(mask)
    if tree is not None and tree.chains:
        return tree_attention(queries, keys, values, tree, 1.0)
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=1.0)


def _as_function(module: Any, many: bool = False) -> Map:
    """Return a function that computes what a torch module without hooks does, without the overhead of its `__call__`.

    Other modules are returned unchanged.

    Args:
        module: A projection or a norm.
        many: Whether the function is called with many positions at once.
    """
    if plain_linear(module):
        if not many and is_half_on_cpu(module):
            half = tokenwise.half_weights(module.weight, module.bias)
            return partial(tokenwise.linear, weight=module.weight, bias=module.bias, half=half)
        large = (many or module.weight.numel() >= MIN_ONEDNN_ELEMENTS) and module.weight.device.type == "cpu"
        return partial(onednn.linear if large else linear, weight=module.weight, bias=module.bias)
    if type(module) is Int8Linear and _has_stock_forward(module):
        return module.product
    if type(module) is nn.LayerNorm and _has_stock_forward(module):
        shape = list(module.normalized_shape)
        return partial(torch.layer_norm, normalized_shape=shape, weight=module.weight, bias=module.bias, eps=module.eps)
    return module


def _has_stock_forward(module: nn.Module) -> bool:
    return "forward" not in vars(module) if type(module) is WhisperDecoder else not has_hooks(module)


def can_use_eager_copy(model: WhisperForConditionalGeneration) -> bool:
    """Return whether a copy of this model's decoder may use another attention implementation than the model itself.

    The copy may not if a module's `forward` was replaced, because the new function reads the settings of the original
    module.
    """
    return not any("forward" in vars(module) for module in model.model.decoder.modules())


def eager_copy(decoder: nn.Module) -> nn.Module:
    """Return a copy of a decoder that shares its weights and hooks, but returns attention maps.

    For this it computes attention by transformers' "eager" code.
    """
    config: Any = copy.copy(decoder.config)
    config._attn_implementation = "eager"

    def change(_module: nn.Module, same: Any) -> None:
        if "config" in vars(same):
            same.config = config

    return copy_modules(decoder, change)
