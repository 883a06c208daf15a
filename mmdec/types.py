"""The types that drafters, targets and the verifier exchange.

Letters in shapes: B rows of the batch, N nodes of a draft tree, A nodes of an accepted path, P prompt tokens (padding
included), S encoder states, V vocabulary, H hidden size. This module does not import torch, so that `mmdec --help`
starts quickly.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Session = TypeVar("Session")  # a target's state of one generate() call


@dataclass(frozen=True)
class Draft:
    """A tree of tokens for each row. A chain is a tree of width one, plain decoding a tree of one node.

    Node 0 is the root: the pending token, chosen but not yet in the cache. A parent comes before its children. Nodes
    from `size` on are padding: any valid token, with parent 0.

    A soft node has an input of its own instead of a token's embedding. It is never accepted: its drafter reads the
    target's logits there, which guess further ahead. It may be deeper than `Plan.depth`.
    """

    tokens: Tensor  # (B, N) int64
    parents: Tensor  # (B, N) int64, index of each node's parent; -1 at the root
    size: Tensor  # (B,) int64, each row's number of nodes without padding, at least 1
    probs: Tensor | None = None  # (B, N, V), distribution that a node's children were sampled from; None: not sampled
    # (B, N, H), embeddings to read at soft nodes, whose tokens may be any; 0 at other nodes
    soft: Tensor | None = None

    @cached_property
    def soft_nodes(self) -> list[list[bool]]:
        """Whether each node of each row is soft. It is read from the device once."""
        if self.soft is None:
            rows, nodes = self.tokens.shape
            return [[False] * nodes] * rows
        is_soft: Any = self.soft.any(-1)
        return is_soft.tolist()


@dataclass(frozen=True)
class Scores:
    """The target's output for a draft."""

    logits: Tensor  # (B, N, V), the target's raw logits after each node, before any logits processor
    features: Mapping[int, Tensor] = field(default_factory=lambda: {})  # layer of `Needs.layers` -> states (B, N, H)
    mean_nodes_per_row: int | None = None  # that the pass computed, rounded up; None: N


@dataclass(frozen=True)
class Verdict:
    """The verifier's decision about one draft.

    `tokens` is the text that this round adds: the tokens of the accepted path after the root, then `next`. A row that
    is done ends where plain decoding would end; its `next` starts no further round.
    """

    path: Tensor  # (B, A) int64, accepted nodes from the root down, -1 beyond
    next: Tensor  # (B,) int64, the root of the next draft: correction or bonus token
    done: Tensor  # (B,) bool: True if the row ends in this round, by EOS, a stopping criterion or its maximum length
    tokens: Tensor  # (B, T) int64, -1 beyond a row's last token
    lengths: Tensor  # (B,) int64, number of tokens of each row in this round, at least 1

    @cached_property
    def new_tokens(self) -> list[list[int]]:
        """The tokens that this round adds to each row. They are read from the device once; do not change the lists."""
        tokens: Any = self.tokens
        lengths: Any = self.lengths
        return [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]


@dataclass(frozen=True)
class Round:
    """The result of one round: one draft and one target pass.

    Its lists have one entry for each batch row that had not ended before.
    """

    index: int  # number of the round in this `generate` call; 0 is the pass over the prompt
    rows: list[int]  # indices in the batch of the rows that had not ended before
    tokens: list[list[int]]  # new tokens of each row, bonus or correction included
    drafted: list[int]  # number of each row's drafted nodes, root excluded
    accepted: list[int]  # number of each row's drafted nodes that were accepted
    done: list[bool]  # for each row, whether it has ended
    target_seconds: float = 0.0  # in the target's pass
    drafter_seconds: float = 0.0  # in the drafter
    core_seconds: float = 0.0  # in everything else
    text: list[str] = field(default_factory=lambda: [])  # each row's new text, if the tokens were decoded; else empty
    logprobs: Tensor | None = field(default=None, repr=False, compare=False)  # (rows, T), log-probability of each token
    report: object = field(default=None, repr=False, compare=False)  # `PrefillOutput.report`; only in round 0
    # for each row, whether it ended by the maximum length, without an end token
    is_cut: list[bool] = field(default_factory=lambda: [], repr=False, compare=False)


