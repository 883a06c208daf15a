"""Plain autoregressive decoding: apply logits processors, choose the next token, check whether a row ends.

Each step handles one row of the batch at one position. Its tensors are exactly those that transformers' `generate`
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

from mmdec.core.tree import int_rows
from mmdec.errors import InputError

Processor = Callable[[Tensor, Tensor], Tensor]  # changes a row's logits: ids (1, L), logits (1, V) -> logits (1, V)
# of one batch row: for each new token, the processed logits (1, V) that it was chosen from
StepLogits = tuple[Tensor, ...]
# ids (1, L), `StepLogits` -> (1,) bool: whether a row ends
Criterion = Callable[[Tensor, StepLogits | None], Tensor | bool]
Listener = Callable[[int, Tensor, Tensor], None]  # called at each position: row index, ids (1, L), logits (1, V)
T = TypeVar("T")


@dataclass(frozen=True)
class Stop:
    """The conditions that end a batch row: an end token, the maximum length, or a stopping criterion."""

    max_length: int  # in tokens, prompt and padding included
    eos: frozenset[int] = frozenset()  # ids of the end tokens
    criteria: Sequence[Criterion] = field(default=())


@dataclass
class WholeBatch:
    """Applies a logits processor to a single row. The processor needs a whole batch, because it holds a value per row.

    The processor gets `batch` copies of the row. Its output at index `row` is returned.
    """

    processor: Processor
    batch: int  # number of rows in the batch
    row: int = 0  # index of this row

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        out = self.processor(ids.repeat(self.batch, 1), scores.repeat(self.batch, 1))
        return out[self.row : self.row + 1]


@dataclass
class WholeBatchCriterion:
    """Applies a stopping criterion to a single row. The criterion needs a whole batch.

    The criterion gets `batch` copies of the row. If it returns one answer per row, the answer at index `row` is used,
    else its single answer.
    """

    criterion: Criterion
    batch: int  # number of rows in the batch
    row: int = 0  # index of this row

    def __call__(self, ids: Tensor, scores: StepLogits | None) -> Tensor | bool:
        steps = None if scores is None else tuple(step.expand(self.batch, -1) for step in scores)
        answer = self.criterion(ids.repeat(self.batch, 1), steps)
        return answer[self.row] if isinstance(answer, Tensor) and answer.ndim else answer


@final
@dataclass(frozen=True, eq=False)
class Suppression:
    """A logits processor that forbids `tokens`: it sets their logits to -inf.

    It reads only the text's length, so it can be applied to all nodes of a draft at once.
    """

    tokens: Tensor  # (K,) int64
    # forbid them only if the text, prompt and padding included, has this many tokens, or at every position if None
    only_at: int | None = None

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if self.only_at is not None and ids.shape[1] != self.only_at:
            return scores
        return scores.index_fill(-1, self.tokens, -torch.inf)


@dataclass
class ListenerProcessor:
    """A logits processor that passes its inputs to a callback, `listener`, and returns the logits unchanged.

    Copies of the processor share the listener. At each position the listener receives the ids and logits that plain
    decoding would have there.
    """

    listener: Listener
    row: int = 0  # index of this row in the batch

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.listener(self.row, ids, scores)
        return scores

    def __deepcopy__(self, memo: dict[int, Any]) -> ListenerProcessor:
        return ListenerProcessor(self.listener, self.row)


class Sequences:
    """The texts of a batch while it is decoded: prompts and new tokens, logits processors, stopping criteria.

    Args:
        prompt: (B, P) int64.
        stop: The conditions that end a batch row.
        processors: Logits processors; copied for each row, since they may hold state. A network inside a processor, as
            in classifier-free guidance, is not copied.
        steps: Called with (row index, n); returns the processed logits (1, V) that each of the row's first n new tokens
            was chosen from. Stopping criteria read them; None if not needed.
    """

    def __init__(
        self,
        prompt: Tensor,
        stop: Stop,
        processors: Sequence[Processor] = (),
        steps: Callable[[int, int], StepLogits] | None = None,
    ) -> None:
        batch, start = prompt.shape
        if start == 0:
            raise InputError("`input_ids` must hold at least one token a row, but is empty. Begin with a BOS token.")
        if start >= stop.max_length:
            raise InputError(
                f"`max_length` must be above the prompt's {start} tokens, but is {stop.max_length}. "
                "Raise it, or set `max_new_tokens`."
            )
        self.prompt, self.start, self.stop = prompt, start, stop
        self.tokens: list[list[int]] = [[] for _ in range(batch)]  # generated tokens of each batch row
        self.live = list(range(batch))  # indices of the rows that have not ended, ascending
        # for each row, how many new tokens have a position, or None without a limit
        self.position_limits: list[int] | None = None
        row_processors = list(processors)
        self.processors = (
            [row_processors] + [copy_processors(row_processors) for _ in range(batch - 1)] if row_processors else None
        )
        self._criteria = [list(stop.criteria)] + [_criteria_for_row(stop.criteria) for _ in range(batch - 1)]
        self._steps = steps
        for row in range(batch):
            for function in (*(self.processors[row] if self.processors else ()), *self._criteria[row]):
                if isinstance(function, (WholeBatch, WholeBatchCriterion, ListenerProcessor)):
                    function.row = row
        suppressions = [processor for processor in row_processors if isinstance(processor, Suppression)]
        # None if some processor is not a `Suppression`: such a processor depends on the text and must be called at each
        # position
        self._suppressions = suppressions if len(suppressions) == len(row_processors) else None
        # Prompts and new tokens in one tensor, for processors and criteria. Without processors and criteria, it holds
        # only the prompts.
        self._ids = torch.cat([prompt, prompt.new_zeros(batch, 64)], 1) if row_processors or stop.criteria else prompt
        self._written = [0] * batch  # for each batch row, how many of its new tokens `_ids` holds

    def ids(self, row: int) -> Tensor:
        """Return the ids (1, L) of the row with index `row`: prompt with padding, and generated tokens."""
        tokens, begin = self.tokens[row], self._written[row]
        end = self.start + len(tokens)
        while end > self._ids.shape[1]:
            self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)], 1)
        if begin < len(tokens):
            self._ids[row, self.start + begin : end] = torch.tensor(tokens[begin:], device=self._ids.device)
            self._written[row] = len(tokens)
        return self._ids[row : row + 1, :end]

    def only_suppresses(self, row: int) -> bool:
        """Return whether `suppress` can replace the logits processors of a row, at this position and all later ones."""
        if self._suppressions is None:
            return False
        columns = self.start + len(self.tokens[row])
        return all(suppression.only_at is None or suppression.only_at < columns for suppression in self._suppressions)

    def suppress(self, logits: Tensor) -> Tensor:
        """Return raw logits (..., V) in float32, with -inf at the tokens that are forbidden at every position."""
        # `processed_logits` uses float32, too, so both break ties between logits equally
        logits = logits.to(torch.float32)
        for suppression in self._suppressions or ():
            if suppression.only_at is None:
                logits = logits.index_fill(-1, suppression.tokens, -torch.inf)
        return logits

    def remaining_tokens(self, row: int) -> int:
        """Return how many more tokens the row may get before it reaches its maximum length."""
        return self.stop.max_length - self.start - len(self.tokens[row])

    def round_limit(self, row: int) -> int:
        """Return how many tokens the next round may add to the row.

        The row's maximum length and the target's number of positions limit it.
        """
        remaining = self.remaining_tokens(row)
        if self.position_limits is None:
            return remaining
        return min(remaining, self.position_limits[row] - len(self.tokens[row]) + 1)

    def is_cut(self, row: int) -> bool:
        """Return whether the row has reached its maximum length without an end token."""
        return self.remaining_tokens(row) <= 0 and self.tokens[row][-1] not in self.stop.eos

    def processed_logits(self, row: int, logits: Tensor) -> Tensor:
        """Apply the row's logits processors to the raw logits (V,) of its next token.

        Returns:
            (1, V) float32.
        """
        scores = logits[None].to(torch.float32, copy=True)
        if self.processors is not None:
            ids = self.ids(row)
            for processor in self.processors[row]:
                scores = processor(ids, scores)
        return scores

    def copied_processors(self, row: int) -> list[Processor]:
        """Copy the row's logits processors for `logits_ahead`, except those that only record."""
        processors = [] if self.processors is None else self.processors[row]
        return copy_processors([processor for processor in processors if not isinstance(processor, ListenerProcessor)])

    def logits_ahead(self, row: int, drafted: Sequence[int], logits: Tensor, processors: list[Processor]) -> Tensor:
        """Apply copies of the row's processors to the raw logits (V,) of the token after drafted ones.

        Args:
            drafted: Tokens after the row's text, which may be rejected.
            processors: Copies that have seen the text up to there.

        Returns:
            (1, V) float32.
        """
        scores = logits[None].to(torch.float32, copy=True)
        if processors:
            ids = self.ids(row)
            ids = torch.cat([ids, ids.new_tensor([list(drafted)])], 1)
            for processor in processors:
                scores = processor(ids, scores)
        return scores

    def append(self, row: int, token: int) -> bool:
        """Add a token to the text of a row, and call the stopping criteria.

        Returns:
            Whether the text ends after this token.
        """
        self.tokens[row].append(token)
        done = token in self.stop.eos or self.remaining_tokens(row) <= 0
        if self._criteria[row]:
            ids, steps = self.ids(row), None if self._steps is None else self._steps(row, len(self.tokens[row]))
            for criterion in self._criteria[row]:  # call all, even after the first True: a criterion may hold state
                done = bool(criterion(ids, steps)) or done
        return done

    def padded_ids(self, pad: int) -> Tensor:
        """Return the ids (B, longest) of all rows, prompts included, padded on the right with the token id `pad`."""
        longest = max(map(len, self.tokens))
        rows = [row + [pad] * (longest - len(row)) for row in self.tokens]
        return torch.cat([self.prompt, torch.tensor(rows, dtype=torch.long, device=self.prompt.device)], 1)


