"""Drafts for an encoder-decoder speech model with a CTC head on its encoder's states (Graves et al. 2006).

The head transcribes the whole audio window at once, frame by frame. The transcript may differ from the model's text.
So in each round the accepted text is aligned to the frames (Viterbi alignment), and the draft is the transcript after
the frame where the accepted text ends. The head's vocabulary, its "pieces", is smaller than the model's, so pieces are
merged into tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from torch import Tensor

from mmdec.checks.fingerprint import fingerprint
from mmdec.core.tree import chain_drafts
from mmdec.drafters.ctc.network import CtcHead
from mmdec.drafters.ctc.tokens import BLANK, FIRST_PIECE, SEGMENT_END, TokenPieces
from mmdec.drafters.registry import built_in_drafter
from mmdec.errors import InputError
from mmdec.types import Context, Draft, Needs, Plan, Scores, Target, Verdict

STATES_PER_SECOND = 50  # encoder states per second of audio
TIMESTAMPS_PER_SECOND = 50  # timestamp tokens per second of audio, one for every 20 ms
MEL_FRAMES_PER_SECOND = 100  # mel frames, the encoder's input, per second of audio
# a frame costs at most this many nats, so accepted text missing from the transcript can still be aligned
MAX_FRAME_COST = 6.0
SCORE_TOLERANCE = 1e-3  # alignments whose log-probabilities differ by less than this (in nats) count as equally good
# a token counts as missing in the transcript if it lowers the alignment's score by more than 2 nats
MISSING_TOKEN_SCORE = -2.0
TIMESTAMP_CHANCE = 0.1  # assumed chance that a timestamp computed from the frames equals the model's
END_CHANCE = 0.7  # assumed chance that the model's text ends where the transcript ends
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
        best = logprobs.max(1, keepdims=True)
        self._costs = np.maximum(logprobs - best, -MAX_FRAME_COST)
        self._silent = self._sums(BLANK)
        # (F + 1,), scores of the best alignments that end in a blank or are empty; of those that end in the last piece
        self._closed = self._silent.copy()
        self._open = np.full_like(self._closed, -np.inf)
        self._last = -1
        self.path = logprobs.argmax(1)
        self.chances = np.exp(best[:, 0])

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

    def pieces_from(self, place: int, most: int) -> list[tuple[int, int, float]]:
        """Return the pieces of the head's best path from the frame `place` on, at most `most`.

        Returns:
            For each piece: its number, its first frame, and the estimated chance that it is right. The chance is the
            piece's probability at its first frame times the lowest probability of the blanks before it, or its
            probability at a later frame if that is higher.
        """
        pieces: list[tuple[int, int, float]] = []
        previous, blank_chance = self._last if place and self.path[place - 1] == self._last else BLANK, 1.0
        for frame in range(place, len(self.path)):
            piece, chance = int(self.path[frame]), float(self.chances[frame])
            if piece == BLANK:
                blank_chance = min(blank_chance, chance)
            elif piece != previous:
                if len(pieces) == most:
                    break
                pieces.append((piece, frame, chance * blank_chance))
                blank_chance = 1.0
            elif pieces and pieces[-1][0] == piece and chance > pieces[-1][2]:
                pieces[-1] = piece, pieces[-1][1], chance
            previous = piece
        return pieces


@dataclass
class CtcRow:
    """The drafter's state of one batch row: the accepted text and its alignment to the frames."""

    head: Ctc  # the head that drafts for the row
    timed: bool  # whether the model writes timestamps
    first_time: int  # id of the timestamp token of 0 seconds
    pending: list[int] = field(default_factory=list[int])  # accepted tokens that are not aligned yet
    alignment: Alignment | None = None  # None: the head does not know the language, so nothing is drafted
    last: int = -1  # id of the last aligned token; -1: there is none
    before: int = -1  # id of the last aligned token but one; -1: there is none
    last_is_missing: bool = False  # whether the transcript lacks the last aligned token


