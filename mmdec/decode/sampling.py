"""The steps of plain decoding: apply a row's logits processors, choose its next token, check whether the row ends.

Each step handles one row at one position, in autoregressive order, on exactly the tensors that transformers' own loop
would pass: ids (1, L), left padding included, and float32 logits (1, V). Nothing here depends on drafts.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from mmdec.decode.tree import int_rows
from mmdec.types import InputError

Processor = Callable[[Tensor, Tensor], Tensor]  # changes a row's logits: ids (1, L), logits (1, V) -> logits (1, V)
Steps = tuple[Tensor, ...]  # a row's processed scores (1, V) at every token so far
Criterion = Callable[[Tensor, Steps | None], Tensor | bool]  # whether a row ends: ids (1, L), scores -> (1,) bool
Listener = Callable[[int, Tensor, Tensor], None]  # receives a row's index, ids (1, L), scores (1, V) at each position
T = TypeVar("T")


@dataclass(frozen=True)
class Stop:
    """When a row ends: a token of `eos`, `max_length` columns (prompt and padding included), or any of `criteria`."""

    max_length: int
    eos: frozenset[int] = frozenset()
    criteria: Sequence[Criterion] = field(default=())


@dataclass
class WholeBatch:
    """Applies a processor that is bound to the batch (it holds a value per row, or needs the row's index) to one row.

    It gives the processor `batch` copies of the row and returns the output at the row's own index.
    """

    processor: Processor
    batch: int  # number of rows in the batch
    row: int = 0  # index of this row

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        out = self.processor(ids.repeat(self.batch, 1), scores.repeat(self.batch, 1))
        return out[self.row : self.row + 1]


@dataclass
class WholeBatchCriterion:
    """Applies a stopping criterion that is bound to the batch to one row: it gets `batch` copies of the row.

    If it returns one answer per row, the answer at the row's own index counts; else its single answer counts.
    """

    criterion: Criterion
    batch: int  # number of rows in the batch
    row: int = 0  # index of this row

    def __call__(self, ids: Tensor, scores: Steps | None) -> Tensor | bool:
        steps = None if scores is None else tuple(step.expand(self.batch, -1) for step in scores)
        answer = self.criterion(ids.repeat(self.batch, 1), steps)
        return answer[self.row] if isinstance(answer, Tensor) and answer.ndim else answer


@final
@dataclass(frozen=True, eq=False)
class Suppression:
    """A processor that forbids `tokens` (K,) int64, at every position or only at one.

    only_at: forbid them only where the text, prompt included, has this many columns; None: everywhere.
    The processor reads nothing else of the text, so it can be applied to all nodes of a draft at once.
    """

    tokens: Tensor
    only_at: int | None = None

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if self.only_at is not None and ids.shape[1] != self.only_at:
            return scores
        return scores.index_fill(-1, self.tokens, -torch.inf)


@dataclass
class ListenerProcessor:
    """A processor that passes its inputs to a listener and returns the scores unchanged.

    Copies of it share the listener. At each position the listener receives the ids and scores that plain decoding would
    have there; `ScoreRecorder` is such a listener.
    """

    listener: Listener
    row: int = 0  # index of this row in the batch

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.listener(self.row, ids, scores)
        return scores

    def __deepcopy__(self, memo: dict[int, Any]) -> ListenerProcessor:
        return ListenerProcessor(self.listener, self.row)


class Sequences:
    """The rows of a run: their ids as the plain loop would hold them, their processors and stopping criteria."""

    def __init__(
        self,
        prompt: Tensor,
        stop: Stop,
        processors: Sequence[Processor] = (),
        steps: Callable[[int, int], Steps] | None = None,
    ) -> None:
        """prompt: (B, P) int64. stop: the conditions that end a row.
        processors: copied for each row, since they may hold state; networks in them (classifier-free guidance) are
            shared.
        steps: returns a row's first n processed scores, for criteria that read them; None if not needed.
        """
        batch, start = prompt.shape
        if start == 0:
            raise InputError("`input_ids` must hold at least one token a row, but is empty. Begin with a BOS token.")
        if start >= stop.max_length:
            raise InputError(
                f"`max_length` must be above the prompt's {start} tokens, but is {stop.max_length}. "
                "Raise it, or set `max_new_tokens`."
            )
        self.prompt, self.start, self.stop = prompt, start, stop
        self.tokens: list[list[int]] = [[] for _ in range(batch)]  # generated tokens of each row
        self.live = list(range(batch))  # indices of the rows that have not ended, ascending
        self.holds: list[int] | None = None  # for each row, how many new tokens the target has positions for; None: any
        given = list(processors)
        self.processors = [given] + [_copied(given) for _ in range(batch - 1)] if given else None
        self._criteria = [list(stop.criteria)] + [_own(stop.criteria) for _ in range(batch - 1)]
        self._steps = steps
        for row in range(batch):
            for each in (*(self.processors[row] if self.processors else ()), *self._criteria[row]):
                if isinstance(each, (WholeBatch, WholeBatchCriterion, ListenerProcessor)):
                    each.row = row
        suppressions = [processor for processor in given if isinstance(processor, Suppression)]
        # None: not known in advance, because some processor depends on the position and must run at each one.
        self._suppressions = suppressions if len(suppressions) == len(given) else None
        # A tensor of the text is needed only if something reads it.
        self._ids = torch.cat([prompt, prompt.new_zeros(batch, 64)], 1) if given or stop.criteria else prompt
        self._written = [0] * batch  # for each row, how many of its tokens were copied into its ids

    def row(self, row: int) -> Tensor:
        """Return the ids (1, L) of the row with index `row`: prompt with padding, and generated tokens."""
        tokens, begin = self.tokens[row], self._written[row]
        end = self.start + len(tokens)
        while end > self._ids.shape[1]:
            self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)], 1)
        if begin < len(tokens):
            self._ids[row, self.start + begin : end] = torch.tensor(tokens[begin:], device=self._ids.device)
            self._written[row] = len(tokens)
        return self._ids[row : row + 1, :end]

    def alike(self, row: int) -> bool:
        """Return whether the row's processors, from this position on, only forbid the tokens that `suppressed` does."""
        if self._suppressions is None:
            return False
        columns = self.start + len(self.tokens[row])
        return all(each.only_at is None or each.only_at < columns for each in self._suppressions)

    def suppressed(self, logits: Tensor) -> Tensor:
        """Return raw logits (..., V) in float32, without the tokens that are forbidden at every position."""
        logits = logits.to(torch.float32)  # float32 as in `warped`, so that ties are the same in both
        for each in self._suppressions or ():
            if each.only_at is None:
                logits = logits.index_fill(-1, each.tokens, -torch.inf)
        return logits

    def room(self, row: int) -> int:
        """Return how many more tokens the row may get before it ends by its maximum length."""
        return self.stop.max_length - self.start - len(self.tokens[row])

    def reach(self, row: int) -> int:
        """Return how many tokens the next round may add to the row, by its `room` and the target's positions."""
        room = self.room(row)
        return room if self.holds is None else min(room, self.holds[row] - len(self.tokens[row]) + 1)

    def warped(self, row: int, logits: Tensor) -> Tensor:
        """Apply the row's processors: raw logits (V,) of the next token -> (1, V) float32."""
        scores = logits[None].to(torch.float32, copy=True)
        if self.processors is not None:
            ids = self.row(row)
            for processor in self.processors[row]:
                scores = processor(ids, scores)
        return scores

    def push(self, row: int, token: int) -> None:
        """Add a token to the row, without evaluating the stopping criteria."""
        self.tokens[row].append(token)

    def pop(self, row: int, count: int) -> None:
        """Remove the row's last `count` tokens."""
        del self.tokens[row][len(self.tokens[row]) - count :]
        self._written[row] = min(self._written[row], len(self.tokens[row]))

    def state(self, row: int) -> list[Processor] | None:
        """Return a copy of the row's processors in their current state."""
        return None if self.processors is None else _copied(self.processors[row])

    def restore(self, row: int, state: list[Processor]) -> None:
        """Reset the row's processors to `state`, which the method `state` returned."""
        if self.processors is not None:
            self.processors[row] = state

    def append(self, row: int, token: int) -> bool:
        """Add a token to the row. Returns whether the row ends with it."""
        self.push(row, token)
        done = token in self.stop.eos or self.room(row) <= 0
        if self._criteria[row]:
            ids, steps = self.row(row), None if self._steps is None else self._steps(row, len(self.tokens[row]))
            for criterion in self._criteria[row]:  # call every criterion, as the plain loop does: it may hold state
                done = bool(criterion(ids, steps)) or done
        return done

    def padded(self, pad: int) -> Tensor:
        """Return the ids (B, longest) of all rows with their prompts, padded on the right with `pad`."""
        longest = max(map(len, self.tokens))
        rows = [row + [pad] * (longest - len(row)) for row in self.tokens]
        return torch.cat([self.prompt, torch.tensor(rows, dtype=torch.long, device=self.prompt.device)], 1)


def _own(criteria: Sequence[Criterion]) -> list[Criterion]:
    """Return one more row's criteria: those bound to the batch are copied, the others, without state, are shared."""
    return [
        _copied([each], "stopping_criteria")[0] if isinstance(each, WholeBatchCriterion) else each for each in criteria
    ]


def _copied(given: list[T], argument: str = "logits_processor") -> list[T]:
    networks: dict[int, nn.Module] = {}
    bare: list[Any] = [each.processor if isinstance(each, WholeBatch) else each for each in given]
    bare = [each.criterion if isinstance(each, WholeBatchCriterion) else each for each in bare]
    for each in bare:
        values: dict[str, Any] = getattr(each, "__dict__", {})
        for value in values.values():
            if isinstance(value, nn.Module):
                networks[id(value)] = value
    try:
        return copy.deepcopy(given, networks)
    except Exception as error:  # a caller's class may raise anything
        names = ", ".join(type(each).__name__ for each in bare)
        raise InputError(
            f"`{argument}` must be copyable for a batch and for block verification, but is {names}: "
            f"{type(error).__name__}: {error}. Give it `__deepcopy__`, or decode one row at a time by another rule."
        ) from error


# chooses plain decoding's next token from processed logits (1, V), the text before it and the row's index in the text
Choice = Callable[[Tensor, Sequences, int], int]


def most_probable(scores: Tensor, text: Sequences, row: int) -> int:
    """Return greedy decoding's next token: the index of the largest of the scores (1, V)."""
    return int(scores.argmax(-1))


def most_probable_each(scores: Tensor) -> list[list[int]]:
    """Return the most probable token at every node, as B lists of N ids. scores: (B, N, V) float32."""
    if scores.device.type == "cpu":
        # NumPy takes a tenth of torch's time; both return the first maximum
        return scores.detach().numpy().argmax(-1).tolist()
    return int_rows(scores.argmax(-1))


def stock_sample(scores: Tensor, text: Sequences, row: int) -> int:
    """Sample as `generate(do_sample=True)` does at batch 1: one `torch.multinomial` with torch's own generator."""
    return int(torch.multinomial(scores.softmax(-1), 1))


@dataclass(frozen=True)
class KeyedSample:
    """Samples with Gumbel noise that depends on (seed, row index, position among the generated tokens, token).

    The token at a position depends on the seed, the row's index and the text before it: not on drafts, rounds or other
    rows.
    """

    seed: int

    def __call__(self, scores: Tensor, text: Sequences, row: int) -> int:
        generator = keyed(scores.device, self.seed, "token", row, len(text.tokens[row]))
        noise = torch.empty_like(scores).exponential_(generator=generator)
        return int((scores - noise.log()).argmax(-1))  # -log of an exponential is Gumbel noise


def keyed(device: torch.device, *key: int | str) -> torch.Generator:
    """Return a generator seeded by the key alone; different keys give independent streams."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


class Dice:
    """The random choices of rejection sampling. Tests replace it to enumerate every outcome."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def happens(self, chance: float) -> bool:
        """Return True with probability `chance`, which is clipped to [0, 1]."""
        device = self.generator.device
        return float(torch.rand((), generator=self.generator, device=device, dtype=torch.float64)) < chance

    def draw(self, weights: Tensor) -> int:
        """Draw a token from weights (V,), which need not sum to 1."""
        return int(torch.multinomial(weights / weights.sum(), 1, generator=self.generator))


def keyed_dice(device: torch.device, *key: int | str) -> Dice:
    """Make a `Dice` whose choices depend on the key alone."""
    return Dice(keyed(device, *key))


@final
class ScoreRecorder:
    """Records the scores (V,) at every position of every row. If a position is visited twice, the last scores count."""

    def __init__(self, rows: int, start: int) -> None:
        """rows: number of rows in the batch. start: number of columns of the prompt."""
        self._start = start
        self._kept: list[dict[int, Tensor]] = [{} for _ in range(rows)]

    def __call__(self, row: int, ids: Tensor, scores: Tensor) -> None:
        # a copy, because later processors may write to their input
        self._kept[row][ids.shape[1] - self._start] = scores[0].clone()

    def row_steps(self, row: int, count: int) -> tuple[Tensor, ...]:
        """Return a row's first `count` scores, (1, V) each."""
        return tuple(self._kept[row][step][None] for step in range(count))

    def steps(self, lengths: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the scores (B, V) for each new token of the longest row; zeros after a row's end."""
        blank = torch.zeros_like(self._kept[0][0])
        return tuple(
            torch.stack([row[step] if step < size else blank for row, size in zip(self._kept, lengths, strict=True)])
            for step in range(max(lengths))
        )


@final
@dataclass
class BatchCollector:
    """Collects the scores of all rows at the first position, then calls a processor once with the whole batch."""

    processor: Processor
    rows: int  # number of rows in the batch
    start: int  # number of columns of the prompt, by which the first position is recognised
    _kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=lambda: {})

    def __call__(self, row: int, ids: Tensor, scores: Tensor) -> None:
        if ids.shape[1] != self.start or row in self._kept:
            return
        self._kept[row] = ids, scores.clone()
        if len(self._kept) == self.rows:
            parts = [self._kept[row] for row in range(self.rows)]
            self.processor(torch.cat([ids for ids, _ in parts]), torch.cat([scores for _, scores in parts]))