def _criteria_for_row(criteria: Sequence[Criterion]) -> list[Criterion]:
    """Return the stopping criteria for one more batch row.

    A `WholeBatchCriterion` holds the index of its row, so it is copied. All other criteria are shared by the rows.
    """
    return [
        copy_processors([criterion], "stopping_criteria")[0]
        if isinstance(criterion, WholeBatchCriterion)
        else criterion
        for criterion in criteria
    ]


def copy_processors(processors: list[T], argument: str = "logits_processor") -> list[T]:
    """Copy logits processors or stopping criteria, which may hold state. Networks inside them are shared.

    Raises:
        InputError: If one of them, which `argument` names, cannot be copied.
    """
    networks: dict[int, nn.Module] = {}
    bare: list[Any] = [item.processor if isinstance(item, WholeBatch) else item for item in processors]
    bare = [item.criterion if isinstance(item, WholeBatchCriterion) else item for item in bare]
    for item in bare:
        values: dict[str, Any] = getattr(item, "__dict__", {})
        for value in values.values():
            if isinstance(value, nn.Module):
                networks[id(value)] = value
    try:
        return copy.deepcopy(processors, networks)
    except Exception as error:  # all exceptions, because the processor is the caller's code
        names = ", ".join(type(item).__name__ for item in bare)
        raise InputError(
            f"`{argument}` must be copyable for a batch and for traversal verification, but is {names}: "
            f"{type(error).__name__}: {error}. Give it `__deepcopy__`, or decode one row at a time by another rule."
        ) from error


