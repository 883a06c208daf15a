"""EAGLE-3 and P-EAGLE: draft networks that read several layers of the target and have an LM head of their own.

Li et al. 2025 (EAGLE-3, arXiv 2503.01840). Column t reads the embedding of token t + 1 beside a feature of token t. For
accepted tokens, fc computes the feature from the target's residual stream after a few layers (Ht channels each), before
the final norm. For drafted tokens, the feature is the network's own last state, without fc. The first layer norms
embedding and feature, attends from the two concatenated (2 H channels) and adds the result to the feature alone. Other
layers are plain. `lm_head` reads the normed last state; its vocabulary may be a part of the target's (`d2t`, `t2d`).

Options, each as published: the residual is the feature before or after its norm (`norm_before_residual`); EAGLE-3.1
(arXiv 2605.09992) norms each target feature (`fc_norm`), or all of them concatenated (`norm_before_fc`), and passes the
normed state to the next column (`norm_output`); Qwen3's layers norm queries and keys (`qk_norm`).

P-EAGLE (arXiv 2602.01469) drafts K tokens in one pass: K - 1 columns are added after the last one. They read the
embedding of `mask_token` and, in place of the target's features, a learned vector.

The parameters have the published names; d2t holds offsets: the target's token is d + d2t[d].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, cast, final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mmdec.nn.draft_network import (
    MOST,
    DecoderLayer,
    DraftConfig,
    DraftNetwork,
    Packed,
    Pair,
    Prompted,
    RMSNorm,
    check_size,
    rms_normed,
    scaled_frequencies,
)
from mmdec.types import InputError

MOST_LAYERS = 64
Positions = Literal["text", "temporal", "axes"]
Pictures = Literal["placeholder", "projected", "dropped"]


class LayeredConfig(DraftConfig):
    """The common part of the configurations of EAGLE-3 and DFlash. Both are dataclasses that also have these fields."""

    num_hidden_layers: int
    draft_vocab_size: int  # number of tokens that can be drafted; 0: all of the target's
    own_embedding: bool  # whether the folder holds an embedding that is not the target's
    # {"rope_type": "linear" | "llama3" | "yarn", "factor": ...} as in transformers; None: rotations are not scaled
    rope_scaling: dict[str, Any] | None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size("num_hidden_layers", self.num_hidden_layers, MOST_LAYERS, "Take the published.")
        if self.draft_vocab_size:
            check_size("draft_vocab_size", self.draft_vocab_size, MOST, "Take the published.")
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, dict):
            raise InputError(f"`rope_scaling` must be settings, but is {self.rope_scaling!r:.60}. Leave it out.")

    @property
    def vocabulary(self) -> int:
        """Count the different tokens that can be drafted."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def mapped(self) -> bool:
        """Return whether the draft vocabulary is a part of the target's, with tables between the two."""
        return self.vocabulary < self.vocab_size


