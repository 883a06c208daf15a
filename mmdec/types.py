"""The errors that mmdec raises, the types that drafters, targets and the verifier exchange, and the supported versions
of transformers.

B rows, N nodes of a draft, A nodes of an accepted path, P prompt columns, S encoder states, V vocabulary, H hidden
size. This module does not import torch, so that `mmdec --help` starts quickly.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


REFUSED = 2  # exit code of a command that ends with an `MmdecError`


class MmdecError(Exception):
    """The base class of all errors that mmdec raises deliberately. The message is written for the caller."""


class InputError(MmdecError, ValueError):
    """An argument or a file breaks a rule. Nothing was computed and nothing was written.

    A message names the argument, the rule, the value and the remedy: "`sample_rate` must be at least 8000 Hz, but is
    4000. Resample the audio first."
    """


OLDEST, FIRST_REFUSED = (5, 23), (5, 25)  # versions of transformers: first supported, first refused


@lru_cache
def transformers_release() -> tuple[int, ...]:
    """Return the first two numbers of the version of transformers that is installed."""
    return tuple(int(number) for number in re.findall(r"\d+", version("transformers"))[:2])


def check_transformers() -> None:
    """Raise MmdecError unless mmdec works with the installed transformers, whose internals it reads."""
    if not OLDEST <= transformers_release() < FIRST_REFUSED:
        oldest, refused = (".".join(map(str, numbers)) for numbers in (OLDEST, FIRST_REFUSED))
        raise MmdecError(
            f"`transformers` must be at least {oldest} and older than {refused}, but is {version('transformers')}. "
            f"Run `pip install 'transformers>={oldest},<{refused}'`."
        )


# name of the key-value cache among the inputs and outputs of transformers' models; it depends on the release
CACHE = "cache" if transformers_release() >= (5, 24) else "past_key_values"


@contextmanager
def told() -> Generator[None]:
    """For command-line programs: if the block raises an mmdec error, print it on stderr and exit with code 2.
    An error that was raised from an mmdec error (its `__cause__`) counts, too.
    """
    try:
        yield
    except Exception as error:
        own: BaseException | None = error
        while own is not None and not isinstance(own, MmdecError):
            own = own.__cause__
        if own is None:
            raise
        sys.stderr.write(f"error: {own}\n")
        raise SystemExit(REFUSED) from error


@dataclass(frozen=True)
class Draft:
    """A tree of tokens for each row. A chain is a tree of width one, plain decoding a tree of one node.

    Node 0 is the root: the pending token, chosen but not yet in the cache. A parent comes before its children. Nodes
    from `size` on are padding: any valid token, with parent 0.
    """

    tokens: Tensor  # (B, N) int64
    parents: Tensor  # (B, N) int64, index of each node's parent; -1 at the root
    size: Tensor  # (B,) int64, each row's number of nodes without padding, at least 1
    probs: Tensor | None = None  # (B, N, V), distribution that a node's children were sampled from; None: not sampled


@dataclass(frozen=True)
class Scores:
    """The target's output for a draft."""

    logits: Tensor  # (B, N, V), the target's raw logits after each node, before any logits processor
    features: Mapping[int, Tensor] = field(default_factory=lambda: {})  # layer of `Needs.layers` -> states (B, N, H)


@dataclass(frozen=True)
class Verdict:
    """The verifier's decision. `tokens` is the text of this round: the path's tokens below the root, then `next`.

    A row that is done ends where plain decoding would end; its `next` is not used for another round.
    """

    path: Tensor  # (B, A) int64, accepted nodes from the root down, -1 beyond
    next: Tensor  # (B,) int64, the root of the next draft: correction or bonus token
    done: Tensor  # (B,) bool: whether the row ends here, by EOS, a stopping criterion or its maximum length
    tokens: Tensor  # (B, T) int64, -1 beyond a row's last token
    lengths: Tensor  # (B,) int64, number of tokens of each row in this round, at least 1


@dataclass(frozen=True)
class Prior:
    """How often a drafter's guesses are expected to be right, before anything was measured in a run."""

    ranks: tuple[tuple[float, ...], ...]  # [depth][k]: chance that the k-th best token is right if all above it are
    measured: bool = True  # False: assumed values; they shape trees but do not set the budget

    @property
    def chain(self) -> tuple[float, ...]:
        """Return the chance of each node of a chain of best tokens; () where nothing was measured."""
        return tuple(row[0] for row in self.ranks) if self.measured else ()


@dataclass(frozen=True)
class Needs:
    """What a drafter reads besides logits. The target puts it into `Context` and `Scores`."""

    layers: tuple[int, ...] = ()  # target layers, from 0, after which it reads hidden states; -1: the last, normed ones
    embeds: bool = False  # whether it reads the input embeddings of the prompt
    memory: bool = False  # whether it reads the encoder's hidden states and the encoder's input features
    prior: Prior | None = None  # first values for tree shapes and the budget; None: the drafter shapes its own trees
    travels: bool = False  # whether a chat stores the drafter's memory for the next turn (`Context.carried`)
    stops: bool = False  # whether it ends chains early, by `Plan.threshold`