# chooses the next token; arguments: processed logits (1, V), all rows' texts, the row's index among these texts
Choice = Callable[[Tensor, Sequences, int], int]


def most_probable(scores: Tensor, sequences: Sequences, row: int) -> int:
    """Return greedy decoding's next token, from processed logits (1, V). It does not read the text."""
    return int(scores.argmax(-1))


def most_probable_each(scores: Tensor) -> list[list[int]]:
    """Return the most probable token after every node of a draft.

    Args:
        scores: Logits (B, N, V) float32.

    Returns:
        B lists of N ids.
    """
    if scores.device.type == "cpu":
        # NumPy is ten times faster here; like torch it returns the first of equal maxima
        return scores.detach().numpy().argmax(-1).tolist()
    return int_rows(scores.argmax(-1))


def transformers_sample(scores: Tensor, sequences: Sequences, row: int) -> int:
    """Sample a token from processed logits (1, V), as transformers' `generate(do_sample=True)` does for one row.

    It calls `torch.multinomial` once, with torch's global generator, and does not read the text.
    """
    return int(torch.multinomial(scores.softmax(-1), 1))


@dataclass(frozen=True)
class KeyedSample:
    """Samples a token by the Gumbel-max method; the noise is seeded by (seed, row index, number of earlier new tokens).

    So the token at a position depends only on the seed, the row's index and the text before it: drafts and other rows
    do not change it.
    """

    seed: int

    def __call__(self, scores: Tensor, sequences: Sequences, row: int) -> int:
        generator = keyed_generator(scores.device, self.seed, "token", row, len(sequences.tokens[row]))
        noise = torch.empty_like(scores).exponential_(generator=generator)
        return int((scores - noise.log()).argmax(-1))  # -log of an exponential variable is Gumbel noise