@dataclass(frozen=True)
class Eagle3Config(LayeredConfig):
    """Sizes and options of the network.

    layers: the target's layers whose features are read; empty: the three of `default_layers`. fc_norm: whether each
    target feature has a norm of its own.
    """

    LEAST: ClassVar[int] = 0

    layers: tuple[int, ...] = ()
    input_norm: bool = True
    fc_bias: bool = False
    features: int = 3  # number of the target's layers whose features are fused
    target_hidden_size: int = 0  # channels of the target's hidden states; 0: the same as `hidden_size`
    draft_vocab_size: int = 0
    num_hidden_layers: int = 1
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    output_bias: bool = False  # whether attention's output projection has a bias
    own_embedding: bool = False
    mask_token: int | None = None  # the token at P-EAGLE's columns without a token; None: the network is EAGLE-3
    rope_scaling: dict[str, Any] | None = None
    # the positions of image columns, if the target's positions have three axes: counted like text; the first axis
    # alone; or all three, by `mrope_section`
    positions: Positions = "text"
    mrope_section: tuple[int, ...] = ()  # number of rotation frequencies of each of the three axes
    mrope_interleaved: bool = False  # whether the axes take turns; else each has consecutive frequencies
    # the embedding at image columns: that of the placeholder token, or the projected visual one; "dropped": image
    # columns are left out and have no positions, for a network that was trained on text
    pictures: Pictures = "placeholder"

    def __post_init__(self) -> None:
        object.__setattr__(self, "mrope_section", tuple(self.mrope_section))
        super().__post_init__()
        check_size("features", self.features, 8, "Take the published.")
        if self.target_hidden_size:
            check_size("target_hidden_size", self.target_hidden_size, MOST, "Take the published.")
        if len(self.layers) not in (0, self.features):
            raise InputError(f"`layers` must be {self.features}, one a feature, but is {self.layers!r:.60}.")
        if self.norm_before_fc and self.fc_norm:
            raise InputError("`fc_norm` must be false with `norm_before_fc`, but both are true. Choose one.")
        if self.draft_vocab_size > self.vocab_size:
            raise InputError(
                f"`draft_vocab_size` must be at most the target's {self.vocab_size}, but is {self.draft_vocab_size}."
            )
        if self.target_size != self.hidden_size and not self.own_embedding:
            raise InputError(
                f"`own_embedding` must be true where the network has {self.hidden_size} channels and the target "
                f"{self.target_size}, but is false. Take the file with `embed_tokens.weight`."
            )
        mask = self.mask_token
        if mask is not None and (type(mask) is not int or not 0 <= mask < self.vocab_size):
            raise InputError(f"`mask_token` must be a token below {self.vocab_size}, but is {mask!r:.60}.")
        self._check_positions()

    def _check_positions(self) -> None:
        pictures = ("placeholder", "projected", "dropped")
        if self.positions not in ("text", "temporal", "axes") or self.pictures not in pictures:
            raise InputError(
                f"`positions` must be text, temporal or axes, and `pictures` {', '.join(pictures)}, but they are "
                f"{self.positions!r:.60} and {self.pictures!r:.60}. Choose one."
            )
        sections = self.mrope_section
        if sections and (
            len(sections) != 3
            or any(type(part) is not int or part < 0 for part in sections)
            or 2 * sum(sections) != self.head_dim
        ):
            raise InputError(
                f"`mrope_section` must be three numbers with the sum {self.head_dim // 2}, half of a head's channels, "
                f"but is {sections!r:.60}. Take the target's."
            )
        if self.positions == "axes" and not sections:
            raise InputError('`mrope_section` must be given with `positions` "axes", but is (). Take the target\'s.')

    @property
    def target_size(self) -> int:
        """Return the number of channels of the target's hidden states."""
        return self.target_hidden_size or self.hidden_size

    @property
    def projected(self) -> bool:
        """Return whether the embedding at image columns is the visual one, that is, `pictures` is "projected"."""
        return self.pictures == "projected"

    @property
    def follows(self) -> bool:
        """Return whether the network uses the target's positions if these have three axes."""
        return self.positions != "text" and self.pictures != "dropped"

    def for_depth(self, layers: int) -> Self:
        """Return the same configuration for a target with `layers` layers; an empty field `layers` is filled in."""
        if self.layers:
            return self
        if self.features != 3:
            raise InputError(
                f"`layers` must name the {self.features} layers that the network reads, but is (): only three have a "
                "default. Take them from the drafter's training."
            )
        return replace(self, layers=default_layers(layers))