def state_lengths(states: Tensor, sound: Tensor | None) -> list[int]:
    """Return for each batch row how many encoder states the head reads: the states of the sound and of 3 s of silence
    after the sound.

    Args:
        states: (B, S, D).
        sound: (B, mels, T), the encoder's input features; frames at the end that equal the last frame are padding.
            None: all states are read.
    """
    size = states.shape[1]
    if sound is None:
        return [size] * len(states)
    differs = (sound != sound[..., -1:]).any(1)  # shape (B, T)
    ends = (differs * torch.arange(1, differs.shape[1] + 1, device=sound.device)).amax(1)
    return [min(end * STATES_PER_SECOND // MEL_FRAMES_PER_SECOND + SILENCE_STATES, size) for end in ends.tolist()]


@dataclass
class CtcState:
    """The drafter's state of one `generate` call: the text and its alignment for each row of the batch."""

    rows: list[CtcRow]


@built_in_drafter("ctc", loader="mmdec.drafters.ctc.checkpoint:load_ctc")
@final
class Ctc:
    """A drafter that proposes the transcript of a CTC head.

    It holds the head and its settings; the state of a `generate` call is in `CtcState`.

    Args:
        head: Reads the encoder's states.
        pieces: The head's vocabulary of subwords, and how these become tokens.
        first_time: Id of the timestamp token of 0 seconds.
        end: Id of the end-of-text token.
        languages: Ids of the language tokens that the head knows. Rows whose prompt has none of them get no drafts.
            Empty: the drafter drafts in every language.
        refused: Ids of prompt tokens with which a row gets no drafts, such as a task whose text is in another language.
    """

    needs = Needs(memory=True, may_stop_early=True, may_find_nothing=True)

    def __init__(
        self,
        head: CtcHead,
        pieces: TokenPieces,
        first_time: int,
        end: int,
        languages: Sequence[int] = (),
        refused: Sequence[int] = (),
    ) -> None:
        if head.config.pieces != len(pieces):
            raise InputError(
                f"`pieces` must be the {head.config.pieces} that the head writes, but are {len(pieces)}. Use its own."
            )
        self.head, self.pieces, self.first_time, self.end = head.eval(), pieces, first_time, end
        self.languages, self.refused = frozenset(languages), frozenset(refused)

    @property
    def name(self) -> str:
        """A name that contains a hash of the head's weights and settings."""
        return f"ctc-{fingerprint(self.head, self.pieces.token_ids[:8])}"

    def check(self, target: Target) -> None:
        """Raise InputError if the head was trained for another model or is on another device."""
        config, weight = self.head.config, self.head.output.weight
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
        if weight.device != target.device:
            raise InputError(f"`drafter` must be on {target.device}, but is on {weight.device}. Move it there.")

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
            raise InputError("`context` must hold the encoder's states, but does not. Draft for a speech model.")
        untimed = self.first_time - 1  # id of <|notimestamps|>, the token before the timestamps
        rows = [CtcRow(self, last != untimed, self.first_time) for last in context.tokens[:, -1].tolist()]
        if row_indices:
            read = state_lengths(encoder.states, encoder.sound)
            alignments = self._listen(encoder.states[list(row_indices)], [read[at] for at in row_indices])
            for at, logprobs in zip(row_indices, alignments, strict=True):
                rows[at].alignment = Alignment(logprobs)
        return rows

    def propose(self, state: CtcState, roots: Tensor, plan: Plan) -> Draft:
        """Draft a chain for each batch row: the transcript after the accepted text.

        The chain ends where the estimated chance that all its tokens are right falls below `plan.threshold`.
        """
        depth = min(plan.nodes, plan.depth)
        if depth < 1:
            return chain_drafts(roots, [[] for _ in state.rows])
        return chain_drafts(roots, [row.head.chain(row, depth, plan.threshold) for row in state.rows])

    def update(self, state: CtcState, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Store the accepted tokens. They are aligned before the next draft."""
        for row, tokens, length in zip(state.rows, verdict.tokens.tolist(), verdict.lengths.tolist(), strict=True):
            row.pending += tokens[:length]

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

    def chain(self, row: CtcRow, depth: int, threshold: float) -> list[int]:
        """Align the row's newly accepted tokens, then draft at most `depth` tokens after them.

        Args:
            threshold: The draft ends before the first token that is less likely than this to be right together with all
                tokens before it.
        """
        alignment = row.alignment
        if alignment is None:
            return []
        score = alignment.score()
        for token in row.pending:
            if token >= self.first_time and row.last < self.first_time and row.last >= 0:
                alignment.add(SEGMENT_END)
            for piece in self.pieces.of_token(token) if token < self.first_time else ():
                alignment.add(piece)
            before, score = score, alignment.score()
            row.last_is_missing = score - before < MISSING_TOKEN_SCORE
            row.before, row.last = row.last, token
        row.pending = []
        draft: list[int] = []
        total = 1.0
        for token, chance in self._continuation(row, alignment, depth):
            total *= chance
            if len(draft) == depth or total < threshold:
                break
            draft.append(token)
        return draft

    def _continuation(self, row: CtcRow, alignment: Alignment, depth: int) -> list[tuple[int, float]]:
        """Return the transcript's tokens after the accepted text, timestamps and end token included.

        Returns:
            For each token: its id, and the chance that it is right if all tokens before it are right.
        """
        most, place = 3 * depth + 3, alignment.place()
        pieces = alignment.pieces_from(place, most)
        ended = len(pieces) < most
        pieces = pieces[self._count_skipped(row, [self.pieces.bytes(piece) for piece, _, _ in pieces]) :]
        continuation: list[tuple[int, float]] = []
        closed = row.last >= self.first_time and 0 <= row.before < self.first_time
        # A segment has ended. The next one usually begins with the timestamp at which this one ends.
        if row.timed and closed:
            continuation.append((row.last, 0.9))
        words: list[tuple[int, int, float]] = []
        has_words = row.last < self.first_time  # whether this segment has words: only then may it end with a timestamp
        for piece in pieces:
            if piece[0] >= FIRST_PIECE:
                words.append(piece)
            elif row.timed:
                continuation += self._tokens(words)
                if words or has_words:
                    continuation += [(self._time(piece[1]), piece[2] * TIMESTAMP_CHANCE), (self._time(piece[1]), 0.9)]
                words, has_words = [], False
            if len(continuation) > depth:
                return continuation
        continuation += self._tokens(words)
        if ended:
            if row.timed and (words or has_words):
                continuation.append((self._time(pieces[-1][1] if pieces else len(alignment.path)), TIMESTAMP_CHANCE))
            continuation.append((self.end, END_CHANCE))
        return continuation

    @staticmethod
    def _count_skipped(row: CtcRow, texts: Sequence[bytes]) -> int:
        """Return how many of the transcript's next pieces are not drafted, because they are the rest of a word that the
        accepted text wrote differently.

        Pieces are skipped up to the next word if the transcript lacks the last accepted token, or if a segment begins.

        Args:
            texts: UTF-8 text of each piece.
        """
        begins = row.timed and row.last >= 0 and row.last >= row.first_time
        at = 0
        while at < len(texts) and texts[at] and (begins or row.last_is_missing):
            sign = texts[at][:1]
            if sign == b" " or not (begins or sign.isalnum() or sign >= b"\x80"):
                break
            at += 1
        return at

    def _time(self, frame: int) -> int:
        return self.first_time + round(frame * self.head.config.stride * TIMESTAMPS_PER_SECOND / STATES_PER_SECOND)

    def _tokens(self, pieces: Sequence[tuple[int, int, float]]) -> list[tuple[int, float]]:
        """Merge pieces into the model's tokens.

        Args:
            pieces: For each piece: its number, its first frame, and the chance that it is right.

        Returns:
            For each token: its id, and its chance, the product of the chances of its pieces.
        """
        texts = [self.pieces.bytes(piece) for piece, _, _ in pieces]
        ends = np.cumsum([len(text) for text in texts]).tolist()
        tokens: list[tuple[int, float]] = []
        at, read = 0, 0
        for token in self.pieces.merges.tokens(b"".join(texts)):
            read += len(self.pieces.merges.bytes(token))
            chance = 1.0
            while at < len(ends) and ends[at] - len(texts[at]) < read:
                chance *= pieces[at][2]
                at += 1
            tokens.append((token, chance))
        return tokens


@final
class CtcByLanguage:
    """Several CTC heads for one model: each row of the batch is drafted by the head that knows the row's language.

    Args:
        heads: At least one, the preferred one first.
    """

    needs = Ctc.needs

    def __init__(self, heads: Sequence[Ctc]) -> None:
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
            head.begin(context, [at for at, one in enumerate(chosen) if one is head]) for head in self.heads
        ]
        return CtcState([rows_of_heads[self.heads.index(head) if head else 0][at] for at, head in enumerate(chosen)])

    def propose(self, state: CtcState, roots: Tensor, plan: Plan) -> Draft:
        """Draft a chain for each row, by the row's own head."""
        return self.heads[0].propose(state, roots, plan)

    def update(self, state: CtcState, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Store the accepted tokens of each row."""
        self.heads[0].update(state, draft, scores, verdict)

    def select(self, state: CtcState, live: Tensor) -> None:
        self.heads[0].select(state, live)