@final
@dataclass(frozen=True, eq=False)
class DraftWarp:
    """Turns a drafter's logits into the distribution that the target would draw from.

    It applies those of the target's logits processors that depend on nothing but their arguments, to all nodes at once.
    """

    processors: Sequence[Processor] = ()  # those that read the text or know tokens, such as penalties
    top_k: int | None = None  # keep the k most probable tokens, or all if None
    warpers: Sequence[Processor] = ()  # those that read a node's logits only, whatever their tokens

    def __call__(self, sequences: Sequences, logits: Tensor, paths: Sequence[Sequence[Sequence[int]]] = ()) -> Tensor:
        """Return distributions (B, n, V) float32; `mmdec.types.Warp` describes the other arguments.

        Args:
            sequences: The texts of the batch, whose `live` rows are those of the logits.
        """
        scores = logits.float().flatten(0, 1)
        if self.processors:
            ids = _node_ids(sequences, logits.shape[1], paths)
            for processor in self.processors:
                scores = processor(ids, scores)
        best_tokens = None
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            # the other processors then work on k tokens: they sort, which takes long for a whole vocabulary
            scores, best_tokens = scores.topk(self.top_k)
        no_ids = scores.new_zeros(len(scores), 0, dtype=torch.long)
        for processor in self.warpers:
            scores = processor(no_ids, scores)
        probs = scores.softmax(-1)
        if best_tokens is not None:
            probs = probs.new_zeros(len(probs), logits.shape[-1]).scatter_(-1, best_tokens, probs)
        return probs.view(logits.shape)


def _node_ids(sequences: Sequences, nodes: int, paths: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """Return the ids (B * n, L) of each node's text: prompt, accepted tokens and the drafted tokens down to the node.

    Shorter texts repeat their last accepted token.
    """
    rows = [sequences.ids(row) for row in sequences.live]
    longest = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.cat([row, row[:, -1:].expand(1, longest - row.shape[1])], 1) for row in rows])
    ids = ids.repeat_interleave(nodes, 0)
    if paths and paths[0][0]:
        blank = [0] * len(paths[0][0])
        drafted = [path for row in paths for path in [*row, *[blank] * (nodes - len(row))]]
        ids = torch.cat([ids, torch.tensor(drafted, device=ids.device)], 1)
    return ids


def keyed_generator(device: torch.device, *key: int | str) -> torch.Generator:
    """Return a random generator on `device`, seeded by a hash of `key`. Different keys give independent numbers."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


class Rng:
    """Makes the random choices of rejection sampling with torch's `generator`. Tests replace it to try all outcomes."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def happens(self, probability: float) -> bool:
        """Return True with probability `probability`, which is clipped to [0, 1]."""
        device = self.generator.device
        return float(torch.rand((), generator=self.generator, device=device, dtype=torch.float64)) < probability

    def draw(self, weights: Tensor) -> int:
        """Draw a token from weights (V,), which need not sum to 1."""
        return int(torch.multinomial(weights / weights.sum(), 1, generator=self.generator))


def keyed_rng(device: torch.device, *key: int | str) -> Rng:
    """Make an `Rng` on `device`. Equal keys give equal choices."""
    return Rng(keyed_generator(device, *key))
