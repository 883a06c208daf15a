"""Drafts for a Whisper with a CTC head on its encoder's states (Graves et al. 2006, Viterbi alignment).

The head transcribes the whole window at once, frame by frame, from the states that the decoder reads anyway. Its
transcript has errors; the text that the model has accepted is right. So each round aligns the accepted text to the
frames, and drafts the transcript from the frame where that text ends. The transcript's pieces are merged into the
model's own tokens: a word that the head writes in three pieces is drafted as one token if the model has one for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from torch import Tensor

from mmdec.decode.tree import chains
from mmdec.nn.ctc_head import CtcHead
from mmdec.nn.fingerprint import fingerprint
from mmdec.phonetics.token_pieces import BLANK, FIRST, MARK, TokenPieces
from mmdec.types import Context, Draft, InputError, Needs, Plan, Scores, Target, Verdict

STATES = 50  # encoder states per second of a Whisper
TIMES = 50  # timestamp tokens per second
FLOOR = 6.0  # the most log-probability that one frame may cost, so that accepted text the head missed can be aligned
EQUAL = 1e-3  # paths whose log-probabilities differ by less are equally good
EXACT = 0.3  # chance that a timestamp read from the frames is the model's own
ENDS = 0.7  # chance that the text ends where the transcript has no more pieces


@final
class Alignment:
    """Aligns the accepted pieces of a window to its frames. Adding a piece takes time linear in the number of frames.

    Values are log-probabilities minus those of the head's best path, which therefore has 0. Entry f of an array is the
    value over the frames before f.
    """

    def __init__(self, logprobs: np.ndarray) -> None:
        """logprobs: (F, V) the head's log-probability of each piece at each frame."""
        best = logprobs.max(1, keepdims=True)
        self._costs = np.maximum(logprobs - best, -FLOOR)
        self._silent = self._sums(BLANK)
        self._closed = self._silent.copy()  # best alignments whose last frame is a blank, or that have no frame
        self._open = np.full_like(self._closed, -np.inf)  # best alignments whose last frame is the last piece
        self._last = -1
        self.path = logprobs.argmax(1)
        self.chances = np.exp(best[:, 0])

    def _sums(self, piece: int) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum(self._costs[:, piece], dtype=np.float64)])

    def add(self, piece: int) -> None:
        """Extend the alignment by the next accepted piece."""
        before = self._closed if piece == self._last else np.maximum(self._closed, self._open)
        self._open = self._held(before, self._sums(piece))
        self._closed = self._held(self._open, self._silent)
        self._last = piece

    @staticmethod
    def _held(before: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """Extend alignments by one piece or blank that lasts at least one frame and begins at the best frame.

        before: (F + 1,) values of the alignments so far. sums: (F + 1,) cumulative values of the piece.
        """
        held = np.full_like(before, -np.inf)
        held[1:] = sums[1:] + np.maximum.accumulate(before[:-1] - sums[:-1])
        return held

    def place(self) -> int:
        """The frame at which the accepted text most likely ends; of equally good frames, the last one."""
        reached = np.maximum(self._closed, self._open)
        return int(np.flatnonzero(reached >= reached.max() - EQUAL)[-1])

    def heard(self, place: int, most: int) -> list[tuple[int, int, float]]:
        """At most `most` pieces of the best path from the frame `place` on, as (piece, frame, chance).

        A piece's chance is its probability at its first frame times the lowest probability of the blanks before it. If
        its probability at a later frame is higher than that, it is taken instead.
        """
        found: list[tuple[int, int, float]] = []
        said, sure = self._last if place and self.path[place - 1] == self._last else BLANK, 1.0
        for frame in range(place, len(self.path)):
            piece, chance = int(self.path[frame]), float(self.chances[frame])
            if piece == BLANK:
                sure = min(sure, chance)
            elif piece != said:
                if len(found) == most:
                    break
                found.append((piece, frame, chance * sure))
                sure = 1.0
            elif found and found[-1][0] == piece and chance > found[-1][2]:
                found[-1] = piece, found[-1][1], chance
            said = piece
        return found


@dataclass
class Row:
    """A row of a run: its accepted tokens that are not aligned yet (`waiting`), and its last two aligned tokens."""

    timed: bool  # whether the model writes timestamps
    waiting: list[int] = field(default_factory=list[int])
    alignment: Alignment | None = None
    last: int = -1
    before: int = -1


@dataclass
class Memory:
    """The drafter's state of a run. The head reads the states only at the first draft."""

    states: Tensor  # (B, S, D)
    rows: list[Row]


@final
class Ctc:
    """Drafts what a CTC head transcribes. It holds weights only; a run's state is in `Memory`."""

    needs = Needs(memory=True, stops=True)

    def __init__(self, head: CtcHead, pieces: TokenPieces, first_time: int, end: int) -> None:
        """head: the trained head. pieces: the vocabulary of its outputs. first_time: id of the timestamp token of 0
        seconds. end: id of the token that ends a text.
        """
        if head.config.pieces != len(pieces):
            raise InputError(
                f"`pieces` must be the {head.config.pieces} that the head writes, but are {len(pieces)}. Use its own."
            )
        self.head, self.pieces, self.first_time, self.end = head.eval(), pieces, first_time, end

    @property
    def name(self) -> str:
        """Identifies the head, by a digest of its weights."""
        return f"ctc-{fingerprint(self.head, self.pieces.kept[:8])}"

    def check(self, target: Target) -> None:
        """Raises InputError if the head belongs to another model or lies on another device."""
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

    def start(self, context: Context) -> Memory:
        """Store the encoder's states; nothing is computed yet."""
        if context.memory is None:
            raise InputError("`context` must hold the encoder's states, but does not. Draft for a speech model.")
        untimed = self.first_time - 1  # <|notimestamps|>
        return Memory(context.memory, [Row(int(row[-1]) != untimed) for row in context.tokens])

    def propose(self, memory: Memory, roots: Tensor, plan: Plan) -> Draft:
        """Draft a chain for each row: the head's transcript after the accepted text, as far as the head is sure."""
        depth = min(plan.nodes, plan.depth)
        if depth < 1:
            return chains(roots, [[] for _ in memory.rows])
        if memory.rows[0].alignment is None:
            for row, logprobs in zip(memory.rows, self._listen(memory.states), strict=True):
                row.alignment = Alignment(logprobs)
        return chains(roots, [self._chain(row, depth, plan.threshold) for row in memory.rows])

    def update(self, memory: Memory, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Store the accepted tokens; they are aligned at the next draft."""
        for row, tokens, length in zip(memory.rows, verdict.tokens.tolist(), verdict.lengths.tolist(), strict=True):
            row.waiting += tokens[:length]

    def select(self, memory: Memory, live: Tensor) -> None:
        """Keep only the rows whose indices are in `live` (K,) int64, in that order."""
        memory.rows = [memory.rows[index] for index in live.tolist()]
        memory.states = memory.states[live.to(memory.states.device)]

    @torch.inference_mode()
    def _listen(self, states: Tensor) -> np.ndarray:
        """Run the head over states (B, S, D). Returns the log-probabilities (B, F, V) of the pieces."""
        weight = self.head.output.weight
        lengths = torch.full((len(states),), states.shape[1], device=weight.device)
        logits, _ = self.head(states.to(weight), lengths)
        return logits.float().log_softmax(-1).cpu().numpy()

    def _chain(self, row: Row, depth: int, threshold: float) -> list[int]:
        """The tokens below a row's root."""
        alignment = row.alignment
        assert alignment is not None
        for token in row.waiting:
            if token >= self.first_time and row.last < self.first_time and row.last >= 0:
                alignment.add(MARK)
            for piece in self.pieces.of_token(token) if token < self.first_time else ():
                alignment.add(piece)
            row.before, row.last = row.last, token
        row.waiting = []
        draft: list[int] = []
        total = 1.0
        for token, chance in self._continued(row, alignment, depth):
            total *= chance
            if len(draft) == depth or total < threshold:
                break
            draft.append(token)
        return draft

    def _continued(self, row: Row, alignment: Alignment, depth: int) -> list[tuple[int, float]]:
        """Tokens of the transcript after the accepted text, each with its chance given the tokens before it."""
        heard = alignment.heard(alignment.place(), 3 * depth + 3)
        found: list[tuple[int, float]] = []
        closed = row.last >= self.first_time and 0 <= row.before < self.first_time
        if row.timed and closed:  # a segment has ended, the next one begins at once
            found.append((row.last, 0.9))
        words: list[tuple[int, int, float]] = []
        spoken = row.last < self.first_time  # whether the open segment has words: only then a timestamp may end it
        for piece in heard:
            if piece[0] >= FIRST:
                words.append(piece)
            elif row.timed:
                found += self._tokens(words)
                if words or spoken:
                    found += [(self._time(piece[1]), piece[2] * EXACT), (self._time(piece[1]), 0.9)]
                words, spoken = [], False
            if len(found) > depth:
                return found
        found += self._tokens(words)
        if len(heard) < 3 * depth + 3:
            if row.timed and (words or spoken):
                found.append((self._time(heard[-1][1] if heard else len(alignment.path)), EXACT))
            found.append((self.end, ENDS))
        return found

    def _time(self, frame: int) -> int:
        """The timestamp token of a frame."""
        return self.first_time + round(frame * self.head.config.stride * TIMES / STATES)

    def _tokens(self, heard: Sequence[tuple[int, int, float]]) -> list[tuple[int, float]]:
        """Merge pieces into the model's tokens. A token's chance is the product of its pieces' chances."""
        texts = [self.pieces.bytes(piece) for piece, _, _ in heard]
        ends = np.cumsum([len(text) for text in texts]).tolist()
        found: list[tuple[int, float]] = []
        at, read = 0, 0
        for token in self.pieces.merges.tokens(b"".join(texts)):
            read += len(self.pieces.merges.bytes(token))
            chance = 1.0
            while at < len(ends) and ends[at] - len(texts[at]) < read:
                chance *= heard[at][2]
                at += 1
            found.append((token, chance))
        return found