def default_layers(depth: int) -> tuple[int, ...]:
    """Choose EAGLE-3's three layers of a target with n = `depth`: those that end at the boundaries 2, n // 2 and n - 3.
    Boundary k is the residual stream that enters layer k, so it lies after layer k - 1."""
    return tuple(min(max(boundary, 1), depth) - 1 for boundary in (2, depth // 2, depth - 3))


class LayeredNetwork(DraftNetwork):
    """The common part of EAGLE-3's and DFlash's networks: several layers, and an LM head or embedding of their own."""

    config: Any  # a `LayeredConfig`; each subclass names its own

    def build_layers(self, own: LayeredConfig, inputs: int, qk_norm: bool, output_bias: bool) -> None:
        """Make the layers. inputs: channels of the first layer's attention input; 0: H. qk_norm: whether queries and
        keys are normed, as Qwen3 does. output_bias: whether attention's output projection has a bias."""
        count, self.qk_norm = own.num_hidden_layers, qk_norm
        self.layers = nn.ModuleList([DecoderLayer(own, 0 if index else inputs) for index in range(count)])
        for layer in self.layers:
            attention: Any = layer.self_attn
            if qk_norm:
                attention.q_norm, attention.k_norm = (RMSNorm(own.head_dim, own.rms_norm_eps) for _ in range(2))
            if output_bias:
                attention.o_proj = nn.Linear(attention.o_proj.in_features, own.hidden_size)

    def build_ends(self, own: LayeredConfig, own_head: bool) -> None:
        """Make the final norm, and if configured an LM head, an embedding and the tables of the draft vocabulary."""
        self.norm = RMSNorm(own.hidden_size, own.rms_norm_eps)
        if own_head:
            self.lm_head = nn.Linear(own.hidden_size, own.vocabulary, bias=False)
        if own.own_embedding:
            self.embed_tokens = nn.Embedding(own.vocab_size, own.hidden_size)
        if own.mapped:
            self.register_buffer("d2t", torch.zeros(own.vocabulary, dtype=torch.long))
            self.register_buffer("t2d", torch.arange(own.vocab_size) < own.vocabulary)

    def share_embedding(self) -> None:
        """Drop the network's embedding, because it equals the target's."""
        self.config = replace(self.config, own_embedding=False)
        del self.embed_tokens

    @property
    def vocabulary(self) -> int:
        """Count the different tokens that the network can draft."""
        return self.config.vocabulary

    @property
    def offsets(self) -> Tensor | None:
        """Return for each drafted index the target's token id minus that index, (`vocabulary`,); None if all are 0."""
        return cast(Tensor, self.d2t) if self.config.mapped else None

    def head_norms(self, queries_keys: Tensor, index: int) -> Tensor:
        """Normalise queries and keys (B, heads + h, n, d) as Qwen3 does, if the layers have norms for them."""
        if not self.qk_norm:
            return queries_keys
        attention, heads = self._layer(index).self_attn, self.config.num_attention_heads
        return torch.cat([attention.q_norm(queries_keys[:, :heads]), attention.k_norm(queries_keys[:, heads:])], 1)

    def frequencies(self, device: torch.device) -> tuple[Tensor, float]:
        """Return the rotations' frequencies and factor, as `DraftNetwork.frequencies`, after `config.rope_scaling`."""
        scaling = self.config.rope_scaling
        return super().frequencies(device) if scaling is None else scaled_frequencies(self.config, scaling, device)


@final
class Eagle3(LayeredNetwork):
    """EAGLE-3's network, and P-EAGLE's where `config.mask_token` is set."""

    system: ClassVar[str] = "eagle3"
    config_class: ClassVar[type[DraftConfig]] = Eagle3Config
    config: Eagle3Config

    def build(self, config: DraftConfig) -> None:
        """Make the weights under their published names."""
        own, size, eps = cast(Eagle3Config, config), config.hidden_size, config.rms_norm_eps
        joined = own.features * own.target_size
        self.fc = nn.Linear(joined, size, bias=own.fc_bias)
        if own.norm_before_fc:
            self.input_norm = RMSNorm(joined, eps)
        if own.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(own.target_size, eps) for _ in range(own.features))
        self.build_layers(own, 2 * size, own.qk_norm, own.output_bias)
        self.layers[0].hidden_norm = RMSNorm(size, eps)
        self.build_ends(own, own_head=True)
        if own.mask_token is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, joined))

    def fuse(self, embeds: Tensor, features: Tensor, carry: Any = None) -> Tensor:
        """Concatenate embeds (..., H) of token t + 1 and the target's features (..., k * Ht) of token t, fused to H
        channels. Returns: (..., 2 H)."""
        return torch.cat([embeds, self.fused(features)], -1)

    def fused(self, features: Tensor) -> Tensor:
        """Apply fc with its norms to the target's features (..., k * Ht). Returns: (..., H)."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        elif self.config.fc_norm:
            parts = features.chunk(self.config.features, -1)
            norms = cast(nn.ModuleList, self.fc_norm)
            features = torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], -1)
        return linear(features, self.fc.weight, self.fc.bias)

    def follow(self, embeds: Tensor, hidden: Tensor, carry: Any = None) -> Tensor:
        """Compute the first layer's input (..., 2 H) at drafted tokens. embeds: (..., H) of these tokens. hidden: (...,
        H), the network's output at the token before each."""
        return torch.cat([embeds, hidden], -1)

    def prompt(self, embeds: Tensor, features: Tensor, visual: Tensor, carry: Any = None) -> Prompted:
        """Compute the first layer's input for one row's prompt, see `DraftNetwork.prompt`. Columns that read an image's
        tokens are left out if `config.pictures` is "dropped"."""
        prompted = super().prompt(embeds, features, visual)
        if self.config.pictures != "dropped":
            return prompted
        states = prompted.states[~visual[1:]]
        return Prompted(states, prompted.positions[: len(states)], end=len(states))

    def feature(self, hidden: Tensor) -> Tensor:
        """Return hidden unchanged: `follow` reads the network's own output in place of the target's features."""
        return hidden

    def fused_weights(self, carry: Any = None) -> Pair | None:
        """Return None: the network's own output does not pass through fc."""
        return None

    def masked(self, embed: Tensor) -> Tensor:
        """Compute the first layer's input (2 H,) at P-EAGLE's columns without a token. embed: (H,) of `mask_token`."""
        return torch.cat([embed, self.fused(self.mask_hidden[0, 0])], -1)

    def packed(self) -> Packed | None:
        """Join the weights as `DraftNetwork.packed` does, with the two norms of the first layer."""
        packed = super().packed()
        return None if packed is None else Packed(*packed[:3], norms=self._norms())

    def _norms(self) -> Tensor:
        layer = self._layer(0)
        return torch.stack([layer.input_layernorm.weight, layer.hidden_norm.weight])

    def read(self, states: Tensor, index: int, packed: Packed | None = None) -> Tensor:
        """Compute the input of layer `index`'s query, key and value projections: the layer's input, normed. In the
        first layer (..., 2 H), embedding and feature have a norm each."""
        if index:
            return self._layer(index).input_layernorm(states)
        # both norms at once: a small network's time depends on the number of operations
        weights = self._norms() if packed is None or packed.norms is None else packed.norms
        halves = states.view(*states.shape[:-1], 2, self.config.hidden_size)
        return rms_normed(halves, weights, self.config.rms_norm_eps).view(states.shape)

    def residual(self, states: Tensor, index: int) -> Tensor:
        """Return the residual to which attention's output is added. In the first layer it is the feature alone, normed
        with `norm_before_residual`."""
        if index:
            return states
        features = states.narrow(-1, self.config.hidden_size, self.config.hidden_size)
        return self._layer(0).hidden_norm(features) if self.config.norm_before_residual else features

    def after_attention(self, states: Tensor, mixed: Tensor, packed: Packed | None = None, index: int = 0) -> Tensor:
        """Run layer `index` after attention, as in `DraftNetwork`. `norm_output` norms the last layer's output."""
        hidden = super().after_attention(states, mixed, packed, index)
        return self.norm(hidden) if self.config.norm_output and index + 1 == self.depth else hidden

    def logits(self, hidden: Tensor, output: nn.Linear) -> Tensor:
        """Score hidden (..., H) by the network's own LM head: (..., `vocabulary`). output: not used."""
        if not self.config.norm_output:
            hidden = rms_normed(hidden, self.norm.weight, self.config.rms_norm_eps)
        return linear(hidden, self.lm_head.weight)

    def layer(
        self, states: Tensor, positions: Tensor, past: Pair | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Pair]:
        """Run all layers; arguments as for `DraftNetwork.layer`. `past` and the returned pair concatenate the layers'
        keys and values along the heads."""
        pairs: list[Pair] = []
        for index in range(self.depth):
            queries, *own = self.project(states, positions, index=index)
            pairs.append((own[0], own[1]))
            if past is not None:
                own = [torch.cat([old.chunk(self.depth, 1)[index], new], 2) for old, new in zip(past, own, strict=True)]
            states = self.attend(states, queries, own[0], own[1], mask, index=index)
        keys, values = (torch.cat(parts, 1) for parts in zip(*pairs, strict=True))
        return states, (keys, values)

    def rotations(self, positions: Tensor | int, dtype: torch.dtype, device: torch.device) -> Pair:
        """Return cosines and signed sines, see `DraftNetwork.rotations`. positions: may be (3, B, n), for three axes;
        then `mrope_section` says which axis rotates each frequency."""
        if isinstance(positions, int) or positions.dim() == 2:
            return super().rotations(positions, dtype, device)
        axes = self._axes(device)  # (d,)
        parts = [super(Eagle3, self).rotations(axis, dtype, device) for axis in positions]
        cosines, sines = (torch.stack(part, -1) for part in zip(*parts, strict=True))  # (B, 1, n, d, 3)
        index = axes.expand(cosines.shape[:-1])[..., None]
        return cosines.gather(-1, index)[..., 0], sines.gather(-1, index)[..., 0]

    def _axes(self, device: torch.device) -> Tensor:
        """Return for each channel the axis whose position rotates it, (head size,) int64."""
        sections = self.config.mrope_section
        if not self.config.mrope_interleaved:
            axes = [axis for axis, size in enumerate(sections) for _ in range(size)]
        else:  # axes 1 and 2 each get every third frequency, up to the numbers in their sections
            axes = [0] * (self.config.head_dim // 2)
            for axis in (1, 2):
                for frequency in range(axis, min(3 * sections[axis], len(axes)), 3):
                    axes[frequency] = axis
        return torch.tensor(axes * 2, device=device)
