"""Drafts for a speech model with a CTC head on its encoder's states (Graves et al. 2006, Viterbi alignment).

The head transcribes the whole window at once, frame by frame, from the states that the decoder reads anyway. Its
transcript differs from the model's text in places. So each round the accepted text is aligned to the frames, and the
draft continues the transcript from the frame where the accepted text ends. The head's pieces are merged into the
model's own tokens: a word of three pieces may be one token of the model. With an n-gram of pieces, a beam search from
the end of the accepted text replaces the head's best path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, final

import numpy as np
import torch
from torch import Tensor

from mmdec.decode.tree import chains
from mmdec.nn.ctc_head import CtcHead
from mmdec.nn.fingerprint import fingerprint
from mmdec.nn.token_pieces import BLANK, FIRST, MARK, TokenPieces
from mmdec.types import Context, Draft, InputError, Needs, Plan, Scores, Target, Verdict

STATES = 50  # states that the encoder gives for a second of sound
TIMES = 50  # timestamp tokens for a second: one each 20 ms
COLUMNS = 100  # the encoder's input frames per second
FLOOR = 6.0  # maximum cost of one frame, in nats: accepted text that the transcript lacks must be aligned, too
EQUAL = 1e-3  # paths whose log-probabilities differ by less count as equally good
WIDTH = 6  # maximum number of texts that the beam search keeps after each frame
CHOICES = 6  # number of likeliest pieces of a frame that the beam search considers, besides the blank
LEAST = -7.0  # minimum log-probability of a piece that the beam search considers
SILENT = -0.01  # where the blank has at least this log-probability, no other piece is considered
WEIGHT, LENGTH = 0.5, 1.0  # weight of the n-gram's log-probability; score added for each piece
UNHEARD = -2.0  # a token that lowers the alignment's score by more than this differs from the head's transcript
EXACT = 0.1  # chance that a timestamp computed from the frames equals the model's
ENDS = 0.7  # chance that the text ends where the head's transcript ends
SILENCE = 3 * STATES  # states of silence after the sound that the head reads: it was trained with them


class PieceModel(Protocol):
    """The part of `mmdec.phonetics.ngram.NGram` that the beam search calls. Its words are piece numbers, as text."""

    @property
    def successors(self) -> Mapping[str, Mapping[str, float]]: ...

    @property
    def beginning(self) -> str: ...

    def score(self, context: str, word: str) -> float: ...

    def advance(self, context: str, word: str) -> str: ...


@final
class Alignment:
    """Aligns the accepted pieces of a window to its frames. Adding a piece takes time linear in the number of frames.

    Values are log-probabilities minus those of the head's best path, which therefore has 0. Entry f of an array is the
    value over the frames before f.
    """

    def __init__(self, logprobs: np.ndarray) -> None:
        """logprobs: (F, V), for each of F frames the head's log-probability of each of V pieces."""
        best = logprobs.max(1, keepdims=True)
        self._costs = np.maximum(logprobs - best, -FLOOR)
        self._silent = self._sums(BLANK)
        self._closed = self._silent.copy()  # (F + 1,), best alignments that end in a blank, or are empty
        self._open = np.full_like(self._closed, -np.inf)  # (F + 1,), best alignments that end in the last piece
        self._last = -1
        self._logprobs = logprobs
        self._choices: dict[int, list[tuple[int, float]]] = {}
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
        """Return the frame at which the accepted text most likely ends; of equally good frames, the last one."""
        reached = np.maximum(self._closed, self._open)
        return int(np.flatnonzero(reached >= reached.max() - EQUAL)[-1])

    def score(self) -> float:
        """Return the score of the best path that spells the accepted text: 0 if it is the head's best, else less."""
        return float(np.maximum(self._closed, self._open).max())

    def heard(self, place: int, most: int) -> list[tuple[int, int, float]]:
        """Return at most `most` pieces of the best path from the frame `place` on, as (piece, frame, chance).

        A piece's chance is its probability at its first frame times the lowest probability of the blanks before it. If
        the piece's probability at a later frame is higher than this product, its chance is that probability.
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

    def choices(self, frame: int) -> list[tuple[int, float]]:
        """Return the likeliest pieces of a frame, the blank first: (piece, log-probability)."""
        if frame not in self._choices:
            row = self._logprobs[frame]
            found = [(BLANK, float(row[BLANK]))]
            if found[0][1] < SILENT:
                best = np.argpartition(row, -CHOICES - 1)[-CHOICES - 1 :] if len(row) > CHOICES else range(len(row))
                found += [(int(piece), float(row[piece])) for piece in best if piece != BLANK and row[piece] > LEAST]
            self._choices[frame] = found
        return self._choices[frame]

    def likeliest(self, place: int, most: int, model: PieceModel, context: str) -> list[tuple[int, int, float]]:
        """Return the same as `heard`, by a beam search with an n-gram of pieces, `model`. context: the n-gram's context
        after the accepted text.

        Prefix search (Hannun et al. 2014) that scores each text by its best path. A piece's chance is the share of the
        kept texts that have it, among those that have all pieces before it, weighted by their scores.
        """
        ended = -np.inf if place and self._open[place] > self._closed[place] else 0.0
        kept = {(): Text(ended, 0.0, context, ())}
        for frame in range(place, len(self.path)):
            (_, silent), *choices = self.choices(frame)
            grown: dict[tuple[int, ...], Text] = {}
            for pieces, text in kept.items():
                best, last = max(text.ended, text.held), pieces[-1] if pieces else self._last
                same = grown.setdefault(pieces, Text(-np.inf, -np.inf, text.context, text.frames))
                same.ended = max(same.ended, best + silent)
                for piece, logprob in choices:
                    before = best
                    if piece == last:
                        same.held, before = max(same.held, text.held + logprob), text.ended
                    longer = (*pieces, piece)
                    if longer not in grown:
                        grown[longer] = text.longer(piece, frame, model)
                    found = grown[longer]
                    found.held = max(found.held, before + logprob + found.gain)
            kept = dict(sorted(grown.items(), key=lambda item: -max(item[1].ended, item[1].held))[:WIDTH])
            if len(next(iter(kept))) > most:
                break
        scores = np.array([max(text.ended, text.held) for text in kept.values()])
        shares = np.exp(scores - scores.max())
        chosen, text = next(iter(kept.items()))
        found, above = [], float(shares.sum())
        for at, (piece, frame) in enumerate(zip(chosen[:most], text.frames, strict=False)):
            begun = chosen[: at + 1]
            agreeing = sum(float(share) for other, share in zip(kept, shares, strict=True) if other[: at + 1] == begun)
            found.append((piece, frame, agreeing / above))
            above = agreeing
        return found


@dataclass(slots=True)
class Text:
    """A text of a beam search."""

    ended: float  # log-probability of its best path that ends in a blank
    held: float  # log-probability of its best path that ends in its last piece
    context: str  # the n-gram's context after this text
    frames: tuple[int, ...]  # the frame at which each of its pieces begins
    gain: float = 0.0  # score of its last piece by the n-gram, `LENGTH` included

    def longer(self, piece: int, frame: int, model: PieceModel) -> Text:
        """Return the text with one more piece, which begins at `frame`. The frame's log-probability is not added yet.
        `MARK` does not change the n-gram's context, because the n-gram has no such piece."""
        if piece == MARK:
            return Text(-np.inf, -np.inf, self.context, (*self.frames, frame), LENGTH)
        gain = WEIGHT * model.score(self.context, str(piece)) + LENGTH
        return Text(-np.inf, -np.inf, model.advance(self.context, str(piece)), (*self.frames, frame), gain)


