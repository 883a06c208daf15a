"""What all draft networks share: one or a few Llama decoder layers that continue the target's hidden states.

A token's feature is a hidden state of the target at this token. Position t of a network reads the embedding of token
t + 1 and the feature of token t, and predicts the feature of token t + 1, from which an LM head predicts token t + 2.

`DraftNetwork` is abstract; each drafter's own network is final (`eagle.py`, `eagle3.py`, `msd.py`, ...). A network says
by methods and attributes what the rest of mmdec asks of it: which features and embeddings it reads, how its drafts grow
(level by level, or all depths at once), which drafter runs it, and what the doctor may try. So a new network costs
mmdec no line outside its folder, except its name in the registry.

Networks override `inputs` (the layer's input for whole rows) or `prompt` (the same for one row, shorter if an image is
compressed). `layer` is split into `project` (queries, keys and values) and `attend`, so that a drafter with a
preallocated cache need not concatenate tensors.

The layers have several implementations: this one, differentiable, for all devices and shapes; and fast paths for small
networks on a CPU, for one token (`../eagle/cpu_step.py`) and for FLASH's slots (`../flash/cpu_step.py`).

Letters in shapes: B rows, L tokens of a text, n positions that the layer processes, S positions in a cache, H hidden
size, k target layers whose features are read, h key-value heads, d channels of a head, V visual tokens.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from mmdec.drafters.networks.conventions import Conventions
from mmdec.drafters.networks.weights import MAX_CONFIG_SIZE, DrafterWeights, WeightsConfig, check_size
from mmdec.errors import InputError
from mmdec.types import Context, Drafter

if TYPE_CHECKING:
    from mmdec.drafters.networks.cpu_step import ColumnStep
    from mmdec.drafters.networks.drafter import NetworkDrafter
    from mmdec.drafters.networks.export import Exported, ExportTarget, Layout
    from mmdec.drafters.networks.kv_cache import DraftCache, DraftState
    from mmdec.drafters.networks.tree import Levels

SIZE_FIELDS = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
KeyValues = tuple[Tensor, Tensor]  # keys and values, each (B, key-value heads, tokens, channels of a head)
# maximum number of weights in the feed-forward network for which packed copies of weights are made
MAX_PACKED_WEIGHTS = 2**21


@dataclass(frozen=True)
class DraftConfig(WeightsConfig):
    """Sizes and options of a draft network, and the target model that it was trained for."""

    MIN_LAYERS: ClassVar[int] = 1  # the minimum number of entries in `layers`

    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    # indices of the target layers whose output is read and concatenated; -1: the input of the LM head
    layers: tuple[int, ...] = (-1,)
    # whether attention has an input norm: False in EAGLE and MSD for LLaVA; True in SpecVLM and MSD for Qwen2-VL
    input_norm: bool = False
    # whether [embedding; feature] is normalised before fc; SpecVLM's paper leaves open where its norm is
    fc_norm: bool = False
    attention_bias: bool = False  # whether the projections of queries, keys and values have a bias
    fc_bias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", tuple(self.layers))  # a list from a JSON file becomes a tuple
        for name in SIZE_FIELDS:
            check_size(name, getattr(self, name), MAX_CONFIG_SIZE, "Take the model's.")
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise InputError(
                f"`num_key_value_heads` must divide `num_attention_heads` and `head_dim` be even, but they are "
                f"{self.num_key_value_heads}, {self.num_attention_heads} and {self.head_dim}. Take the model's."
            )
        for name in ("rope_theta", "rms_norm_eps"):
            number = getattr(self, name)
            if type(number) not in (int, float) or not 0 < number < math.inf:
                raise InputError(f"`{name}` must be a positive number, but is {number!r:.60}. Take the model's.")
        if not self.MIN_LAYERS <= len(self.layers) <= 8 or any(type(layer) is not int for layer in self.layers):
            raise InputError(f"`layers` must be 1 to 8 integers, but is {self.layers!r:.60}. (-1,) is EAGLE's.")
        for name in (field.name for field in fields(self) if field.type == "bool"):
            if type(getattr(self, name)) is not bool:
                raise InputError(f"`{name}` must be true or false, but is {getattr(self, name)!r:.60}. Choose one.")

    def check_depth(self, layers: int) -> None:
        if max(self.layers) >= layers or min(self.layers) < -1:
            raise InputError(
                f"`model` must have the layers {self.layers} for this drafter, but has {layers} in all. It was trained "
                f"for {self.trained_for or 'another model'}; use a drafter trained for this model."
            )

    @property
    def projected(self) -> bool:
        """Which embedding the network reads at image tokens: True: the projected visual embedding; False: that
        of the placeholder token."""
        return True

    @property
    def mrope_axes(self) -> int:
        """How many axes of the target's M-RoPE positions the network uses. 0: it counts tokens."""
        return 0

    @property
    def uses_mrope(self) -> bool:
        """Whether the network uses the target's M-RoPE positions instead of counting tokens."""
        return self.mrope_axes > 0

    @classmethod
    def like(cls, model: Any, **changes: Any) -> Self:
        """Make a configuration with the layer sizes of a model.

        Args:
            model: The configuration of the target's text model.
            changes: Values of other fields.
        """
        # the layers of Gemma 4 differ in size: use the sizes of the first layer
        if getattr(model, "is_heterogeneous", False):
            model = model.per_layer_config[0]
        heads = model.num_attention_heads
        rope = getattr(model, "rope_parameters", None) or {}
        sizes = {
            "intermediate_size": model.intermediate_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(model, "num_key_value_heads", None) or heads,
            "head_dim": getattr(model, "head_dim", None) or model.hidden_size // heads,
            "rope_theta": float(rope.get("rope_theta", 10000.0)),
            "rms_norm_eps": float(getattr(model, "rms_norm_eps", 1e-6)),
        }
        return super().like(model, **{**sizes, **changes}).for_depth(model.num_hidden_layers)


