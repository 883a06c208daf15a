"""What all draft networks share: one or a few Llama decoder layers that continue the target's hidden states.

A token's feature is a hidden state of the target at this token. Position t of a network reads the embedding of token
t + 1 and the feature of token t, and predicts the feature of token t + 1, from which an LM head predicts token t + 2.

`DraftNetwork` is abstract; each drafter's own network is final (`eagle/eagle3.py`, `eagle/msd.py`, ...). A network says
by methods and attributes what the rest of mmdec asks of it: which features and embeddings it reads, how its drafts grow
(level by level, or all depths at once), which drafter runs it, and what the doctor may try. So a new network costs
mmdec no line outside its folder, except its name in the registry.

What the layers compute is in `layers.py`.

Letters in shapes: B rows, L tokens of a text, n positions that the layers process, S positions in a cache, H hidden
size, k target layers whose features are read, h key-value heads, d channels of a head, V visual tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mmdec.drafters.networks.config import DraftConfig
from mmdec.drafters.networks.conventions import Conventions
from mmdec.drafters.networks.layers import DraftLayer, KeyValues, PackedWeights
from mmdec.drafters.networks.vocabulary import DraftVocabulary
from mmdec.drafters.networks.weights import DrafterWeights
from mmdec.types import Context, Drafter

if TYPE_CHECKING:
    from mmdec.drafters.networks.cpu_step import SingleTokenStep
    from mmdec.drafters.networks.drafter import NetworkDrafter
    from mmdec.drafters.networks.export import Exporter
    from mmdec.drafters.networks.kv_cache import DraftCache, DraftState
    from mmdec.drafters.networks.tree import Levels


@dataclass
class PromptInput:
    """The layer's input for the prompt of one row with L tokens: M positions."""

    states: Tensor  # (M, H), the layer's input at each position; M is L - 1, or less if images are compressed
    positions: Tensor  # (M,), position id of each state, counted from the row's first token after padding
    condition: Tensor | None = None  # vector that all later positions read, from `condition_on`; None without it
    # (visual tokens,) in [0, 1]: weight of each one after compression, 0 if dropped; None if no image was compressed
    visual_weights: Tensor | None = None
    compressor: str | None = None  # name of the image compressor that was used; None if no image was compressed
    end: int | None = None  # position id of the first token after the prompt's states; L - 1 if None


def stack_conditions(prompts: Sequence[PromptInput]) -> Tensor | None:
    """Stack the vectors that prompts gave for later positions: (B, 1, C), zeros for a prompt without one.

    Returns:
        None if no prompt gave one.
    """
    first = next((prompt.condition for prompt in prompts if prompt.condition is not None), None)
    if first is None:
        return None
    zeros = torch.zeros_like(first)
    return torch.stack([zeros if prompt.condition is None else prompt.condition for prompt in prompts])[:, None]