@dataclass
class Row:
    """The state of one row of a run."""

    timed: bool  # whether the model writes timestamps
    first_time: int  # id of the timestamp of 0 seconds
    waiting: list[int] = field(default_factory=list[int])  # accepted tokens that are not aligned yet
    alignment: Alignment | None = None  # None: the head does not know the language
    last: int = -1  # id of the last aligned token; -1: there is none
    before: int = -1  # id of the aligned token before it; -1: there is none
    unheard: bool = False  # whether the head's transcript differs from the last token
    context: str = ""  # the n-gram's context after this text


def heard_states(states: Tensor, sound: Tensor | None) -> list[int]:
    """Return, for each row of states (B, S, D), how many of them a head reads: those of the sound and of some silence
    after it.

    sound: (B, mels, T) the encoder's input features; padding after a recording has equal columns. None: all are read.
    """
    size = states.shape[1]
    if sound is None:
        return [size] * len(states)
    differs = (sound != sound[..., -1:]).any(1)  # (B, T)
    ends = (differs * torch.arange(1, differs.shape[1] + 1, device=sound.device)).amax(1)
    return [min(end * STATES // COLUMNS + SILENCE, size) for end in ends.tolist()]


@dataclass
class Memory:
    """The drafter's state of a run: one `Row` for each row of the batch."""

    rows: list[Row]


@final
class Ctc:
    """Drafts what a CTC head transcribes. It holds weights only; a run's state is in `Memory`."""

    needs = Needs(memory=True, stops=True)

    def __init__(
        self,
        head: CtcHead,
        pieces: TokenPieces,
        first_time: int,
        end: int,
        model: PieceModel | None = None,
        languages: Sequence[int] = (),
    ) -> None:
        """head: reads the encoder's states. pieces: the head's vocabulary. first_time: the token of 0 seconds. end: the
        token that ends a text. model: an n-gram of pieces (`piece_ngram`); None: draft the head's best path.
        languages: tokens of the languages that the head knows. Rows whose prompt has none of them are decoded plainly.
            Empty: it drafts in every language.
        """
        if head.config.pieces != len(pieces):
            raise InputError(
                f"`pieces` must be the {head.config.pieces} that the head writes, but are {len(pieces)}. Use its own."
            )
        self.head, self.pieces, self.first_time, self.end = head.eval(), pieces, first_time, end
        self.model, self.languages = model, frozenset(languages)

    @property
    def name(self) -> str:
        """Return a name made of a digest of the head's weights and settings."""
        entries = self.model and sum(map(len, self.model.successors.values()))
        return f"ctc-{fingerprint(self.head, self.pieces.kept[:8], entries)}"

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
        """Read the encoder's states up to the end of the sound, for rows in a language that the head was trained on."""
        if context.memory is None:
            raise InputError("`context` must hold the encoder's states, but does not. Draft for a speech model.")
        untimed = self.first_time - 1  # id of <|notimestamps|>, the token before the timestamps
        begun = "" if self.model is None else self.model.beginning
        prompts = context.tokens.tolist()
        rows = [Row(row[-1] != untimed, self.first_time, context=begun) for row in prompts]
        known = [at for at, row in enumerate(prompts) if not self.languages or not self.languages.isdisjoint(row)]
        if known:
            read = heard_states(context.memory, context.sound)
            heard = self._listen(context.memory[known], [read[at] for at in known])
            for at, logprobs in zip(known, heard, strict=True):
                rows[at].alignment = Alignment(logprobs)
        return Memory(rows)

    def propose(self, memory: Memory, roots: Tensor, plan: Plan) -> Draft:
        """Draft a chain for each row: the transcript after the accepted text. It ends where the chance that all its
        tokens are right falls below `plan.threshold`."""
        depth = min(plan.nodes, plan.depth)
        if depth < 1:
            return chains(roots, [[] for _ in memory.rows])
        return chains(roots, [self._chain(row, depth, plan.threshold) for row in memory.rows])

    def update(self, memory: Memory, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Store the accepted tokens; they are aligned at the next draft."""
        for row, tokens, length in zip(memory.rows, verdict.tokens.tolist(), verdict.lengths.tolist(), strict=True):
            row.waiting += tokens[:length]

    def select(self, memory: Memory, live: Tensor) -> None:
        """Keep only the rows whose indices are in `live` (K,) int64, in that order."""
        memory.rows = [memory.rows[index] for index in live.tolist()]

    @torch.inference_mode()
    def _listen(self, states: Tensor, read: Sequence[int]) -> list[np.ndarray]:
        """Run the head over states (B, S, D); a row's first `read` states are valid. Returns each row's
        log-probabilities (F, V) of the pieces."""
        weight = self.head.output.weight
        lengths = torch.tensor(read, device=weight.device)
        logits, frames = self.head(states[:, : max(read)].to(weight), lengths)
        rows = logits.float().log_softmax(-1).cpu().numpy()
        return [row[:count] for row, count in zip(rows, frames.tolist(), strict=True)]

    def _chain(self, row: Row, depth: int, threshold: float) -> list[int]:
        """Align the row's waiting tokens, then draft. Returns: at most `depth` tokens below its root; the draft ends
        where the chance that a token and all before it are right falls below `threshold`.
        """
        alignment = row.alignment
        if alignment is None:
            return []
        score = alignment.score()
        for token in row.waiting:
            if token >= self.first_time and row.last < self.first_time and row.last >= 0:
                alignment.add(MARK)
            for piece in self.pieces.of_token(token) if token < self.first_time else ():
                alignment.add(piece)
                if self.model is not None:
                    row.context = self.model.advance(row.context, str(piece))
            before, score = score, alignment.score()
            row.unheard = score - before < UNHEARD
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
        """Return the transcript's tokens after the accepted text, timestamps and end token included; each with its
        chance to be right, given that those before it are right."""
        most, place = 3 * depth + 3, alignment.place()
        if self.model is None:
            heard = alignment.heard(place, most)
        else:
            most = 2 * depth
            heard = alignment.likeliest(place, most, self.model, row.context)
        ended = len(heard) < most
        heard = heard[self._skipped(row, [self.pieces.bytes(piece) for piece, _, _ in heard]) :]
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
        if ended:
            if row.timed and (words or spoken):
                found.append((self._time(heard[-1][1] if heard else len(alignment.path)), EXACT))
            found.append((self.end, ENDS))
        return found

    @staticmethod
    def _skipped(row: Row, texts: Sequence[bytes]) -> int:
        """Return how many of the first pieces to skip. If the transcript differs from the last token, the rest of that
        word is skipped. A new segment begins with a new word."""
        begins = row.timed and row.last >= 0 and row.last >= row.first_time
        at = 0
        while at < len(texts) and texts[at] and (begins or row.unheard):
            sign = texts[at][:1]
            if sign == b" " or not (begins or sign.isalnum() or sign >= b"\x80"):
                break
            at += 1
        return at

    def _time(self, frame: int) -> int:
        """Return the id of the timestamp token nearest to a frame."""
        return self.first_time + round(frame * self.head.config.stride * TIMES / STATES)

    def _tokens(self, heard: Sequence[tuple[int, int, float]]) -> list[tuple[int, float]]:
        """Merge the transcript's (piece, frame, chance) into the model's tokens. A token's chance is the product of its
        pieces' chances."""
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