@dataclass
class PromptInput:
    """The layer's input for the prompt of one row with L tokens: M positions."""

    states: Tensor  # (M, H), the layer's input at each position; M is L - 1, or less if images are compressed
    positions: Tensor  # (M,), position id of each state, counted from the row's first token after padding
    # what later positions need of this prompt: for ViSpec, a vector of the last image; else None
    carry: Any = None
    # (visual tokens,) in [0, 1]: weight of each one after compression, 0 if dropped; None: no image was compressed
    visual_weights: Tensor | None = None
    compressor: str | None = None  # name of the image compressor that was used; None: no image was compressed
    end: int | None = None  # position id of the first token after the prompt's states; None: L - 1


class PackedWeights(NamedTuple):
    """A layer's weights, concatenated so that one matrix product replaces several: a small network's time depends on
    the number of operations."""

    attention: Tensor  # weights of the query, key and value projections, concatenated along the outputs
    bias: Tensor | None  # biases of these three projections
    gate_up: Tensor  # weights of the feed-forward's gate and up projections, concatenated
    norms: Tensor | None = None  # (2, H), weights of the norms of embedding and feature (EAGLE-3 only)


class RMSNorm(nn.Module):
    """Root mean square norm, as in Llama."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return apply_rms_norm(x, self.weight, self.eps)


def apply_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply an RMS norm to x (..., H).

    Args:
        weight: (H,), or (k, H) for x (..., k, H).
    """
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and not torch.is_grad_enabled():
        # this takes half the time of torch's `rms_norm`
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        return x * squares.div_(x.shape[-1]).add_(eps).rsqrt_() * weight
    # autocast gives x in half precision
    x = x.to(weight.dtype)
    return (
        rms_norm(x, weight.shape, weight, eps) if weight.dim() == 1 else rms_norm(x, x.shape[-1:], None, eps) * weight
    )


class DraftAttention(nn.Module):
    """The projections of grouped-query attention.

    Args:
        inputs: Number of input channels; default H.
    """

    def __init__(self, config: DraftConfig, inputs: int = 0) -> None:
        super().__init__()
        size, dim, bias = inputs or config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(size, config.num_attention_heads * dim, bias=bias)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * dim, bias=bias)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, config.hidden_size, bias=False)