@dataclass(frozen=True)
class Prior:
    """A drafter's expected acceptance rates, used until the rates of actual generation have been measured."""

    # ranks[depth][k]: probability that the drafter's k-th best token at this depth is right, if its parent is right
    ranks: tuple[tuple[float, ...], ...]
    is_measured: bool = True  # False: assumed values, which are used for tree shapes but not for draft sizes

    @property
    def chain(self) -> tuple[float, ...]:
        """The acceptance probability at each depth of a chain of best tokens; () if the values were not measured."""
        return tuple(row[0] for row in self.ranks) if self.is_measured else ()


@dataclass(frozen=True)
class Needs:
    """What a drafter reads besides tokens and logits. The target puts these values into `Context` and `Scores`."""

    # indices of the target layers whose output hidden states are read; -1: the last layer, after the final norm
    layers: tuple[int, ...] = ()
    embeds: bool = False  # whether the drafter reads the input embeddings of the prompt
    encoder: bool = False  # whether it reads the encoder's hidden states and the encoder's input features
    # initial acceptance rates, for tree shapes and draft sizes; None: the drafter chooses its tree shapes itself
    prior: Prior | None = None
    # whether a chat keeps the drafter's state for the next turn (`Context.previous_state`)
    keeps_state_between_turns: bool = False
    may_stop_early: bool = False  # whether it ends a chain early if its tokens become improbable, see `Plan.threshold`
    may_find_nothing: bool = False  # whether it drafts nothing in some texts, without any fault
    has_other_vocabulary: bool = False  # whether its tokens are not the target's, so that its text is converted


class TreeShape(Protocol):
    """Chooses the likeliest nodes of a tree, for a drafter that predicts each depth independently.

    Several `generate` calls may share one object.
    """

    width: int  # number of the best tokens at each depth from which a tree may choose

    def tree(self, nodes: int, depth: int) -> Sequence[tuple[int, int, int]]:
        """Choose the tree's nodes.

        Args:
            nodes: Maximum number of nodes.
            depth: Maximum depth.

        Returns:
            (parent, depth from 0, rank) of each node below the root.
        """
        ...

    def probabilities(self) -> Sequence[Sequence[float]]:
        """Return the estimated probability [depth][rank] that the drafter's token of this rank is right."""
        ...

    def learn(self, depth: int, rank: int | None) -> None:
        """Record which of the ranked tokens was right.

        Args:
            depth: Depth of the tokens in the tree, from 0.
            rank: Index of the right token, 0 for the best one; None: none was right.
        """
        ...


@dataclass(frozen=True)
class MediaContext:
    """The images, video and sound of a prompt, for a model that reads them at placeholders among its tokens."""

    placeholders: Tensor  # (B, P) bool, True at the placeholder tokens of images, video or sound
    # the processor's outputs (pixels, sizes, sound features); None if the target received encoded images instead
    inputs: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class EncoderContext:
    """What the encoder of an encoder-decoder model computed, for drafters with `Needs.encoder`."""

    states: Tensor  # (B, S, H), the encoder's hidden states
    input_features: Tensor | None = None  # (B, mels, T), what the speech encoder has read; None: not known


