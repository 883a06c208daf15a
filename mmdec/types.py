"""What drafters, targets and the verifier exchange; and the errors, from `mmdec.checks.errors`.

B rows, N nodes of a draft, A nodes of an accepted path, P prompt columns, V vocabulary, H hidden size. torch is
imported by those who make tensors, not here: `mmdec --help` is to be quick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from mmdec.checks.errors import InputError as InputError  # handed on
from mmdec.checks.errors import MmdecError as MmdecError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Draft:
    """A tree of tokens for each row. A chain is a tree of width one, plain decoding a tree of one node.

    Node 0 is the root: the pending token, chosen but not yet in the cache. A parent comes before its children. What
    lies at nodes `size` and beyond is padding: any valid token, parent 0.
    """

    tokens: Tensor  # (B, N) int64
    parents: Tensor  # (B, N) int64, -1 at the root
    size: Tensor  # (B,) int64, at least 1
    probs: Tensor | None = None  # (B, N, V): what the children of a node were drawn from; None: they were not drawn


@dataclass(frozen=True)
class Scores:
    """What one pass of the target says about a draft."""

    logits: Tensor  # (B, N, V), raw
    features: Mapping[int, Tensor] = field(default_factory=lambda: {})  # layer -> (B, N, H); those of `Needs`


@dataclass(frozen=True)
class Verdict:
    """What the verifier decided. `tokens` is the text of this round: the path's tokens below the root, then `next`.

    A row that is done was cut where plain decoding would have ended; its `next` is no root of anything.
    """

    path: Tensor  # (B, A) int64, accepted nodes from the root down, -1 beyond
    next: Tensor  # (B,) int64, the next root: correction or bonus
    done: Tensor  # (B,) bool: end of sequence, stop or length
    tokens: Tensor  # (B, T) int64, -1 beyond a row's own
    lengths: Tensor  # (B,) int64, tokens of a row in this round, at least 1


@dataclass(frozen=True)
class Prior:
    """How often a drafter's guesses are right, as known before it runs."""

    ranks: tuple[tuple[float, ...], ...]  # [depth][k]: chance of the k-th best token, given that all above it was right
    measured: bool = True  # False: a guess, which shapes trees and says nothing of how much to draft

    @property
    def chain(self) -> tuple[float, ...]:
        """Chance of each node of a chain of best tokens; () where nothing was measured."""
        return tuple(row[0] for row in self.ranks) if self.measured else ()


@dataclass(frozen=True)
class Needs:
    """What a drafter asks for besides logits; it comes in `Context` and `Scores`."""

    layers: tuple[int, ...] = ()  # hidden states after these layers; -1 is the last, final norm included
    embeds: bool = False  # the prompt's input embeddings
    memory: bool = False  # the encoder's states
    prior: Prior | None = None  # where its trees' shape and the budget begin; None: it shapes its trees by itself
    travels: bool = False  # its memory goes on with a conversation, from turn to turn (`Context.carried`)
    stops: bool = False  # it ends chains as `Plan.threshold` says


class TreeShape(Protocol):
    """Which nodes of a tree are likeliest, for a drafter that guesses each depth by itself. Runs share it."""

    width: int  # best tokens of a depth that count

    def tree(self, nodes: int, depth: int) -> Sequence[tuple[int, int, int]]:
        """(parent, depth from 0, rank) of the nodes below the root."""
        ...

    def learn(self, depth: int, rank: int | None) -> None:
        """At `depth` (from 0) this rank was right; None: no rank was."""
        ...


@dataclass(frozen=True)
class Context:
    """The prompt after its pass, for drafters that read it.

    `features`, `embeds`, `visual` and `positions` cover the fresh columns, the last F of the text: what the prompt's
    pass read. F = P without a given cache.
    """

    tokens: Tensor  # (B, P) int64
    mask: Tensor  # (B, P) bool, False at padding
    positions: Tensor  # (1 or 3, B, F)
    next_position: Tensor  # (B,) of the root, rope_delta included
    features: Mapping[int, Tensor] = field(default_factory=lambda: {})  # layer -> (B, F, H)
    embeds: Tensor | None = None  # (B, F, H), the first layer's inputs: at visual tokens the projected visual embedding
    visual: Tensor | None = None  # (B, F) bool, True at visual tokens
    images: Mapping[str, Any] | None = None  # pixels and sizes as the processor gave them, where the target got them so
    memory: Tensor | None = None  # (B, S, H)
    room: Tensor | None = None  # (B,) positions that the target has from `next_position` on; None: no end
    columns: bool = False  # attention has a table by column: every node of a draft takes room, not its depth alone
    shape: TreeShape | None = None  # what runs before this one learned, beginning with the drafter's prior
    past: int = 0  # columns that a given cache held
    vision_seconds: float = 0.0  # seconds in the vision tower during the prompt's pass; 0 if the caller ran the tower
    carried: Any = None  # the drafter's own memory of the conversation so far, where the run before left one


@dataclass(frozen=True)
class Plan:
    """How much to draft in a round, and how: `nodes` below the root in all, at most `depth` deep."""

    nodes: int
    depth: int
    temperature: float | None = None  # draw children, at this temperature, and report `probs`; None: deterministic
    generator: torch.Generator | None = None  # for those draws alone, on the target's device
    # A chain (nodes <= depth) of likeliest tokens ends with the first node whose chance to be accepted, with all before
    # it and on the mean of the rows, is below this, as the drafter estimates it.
    threshold: float = 0.0


class Target(Protocol):
    """A model that scores drafts. It knows nothing of how they come about. Weights only: a run lives in its session."""

    vocab_size: int
    hidden_size: int

    @property
    def name(self) -> str:
        """Identifies the weights. `DecodingStatistics` uses the name as its key."""
        ...

    @property
    def device(self) -> torch.device: ...

    def prefill(self, inputs: Mapping[str, Any], needs: Needs) -> tuple[Any, Context, Draft, Scores]:
        """The prompt's pass: (session, context, draft, scores). The draft is the last prompt token alone, whose cache
        entry is already there: committing it changes nothing."""
        ...

    def score(self, session: Any, draft: Draft) -> Scores:
        """One pass over the whole tree; nothing is accepted yet."""
        ...

    def commit(self, session: Any, verdict: Verdict) -> None:
        """Keep the accepted path's cache, drop the rest."""
        ...

    def select(self, session: Any, live: Tensor) -> None:
        """Rows live (K,) int64 go on, in that order."""
        ...


class Drafter(Protocol):
    """Proposes drafts and never accepts them.

    It holds weights only: `start` returns the memory of a run, and what runs learn is kept in `DecodingStatistics`.
    """

    needs: Needs

    @property
    def name(self) -> str:
        """Identifies the weights and settings. `DecodingStatistics` uses the name as its key."""
        ...

    def check(self, target: Target) -> None:
        """Raise InputError if the pair cannot work; says what would."""
        ...

    def start(self, context: Context) -> Any:
        """The memory of a run, from its prompt."""
        ...

    def propose(self, memory: Any, roots: Tensor, plan: Plan) -> Draft:
        """A tree below each root (B,), within the plan. It may have fewer nodes than planned, or none."""
        ...

    def update(self, memory: Any, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """See what became of a draft, whoever proposed it: also of plain rounds and of the prompt's."""
        ...

    def select(self, memory: Any, live: Tensor) -> None:
        """Rows live (K,) int64 go on, in that order."""
        ...
