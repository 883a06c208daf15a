"""Heads that draft one token a level and keep a state from level to level.

The heads read the target's last hidden state h at the token before the root. Level 0 reads the root, level i the i-th
drafted token, and predicts the token after it:

| kind | what level i hands to the LM head (e_j: the embedding of the token that level j reads) |
|---|---|
| medusa | x_i = blocks_i(h): the drafted tokens are not read |
| hydra | blocks_i([h; e_0; ...; e_i]) |
| recurrent | blocks([h; s_i]), where s_i = SiLU(W e_i + U s_{i-1} + b) and s_{-1} = 0; the same for all levels |
| mlp | s_i = GELU(LN_i(P_i s_{i-1} + (a / c) E_i[token])), where s_{-1} = h and E_i are embeddings of its own |

The recurrent kind is ReDrafter's, mlp is IBM's MLPSpeculator. A block is x + SiLU(W x + b). Hydra's first block, which
narrows its input, has a second product instead of the plain x. In mlp, c = 0.5^(1 / 2n) for n heads and
a = sqrt((1 - c^2) D / 2) for D inner channels; LN divides by the root mean square, with scale and shift.

Hydra++ is Hydra whose h has passed a decoder layer with a cache of its own (`prefix_layer`). Amphista is Medusa whose
x_i have passed a layer in which all levels attend to each other (`attention`); its adaptation layers are not here.

References:
    Medusa: Cai et al. 2024, arXiv 2401.10774. Hydra, Hydra++: Ankner et al. 2024, arXiv 2402.05109. ReDrafter: Zhang et
    al. 2024, arXiv 2403.09919. MLPSpeculator: Wertheimer et al. 2024, arXiv 2404.19124. Cerberus: Liu et al. 2024,
    arXiv 2410.13344. KOALA: Zhang et al. 2024, arXiv 2408.08146. Amphista: Li et al. 2024, arXiv 2406.13170.

Letters in shapes: B rows, n nodes of a level, K levels, H channels of the target, D channels that enter the LM head,
S channels of a state, V vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, cast, final

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, rms_norm, silu

from mmdec.drafters.networks.config import DraftConfig
from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.drafters.networks.layers import DraftLayer, PackedWeights, RMSNorm
from mmdec.drafters.networks.tree import Levels
from mmdec.drafters.networks.weights import MAX_CONFIG_SIZE, check_size
from mmdec.drafters.registry import built_in_network
from mmdec.errors import InputError
from mmdec.types import Context

if TYPE_CHECKING:
    from mmdec.drafters.networks.drafter import NetworkDrafter
    from mmdec.drafters.networks.export import Exporter
    from mmdec.drafters.networks.kv_cache import DraftCache, DraftState

HeadsKind = Literal["medusa", "hydra", "recurrent", "mlp"]
Embed = Callable[[Tensor], Tensor]  # token ids (...) -> embeddings (..., H)
HEADS_KINDS: tuple[HeadsKind, ...] = ("medusa", "hydra", "recurrent", "mlp")
LM_HEADS = ("target", "one", "each")
MAX_HEADS, MAX_BLOCKS = 64, 16
MLP_EPSILON = 1e-6  # what fms-extras and vLLM add to the mean square in LN


@dataclass(frozen=True)
class HeadsConfig(DraftConfig):
    """Sizes and options of heads. Those of attention and feed-forward are for `prefix_layer` and `attention`."""

    intermediate_size: int = 1
    num_attention_heads: int = 1
    num_key_value_heads: int = 1
    head_dim: int = 2
    input_norm: bool = True
    kind: HeadsKind = "hydra"
    heads: int = 4  # number of levels; the recurrent kind has any number
    blocks: int = 1  # number of residual blocks of each head; KOALA's are 2 or 3 deep
    # "target": the target's LM head serves all levels; "one": one of the network's own; "each": one for each level
    lm_heads: Literal["target", "one", "each"] = "target"
    lm_head_bias: bool = False
    prefix_layer: bool = False  # whether h passes a decoder layer first, as in Hydra++
    attention: bool = False  # medusa: whether the levels pass a layer that attends in both directions, as in Amphista
    previous_head: bool = False  # hydra: whether a head also reads the output of the head before, as in Cerberus
    # recurrent and mlp: D; 0: 2 H in recurrent, H in mlp. With another D, recurrent projects [h; s] to it.
    inner_size: int = 0
    summed: bool = False  # recurrent: whether s_i is the sum of the embeddings, without W and U
    tied: bool = False  # mlp: whether all levels share E and LN, and those after the first share P
    scale_input: bool = False  # mlp: whether h is normalised and divided by the root of 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size("heads", self.heads, MAX_HEADS, "Use the value from the published config.json.")
        check_size("blocks", self.blocks, MAX_BLOCKS, "Use the value from the published config.json.")
        for name, choices in (("kind", HEADS_KINDS), ("lm_heads", LM_HEADS)):
            if getattr(self, name) not in choices:
                raise InputError(f"`{name}` must be one of {', '.join(choices)}, but is {getattr(self, name)!r:.60}.")
        if self.inner_size:
            check_size("inner_size", self.inner_size, MAX_CONFIG_SIZE, "Use the value from the published config.json.")
        if self.lm_heads == "target" and (self.output_size != self.hidden_size or self.lm_head_bias):
            raise InputError(
                f"`inner_size` must be the target's {self.hidden_size}, without `lm_head_bias`, for heads that use the "
                f"target's LM head, but {self.output_size} channels enter it. Change it, or give the "
                "heads their own LM heads with `lm_heads`."
            )
        if self.lm_heads == "each" and self.kind == "recurrent":
            raise InputError("`lm_heads` must be one or target for the recurrent kind, but is each. Choose one.")
        for name, kind in (("attention", "medusa"), ("previous_head", "hydra")):
            if getattr(self, name) and self.kind != kind:
                raise InputError(f"`{name}` must be false for the kind {self.kind}, but is true. Leave it out.")

    @property
    def output_size(self) -> int:
        """D, the number of channels that enter the LM head."""
        size = self.hidden_size
        return {"recurrent": self.inner_size or 2 * size, "mlp": self.inner_size or size}.get(self.kind, size)

    @property
    def projected(self) -> bool:
        return False  # the heads read no embeddings of the prompt


class StatefulHeads(nn.Module, ABC):
    """The heads of all levels. The last D channels of a node's state (..., S) enter the LM head."""

    reads_tokens: ClassVar[bool] = True  # whether the nodes of a level differ

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.config = config

    def begin(self, hidden: Tensor) -> Tensor:
        """Return the state (..., S) before any token is read, from the target's hidden states (..., H)."""
        return hidden

    @abstractmethod
    def step(self, state: Tensor, tokens: Tensor, level: int, embed: Embed) -> Tensor:
        """Return the state (..., S) of nodes.

        Args:
            state: (..., S), their parents', or what `begin` returned.
            tokens: (...), the nodes' tokens.
            level: The level of the nodes; 0 for roots.
            embed: The target's embedding.
        """


