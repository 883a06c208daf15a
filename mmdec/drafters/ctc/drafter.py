"""Drafts for an encoder-decoder speech model with a CTC head on its encoder's states (Graves et al. 2006).

The head transcribes the whole audio window at once, frame by frame. The transcript may differ from the model's text.
So in each round the accepted text is aligned to the frames (Viterbi alignment), and the draft is a tree of the
likeliest texts after the frame where the accepted text ends: by the head's probabilities, and by an n-gram that reads
the accepted text. The head's vocabulary, its "pieces", is smaller than the model's, so pieces are merged into tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import exp
from typing import final

import numpy as np
import torch
from torch import Tensor

from mmdec.checks.fingerprint import fingerprint
from mmdec.core.tree import PrefixTree, trees_from_lists
from mmdec.drafters.ctc.confusion import Bin, ConfusionNetwork
from mmdec.drafters.ctc.network import CtcHead
from mmdec.drafters.ctc.tokens import BLANK, FIRST_PIECE, SEGMENT_END, TokenPieces
from mmdec.drafters.fit import check_drafter_device
from mmdec.drafters.registry import built_in_drafter
from mmdec.errors import InputError
from mmdec.phonetics.piece_ngram import PieceNGram
from mmdec.types import Context, Draft, Needs, Plan, Scores, Target, Verdict

STATES_PER_SECOND = 50  # encoder states per second of audio
TIMESTAMPS_PER_SECOND = 50  # timestamp tokens per second of audio, one for every 20 ms
MEL_FRAMES_PER_SECOND = 100  # mel frames, the encoder's input, per second of audio
# a frame costs at most this many nats, so accepted text missing from the transcript can still be aligned
MAX_FRAME_COST = 6.0
SCORE_TOLERANCE = 1e-3  # alignments whose log-probabilities differ by less than this (in nats) count as equally good
# a token counts as missing in the transcript if it lowers the alignment's score by more than 2 nats
MISSING_TOKEN_SCORE = -2.0
TIMESTAMP_PROBABILITY = 0.1  # assumed probability that a timestamp computed from the frames equals the model's
# assumed probabilities that the last timestamp is the nearest whole second, or the next nearest
WHOLE_SECOND_PROBABILITIES = (0.4, 0.1)
END_PROBABILITY = 0.7  # assumed probability that the model's text ends where the transcript ends
SAME_TIME_PROBABILITY = 0.9  # assumed probability that a segment begins with the timestamp at which the last one ended
# assumed probability that a word goes on as in the transcript, though its beginning is missing there
REST_PROBABILITY = 0.3
NGRAM_WEIGHT = 0.4  # factor on the n-gram's log-probability
STEPS_PER_NODE = 10  # the search ends after so many steps for each node of the tree
MAX_WORD = 24  # bytes of a word after which it is drafted even if it goes on, as in languages without spaces
WORD_BEGINNINGS = b" ,.?!;:"  # bytes at which the BPE never joins a piece to the word before
# the head reads this many encoder states of silence after the sound, as in its training
SILENCE_STATES = 3 * STATES_PER_SECOND


@final
class Alignment:
    """The Viterbi alignment of the accepted pieces (subwords of the CTC head) to the frames of an audio window.

    It grows piece by piece.

    Scores are log-probabilities (nats) relative to the head's best path, whose score is 0. Entry f of an array is the
    score over frames 0 .. f - 1. Adding a piece takes time linear in the number of frames.

    Args:
        logprobs: (F, V), for each of F frames the CTC head's log-probability of each of V pieces (subwords).
    """

    def __init__(self, logprobs: np.ndarray) -> None:
        self._costs = np.maximum(logprobs - logprobs.max(1, keepdims=True), -MAX_FRAME_COST)
        self._silent = self._sums(BLANK)
        # (F + 1,), scores of the best alignments that end in a blank or are empty; of those that end in the last piece
        self._closed = self._silent.copy()
        self._open = np.full_like(self._closed, -np.inf)
        self._last = -1
        self._network = ConfusionNetwork(logprobs)
        self.frames = len(logprobs)

    def _sums(self, piece: int) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum(self._costs[:, piece], dtype=np.float64)])

    def add(self, piece: int) -> None:
        """Extend the alignment by the next accepted piece."""
        before = self._closed if piece == self._last else np.maximum(self._closed, self._open)
        self._open = self._extend(before, self._sums(piece))
        self._closed = self._extend(self._open, self._silent)
        self._last = piece

    @staticmethod
    def _extend(before: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """Extend alignments by one piece or blank that lasts at least one frame and begins at the best frame.

        Args:
            before: (F + 1,) scores of the alignments so far.
            sums: (F + 1,) cumulative sums of the piece's frame scores.

        Returns:
            (F + 1,) scores of the extended alignments.
        """
        extended = np.full_like(before, -np.inf)
        extended[1:] = sums[1:] + np.maximum.accumulate(before[:-1] - sums[:-1])
        return extended

    def place(self) -> int:
        """Return the frame at which the accepted text most likely ends; of equally good frames, the last one."""
        reached = np.maximum(self._closed, self._open)
        return int(np.flatnonzero(reached >= reached.max() - SCORE_TOLERANCE)[-1])

    def score(self) -> float:
        """Return the score of the accepted text's best alignment: 0 if it is the head's best path, else below 0."""
        return float(np.maximum(self._closed, self._open).max())

    @property
    def bins(self) -> Sequence[Bin]:
        """The window's confusion network."""
        return self._network.bins

    def next_bin(self) -> int:
        """Return the index of the first bin after the accepted text; the number of bins if it leaves none."""
        return self._network.after(self.place(), self._last)