@dataclass(frozen=True)
class Context:
    """What the pass over the prompt computed, for drafters that read it.

    `positions`, `features` and `embeds` cover only the last F tokens of the prompt: those that were not yet in the
    key-value cache that the caller passed. Without such a cache F = P.
    """

    tokens: Tensor  # (B, P) int64, the prompts' token ids
    mask: Tensor  # (B, P) bool, False at padding
    positions: Tensor  # (1 or 3, B, F), the target's position ids; 3 with M-RoPE
    next_position: Tensor  # (B,), the target's position of the first root; M-RoPE's rope_delta is included
    features: Mapping[int, Tensor] = field(default_factory=lambda: {})  # layer -> its hidden states (B, F, H)
    embeds: Tensor | None = None  # (B, F, H), the first layer's inputs: at visual tokens the projected visual embedding
    past: int = 0  # number of tokens that were in the caller's key-value cache before this call
    media: MediaContext | None = None  # None: the model reads only text
    encoder: EncoderContext | None = None  # None without `Needs.encoder`
    source: Sequence[Sequence[int]] | None = None  # each row's encoder input ids, if the decoder has the same tokens

    # What the target can score.
    room: Tensor | None = None  # (B,), number of further tokens until the target's maximum length; None: no maximum
    # True: each node of a draft takes up one of the target's positions; False: nodes of equal depth share a position
    nodes_take_positions: bool = False
    needs_chains: bool = False  # whether a draft must be a chain

    # What the loop and the chat add for the drafter.
    # chooses tree shapes by the acceptance rates of earlier generate() calls; None without `Needs.prior`
    tree_shape: TreeShape | None = None
    previous_state: Any = None  # the drafter's state from the previous turn of a chat; None: there is none

    @property
    def visual(self) -> Tensor:
        """Which of the last F tokens are placeholders of images, video or sound, (B, F) bool."""
        rows, width = self.positions.shape[-2:]
        return self.mask.new_zeros(rows, width) if self.media is None else self.media.placeholders[:, -width:]

    @property
    def text_mask(self) -> Tensor:
        """Which prompt tokens are text, neither padding nor placeholders, (B, P) bool."""
        return self.mask if self.media is None else self.mask & ~self.media.placeholders


class Warp(Protocol):
    """Turns a drafter's logits into the distribution that the target would draw from.

    It applies the same temperature, top-k, top-p, penalties and so on. Any other distribution keeps the output exact,
    too, if children are drawn from it and `Draft.probs` holds it. But tokens outside the target's distribution are
    never accepted.
    """

    def __call__(self, logits: Tensor, paths: Sequence[Sequence[Sequence[int]]] = ()) -> Tensor:
        """Return the distributions (B, n, V) float32 of the children of n nodes in each row.

        A distribution may have fewer tokens than the plan has children: draw only those.

        Args:
            logits: (B, n, V), the drafter's logits after the nodes, over the target's vocabulary; -inf at tokens that
                the drafter does not have.
            paths: For each row, the drafted tokens from the root's child down to each node, all of one length.
                Penalties read them after the accepted text. (): they read only that text.
        """
        ...


@dataclass(frozen=True)
class Plan:
    """The maximum size of a round's draft, and how to choose its tokens."""

    nodes: int  # maximum number of nodes below the root
    depth: int  # maximum depth of the tree
    # draw children from the distributions that this returns, and return these as `probs`; None: deterministic drafts
    warp: Warp | None = None
    generator: torch.Generator | None = None  # for sampling children, on the target's device
    # A chain of most probable tokens ends at the first node for which the estimated probability that it and all nodes
    # before it are accepted (mean over the rows) is below `threshold`.
    threshold: float = 0.0
    # A chain is not drafted at all if fewer of its tokens are expected to be accepted (mean over the rows): the target
    # would need more time to check the chain than the chain saves. Only drafters that take almost no time read this.
    min_expected_accepted: float = 0.0

    @property
    def is_chain(self) -> bool:
        """Whether a chain is asked for.

        Drafters that rank whole texts, as CTC heads do, may branch all the same, with no more nodes.
        """
        return self.nodes <= self.depth


@dataclass(frozen=True)
class PrefillOutput(Generic[Session]):
    """What a target's pass over a prompt returns."""

    session: Session  # the target's state of one generate() call
    context: Context  # what drafters read of the prompt
    # One node, the last prompt token. Its keys and values are in the cache already, so `commit` of it changes nothing.
    draft: Draft
    scores: Scores  # of that node
    # what the target tells callers of this pass, such as `mmdec.targets.media.VisionReport`; the core does not read it
    report: object = None


