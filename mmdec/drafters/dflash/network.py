"""DFlash: a draft network that drafts a whole block of tokens in one pass (Chen et al. 2026, arXiv 2602.06036).

Each accepted token has features: the target's residual stream after some layers. fc and a norm turn them into one
state, from which every layer of the draft network projects a key and a value. A block is the root token followed by
mask tokens. The tokens of a block attend to all accepted tokens and to each other, in both directions. The state of
mask token k predicts the k-th token after the root, so a block of b tokens drafts b - 1 tokens. The layers are Qwen3's.
Embedding and LM head are the target's. A network that can draft only a part of the target's vocabulary (published by
speculators, with the tables `d2t` and `t2d`) has its own LM head. The parameters have the published names.

DSpark, DFlash 2 and Domino are this network with a head that lets a token depend on those above it (`heads.py`).
DFlash 2 also has a convolution of two taps before and after each sublayer: within a block, a token is mixed with the
one before it.

Letters in shapes: B rows, b tokens of a block, n accepted tokens, H channels, k target layers whose features are read,
h key-value heads, d channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast, final, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding as looked_up
from torch.nn.functional import linear, pad, silu

from mmdec.drafters.dflash.heads import (
    MARKOV_HEADS,
    CandidateSelector,
    ConfidenceHead,
    DominoHead,
    HeadKind,
    MarkovHead,
    SequentialHead,
)
from mmdec.drafters.dflash.levels import SequentialLevels
from mmdec.drafters.networks.config import DraftConfig
from mmdec.drafters.networks.layered_network import LayeredConfig, LayeredNetwork
from mmdec.drafters.networks.layers import (
    DraftLayer,
    KeyValues,
    PackedWeights,
    RMSNorm,
    RotaryEmbedding,
    apply_rms_norm,
    positions_from,
    rotate,
)
from mmdec.drafters.networks.tree import BlockLevels, Levels
from mmdec.drafters.networks.weights import MAX_CONFIG_SIZE, check_size
from mmdec.drafters.registry import built_in_network
from mmdec.errors import InputError
from mmdec.types import Context

if TYPE_CHECKING:
    from mmdec.drafters.networks.drafter import NetworkDrafter
    from mmdec.drafters.networks.export import Exporter
    from mmdec.drafters.networks.kv_cache import DraftCache, DraftState

MAX_BLOCK_SIZE = 64


@dataclass(frozen=True)
class DFlashConfig(LayeredConfig):
    """Sizes and options of a DFlash network.

    Args:
        layers: Indices of the target's layers whose features are read; (): those that `spread_layers` chooses.
    """

    MIN_LAYERS: ClassVar[int] = 0

    layers: tuple[int, ...] = ()
    input_norm: bool = True
    fc_bias: bool = False
    block_size: int = 16  # tokens in a block, the root included; drafting must use the same number as training
    mask_token: int = 0  # id of the mask token, which fills all positions of a block except the root's
    num_hidden_layers: int = 5
    # True: the root's state predicts the first draft token; False: only the mask tokens' states predict
    from_anchor: bool = False
    # number of tokens that can be drafted; 0: all tokens of the target. A smaller number needs `own_head`
    draft_vocab_size: int = 0
    own_head: bool = False  # whether the network has an LM head of its own
    own_embedding: bool = False  # whether the network has an embedding of its own; False: it uses the target's
    # True: a block is embedded by the rows of the embedding matrix alone; False: by the target's embedding module,
    # which may also scale or normalise the rows
    plain_embedding: bool = False
    rope_scaling: dict[str, Any] | None = None
    # what lets a token depend on those above it: DSpark's "vanilla", "gated" and "rnn", "dflash2", "domino"
    head: HeadKind = "none"
    head_rank: int = 256  # inner width of the head
    head_candidates: int = 16  # DFlash 2: number of each depth's best tokens that the selector compares
    head_state: int = 1024  # Domino: width of the GRU's state
    plain_prefix: int = 0  # Domino: number of first draft tokens that the head does not correct
    confidence: bool = False  # DSpark: whether the network estimates how probable it is that a token is accepted
    confidence_reads_token: bool = True  # whether this estimate reads the Markov head's vector of the token above
    convolution_group: int = 16  # DFlash 2: number of channels with the same correction of the taps
    # positions of image tokens if the target has three-dimensional positions (M-RoPE): "text": counted like text
    # tokens; "temporal": the first of the three axes
    positions: Literal["text", "temporal"] = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size("block_size", self.block_size, MAX_BLOCK_SIZE, "Use the published value.")
        if self.block_size < 2:
            raise InputError(
                f"`block_size` must be at least 2, the root and a mask, but is {self.block_size}. "
                "Correct it in the folder's config.json."
            )
        if self.vocabulary > self.vocab_size or (self.has_draft_vocabulary and not self.own_head):
            raise InputError(
                f"`draft_vocab_size` must be at most the target's {self.vocab_size}, and the same without `own_head`, "
                f"but is {self.draft_vocab_size}. Use the published value."
            )
        if type(self.mask_token) is not int or not 0 <= self.mask_token < self.vocab_size:
            raise InputError(
                f"`mask_token` must be a token below {self.vocab_size}, but is {self.mask_token!r:.60}. "
                "Correct it in the folder's config.json."
            )
        if self.head not in get_args(HeadKind):
            raise InputError(
                f"`head` must be {', '.join(get_args(HeadKind))}, but is {self.head!r:.60}. Use the published value."
            )
        for name in ("head_rank", "head_candidates", "head_state", "convolution_group"):
            check_size(name, getattr(self, name), MAX_CONFIG_SIZE, "Use the published value.")
        if type(self.plain_prefix) is not int or not 0 <= self.plain_prefix <= self.block_size:
            raise InputError(
                f"`plain_prefix` must be from 0 to {self.block_size}, but is {self.plain_prefix!r:.60}. Use the "
                "published value."
            )
        if self.head == "dflash2" and (self.hidden_size % self.convolution_group or not self.input_norm):
            raise InputError(
                f"`convolution_group` must divide the {self.hidden_size} channels, and `input_norm` be true, but they "
                f"are {self.convolution_group} and {self.input_norm}. Use the published value."
            )
        if self.confidence and self.confidence_reads_token and self.head not in MARKOV_HEADS:
            raise InputError(
                f"`confidence_reads_token` must be false without a head of DSpark's, but `head` is {self.head}. Use "
                "the published value."
            )
        if self.positions not in ("text", "temporal"):
            raise InputError(f"`positions` must be text or temporal, but is {self.positions!r:.60}.")

    @property
    def features(self) -> int:
        """The number of target layers whose features are read."""
        return len(self.layers) or self.num_hidden_layers

    @property
    def drafts(self) -> int:
        """The number of tokens that one block drafts."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @property
    def projected(self) -> bool:
        return False  # the network reads no embeddings of accepted tokens

    @property
    def mrope_axes(self) -> int:
        return int(self.positions == "temporal")

    def for_depth(self, layers: int) -> Self:
        """Return the configuration for a target with `layers` layers.

        If no layers are listed, the default layers are filled in.
        """
        return self if self.layers else replace(self, layers=spread_layers(layers, self.num_hidden_layers))