@dataclass
class CtcRow:
    """The drafter's state of one batch row: the accepted text and its alignment to the frames."""

    head: CtcDrafter  # the head that drafts for the row
    timed: bool  # whether the model writes timestamps
    first_time: int  # id of the timestamp token of 0 seconds
    pending: list[int] = field(default_factory=list[int])  # accepted tokens that are not aligned yet
    alignment: Alignment | None = None  # None if the head does not know the language: nothing is drafted
    history: tuple[int, ...] = ()  # the newest aligned pieces, which the n-gram reads
    # pieces before -> the n-gram's scores of the next piece; searches ask for the same ones again and again
    ngram_scores: dict[tuple[int, ...], Callable[[int], float]] = field(default_factory=lambda: {})
    last: int = -1  # id of the last aligned token; -1: there is none
    before: int = -1  # id of the last aligned token but one; -1: there is none
    last_is_missing: bool = False  # whether the transcript lacks the last aligned token


def state_lengths(states: Tensor, input_features: Tensor | None) -> list[int]:
    """Return for each batch row how many encoder states the head reads.

    They are the states of the sound and of 3 s of silence after the sound.

    Args:
        states: (B, S, D).
        input_features: (B, mels, T), what the encoder has read; frames at the end that equal the last frame are
            padding. None: all states are read.
    """
    size = states.shape[1]
    if input_features is None:
        return [size] * len(states)
    differs = (input_features != input_features[..., -1:]).any(1)  # shape (B, T)
    ends = (differs * torch.arange(1, differs.shape[1] + 1, device=input_features.device)).amax(1)
    return [min(end * STATES_PER_SECOND // MEL_FRAMES_PER_SECOND + SILENCE_STATES, size) for end in ends.tolist()]


@dataclass(frozen=True)
class Branch:
    """A text that the search for drafts follows, up to a bin of the confusion network."""

    node: int  # the draft's node that the text has reached
    place: int  # index of the next bin
    history: tuple[int, ...]  # the newest pieces
    word: bytes = b""  # a word that may still grow, so it is not drafted yet
    tokens: tuple[int, ...] = ()  # tokens to draft before the text goes on
    is_complete: bool = False  # the next piece begins a word
    has_words: bool = False  # the segment has words: only then may it end with a timestamp
    drops: bool = False  # pieces are dropped up to the next word
    is_over: bool = False  # the text has ended


@dataclass
class CtcState:
    """The drafter's state of one `generate` call: the text and its alignment for each row of the batch."""

    rows: list[CtcRow]


@built_in_drafter("ctc", loader="mmdec.drafters.ctc.checkpoint:load_ctc")
@final
class CtcDrafter:
    """A drafter that proposes the likeliest transcripts of a CTC head.

    It holds the head and its settings; the state of a `generate` call is in `CtcState`.

    Args:
        head: Reads the encoder's states.
        pieces: The head's vocabulary of subwords, and how these become tokens.
        first_time: Id of the timestamp token of 0 seconds.
        end: Id of the end-of-text token.
        languages: Ids of the language tokens that the head knows. Rows whose prompt has none of them get no drafts.
            Empty: the drafter drafts in every language.
        refused: Ids of prompt tokens with which a row gets no drafts, such as a task whose text is in another language.
        ngram: A language model of the pieces, or None to score only what is heard.
    """

    needs = Needs(encoder=True, may_stop_early=True, may_find_nothing=True)

    def __init__(
        self,
        head: CtcHead,
        pieces: TokenPieces,
        first_time: int,
        end: int,
        languages: Sequence[int] = (),
        refused: Sequence[int] = (),
        ngram: PieceNGram | None = None,
    ) -> None:
        if head.config.pieces != len(pieces):
            raise InputError(
                f"`pieces` must be the {head.config.pieces} that the head writes, but are {len(pieces)}. Use its own."
            )
        self.head, self.pieces, self.first_time, self.end = head.eval(), pieces, first_time, end
        self.languages, self.refused, self.ngram = frozenset(languages), frozenset(refused), ngram
        self._context = 1 if ngram is None else max(ngram.order - 1, 1)  # newest pieces that matter
        self._word_beginnings = {SEGMENT_END} | {
            piece for piece in range(FIRST_PIECE, len(pieces)) if pieces.bytes(piece)[:1] in WORD_BEGINNINGS
        }

    @property
    def name(self) -> str:
        """A name that contains a hash of the head's weights, pieces and n-gram."""
        known = () if self.ngram is None else self.ngram.arrays["unigrams"][:8].tolist()
        return f"ctc-{fingerprint(self.head, self.pieces.token_ids[:8], known)}"

    def check(self, target: Target) -> None:
        """Raise InputError if the head was trained for another model or is on another device."""
        config = self.head.config
        if not getattr(target, "reads_encoder", False) or config.d_states != target.hidden_size:
            raise InputError(
                f"`drafter` must read a speech model's encoder of {config.d_states} channels, but the model has "
                f"{target.hidden_size}. Use the head that was trained for this model."
            )
        if max(self.end, self.first_time) >= target.vocab_size:
            raise InputError(
                f"`drafter` must write tokens below {target.vocab_size}, the model's, but writes {self.end} and "
                f"{self.first_time}. Use the head that was trained for this model."
            )
        check_drafter_device(target, self.head.output.weight.device)

    def drafts_for(self, prompt: Sequence[int]) -> bool:
        """Return whether the head drafts for a row with this prompt: it knows the language, and refuses no token."""
        return self.refused.isdisjoint(prompt) and (not self.languages or not self.languages.isdisjoint(prompt))

    def start(self, context: Context) -> CtcState:
        """Run the head over the encoder's states of the rows that it knows.

        Returns:
            The drafter's state.
        """
        rows = [index for index, prompt in enumerate(context.tokens.tolist()) if self.drafts_for(prompt)]
        return CtcState(self.begin(context, rows))

    def begin(self, context: Context, row_indices: Sequence[int]) -> list[CtcRow]:
        """Return the state of each batch row. The head is run over the rows with the indices `row_indices` only."""
        encoder = context.encoder
        if encoder is None:
            raise InputError(
                "`drafter` must fit the model, but reads an encoder's states, which this model does not have. Use it "
                "with the speech model that it was trained for."
            )
        untimed = self.first_time - 1  # id of <|notimestamps|>, the token before the timestamps
        start = () if self.ngram is None else (self.ngram.pieces,)
        rows = [
            CtcRow(self, last != untimed, self.first_time, history=start) for last in context.tokens[:, -1].tolist()
        ]
        if row_indices:
            read = state_lengths(encoder.states, encoder.input_features)
            alignments = self._listen(encoder.states[list(row_indices)], [read[index] for index in row_indices])
            for row_index, logprobs in zip(row_indices, alignments, strict=True):
                rows[row_index].alignment = Alignment(logprobs)
        return rows

    def propose(self, state: CtcState, roots: Tensor, plan: Plan) -> Draft:
        """Draft a tree for each batch row: the likeliest texts after the accepted text.

        A token is left out if the estimated probability that it is right together with all tokens before it is below
        `plan.threshold`.
        """
        return trees_from_lists(roots, [row.head.tree(row, plan) for row in state.rows])

    def update(self, state: CtcState, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Store the accepted tokens. They are aligned before the next draft."""
        for row, tokens in zip(state.rows, verdict.new_tokens, strict=True):
            row.pending += tokens

    def select(self, state: CtcState, live: Tensor) -> None:
        state.rows = [state.rows[index] for index in live.tolist()]

    @torch.inference_mode()
    def _listen(self, states: Tensor, read: Sequence[int]) -> list[np.ndarray]:
        """Run the head over states (B, S, D).

        Args:
            read: For each batch row, how many of its first states are read.

        Returns:
            For each row, log-probabilities (F, V) of V pieces at F frames.
        """
        weight = self.head.output.weight
        lengths = torch.tensor(read, device=weight.device)
        logits, frames = self.head(states[:, : max(read)].to(weight), lengths)
        rows = logits.float().log_softmax(-1).cpu().numpy()
        return [row[:count] for row, count in zip(rows, frames.tolist(), strict=True)]

    def tree(self, row: CtcRow, plan: Plan) -> tuple[list[int], list[int]]:
        """Align the row's newly accepted tokens, then draft the likeliest texts after them.

        Returns:
            Tokens and parents' indices of the nodes below the root; parent 0 is the root.
        """
        alignment = row.alignment
        if alignment is None or plan.nodes < 1:
            return [], []
        self._align(row, alignment)
        tree = PrefixTree(plan.nodes, plan.depth)
        heap, order, seen = list[tuple[float, int, Branch]](), itertools.count(), set[Branch]()

        def push(probability: float, branches: Iterable[tuple[float, Branch]]) -> None:
            for share, branch in branches:
                if probability * share >= plan.threshold:
                    heappush(heap, (-probability * share, next(order), branch))

        push(1.0, self._roots(row, alignment))
        for _ in range(STEPS_PER_NODE * plan.nodes):
            if not heap or tree.is_full:
                break
            probability, _, branch = heappop(heap)
            node = branch.node
            for token in branch.tokens:
                node = tree.add(node, token)
                if not node:
                    break
            else:
                branch = replace(branch, node=node, tokens=())
                if branch not in seen:  # a likelier way to the same text was followed before
                    seen.add(branch)
                    push(-probability, self._next(row, alignment, branch))
        return tree.tokens, tree.parents

    def _align(self, row: CtcRow, alignment: Alignment) -> None:
        """Align the row's newly accepted tokens."""
        score = alignment.score()
        for token in row.pending:
            if token >= self.first_time and row.last < self.first_time and row.last >= 0:
                alignment.add(SEGMENT_END)
            for piece in self.pieces.of_token(token) if token < self.first_time else ():
                alignment.add(piece)
                row.history = (*row.history, piece)[-self._context :]
            before, score = score, alignment.score()
            row.last_is_missing = score - before < MISSING_TOKEN_SCORE
            row.before, row.last = row.last, token
        row.pending = []

    def _roots(self, row: CtcRow, alignment: Alignment) -> Iterator[tuple[float, Branch]]:
        """Return the branches that begin at the accepted text's end, with their probabilities."""
        place = alignment.next_bin()
        begins = row.timed and row.last >= self.first_time  # a segment: its words begin with a space
        branch = Branch(0, place, row.history, drops=begins, has_words=row.last < self.first_time)
        if begins and 0 <= row.before < self.first_time:
            # A segment has ended. The next one usually begins with the timestamp at which this one ends.
            is_last = place == len(alignment.bins)
            yield 1 - END_PROBABILITY if is_last else SAME_TIME_PROBABILITY, replace(branch, tokens=(row.last,))
            if is_last:
                yield END_PROBABILITY, replace(branch, tokens=(self.end,), is_over=True)
        elif row.last_is_missing and not begins:
            # the transcript may have the word written differently: then its rest is not what follows
            yield REST_PROBABILITY, branch
            yield 1 - REST_PROBABILITY, replace(branch, drops=True)
        else:
            yield 1.0, branch

    def _next(self, row: CtcRow, alignment: Alignment, branch: Branch) -> Iterator[tuple[float, Branch]]:
        """Return the branches that continue `branch` by a bin, with their probabilities if `branch` is right."""
        if branch.is_over:
            return
        if len(branch.word) >= MAX_WORD:
            yield 1.0, replace(branch, word=b"", tokens=tuple(self.pieces.merges.tokens(branch.word)))
            return
        if branch.place == len(alignment.bins):
            yield from self._last(row, alignment, branch)
            return
        choices, after = alignment.bins[branch.place].choices, replace(branch, place=branch.place + 1)
        if not branch.drops:
            choices = self._weigh(row, choices, branch.history)
        begin = [choice for choice in choices if choice[0] in self._word_beginnings]
        if branch.word and begin:
            # whichever of these follows, the word is complete
            written = tuple(self.pieces.merges.tokens(branch.word))
            yield _total(begin) / _total(choices), replace(branch, word=b"", tokens=written, is_complete=True)
        if branch.is_complete:
            share = _total(begin) / _total(choices)
            choices = [(piece, probability / share) for piece, probability in begin]
        elif branch.word:
            choices = [choice for choice in choices if choice not in begin]
        for piece, probability in choices:
            text = self.pieces.bytes(piece)
            if piece == BLANK or (branch.drops and _is_rest(text, row.timed and row.last >= self.first_time)):
                yield probability, after
            elif piece == SEGMENT_END and row.timed and branch.has_words:
                time = self._time(alignment.bins[branch.place].first)
                yield (
                    probability * TIMESTAMP_PROBABILITY,
                    replace(after, tokens=(time, time), has_words=False, is_complete=False),
                )
            elif piece == SEGMENT_END:
                yield probability, replace(after, is_complete=False, drops=False)
            else:
                history = (*branch.history, piece)[-self._context :]
                word = branch.word + text
                yield (
                    probability,
                    replace(after, history=history, word=word, has_words=True, is_complete=False, drops=False),
                )

    def _last(self, row: CtcRow, alignment: Alignment, branch: Branch) -> Iterator[tuple[float, Branch]]:
        """Return the branches that end the text, where the transcript has ended."""
        if branch.word:
            yield 1.0, replace(branch, word=b"", tokens=tuple(self.pieces.merges.tokens(branch.word)))
        elif row.timed and branch.has_words:
            for time, probability in self._last_times(alignment):
                yield probability, replace(branch, tokens=(time, self.end), is_over=True)
        else:
            yield END_PROBABILITY, replace(branch, tokens=(self.end,), is_over=True)

    def _last_times(self, alignment: Alignment) -> Iterator[tuple[int, float]]:
        """Return the likeliest timestamps of the last segment's end, with their probabilities.

        They are where the head hears it, and the whole seconds around it, which Whisper often writes there.
        """
        end_timestamp = self._time(alignment.bins[-1].first if alignment.bins else alignment.frames)
        yield end_timestamp, TIMESTAMP_PROBABILITY
        seconds = (end_timestamp - self.first_time) // TIMESTAMPS_PER_SECOND
        before = self.first_time + seconds * TIMESTAMPS_PER_SECOND
        nearest = sorted((before, before + TIMESTAMPS_PER_SECOND), key=lambda time: abs(time - end_timestamp))
        for time, probability in zip(nearest, WHOLE_SECOND_PROBABILITIES, strict=True):
            if self.first_time < time <= self._time(alignment.frames) and time != end_timestamp:
                yield time, probability

    def _weigh(
        self, row: CtcRow, choices: Sequence[tuple[int, float]], history: tuple[int, ...]
    ) -> Sequence[tuple[int, float]]:
        """Multiply each choice's probability by how much likelier the n-gram finds it after `history` than elsewhere.

        The blank and a segment's end keep theirs.
        """
        if self.ngram is None or len(choices) < 2:
            return choices
        for context in (history, ()):
            if context not in row.ngram_scores:
                row.ngram_scores[context] = self.ngram.after(context)
        follows, alone = row.ngram_scores[history], row.ngram_scores[()]
        weighed = [
            (
                piece,
                probability * exp(NGRAM_WEIGHT * (follows(piece) - alone(piece)))
                if piece >= FIRST_PIECE
                else probability,
            )
            for piece, probability in choices
        ]
        share = _total(choices) / _total(weighed)
        return [(piece, probability * share) for piece, probability in weighed]

    def _time(self, frame: int) -> int:
        return self.first_time + round(frame * self.head.config.stride * TIMESTAMPS_PER_SECOND / STATES_PER_SECOND)


def _total(choices: Iterable[tuple[int, float]]) -> float:
    return sum(probability for _, probability in choices)


def _is_rest(text: bytes, begins: bool) -> bool:
    """Return whether a piece may be the rest of a word that the accepted text wrote differently.

    Args:
        text: The piece's text; empty for a segment's end.
        begins: Whether a segment begins, whose words have a space before them.
    """
    sign = text[:1]
    return bool(sign) and sign != b" " and (begins or sign.isalnum() or sign >= b"\x80")


@final
class MultilingualCtcDrafter:
    """Several CTC heads for one model: each row of the batch is drafted by the head that knows the row's language.

    Args:
        heads: At least one, the preferred one first.
    """

    needs = CtcDrafter.needs

    def __init__(self, heads: Sequence[CtcDrafter]) -> None:
        self.heads = list(heads)

    @property
    def name(self) -> str:
        """The names of all heads."""
        return "+".join(head.name for head in self.heads)

    def check(self, target: Target) -> None:
        """Raise InputError if a head was trained for another model or is on another device."""
        for head in self.heads:
            head.check(target)

    def start(self, context: Context) -> CtcState:
        """Run over each row the first head that knows its language.

        Returns:
            The drafter's state.
        """
        prompts = context.tokens.tolist()
        chosen = [next((head for head in self.heads if head.drafts_for(row)), None) for row in prompts]
        rows_of_heads = [
            head.begin(context, [row for row, candidate in enumerate(chosen) if candidate is head])
            for head in self.heads
        ]
        return CtcState([rows_of_heads[self.heads.index(head) if head else 0][at] for at, head in enumerate(chosen)])

    def propose(self, state: CtcState, roots: Tensor, plan: Plan) -> Draft:
        """Draft a tree for each row, by the row's own head."""
        return self.heads[0].propose(state, roots, plan)

    def update(self, state: CtcState, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Store the accepted tokens of each row."""
        self.heads[0].update(state, draft, scores, verdict)

    def select(self, state: CtcState, live: Tensor) -> None:
        self.heads[0].select(state, live)
