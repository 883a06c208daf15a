"""EAGLE-3 and P-EAGLE: draft networks that read several layers of the target and have their own LM head.

Li et al. 2025 (EAGLE-3, arXiv 2503.01840). Position t of the network reads the embedding of token t + 1 and a feature
of token t. For accepted tokens, fc computes the feature from the target's residual stream after a few layers (Ht
channels each), before the final norm. For drafted tokens, the feature is the network's own last state, without fc. The
first layer normalises embedding and feature, computes attention from the two concatenated (2 H channels), and adds the
result to the feature only. Other layers are as in Llama. `lm_head` reads the normalised last state. The vocabulary of
`lm_head` may be a part of the target's (tables `d2t`, `t2d`).

Options, each as published: the residual is the feature before or after its norm (`norm_before_residual`); EAGLE-3.1
(arXiv 2605.09992) normalises each target feature (`fc_norm`), or all of them concatenated (`norm_before_fc`), and
passes the normalised state to the next position (`norm_output`); Qwen3's layers normalise queries and keys (`qk_norm`).

P-EAGLE (arXiv 2602.01469) drafts K tokens in one pass: K - 1 positions are added after the last token. They read the
embedding of `mask_token` and, instead of the target's features, a learned vector.

The parameters have the published names. d2t holds offsets: token d of the draft vocabulary is the target's token d +
d2t[d].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast, final, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mmdec.drafters.eagle.cpu_step import Eagle3Step
from mmdec.drafters.networks.config import DraftConfig
from mmdec.drafters.networks.conventions import Conventions, OptionalNorm, PictureChoice, Switch
from mmdec.drafters.networks.cpu_step import SingleTokenStep
from mmdec.drafters.networks.draft_network import PromptInput
from mmdec.drafters.networks.layered_network import LayeredConfig, LayeredNetwork
from mmdec.drafters.networks.layers import (
    DraftLayer,
    KeyValues,
    PackedWeights,
    RMSNorm,
    RotaryEmbedding,
    apply_rms_norm,
)
from mmdec.drafters.networks.tree import BlockLevels, Levels
from mmdec.drafters.networks.weights import MAX_CONFIG_SIZE, check_size
from mmdec.drafters.registry import built_in_network
from mmdec.errors import InputError
from mmdec.types import Context

if TYPE_CHECKING:
    from mmdec.drafters.networks.drafter import NetworkDrafter
    from mmdec.drafters.networks.export import Exporter
    from mmdec.drafters.networks.kv_cache import DraftState

Positions = Literal["text", "temporal", "axes"]
Pictures = Literal["placeholder", "projected", "dropped"]


@dataclass(frozen=True)
class Eagle3Config(LayeredConfig):
    """Sizes and options of an EAGLE-3 or P-EAGLE network.

    Args:
        layers: Indices of the target's layers whose features are read; empty: the three that `default_layers` chooses.
        fc_norm: Whether each of these features has its own norm before fc.
    """

    MIN_LAYERS: ClassVar[int] = 0

    layers: tuple[int, ...] = ()
    input_norm: bool = True
    fc_bias: bool = False
    features: int = 3  # number of target layers whose features are read
    target_hidden_size: int = 0  # channels of the target's hidden states; 0: the same as `hidden_size`
    draft_vocab_size: int = 0
    num_hidden_layers: int = 1
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    output_bias: bool = False  # whether attention's output projection has a bias
    own_embedding: bool = False
    # id of the token that P-EAGLE reads at positions after the last token; None in EAGLE-3
    mask_token: int | None = None
    rope_scaling: dict[str, Any] | None = None
    # positions of image tokens if the target has three-dimensional positions (M-RoPE): "text": counted like text
    # tokens; "temporal": the first of the three axes; "axes": all three axes, as `mrope_section` says
    positions: Positions = "text"
    mrope_section: tuple[int, ...] = ()  # for each of the three M-RoPE axes: its number of rotary frequencies
    # True: the axes alternate along the frequencies; False: each axis has consecutive frequencies
    mrope_interleaved: bool = False
    # what the network reads at image tokens: "placeholder": the embedding of the placeholder token; "projected": the
    # projected visual embedding; "dropped": nothing, image tokens are left out (for a network trained on text)
    pictures: Pictures = "placeholder"

    def __post_init__(self) -> None:
        object.__setattr__(self, "mrope_section", tuple(self.mrope_section))
        super().__post_init__()
        check_size("features", self.features, 8, "Use the published value.")
        if self.target_hidden_size:
            check_size("target_hidden_size", self.target_hidden_size, MAX_CONFIG_SIZE, "Use the published value.")
        if len(self.layers) not in (0, self.features):
            raise InputError(
                f"`layers` must be {self.features}, one a feature, but is {self.layers!r:.60}. Use the published list."
            )
        if self.norm_before_fc and self.fc_norm:
            raise InputError(
                "`fc_norm` must be false with `norm_before_fc`, but both are true. Set one of them to false."
            )
        if self.draft_vocab_size > self.vocab_size:
            raise InputError(
                f"`draft_vocab_size` must be at most the target's {self.vocab_size}, but is {self.draft_vocab_size}. "
                "Use the published value."
            )
        if self.target_size != self.hidden_size and not self.own_embedding:
            raise InputError(
                f"`own_embedding` must be true where the network has {self.hidden_size} channels and the target "
                f"{self.target_size}, but is false. Use the checkpoint that holds `embed_tokens.weight`."
            )
        mask = self.mask_token
        if mask is not None and (type(mask) is not int or not 0 <= mask < self.vocab_size):
            raise InputError(
                f"`mask_token` must be a token below {self.vocab_size}, but is {mask!r:.60}. "
                "Correct it in the folder's config.json."
            )
        self._check_positions()

    def _check_positions(self) -> None:
        pictures = ("placeholder", "projected", "dropped")
        if self.positions not in ("text", "temporal", "axes") or self.pictures not in pictures:
            raise InputError(
                f"`positions` must be text, temporal or axes, and `pictures` {', '.join(pictures)}, but they are "
                f"{self.positions!r:.60} and {self.pictures!r:.60}."
            )
        sections = self.mrope_section
        if sections and (
            len(sections) != 3
            or any(type(part) is not int or part < 0 for part in sections)
            or 2 * sum(sections) != self.head_dim
        ):
            raise InputError(
                f"`mrope_section` must be three numbers with the sum {self.head_dim // 2}, half of a head's channels, "
                f"but is {sections!r:.60}. Use the target's."
            )
        if self.positions == "axes" and not sections:
            raise InputError('`mrope_section` must be given with `positions` "axes", but is (). Use the target\'s.')

    @property
    def target_size(self) -> int:
        return self.target_hidden_size or self.hidden_size

    @property
    def projected(self) -> bool:
        """Whether the network reads the projected visual embedding at image tokens."""
        return self.pictures == "projected"

    @property
    def mrope_axes(self) -> int:
        if self.pictures == "dropped":
            return 0
        return {"text": 0, "temporal": 1, "axes": 3}[self.positions]

    def for_depth(self, layers: int) -> Self:
        """Return the configuration for a target with `layers` layers.

        If no layers are listed, the default layers are filled in.
        """
        if self.layers:
            return self
        if self.features != 3:
            raise InputError(
                f"`layers` must name the {self.features} layers that the network reads, but is (): only three have a "
                "default. Use those of the drafter's training."
            )
        return replace(self, layers=default_layers(layers))


def default_layers(depth: int) -> tuple[int, ...]:
    """Return the default layers of EAGLE-3 for a target with n = `depth` layers.

    They are the layers before the boundaries 2, n // 2 and n - 3, where boundary k is the residual stream that enters
    layer k.
    """
    return tuple(min(max(boundary, 1), depth) - 1 for boundary in (2, depth // 2, depth - 3))


@built_in_network(
    "eagle3",
    published="mmdec.drafters.eagle.checkpoint",
    note="EAGLE-3: reads three of the model's layers; P-EAGLE drafts all depths at once.",
)
@final
class Eagle3(LayeredNetwork):
    """EAGLE-3's network; P-EAGLE's if `config.mask_token` is set. Holds its weights and its LM head."""

    config_class: ClassVar[type[DraftConfig]] = Eagle3Config
    config: Eagle3Config

    def build(self, config: DraftConfig) -> None:
        """Create the weights, under their published names."""
        sizes, size, eps = cast(Eagle3Config, config), config.hidden_size, config.rms_norm_eps
        width = sizes.features * sizes.target_size
        self.fc = nn.Linear(width, size, bias=sizes.fc_bias)
        if sizes.norm_before_fc:
            self.input_norm = RMSNorm(width, eps)
        if sizes.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(sizes.target_size, eps) for _ in range(sizes.features))
        rotary = AxesRotaryEmbedding(sizes)
        later = (DraftLayer(sizes, rotary, qk_norm=sizes.qk_norm) for _ in range(1, sizes.num_hidden_layers))
        self.build_layers([FirstLayer(sizes, rotary), *later], sizes.output_bias)
        self.build_ends(sizes, own_head=True)
        if sizes.mask_token is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, width))

    def fuse(self, embeds: Tensor, features: Tensor) -> Tensor:
        """Compute the first layer's input (..., 2 H) at position t.

        Args:
            embeds: (..., H), embedding of token t + 1.
            features: (..., k * Ht), the target's features of token t, which fc maps to H channels.
        """
        return torch.cat([embeds, self.fuse_features(features)], -1)

    def fuse_features(self, features: Tensor) -> Tensor:
        """Apply fc and its norms to the target's features (..., k * Ht).

        Returns:
            (..., H).
        """
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        elif self.config.fc_norm:
            parts = features.chunk(self.config.features, -1)
            norms = cast(nn.ModuleList, self.fc_norm)
            features = torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], -1)
        return linear(features, self.fc.weight, self.fc.bias)

    def fuse_drafted(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """Compute the first layer's input (..., 2 H) at drafted tokens.

        Args:
            embeds: (..., H), their embeddings.
            hidden: (..., H), the network's output at the token before each.
        """
        return torch.cat([embeds, hidden], -1)

    def prompt(self, embeds: Tensor, features: Tensor, visual: Tensor) -> PromptInput:
        """Compute the first layer's input for the prompt of one row with L tokens.

        If `config.pictures` is "dropped", positions that read an image token are left out.

        Args:
            embeds: (L, H).
            features: (L, k * Ht).
            visual: (L,) bool, True at visual tokens.
        """
        prompted = super().prompt(embeds, features, visual)
        if self.config.pictures != "dropped":
            return prompted
        states = prompted.states[~visual[1:]]
        return PromptInput(states, prompted.positions[: len(states)], end=len(states))

    def masked_input(self, embed: Tensor) -> Tensor:
        """Compute the first layer's input (2 H,) at P-EAGLE's added positions, where no token is known.

        Args:
            embed: (H,), embedding of `mask_token`.
        """
        return torch.cat([embed, self.fuse_features(self.mask_hidden[0, 0])], -1)

    @property
    def own_head(self) -> nn.Linear | None:
        return self.lm_head

    def conventions(self) -> Conventions:
        config = self.config
        each = {f"fc_norm.{index}.weight": config.target_size for index in range(config.features)}
        whole = {"input_norm.weight": config.features * config.target_size}
        # a projected embedding must have the network's number of channels
        fits = config.hidden_size == config.target_size
        return Conventions(
            switches=[
                Switch(
                    "norm_before_residual",
                    "residual",
                    ("the feature before its norm", "the feature after its norm"),
                ),
                Switch(
                    "norm_output",
                    "feature of drafted tokens",
                    ("the state before the last norm", "the state after the last norm"),
                    depth=2,  # the first drafted token's feature is the target's
                ),
            ],
            norms=[
                OptionalNorm("fc_norm", "each feature before fc", each, published=True),
                OptionalNorm("norm_before_fc", "all features before fc", whole, published=True),
            ],
            pictures=[
                PictureChoice(
                    "pictures",
                    "embedding of pictures",
                    [kind for kind in get_args(Pictures) if fits or kind != "projected"],
                )
            ],
            positions=get_args(Positions),
            rope_scaling=True,
            layer_ids="eagle_aux_hidden_state_layer_ids",
        )

    @property
    def exporter(self) -> Exporter:
        from mmdec.drafters.eagle.export import eagle3_exporter

        return eagle3_exporter(self)

    def prompt_embeds(self, context: Context, visual: Tensor, embedding: nn.Module) -> Tensor:
        embeds = embedding(context.tokens[:, -visual.shape[1] :])
        return embeds if context.embeds is None else torch.where(visual[..., None], context.embeds, embeds)

    def chain_input(self, embeds: Tensor, hidden: Tensor, embedding: Callable[[Tensor], Tensor]) -> Tensor:
        mask = self.config.mask_token
        if mask is None:
            return self.fuse_drafted(embeds, hidden)
        return self.masked_input(embedding(torch.tensor(mask, device=embeds.device))).expand(len(embeds), -1)

    def draft_in_parallel(
        self, drafter: NetworkDrafter, state: DraftState, roots: Tensor, depth: int
    ) -> tuple[Tensor, Levels] | None:
        """Run P-EAGLE: one pass over the queued tokens, and over `depth` - 1 positions without tokens after them.

        Only the queued tokens stay in the cache.

        Returns:
            The hidden state (B, 1, H) at each batch row's last token, and the levels of this and the positions without
            tokens. None for EAGLE-3.
        """
        if self.config.mask_token is None:
            return None
        cache = state.cache
        states, positions, counts = drafter.advance_over_text(state, drafter.catch_up(state))
        device = states.device
        rows = torch.arange(len(counts), device=device)[:, None]
        ends = [length + depth - 1 for length in counts]
        begins = torch.tensor(counts, device=device)[:, None]
        places = begins + torch.arange(depth - 1, device=device)  # indices of the positions without tokens
        token = torch.tensor(self.config.mask_token, device=device)
        wide = nn.functional.pad(states, (0, 0, 0, depth - 1))
        wide[rows, places] = self.masked_input(drafter.embedding(token))
        starts = positions[:, :1].expand(len(counts), -1)
        positions = starts + torch.arange(wide.shape[1], device=device)
        wide, queries, keys, values = self.run_layers(cache, wide, positions, ends, state.packed)
        keys, values = cache.write(keys, values, ends, self.depth - 1)
        chosen = begins - 1 + torch.arange(depth, device=device)
        queries = queries.transpose(1, 2)[rows, chosen].transpose(1, 2)
        mask = cache.causal_mask(wide.shape[1], keys.shape[2])[rows, 0, chosen][:, None]
        last = self.layer(self.depth - 1)
        hidden = self.output_norm(last.attend(wide[rows, chosen], queries, keys, values, mask, state.packed))
        cache.accept(counts)
        return hidden[:, :1], BlockLevels(drafter, state, hidden)

    def cpu_step(self, packed: PackedWeights | None, embedding: nn.Module, output: nn.Linear) -> SingleTokenStep | None:
        return Eagle3Step.for_network(self, packed, embedding)

    def output_norm(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden) if self.config.norm_output else hidden

    def logits(self, hidden: Tensor, output: nn.Linear) -> Tensor:
        """Compute logits (..., Vd) from hidden states (..., H) by the network's own LM head.

        Args:
            output: The target's LM head, which this network does not need.
        """
        if not self.config.norm_output:
            hidden = apply_rms_norm(hidden, self.norm.weight, self.config.rms_norm_eps)
        return linear(hidden, self.lm_head.weight)


@final
class FirstLayer(DraftLayer):
    """EAGLE-3's first layer, whose input (B, n, 2 H) is a token's embedding and a feature."""

    def __init__(self, config: Eagle3Config, rotary: RotaryEmbedding) -> None:
        super().__init__(config, rotary, 2 * config.hidden_size, config.qk_norm)
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def pack_weights(self) -> PackedWeights | None:
        packed = super().pack_weights()
        return None if packed is None else PackedWeights(*packed[:3], norms=self._norms())

    def attention_input(self, states: Tensor, packed: PackedWeights | None = None) -> Tensor:
        # one operation computes both norms, because a small network's time depends on the number of operations
        weights = self._norms() if packed is None or packed.norms is None else packed.norms
        halves = states.view(*states.shape[:-1], 2, self.config.hidden_size)
        return apply_rms_norm(halves, weights, self.config.rms_norm_eps).view(states.shape)

    def residual(self, states: Tensor) -> Tensor:
        features = states.narrow(-1, self.config.hidden_size, self.config.hidden_size)
        return self.hidden_norm(features) if self.norm_before_residual else features

    def _norms(self) -> Tensor:
        return torch.stack([cast(RMSNorm, self.input_layernorm).weight, self.hidden_norm.weight])


@final
class AxesRotaryEmbedding(RotaryEmbedding):
    """Rotary positions, with M-RoPE's three axes where positions are (3, B, n)."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config.head_dim, config.rope_theta, config.rope_scaling)
        self.sections, self.interleaved = config.mrope_section, config.mrope_interleaved

    def __call__(self, positions: Tensor | int, dtype: torch.dtype, device: torch.device) -> KeyValues:
        if isinstance(positions, int) or positions.dim() == 2:
            return super().__call__(positions, dtype, device)
        axes = self._axes(device)  # shape (d,)
        parts = [super(AxesRotaryEmbedding, self).__call__(axis, dtype, device) for axis in positions]
        cosines, sines = (torch.stack(part, -1) for part in zip(*parts, strict=True))  # shape (B, 1, n, d, 3)
        index = axes.expand(cosines.shape[:-1])[..., None]
        return cosines.gather(-1, index)[..., 0], sines.gather(-1, index)[..., 0]

    def _axes(self, device: torch.device) -> Tensor:
        """Return for each channel the M-RoPE axis whose position rotates it, (d,) int64."""
        sections = self.sections
        if not self.interleaved:
            axes = [axis for axis, size in enumerate(sections) for _ in range(size)]
        else:
            # Frequencies 1, 4, 7, ... belong to axis 1, and 2, 5, 8, ... to axis 2, as many as their sections say.
            # Axis 0 has the rest.
            axes = [0] * (self.dim // 2)
            for axis in (1, 2):
                for frequency in range(axis, min(3 * sections[axis], len(axes)), 3):
                    axes[frequency] = axis
        return torch.tensor(axes * 2, device=device)