class DraftNetwork(DrafterWeights[DraftConfig]):
    """The abstract base of draft networks.

    An author must implement `build` and `fuse`, two methods.
    An author may override any other method, each of which says what EAGLE does, and `continues_features`.
    Nobody overrides `forward`, `run_layers`, `pack_weights`, `layer` and `depth`, which run the layers.
    """

    layers: nn.ModuleList  # of `DraftLayer`; `build` creates it
    # Whether each position's output continues the target's features, so that the doctor can run the network over a
    # whole text at once, and try its conventions there.
    continues_features: ClassVar[bool] = True

    @abstractmethod
    def fuse(self, embeds: Tensor, features: Tensor) -> Tensor:
        """Compute the layer's input at position t.

        Args:
            embeds: (..., H), embedding of token t + 1.
            features: (..., k * H), of token t.
        """

    def condition_on(self, vector: Tensor | None) -> Self:
        """Return the network whose positions also read a vector that the prompt gave (`PromptInput.condition`).

        It shares its weights with this network. Here it is this network, which reads no such vector.

        Args:
            vector: Broadcastable to the features; None: the prompt gave none.
        """
        return self

    def make_drafter(self, embedding: nn.Module, output: nn.Linear) -> Drafter:
        from mmdec.drafters.networks.drafter import NetworkDrafter

        return NetworkDrafter(self, embedding, output)

    @property
    def own_embedding(self) -> nn.Embedding | None:
        """The network's own embedding, or None if it uses the target's."""
        return None

    @property
    def own_head(self) -> nn.Linear | None:
        """The network's own LM head, or None if it uses the target's."""
        return None

    @property
    def card_note(self) -> str:
        """What users must know of this network, for the model card of a converted folder; "": nothing."""
        return ""

    @property
    def exporter(self) -> Exporter | None:
        """The exporter to formats of inference engines, or None if no engine reads the network."""
        return None

    def conventions(self) -> Conventions:
        """Return the settings that the drafter doctor may try with this network."""
        return Conventions()

    @property
    def max_depth(self) -> int | None:
        """The maximum number of tokens on a draft's path, or None if unlimited."""
        return None

    def prompt_embeds(self, context: Context, visual: Tensor, embedding: nn.Module) -> Tensor:
        """Return the embeddings (B, F, H) of the prompt's new tokens, for `prompt`.

        Args:
            context: What the target recorded of the prompt.
            visual: (B, F) bool, True at placeholders of images, video or sound.
            embedding: The network's embedding, or the target's.
        """
        return cast(Tensor, context.embeds)

    def draft_in_parallel(
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
            packed: The result of `pack_weights`, or None.

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
            layer = self.layer(index)
            queries, keys, values = layer.project(states, positions)
            keys, values = cache.write(keys, values, counts, index)
            states = layer.attend(states, queries, keys, values, cache.causal_mask(states.shape[1], keys.shape[2]))
        return states, *self.layer(last).project(states, positions, packed)

    def cpu_step(self, packed: PackedWeights | None, embedding: nn.Module, output: nn.Linear) -> SingleTokenStep | None:
        """Make the fast path that runs the network on one token at a time; None if there is none for this network.

        Args:
            packed: The result of `pack_weights`, or None.
            embedding: The embedding that the network uses.
            output: The target's LM head.
        """
        return None

    @property
    def depth(self) -> int:
        """The number of layers."""
        return len(self.layers)

    def layer(self, index: int) -> DraftLayer:
        return cast(DraftLayer, self.layers[index])

    def pack_weights(self) -> PackedWeights | None:
        """Return the weights of the network's single layer, packed; None if it has several layers or a large one."""
        return self.layer(0).pack_weights() if self.depth == 1 else None

    def output_norm(self, hidden: Tensor) -> Tensor:
        """Compute the network's output (B, n, H) from that of its last layer. Here both are the same."""
        return hidden

    def forward(
        self, states: Tensor, positions: Tensor, past: KeyValues | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, KeyValues]:
        """Run all layers.

        Args:
            states: (B, n, H), the first layer's input.
            positions: (B, n), or (3, B, n) for M-RoPE.
            past: Keys and values of S earlier positions, those of all layers concatenated along the heads: (B, layers *
                h, S, d).
            mask: Additive (B, 1, n, S + n); None: causal.

        Returns:
            Hidden (B, n, H), which is the LM head's input and the feature for the next position; keys and values of the
            n positions, in the same form as `past`.
        """
        pairs: list[KeyValues] = []
        for index in range(self.depth):
            layer = self.layer(index)
            queries, keys, values = layer.project(states, positions)
            pairs.append((keys, values))
            if past is not None:
                keys, values = (
                    torch.cat([old.chunk(self.depth, 1)[index], new], 2)
                    for old, new in zip(past, pairs[-1], strict=True)
                )
            states = layer.attend(states, queries, keys, values, mask)
        all_keys, all_values = (torch.cat(parts, 1) for parts in zip(*pairs, strict=True))
        return self.output_norm(states), (all_keys, all_values)

    @property
    def draft_vocabulary(self) -> DraftVocabulary:
        """The tokens that the network can draft. Here they are all tokens of the target."""
        return DraftVocabulary(self.config.vocab_size)

    def logits(self, hidden: Tensor, output: nn.Linear) -> Tensor:
        """Compute logits (..., Vd) of the draft vocabulary from hidden (..., H).

        Args:
            output: The target's LM head.
        """
        return linear(hidden, output.weight, output.bias)

    def acceptance_probability(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """Estimate how probable it is that nodes' likeliest children are accepted; see `Levels`."""
        return logits.float().softmax(-1).amax(-1)

    def fuse_drafted(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """Compute the layer's input at drafted tokens.

        Args:
            embeds: (..., H), their embeddings.
            hidden: (..., H), the network's output at the token before each.
        """
        # only the target could compute the true features: outputs of k of its layers
        count = len(self.config.layers)
        features = hidden if count == 1 else hidden.repeat(*[1] * (hidden.dim() - 1), count)
        return self.fuse(embeds, features)

    def chain_input(self, embeds: Tensor, hidden: Tensor, embedding: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute the layer's input at the next tokens of drafted chains.

        Here it is that of `fuse_drafted`. A network that drafts all depths in parallel reads a mask token instead.

        Args:
            embeds: (n, H), the tokens' embeddings.
            hidden: (n, H), the network's output at the token before each.
            embedding: Embeds the mask token.
        """
        return self.fuse_drafted(embeds, hidden)

    def prompt(self, embeds: Tensor, features: Tensor, visual: Tensor) -> PromptInput:
        """Compute the layer's input for the prompt of one row, without padding.

        Position t reads the embedding of token t + 1, so the last token has no input.

        Args:
            embeds: (L, H).
            features: (L, k * H).
            visual: (L,) bool, True at visual tokens.
        """
        states = self.fuse(embeds[1:], features[:-1])
        return PromptInput(states, torch.arange(len(states), device=states.device))