class TreeShape(Protocol):
    """Chooses the likeliest nodes of a tree, for a drafter that guesses each depth independently. Several runs may use
    the same object."""

    width: int  # number of ranks (k-th best tokens) that a tree may use at each depth

    def tree(self, nodes: int, depth: int) -> Sequence[tuple[int, int, int]]:
        """Return (parent, depth from 0, rank) of each node below the root."""
        ...

    def learn(self, depth: int, rank: int | None) -> None:
        """Record which rank was right at `depth` (from 0); None: no rank was right."""
        ...


@dataclass(frozen=True)
class Context:
    """What the prompt's pass computed, for drafters that read it.

    `features`, `embeds`, `visual` and `positions` cover only the last F columns of the prompt: those that the caller's
    cache did not hold yet. Without such a cache F = P.
    """

    tokens: Tensor  # (B, P) int64, the prompts' token ids
    mask: Tensor  # (B, P) bool, False at padding
    positions: Tensor  # (1 or 3, B, F), the target's positions; 3 with M-RoPE
    next_position: Tensor  # (B,), the target's position of the first root; M-RoPE's rope_delta is included
    features: Mapping[int, Tensor] = field(default_factory=lambda: {})  # layer -> its hidden states (B, F, H)
    embeds: Tensor | None = None  # (B, F, H), the first layer's inputs: at visual tokens the projected visual embedding
    visual: Tensor | None = None  # (B, F) bool, True at placeholders of images, video or sound
    pictures: Tensor | None = None  # (B, P) bool, the same for all of `tokens`
    images: Mapping[str, Any] | None = None  # the processor's pixels, sizes and sound, if the target received them
    memory: Tensor | None = None  # (B, S, H), the encoder's hidden states
    sound: Tensor | None = None  # (B, mels, T), the encoder's input features; None: not known
    source: Sequence[Sequence[int]] | None = None  # each row's encoder input ids, if the decoder has the same tokens
    room: Tensor | None = None  # (B,), number of positions left before the target's maximum; None: no maximum
    columns: bool = False  # whether each node of a draft needs a position of its own; else each depth has one
    chains: bool = False  # whether a draft must be a chain
    shape: TreeShape | None = None  # tree shapes by chances learned in earlier runs; None without `Needs.prior`
    past: int = 0  # number of columns that the caller's cache already held
    vision_seconds: float = 0.0  # seconds in the vision tower during the prompt's pass; 0 if the caller ran the tower
    summaries: Tensor | None = None  # (images, 2 * width): mean and deviation of each image's states (vision tower)
    carried: Any = None  # the drafter's memory from the previous turn of a chat; None: there is none


@dataclass(frozen=True)
class Plan:
    """The size and kind of a round's draft: `nodes` below the root in total, at most `depth` deep."""

    nodes: int
    depth: int
    temperature: float | None = None  # sample children at this temperature and return `probs`; None: deterministic
    generator: torch.Generator | None = None  # for sampling children, on the target's device
    # A chain (nodes <= depth) of likeliest tokens ends at the first node whose estimated chance to be accepted together
    # with all nodes before it, averaged over the rows, is below `threshold`.
    threshold: float = 0.0
    # Such a chain is not drafted at all if fewer than `least` of its tokens are expected to be accepted, averaged over
    # the rows: it would not pay for a pass over several columns. Only drafters that take no time read this.
    least: float = 0.0


class Target(Protocol):
    """A model that scores drafts. It does not know how drafts are made.

    The object holds weights only. `prefill` returns a session, which holds the state of one run.
    """

    vocab_size: int
    hidden_size: int

    @property
    def name(self) -> str:
        """Identifies the weights. `DecodingStatistics` uses the name as its key."""
        ...

    @property
    def device(self) -> torch.device: ...

    def prefill(self, inputs: Mapping[str, Any], needs: Needs) -> tuple[Any, Context, Draft, Scores]:
        """Run the prompt. Returns (session, context, draft, scores).

        The draft holds only the last prompt token, whose column is in the cache already: committing it changes nothing.
        """
        ...

    def score(self, session: Any, draft: Draft) -> Scores:
        """Run one pass over the whole tree. Nothing is accepted yet."""
        ...

    def commit(self, session: Any, verdict: Verdict) -> None:
        """Keep the columns of the accepted path in the cache, and drop the draft's others."""
        ...

    def select(self, session: Any, live: Tensor) -> None:
        """Keep only the rows with the indices `live` (K,) int64, in that order. The others have ended."""
        ...


class Drafter(Protocol):
    """Proposes drafts and never accepts them.

    It holds weights only: `start` returns the memory of a run, and `DecodingStatistics` stores what runs measure.
    """

    needs: Needs

    @property
    def name(self) -> str:
        """Identifies the weights and settings. `DecodingStatistics` uses the name as its key."""
        ...

    def check(self, target: Target) -> None:
        """Raise InputError if the drafter cannot work with this target. The message says what is supported."""
        ...

    def start(self, context: Context) -> Any:
        """Read the prompt and return the drafter's memory of this run."""
        ...

    def propose(self, memory: Any, roots: Tensor, plan: Plan) -> Draft:
        """Draft a tree below each root (B,), within the plan. It may have fewer nodes than planned, or none."""
        ...

    def update(self, memory: Any, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Learn from the verdict on a draft. Called after every round: also after plain rounds, after drafts of another
        drafter, and after the prompt's pass."""
        ...

    def select(self, memory: Any, live: Tensor) -> None:
        """Keep only the rows with the indices `live` (K,) int64, in that order. The others have ended."""
        ...