@final
class MedusaLevels(StatefulHeads):
    """Medusa's heads: each reads the target's hidden state alone, and with `attention` the outputs of the others."""

    reads_tokens: ClassVar[bool] = False

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.levels = nn.ModuleList(_blocks(size, size, config.blocks) for _ in range(config.heads))
        self.attention = DraftLayer(config) if config.attention else None
        if self.attention is not None:  # like a block, a new layer adds nothing
            nn.init.zeros_(self.attention.self_attn.o_proj.weight)
            nn.init.zeros_(self.attention.mlp.down_proj.weight)

    def begin(self, hidden: Tensor) -> Tensor:
        """Return `hidden`; with `attention` the outputs of all levels, the deepest first, then `hidden`."""
        if self.attention is None:
            return hidden
        outputs = torch.stack([blocks(hidden) for blocks in self.levels], -2)  # (..., K, H)
        outputs = _attend_in_both_directions(self.attention, outputs)
        return torch.cat([outputs.flip(-2).flatten(-2), hidden], -1)

    def step(self, state: Tensor, tokens: Tensor, level: int, embed: Embed) -> Tensor:
        if self.attention is not None:
            return state[..., : -self.config.hidden_size]
        hidden = state[..., : self.config.hidden_size]
        return torch.cat([hidden, self.levels[level](hidden)], -1)