def spread_layers(depth: int, count: int) -> tuple[int, ...]:
    """Choose the published default layers: `count` indices, spread evenly.

    They go from the second to the third last of `depth` layers. A single layer is the middle one.
    """
    if count == 1:
        return (depth // 2,)
    span = depth - 3 - 1
    return tuple(min(max(round(1 + index * span / (count - 1)), 0), depth - 1) for index in range(count))


@built_in_network(
    "dflash",
    published="mmdec.drafters.dflash.checkpoint",
    note="DFlash: reads several of the model's layers, and drafts a block of tokens at once.",
)
@final
class DFlash(LayeredNetwork):
    """DFlash's network. Holds its weights; embedding and LM head may be the target's."""

    config_class: ClassVar[type[DraftConfig]] = DFlashConfig
    continues_features: ClassVar[bool] = False
    config: DFlashConfig

    def build(self, config: DraftConfig) -> None:
        """Create the weights, under their published names."""
        sizes, size, eps = cast(DFlashConfig, config), config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(sizes.features * size, size, bias=sizes.fc_bias)
        self.hidden_norm = RMSNorm(size, eps)
        rotary = RotaryEmbedding(sizes.head_dim, sizes.rope_theta, sizes.rope_scaling)
        kind = ConvolutionLayer if sizes.head == "dflash2" else DraftLayer
        layers = [kind(sizes, rotary, qk_norm=True) for _ in range(sizes.num_hidden_layers)]
        self.build_layers(layers, output_bias=sizes.attention_bias)
        self.build_ends(sizes, sizes.own_head)
        if sizes.head in MARKOV_HEADS:
            self.markov_head = MarkovHead(sizes)
        elif sizes.head == "dflash2":
            self.candidate_selector = CandidateSelector(sizes)
            for layer in self.layers:
                layer.attention_conv, layer.mlp_conv = BlockConvolution(sizes), BlockConvolution(sizes)
        elif sizes.head == "domino":
            self.prefix_gru, self.embed_proj = DominoHead.layers(sizes)
        if sizes.confidence:
            self.confidence_head = ConfidenceHead(sizes)

    @property
    def head(self) -> SequentialHead | None:
        """The head by which a token of a block depends on those above it, or None if there is none."""
        kind = self.config.head
        if kind == "domino":
            return DominoHead(self.prefix_gru, self.embed_proj, self.config.plain_prefix)
        return None if kind == "none" else self.candidate_selector if kind == "dflash2" else self.markov_head

    @property
    def own_head(self) -> nn.Linear | None:
        return cast(nn.Linear, self.lm_head) if self.config.own_head else None

    def share_ends(self, embedding: nn.Module, output: nn.Linear) -> None:
        super().share_ends(embedding, output)
        head = self.own_head
        if head is not None and output.bias is None and torch.equal(head.weight, output.weight):
            self.config = replace(self.config, own_head=False)
            del self.lm_head

    @property
    def max_depth(self) -> int:
        return self.config.drafts

    @property
    def exporter(self) -> Exporter:
        from mmdec.drafters.dflash.checkpoint import dflash_exporter

        return dflash_exporter(self)

    def prompt_embeds(self, context: Context, visual: Tensor, embedding: nn.Module) -> Tensor:
        return next(iter(context.features.values()))[..., :0]  # they are not read

    def embed_block(self, tokens: Tensor, embedding: nn.Module) -> Tensor:
        """Embed the tokens (B, b) of blocks.

        Args:
            embedding: The target's embedding module, or the network's own.

        Returns:
            (B, b, H).
        """
        return looked_up(tokens, cast(Tensor, embedding.weight)) if self.config.plain_embedding else embedding(tokens)

    def fuse(self, embeds: Tensor, features: Tensor) -> Tensor:
        """Compute a token's state (..., H) from the target's features (..., k * H) of this token.

        Each layer projects its key and value from this state.

        Args:
            embeds: Not used; other draft networks need it.
        """
        return self.hidden_norm(linear(features, self.fc.weight, self.fc.bias))

    def extend_cache(
        self,
        cache: DraftCache,
        states: Tensor,
        positions: Tensor,
        counts: Sequence[int],
        packed: PackedWeights | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of accepted tokens to the cache, from `states` (B, n, H), the result of `fuse`.

        The layers are not run, so there are no queries.
        """
        for index in range(self.depth):
            cache.write(*self.context(states, positions, index), counts, index)
        return states, torch.empty(0)

    def draft_in_parallel(
        self, drafter: NetworkDrafter, state: DraftState, roots: Tensor, depth: int
    ) -> tuple[Tensor, Levels]:
        """Cache the queued tokens' features, then process a block of each batch row's last token and mask tokens."""
        cache, config = state.cache, self.config
        drafter.extend_cache(state, drafter.catch_up(state))
        tokens = roots[:, None].repeat(1, config.block_size)
        tokens[:, 1:] = config.mask_token
        states = self.embed_block(tokens, drafter.embedding)
        positions = positions_from(state.positions, config.block_size, roots.device)
        mask = cache.mask(states.new_zeros(len(roots), config.block_size, config.block_size))  # no -inf: all see all
        for index in range(self.depth):
            layer = self.layer(index)
            queries, keys, values = layer.project(states, positions, state.packed)
            keys, values = cache.draft(keys, values, 0, index)
            states = layer.attend(states, queries, keys, values, mask, state.packed)
        first, head = config.block_size - config.drafts, self.head  # `first`: index of the first draft token's state
        drafted = states[:, first : first + depth]
        if head is None:
            return drafted[:, :1], BlockLevels(drafter, state, drafted)
        normed = self.apply_norm(states)
        hidden = normed[:, first : first + depth]
        base = self.block_logits(hidden, drafter.output)
        root = head.begin(roots[:, None], normed[:, :1], drafter.embedding)
        confidence = self.confidence_head if config.confidence else None
        return root, SequentialLevels(drafter, state, head, confidence, hidden, base)

    def context(self, states: Tensor, positions: Tensor, index: int) -> KeyValues:
        """Compute the keys and values (B, h, n, d) of layer `index`.

        Args:
            states: (B, n, H), from `fuse`.
            positions: (B, n).
        """
        layer, heads = self.layer(index), (self.config.num_key_value_heads, self.config.head_dim)
        attention = layer.self_attn
        keys, values = (
            linear(states, part.weight, part.bias).unflatten(-1, heads).transpose(1, 2)
            for part in (attention.k_proj, attention.v_proj)
        )
        if attention.k_norm is not None:
            keys = attention.k_norm(keys)
        return rotate(keys, *layer.rotary(positions, states.dtype, states.device)), values

    def logits(self, hidden: Tensor, output: nn.Linear) -> Tensor:
        """Compute logits (..., Vd) from a block's hidden states (..., H).

        Args:
            output: The target's LM head, which is used if the network has no LM head.
        """
        return self.block_logits(self.apply_norm(hidden), output)

    def apply_norm(self, hidden: Tensor) -> Tensor:
        """Apply the final norm to a block's hidden states (..., H)."""
        return apply_rms_norm(hidden, self.norm.weight, self.config.rms_norm_eps)

    def block_logits(self, normed: Tensor, output: nn.Linear) -> Tensor:
        """Compute the block's own logits (..., Vd) from its normed states (..., H), without a head."""
        return linear(normed, self.lm_head.weight) if self.config.own_head else super().logits(normed, output)

    def acceptance_probability(self, logits: Tensor, hidden: Tensor) -> Tensor:
        if not self.config.confidence:
            return super().acceptance_probability(logits, hidden)
        return self.confidence_head(self.apply_norm(hidden), None).sigmoid()


@final
class BlockConvolution(nn.Module):
    """DFlash 2's convolutions before and after a sublayer: y_t = k_{t,0} x_t + k_{t,1} x_{t-1} within a block.

    The taps k are learned, with corrections predicted from the sublayer's input, each for a group of channels. The
    first token of a block has none before it. A new convolution changes nothing.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        size, self.group, self.block_size = config.hidden_size, config.convolution_group, config.block_size
        self.base_kernel = nn.Parameter(torch.tensor([1.0, 0.0])[None, :, None].repeat(2, 1, size))
        self.kernel_projection = nn.Linear(size, 4 * size // self.group, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, states: Tensor, inputs: Tensor, place: int) -> Tensor:
        """Mix each token of R blocks with the one before it.

        Args:
            states: (B, R * b, H).
            inputs: (B, R * b, H), the sublayer's normed input.
            place: 0 before the sublayer, 1 after it.

        Returns:
            (B, R * b, H).
        """
        blocks = states.unflatten(1, (-1, self.block_size))
        before = pad(blocks[:, :, :-1], (0, 0, 1, 0))
        corrections = linear(inputs, self.kernel_projection.weight.unflatten(0, (2, -1))[place])
        taps = self.base_kernel[place] + corrections.unflatten(-1, (2, -1)).repeat_interleave(self.group, -1)
        own, other = taps.unflatten(1, (-1, self.block_size)).unbind(-2)
        return (own * blocks + other * before).flatten(1, 2)


@final
class ConvolutionLayer(DraftLayer):
    """DFlash 2's decoder layer: a convolution before and after each sublayer."""

    attention_conv: BlockConvolution
    mlp_conv: BlockConvolution

    def attention_input(self, states: Tensor, packed: PackedWeights | None = None) -> Tensor:
        normed = super().attention_input(states)
        return self.attention_conv(normed, normed, 0)

    def after_attention(self, states: Tensor, mixed: Tensor, packed: PackedWeights | None = None) -> Tensor:
        normed = super().attention_input(states)
        output = self.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        states = states + self.attention_conv(output, normed, 1)
        normed, mlp = self.post_attention_layernorm(states), self.mlp
        inner = self.mlp_conv(normed, normed, 0)
        output = mlp.down_proj(silu(mlp.gate_proj(inner)) * mlp.up_proj(inner))
        return states + self.mlp_conv(output, normed, 1)