class Target(Protocol):
    """A model that scores drafts. It does not know how drafts are made.

    The object holds weights only. `prefill` makes a session, which holds the state of one generate() call.
    """

    vocab_size: int
    hidden_size: int

    @property
    def name(self) -> str:
        """A name of the weights, which `DecodingStatistics` uses as its key."""
        ...

    @property
    def device(self) -> torch.device: ...

    @abstractmethod
    def prefill(self, inputs: Mapping[str, Any], needs: Needs) -> PrefillOutput[Any]:
        """Run the prompt.

        Args:
            inputs: The arguments of the model's forward.
            needs: What the drafter reads.
        """
        ...

    @abstractmethod
    def score(self, session: Any, draft: Draft) -> Scores:
        """Run one pass over the whole tree. Nothing is accepted yet."""
        ...

    @abstractmethod
    def commit(self, session: Any, verdict: Verdict) -> None:
        """Keep the keys and values of the accepted path in the cache, and remove those of the draft's other nodes."""
        ...

    @abstractmethod
    def select(self, session: Any, live: Tensor) -> None:
        """Keep only the rows with the indices `live` (K,) int64, in that order. The others have ended."""
        ...


@runtime_checkable
class SharedPassTarget(Protocol):
    """What a target offers besides `Target` if several decodings may share its passes."""

    @property
    def model(self) -> object:
        """The model; decodings with the same one share passes."""
        ...

    def prompt_tokens(self, inputs: Mapping[str, Any]) -> int | None:
        """Return how many tokens `prefill` reads, over all rows; None if other work outweighs them, such as a tower's.

        A scheduler limits how many tokens of prompts are read between two passes over drafts.
        """
        ...

    def prefill_in_pieces(
        self, inputs: Mapping[str, Any], needs: Needs, size: int | None
    ) -> Iterator[PrefillOutput[Any] | None]:
        """Run `Target.prefill` in pieces of at most `size` tokens, between which other passes may run.

        Yields:
            None after each piece but the last, then what `prefill` returns.
        """
        ...

    def shares_passes(self, session: Any) -> bool:
        """Return whether the rows of a session may be scored in one pass with those of other sessions."""
        ...

    def score_together(self, parts: Sequence[tuple[Any, Draft]]) -> Sequence[Scores]:
        """Score the drafts of several sessions, for all of which `shares_passes` is true, in one pass.

        Returns:
            The scores of each session.
        """
        ...

    def release(self, session: Any) -> None:
        """Forget a session whose decoding has ended or was cancelled."""
        ...


class Drafter(Protocol):
    """Proposes drafts. Whether they are accepted is decided by the verifier.

    The object holds weights only. `start` returns the state of one generate() call, and `DecodingStatistics` stores
    what is measured during the calls.
    """

    needs: Needs

    @property
    def name(self) -> str:
        """A name of the weights and settings, which `DecodingStatistics` uses as its key."""
        ...

    def check(self, target: Target) -> None:
        """Raise InputError if the drafter cannot work with this target. The message says what is supported."""
        ...

    def start(self, context: Context) -> Any:
        """Read the prompt and return the drafter's state for this generate() call."""
        ...

    def propose(self, state: Any, roots: Tensor, plan: Plan) -> Draft:
        """Draft a tree below each root (B,), within the plan. It may have fewer nodes than planned, or none."""
        ...

    def update(self, state: Any, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Update the drafter's state after a round.

        This is called after every round: also after rounds without a draft, after rounds in which another drafter
        drafted, and after the prompt's pass.
        """
        ...

    def select(self, state: Any, live: Tensor) -> None:
        """Keep only the rows with the indices `live` (K,) int64, in that order. The others have ended."""
        ...
