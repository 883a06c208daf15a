"""Imitates a CTC head's errors in text.

The errors are drawn from those of the head on recordings that it was not trained on, which
`recipes/reader/imitation.py` collects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from mmdec.checks.weights import read_weights
from mmdec.drafters.ctc.network import CtcTranscripts
from mmdec.errors import InputError
from mmdec.training.metrics.text import import_extra

START = 0  # piece id for the start of a sentence: a head may output something before the first piece
MIN_OUTCOMES = 4  # with fewer occurrences of a piece, outputs for other pieces are imitated, to have variety


@dataclass(frozen=True)
class Confusions:
    """The outputs of a CTC head, collected by the true piece that was spoken.

    An outcome is the output for one occurrence of a piece. Outcome o has the output positions from `starts[o]` to
    `starts[o + 1]` - 1. If it has none, the head missed the piece. If it has several, the head inserted something after
    the piece.
    """

    pieces: Tensor  # (P, K) ids of the K likeliest pieces at each output position, the likeliest first
    weights: Tensor  # (P, K) their probabilities, from 0 to 1
    true_pieces: Tensor  # (O,) id of the true piece of each outcome
    starts: Tensor  # (O + 1,) first output position of each outcome, then P

    @cached_property
    def by_piece(self) -> dict[int, list[int]]:
        """Map each true piece to the indices of its outcomes."""
        by_piece: dict[int, list[int]] = {}
        for outcome, piece in enumerate(self.true_pieces.tolist()):
            by_piece.setdefault(piece, []).append(outcome)
        return by_piece

    def imitate(self, text: Sequence[int], draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Draw what a CTC head might output for a text.

        For each piece one of its outcomes is drawn. A rare piece (fewer than `MIN_OUTCOMES` outcomes) takes an
        outcome of any correctly recognised piece, and replaces the likeliest piece at the outcome's first position.

        Args:
            text: Piece ids.
            draw: Source of random numbers.

        Returns:
            Pieces (N, K) and their probabilities (N, K), with N at least 1.
        """
        pieces, weights = [], []
        for at, piece in enumerate([START, *text]):
            outcomes = self.by_piece.get(piece, [])
            foreign = len(outcomes) < MIN_OUTCOMES and at > 0
            if foreign:
                outcomes = self.recognised
            if not outcomes:
                continue
            outcome = outcomes[int(draw.integers(len(outcomes)))]
            places = slice(int(self.starts[outcome]), int(self.starts[outcome + 1]))
            found = self.pieces[places].clone()
            if foreign:
                found[0, 0] = piece
            pieces.append(found)
            weights.append(self.weights[places])
        if not sum(map(len, pieces)):
            first = torch.zeros(1, self.pieces.shape[1], dtype=self.pieces.dtype)
            first[0, 0] = text[0]
            return first, torch.eye(1, self.pieces.shape[1])
        return torch.cat(pieces), torch.cat(weights)

    @cached_property
    def recognised(self) -> list[int]:
        """The indices of the outcomes whose likeliest piece at the first position is the true piece."""
        some = self.starts[1:] > self.starts[:-1]
        first = self.pieces[self.starts[:-1].clamp(max=len(self.pieces) - 1), 0]
        return (some & (first == self.true_pieces)).nonzero()[:, 0].tolist()

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"pieces": self.pieces, "weights": self.weights, "said": self.true_pieces, "starts": self.starts}
        save_file(tensors, path)

    @classmethod
    def read(cls, path: Path) -> Confusions:
        """Read a file that `save` wrote.

        Raises:
            InputError: For any other file.
        """
        tensors = read_weights([path], "imitation")
        try:
            return cls(*(tensors[name] for name in ("pieces", "weights", "said", "starts")))
        except KeyError as error:
            raise InputError(
                f"`imitation` must be a file of confusions, but '{path}' lacks {error}. Write it by "
                "`recipes/reader/imitation.py`."
            ) from None


def collect_confusions(sentences: Iterable[tuple[Sequence[int], CtcTranscripts]]) -> Confusions:
    """Collect the outputs of a CTC head by the true piece.

    Args:
        sentences: Pairs of a sentence's true piece ids and the head's output for it, a batch of one row. The two are
            aligned with the fewest edits.

    Raises:
        InputError: If the head's output is empty for all sentences.
    """
    pieces, weights, true_pieces, starts = [], [], [], [0]
    for text, row in sentences:
        count = int(row.lengths[0])
        first = row.pieces[0, :count, 0].tolist()
        # output positions of the start and of each piece
        positions: list[list[int]] = [[] for _ in range(len(text) + 1)]
        for tag, a, b, c, d in import_extra("rapidfuzz.distance").Levenshtein.opcodes(list(text), first):
            if tag == "insert":
                positions[a] += range(c, d)
            elif tag != "delete":
                for piece, position in zip(range(a, b), range(c, d), strict=True):
                    positions[piece + 1].append(position)
        for piece, outputs in zip([START, *text], positions, strict=True):
            true_pieces.append(piece)
            starts.append(starts[-1] + len(outputs))
            pieces.append(row.pieces[0, outputs])
            weights.append(row.weights[0, outputs])
    if starts[-1] == 0:
        raise InputError("`head` must recognise pieces in the recordings, but recognises none. Train it for longer.")
    return Confusions(torch.cat(pieces), torch.cat(weights), torch.tensor(true_pieces), torch.tensor(starts))