class MLP(nn.Module):
    """The projections of a SwiGLU feed-forward network."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)


class DraftLayer(nn.Module):
    """The weights of one decoder layer, named as in Llama.

    Args:
        inputs: Number of input channels of attention; default H.
    """

    def __init__(self, config: DraftConfig, inputs: int = 0) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, inputs)
        self.mlp = MLP(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.input_norm:
            self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class DraftNetwork(DrafterWeights[DraftConfig]):
    """The abstract base of draft networks."""

    layers: nn.ModuleList  # `build` creates it
    # Whether each position's output continues the target's features, so that the doctor can run the network over a
    # whole text at once, and try its conventions there.
    continues_features: ClassVar[bool] = True

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self._rope: KeyValues | None = None  # cached cosines and sines of rotary positions, each (positions, d)

    @abstractmethod
    def fuse(self, embeds: Tensor, features: Tensor, carry: Any = None) -> Tensor:
        """Compute the layer's input at position t.

        Args:
            embeds: (..., H), embedding of token t + 1.
            features: (..., k * H), of token t.
            carry: What `prompt` has stored of the prompt for later positions (`PromptInput.carry`).
        """

    def make_drafter(self, embedding: nn.Module, output: nn.Linear) -> Drafter:
        from mmdec.drafters.networks.drafter import NetworkDrafter

        return NetworkDrafter(self, embedding, output)

    @property
    def own_embedding(self) -> nn.Embedding | None:
        """The network's own embedding; None: it uses the target's."""
        return None

    @property
    def own_head(self) -> nn.Linear | None:
        """The network's own LM head; None: it uses the target's."""
        return None

    @property
    def card_note(self) -> str:
        """What users must know of this network, for the model card of a converted folder; "": nothing."""
        return ""

    @property
    def engine_name(self) -> str | None:
        """What inference engines call such a drafter, such as "EAGLE-3"; None: no engine reads it."""
        return None

    def export(self, to: Layout, served: ExportTarget, count: int) -> Exported:
        """Convert the network to a format of inference engines; only where there is an `engine_name`.

        Args:
            to: The format.
            served: The target.
            count: Number of tokens that the engine drafts in a round.

        Raises:
            InputError: If the network has a feature that the format cannot describe.
        """
        raise NotImplementedError(f"{type(self).__name__} names a format of inference engines, but writes none")

    def conventions(self) -> Conventions:
        """Return the settings that the drafter doctor may try with this network."""
        return Conventions()

    @property
    def max_depth(self) -> int | None:
        """The number of tokens that a draft's longest path may have; None: any number."""
        return None

    def prompt_embeds(self, context: Context, visual: Tensor, embedding: nn.Module) -> Tensor:
        """Return the embeddings (B, F, H) of the prompt's new tokens, for `prompt`.

        Args:
            context: What the target recorded of the prompt.
            visual: (B, F) bool, True at placeholders of images, video or sound.
            embedding: The network's embedding, or the target's.
        """
        return cast(Tensor, context.embeds)

    def draft_at_once(
        self, drafter: NetworkDrafter, state: DraftState, roots: Tensor, depth: int
    ) -> tuple[Tensor, Levels] | None:
        """Compute the hidden states of all depths of a draft in one pass.

        Args:
            drafter: The drafter that runs the network.
            state: The drafter's state. The pass also processes the tokens that wait in its queue.
            roots: (B,), each row's last token.
            depth: Number of depths.

        Returns:
            The root's hidden state (B, 1, H), and what grows the draft from these states. None: the network drafts
            level by level, and nothing was computed.
        """
        return None

    def extend_cache(
        self,
        cache: DraftCache,
        states: Tensor,
        positions: Tensor,
        counts: Sequence[int],
        packed: PackedWeights | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the network over n accepted tokens, and write their keys and values to the cache.

        Args:
            cache: The network's cache; the caller accepts the tokens there.
            states: (B, n, H), input of the first layer; n > 0.
            positions: (B, n), or (3, B, n) for M-RoPE.
            counts: Each batch row's number of tokens; the rest is padding.
            packed: The result of `packed`, or None.

        Returns:
            The last layer's input (B, n, H) and queries (B, heads, n, d).
        """
        states, queries, keys, values = self.run_layers(cache, states, positions, counts, packed)
        cache.write(keys, values, counts, self.depth - 1)
        return states, queries

    def run_layers(
        self,
        cache: DraftCache,
        states: Tensor,
        positions: Tensor,
        counts: Sequence[int],
        packed: PackedWeights | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run all layers but the last over n new positions, and write their keys and values to the cache.

        Arguments are those of `extend_cache`.

        Returns:
            The last layer's input (B, n, H), queries, keys and values (B, heads, n, d).
        """
        last = self.depth - 1
        for index in range(last):
            queries, keys, values = self.project(states, positions, None, index)
            keys, values = cache.write(keys, values, counts, index)
            mask = cache.causal_mask(states.shape[1], keys.shape[2])
            states = self.attend(states, queries, keys, values, mask, None, index)
        return states, *self.project(states, positions, packed, last)

    def column_step(
        self, packed: PackedWeights | None, carry: Any, embedding: nn.Module, output: nn.Linear
    ) -> ColumnStep | None:
        """Make the fast path that runs the network on one token at a time; None if there is none for this network.

        Args:
            packed: The result of `packed`, or None.
            carry: Further input of `fuse`.
            embedding: The embedding that the network uses.
            output: The target's LM head.
        """
        return None

    @property
    def depth(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the network can draft."""
        return self.config.vocab_size

    def logits(self, hidden: Tensor, output: nn.Linear) -> Tensor:
        """Compute logits (..., `vocabulary`) from hidden (..., H).

        Args:
            output: The target's LM head.
        """
        return linear(hidden, output.weight, output.bias)

    @property
    def max_children(self) -> int:
        """The number of a node's children that can have a probability above 0."""
        return self.vocabulary

    def chances(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """Estimate how probable it is that the likeliest of drafted tokens are accepted; see `Levels.chances`."""
        return logits.float().softmax(-1).amax(-1)

    @property
    def offsets(self) -> Tensor | None:
        """(`vocabulary`,): for each token of the draft vocabulary, its id in the target's vocabulary minus its
        id in the draft vocabulary. None if both vocabularies are the same."""
        return None

    def token_ids(self, drafted: Tensor) -> Tensor:
        """Convert token ids of the draft vocabulary to those of the target's vocabulary."""
        return drafted if self.offsets is None else drafted + self.offsets[drafted]

    def spread(self, logits: Tensor) -> Tensor:
        """Convert logits over the draft vocabulary (..., `vocabulary`) to logits over the target's (..., V).

        They are -inf at tokens that cannot be drafted.
        """
        if self.offsets is None:
            return logits
        wide = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -math.inf)
        wide[..., self.token_ids(torch.arange(self.vocabulary, device=logits.device))] = logits
        return wide

    def follow(self, embeds: Tensor, hidden: Tensor, carry: Any = None) -> Tensor:
        """Compute the layer's input at drafted tokens.

        Args:
            embeds: (..., H), their embeddings.
            hidden: (..., H), the network's output at the token before each.
            carry: For ViSpec, the global vector of the last image.
        """
        return self.fuse(embeds, self.feature(hidden), carry)

    def drafted_input(
        self, embeds: Tensor, hidden: Tensor, carry: Any, embedding: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Compute the layer's input at drafted tokens, as `follow` does, for a network that may draft all depths at
        once and then does not read the drafted tokens.

        Args:
            embeds: (n, H), the tokens' embeddings.
            hidden: (n, H), the network's output at the token before each.
            carry: What `prompt` has stored of the prompt for later positions (`PromptInput.carry`).
            embedding: Embeds the token that such a network reads instead.
        """
        return self.follow(embeds, hidden, carry)

    def inputs(self, embeds: Tensor, features: Tensor, visual: Tensor | None = None) -> Tensor:
        """Compute the layer's input (B, L - 1, H) for whole rows. Position t reads the embedding of token t + 1.

        Args:
            embeds: (B, L, H) of the tokens.
            features: (B, L, k * H).
            visual: (B, L) bool, True at visual tokens.
        """
        return self.fuse(embeds[:, 1:], features[:, :-1])

    def prompt(self, embeds: Tensor, features: Tensor, visual: Tensor, carry: Any = None) -> PromptInput:
        """Compute the layer's input for the prompt of one row, without padding.

        The last token has no input: it would need the next token.

        Args:
            embeds: (L, H).
            features: (L, k * H).
            visual: (L,) bool, True at visual tokens.
            carry: From an earlier turn of the chat; for ViSpec, the global vector of the last image.
        """
        states = self.inputs(embeds[None], features[None], visual[None])[0]
        return PromptInput(states, torch.arange(len(states), device=states.device))

    def layer(
        self, states: Tensor, positions: Tensor, past: KeyValues | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, KeyValues]:
        """Run the layer.

        Args:
            states: (B, n, H).
            positions: (B, n).
            past: Keys and values (B, h, S, d) of S earlier positions.
            mask: Additive (B, 1, n, S + n); None: causal.

        Returns:
            Hidden (B, n, H), which is the LM head's input and the feature for the next position; keys and values of the
            n positions.
        """
        queries, keys, values = self.project(states, positions)
        pair = keys, values
        if past is not None:
            keys, values = torch.cat([past[0], keys], 2), torch.cat([past[1], values], 2)
        return self.attend(states, queries, keys, values, mask), pair

    def feature(self, hidden: Tensor) -> Tensor:
        """Return a substitute for a drafted token's features (..., k * H).

        Only the target could compute the true features: outputs of k of its layers. The substitute is the network's own
        output, repeated k times.

        Args:
            hidden: (..., H), this output.
        """
        layers = len(self.config.layers)
        return hidden if layers == 1 else hidden.repeat(*[1] * (hidden.dim() - 1), layers)

    def pack_weights(self) -> PackedWeights | None:
        """Return the weights of the network's single layer, copied and concatenated.

        The result is None if the network has several layers, or is so large that copying takes longer than it saves.

        Later changes of the weights do not change the copy: make a new copy for each generate() call.
        """
        weights: Any = self._layer(0).self_attn
        mlp: Any = self._layer(0).mlp
        if self.depth > 1 or 3 * mlp.gate_proj.weight.numel() > MAX_PACKED_WEIGHTS:
            return None
        parts = (weights.q_proj, weights.k_proj, weights.v_proj)
        bias = torch.cat([part.bias for part in parts]) if self.config.attention_bias else None
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        return PackedWeights(torch.cat([part.weight for part in parts]), bias, gate_up)

    def attention_input(self, states: Tensor, index: int, packed: PackedWeights | None = None) -> Tensor:
        """Compute the input of the query, key and value projections of layer `index`.

        Here it is the layer's input (B, n, H), normalised if there is an input norm.

        Args:
            packed: The result of `packed`, or None.
        """
        return self._layer(index).input_layernorm(states) if self.config.input_norm else states

    def residual(self, states: Tensor, index: int) -> Tensor:
        """Return the tensor to which layer `index` adds attention's output. Here it is the layer's input (B, n, H)."""
        return states

    def head_norms(self, queries_keys: Tensor, index: int) -> Tensor:
        """Normalise queries and keys (B, heads + h, n, d) before rotary positions are applied.

        Here they stay unchanged.
        """
        return queries_keys

    def project(
        self, states: Tensor, positions: Tensor | int, packed: PackedWeights | None = None, index: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values (B, heads, n, d), with rotary positions applied to queries and keys.

        Args:
            states: (B, n, H), the input of layer `index`.
            positions: (B, n), or one number for all.
            packed: The result of `packed`, or None.
        """
        config = self.config
        states = self.attention_input(states, index, packed)
        if packed is None:
            weights: Any = self._layer(index).self_attn
            parts = (weights.q_proj, weights.k_proj, weights.v_proj)
            joint = torch.cat([linear(states, part.weight, part.bias) for part in parts], -1)
        else:
            joint = linear(states, packed.attention, packed.bias)
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        joint = joint.view(*states.shape[:2], heads + 2 * groups, config.head_dim).transpose(1, 2)
        cosines, sines = self.rotations(positions, states.dtype, states.device)
        turned = self.head_norms(joint[:, : heads + groups], index)
        turned = turned * cosines + turned.roll(config.head_dim // 2, -1) * sines
        return turned[:, :heads], turned[:, heads:], joint[:, heads + groups :]

    def attend(
        self,
        states: Tensor,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        packed: PackedWeights | None = None,
        index: int = 0,
    ) -> Tensor:
        """Compute the rest of layer `index`, after `project`.

        Args:
            states: (B, n, H), the layer's input.
            queries: (B, heads, n, d).
            keys: (B, h, S + n, d).
            values: Of the same shape as `keys`.
            mask: Additive (B, 1, n, S + n); None: causal.
            packed: The result of `packed`, or None.

        Returns:
            Hidden (B, n, H).
        """
        size, width = queries.shape[2], keys.shape[2]
        if mask is None and 1 < size < width:
            causal = torch.ones(size, width, dtype=torch.bool, device=states.device).tril(width - size)
            mask = torch.zeros(size, width, dtype=states.dtype, device=states.device).masked_fill(~causal, -math.inf)
        mixed = scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None and size == width > 1,
            enable_gqa=self.config.num_key_value_heads != self.config.num_attention_heads,
        )
        return self.after_attention(states, mixed, packed, index)

    def after_attention(
        self, states: Tensor, mixed: Tensor, packed: PackedWeights | None = None, index: int = 0
    ) -> Tensor:
        """Compute the rest of layer `index`, after attention.

        Args:
            states: (B, n, H), the layer's input.
            mixed: (B, heads, n, d), attention's output.
            packed: The result of `packed`, or None.

        Returns:
            Hidden (B, n, H).
        """
        layer = self._layer(index)
        o_proj = layer.self_attn.o_proj
        states = self.residual(states, index) + linear(mixed.transpose(1, 2).flatten(2), o_proj.weight, o_proj.bias)
        normed, mlp = layer.post_attention_layernorm(states), layer.mlp
        if packed is None:
            gate, up = linear(normed, mlp.gate_proj.weight), linear(normed, mlp.up_proj.weight)
        else:
            gate, up = linear(normed, packed.gate_up).chunk(2, -1)
        return states + linear(silu(gate) * up, mlp.down_proj.weight)

    def rotations(self, positions: Tensor | int, dtype: torch.dtype, device: torch.device) -> KeyValues:
        """Return cosines and signed sines for `x * cosines + (x with halves exchanged) * sines`: (B, 1, n, d) for
        positions (B, n), (d,) for a single position."""
        if isinstance(positions, int):
            cosines, sines = self.rope_table(positions + 1, dtype, device)
            return cosines[positions], sines[positions]
        if device.type != "cpu":  # reading the largest position would synchronise with the device
            cosines, sines = self._waves(positions, dtype)
            return cosines[:, None], sines[:, None]
        cosines, sines = self.rope_table(int(positions.max()) + 1, dtype, device)
        return cosines[positions][:, None], sines[positions][:, None]

    def rope_table(self, length: int, dtype: torch.dtype, device: torch.device) -> KeyValues:
        """Return cached cosines and signed sines (L, d) of the positions 0 .. L - 1. L is at least `length`."""
        table = self._rope
        if table is None or table[0].dtype != dtype or table[0].device != device or len(table[0]) < length:
            with torch.inference_mode(False), torch.no_grad():  # the cached table is used in training, too
                table = self._waves(torch.arange(max(1024, 2 * length), device=device), dtype)
            self._rope = table
        return table

    def _layer(self, index: int) -> Any:
        return self.layers[index]

    def frequencies(self, device: torch.device) -> tuple[Tensor, float]:
        """Return the rotary frequencies (d / 2,) in float32, and a factor on cosines and sines."""
        half = torch.arange(0, self.config.head_dim, 2, device=device).float() / self.config.head_dim
        return 1.0 / self.config.rope_theta**half, 1.0

    def _waves(self, positions: Tensor, dtype: torch.dtype) -> KeyValues:
        """Compute cosines and signed sines (..., d) as transformers does, in float32.

        The first half of the sines is negated. So rotary positions are x * cosines + (x with halves exchanged) * sines.
        """
        frequencies, factor = self.frequencies(positions.device)
        angles = positions[..., None].float() * frequencies
        cosines, sines = angles.cos() * factor, angles.sin() * factor
        return torch.cat([cosines, cosines], -1).to(dtype), torch.cat([-sines, sines], -1).to(dtype)


def positions_from(starts: Sequence[int], size: int, device: torch.device) -> Tensor:
    """Return position ids (B, size): row r has starts[r], starts[r] + 1, ..."""
    if len(starts) == 1:
        return torch.arange(starts[0], starts[0] + size, device=device)[None]
    return torch.tensor(starts, device=device)[:, None] + torch.arange(size, device=device)


def scaled_frequencies(config: DraftConfig, scaling: dict[str, Any], device: torch.device) -> tuple[Tensor, float]:
    """Compute the frequencies (d / 2,) and the factor of a scaled RoPE with transformers.

    Args:
        scaling: The RoPE's `rope_parameters`.
    """
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    llama = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=scaling.get("original_max_position_embeddings") or 2048,
        rope_parameters={**scaling, "rope_theta": config.rope_theta},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](llama, device)
    return frequencies, float(factor)