@final
class HydraLevels(StatefulHeads):
    """Hydra's heads: each also reads the embeddings of the tokens down to its level."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        size, count = config.hidden_size, config.blocks
        before = [int(config.previous_head and level > 0) for level in range(config.heads)]
        self.levels = nn.ModuleList(
            _blocks((2 + level + more) * size, size, count) for level, more in enumerate(before)
        )

    def step(self, state: Tensor, tokens: Tensor, level: int, embed: Embed) -> Tensor:
        size = self.config.hidden_size
        above = state[..., : (1 + level) * size]  # without the output of the head before
        inputs = [above, embed(tokens).to(state.dtype)]
        own = [state[..., -size:]] if self.config.previous_head and level else []
        return torch.cat([*inputs, self.levels[level](torch.cat([*inputs, *own], -1))], -1)


@final
class RecurrentLevels(StatefulHeads):
    """ReDrafter's head: a recurrent network reads the tokens, and one head serves all levels."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        size, inner = config.hidden_size, config.output_size
        if not config.summed:
            self.rnn_u, self.rnn_w = nn.Linear(size, size), nn.Linear(size, size, bias=False)
        if inner != 2 * size:
            self.input_proj = nn.Linear(2 * size, inner)
        self.blocks = nn.Sequential(*(HeadBlock(inner, inner) for _ in range(config.blocks)))

    def begin(self, hidden: Tensor) -> Tensor:
        return torch.cat([hidden, torch.zeros_like(hidden)], -1)

    def step(self, state: Tensor, tokens: Tensor, level: int, embed: Embed) -> Tensor:
        size = self.config.hidden_size
        hidden, memory = state[..., :size], state[..., size : 2 * size]
        token = embed(tokens).to(state.dtype)
        memory = token + memory if self.config.summed else silu(self.rnn_w(token) + self.rnn_u(memory))
        both = torch.cat([hidden, memory], -1)
        projected = both if self.config.output_size == 2 * size else self.input_proj(both)
        return torch.cat([both, self.blocks(projected)], -1)


@final
class SpeculatorLevels(StatefulHeads):
    """IBM's heads: each adds an embedding of its own to the state before, normalises and activates the sum."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        size, count = config.output_size, 1 if config.tied else config.heads
        self.emb = nn.ModuleList(nn.Embedding(config.vocab_size, size) for _ in range(count))
        inputs = [config.hidden_size] + [size] * (min(config.heads, 2) - 1 if config.tied else config.heads - 1)
        self.proj = nn.ModuleList(nn.Linear(width, size, bias=False) for width in inputs)
        self.ln = nn.ModuleList(ScaleShiftNorm(size) for _ in range(count))
        for weight in self.parameters():
            if weight.dim() > 1:  # as published
                nn.init.trunc_normal_(weight, 0, 1 / math.sqrt(size))
        state_weight = 0.5 ** (0.5 / config.heads)
        self.embedding_weight = math.sqrt((1 - state_weight**2) * size / 2) / state_weight

    def begin(self, hidden: Tensor) -> Tensor:
        if not self.config.scale_input:
            return hidden
        return rms_norm(hidden, hidden.shape[-1:], eps=MLP_EPSILON) / math.sqrt(2)

    def step(self, state: Tensor, tokens: Tensor, level: int, embed: Embed) -> Tensor:
        own = 0 if self.config.tied else level
        projection = self.proj[min(level, len(self.proj) - 1)]
        return gelu(self.ln[own](projection(state) + self.embedding_weight * self.emb[own](tokens)))


@final
class HeadBlock(nn.Module):
    """A residual block, x + SiLU(W x + b); with another number of outputs than inputs, R x + SiLU(W x + b)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        if inputs != outputs:
            self.res_connection = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        plain = self.res_connection(x) if self.linear.in_features != self.linear.out_features else x
        return plain + silu(self.linear(x))


@final
class ScaleShiftNorm(nn.Module):
    """A norm by the root mean square, with scale and shift."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weight, MLP_EPSILON) + self.bias


def _attend_in_both_directions(layer: DraftLayer, states: Tensor) -> Tensor:
    """Run a layer over the K positions of states (..., K, H), without a causal mask."""
    count, rows = states.shape[-2], states.reshape(-1, *states.shape[-2:])
    queries, keys, values = layer.project(rows, torch.arange(count, device=states.device)[None])
    return layer.attend(rows, queries, keys, values, rows.new_zeros(count, count)).view_as(states)


def _blocks(inputs: int, size: int, count: int) -> nn.Sequential:
    return nn.Sequential(*(HeadBlock(size if index else inputs, size) for index in range(count)))


LEVELS_OF: dict[str, type[StatefulHeads]] = {
    "medusa": MedusaLevels,
    "hydra": HydraLevels,
    "recurrent": RecurrentLevels,
    "mlp": SpeculatorLevels,
}


@built_in_network(
    "heads",
    published="mmdec.drafters.heads.checkpoint",
    note="Heads: Medusa, Hydra, ReDrafter and MLPSpeculator draft from the last hidden state.",
)
@final
class Heads(DraftNetwork):
    """Heads with a state, and their weights. The LM head may be the target's."""

    config_class: ClassVar[type[DraftConfig]] = HeadsConfig
    continues_features: ClassVar[bool] = False
    config: HeadsConfig

    def build(self, config: DraftConfig) -> None:
        sizes = cast(HeadsConfig, config)
        self.layers = nn.ModuleList([DraftLayer(sizes)] if sizes.prefix_layer else [])
        if sizes.prefix_layer:
            self.norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.heads = LEVELS_OF[sizes.kind](sizes)
        count = {"target": 0, "one": 1, "each": sizes.heads}[sizes.lm_heads]
        self.lm_heads = nn.ModuleList(
            nn.Linear(sizes.output_size, sizes.vocab_size, bias=sizes.lm_head_bias) for _ in range(count)
        )

    @property
    def max_depth(self) -> int | None:
        return None if self.config.kind == "recurrent" else self.config.heads

    @property
    def exporter(self) -> Exporter:
        from mmdec.drafters.heads.export import heads_exporter

        return heads_exporter(self)

    def prompt_embeds(self, context: Context, visual: Tensor, embedding: nn.Module) -> Tensor:
        return next(iter(context.features.values()))[..., :0]  # they are not read

    def fuse(self, embeds: Tensor, features: Tensor) -> Tensor:
        """Return the target's features (..., H), the input of `prefix_layer`. Other arguments are not read."""
        return features

    def extend_cache(
        self,
        cache: DraftCache,
        states: Tensor,
        positions: Tensor,
        counts: Sequence[int],
        packed: PackedWeights | None = None,
    ) -> tuple[Tensor, Tensor]:
        if self.layers:
            return super().extend_cache(cache, states, positions, counts, packed)
        return states, torch.empty(0)  # without a layer nothing is remembered

    def draft_in_parallel(
        self, drafter: NetworkDrafter, state: DraftState, roots: Tensor, depth: int
    ) -> tuple[Tensor, Levels]:
        """Compute the roots' states from the target's hidden states before them. Deeper levels follow one by one."""
        part = drafter.catch_up(state)
        if self.layers:
            hidden = self.norm(drafter.root_state(state, part).hidden_state(self, state.cache, state.packed))
        else:
            last = torch.tensor(part.counts, device=roots.device) - 1
            hidden = part.features[torch.arange(len(last), device=roots.device), last][:, None]
        root = self.heads.step(self.heads.begin(hidden), roots[:, None], 0, drafter.embedding)
        return root, HeadLevels(drafter, state)

    def lm_head(self, level: int) -> nn.Linear | None:
        """Return the LM head for the children of a level's nodes, or None if they use the target's."""
        heads = self.lm_heads
        return cast(nn.Linear, heads[min(level, len(heads) - 1)]) if len(heads) else None

    def level_logits(self, state: Tensor, level: int, output: nn.Linear) -> Tensor:
        """Compute the logits (..., V) of the children of nodes.

        Args:
            state: (..., S), the nodes'.
            level: The nodes' level.
            output: The target's LM head, which is used if the network has none.
        """
        head = self.lm_head(level) or output
        return linear(state[..., -self.config.output_size :], head.weight, head.bias)


@final
class HeadLevels(Levels):
    """Grows one draft with heads. What `Levels` calls a node's hidden state is the heads' state of this node."""

    def __init__(self, drafter: NetworkDrafter, state: DraftState) -> None:
        super().__init__(drafter, state)
        self.network, self.output = cast(Heads, drafter.network), drafter.output

    def expand(self, tokens: Tensor, features: Tensor, above: Tensor | None) -> Tensor:
        """Return the states (B, n, S) of n nodes.

        Args:
            tokens: (B, n), the nodes' tokens.
            features: (B, n, S), the states of their parents.
            above: Not read.
        """
        self.level += 1
        return self.network.heads.step(features, tokens, self.level, self.drafter.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.network.level_logits(self._differing(hidden), self.level, self.output)
        return logits.expand(-1, hidden.shape[1], -1)

    def _best(self, hidden: Tensor, width: int) -> tuple[Tensor, Tensor]:
        values, tokens = super()._best(self._differing(hidden), width)
        return values.expand(-1, hidden.shape[1], -1), tokens.expand(-1, hidden.shape[1], -1)

    def _differing(self, hidden: Tensor) -> Tensor:
        """Return the states of the nodes whose children's logits differ: one node where no tokens are read."""
        return hidden if self.network.heads.reads_tokens else hidden[:, :1]
