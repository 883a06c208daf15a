"""Training data of the text translator (the "reader" and its decoders): sentence pairs as subword pieces.

The source text is in the pieces that a CTC head outputs; the target text is English.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from mmdec.checks.sampling import evenly_spaced
from mmdec.daspeech.training.reader.confusions import Confusions
from mmdec.daspeech.units import BOS, EOS, PAD
from mmdec.errors import InputError
from mmdec.phonetics.pieces import CTC_SPECIAL_PIECES, DECODER_SPECIAL_PIECES, PieceTokenizer, normalise_for_speech
from mmdec.training.corpora.text_files import TextPair, read_text_pairs, read_training_pairs
from mmdec.training.optim import batches_by_size, rows_of


@dataclass
class PairBatch:
    """A batch of B sentences, padded to N source positions, each with one translation, padded to M pieces."""

    pieces: Tensor  # (B, N, K) source piece ids, padded with 0; K alternatives at each position
    weights: Tensor  # (B, N, K) probabilities of the alternatives, from 0 to 1
    lengths: Tensor  # (B,) number of source positions
    units: Tensor  # (B, M) target piece ids, from <s> to </s>, padded with <pad>
    unit_lengths: Tensor  # (B,) number of target pieces, <s> and </s> included
    rows: list[int]  # index of each sentence in the data set


class Pairs(Dataset[PairBatch]):
    """A dataset of batches.

    With `confusions`, imitated errors of a CTC head are put into a `share` of the source sentences.

    Args:
        pieces: Source piece ids of each sentence.
        units: [sentence][reference] target piece ids.
        batches: Each a list of (index of a sentence, index of one of its references).
        seed: First numbers of the random seed of the errors.
    """

    def __init__(
        self,
        pieces: Sequence[list[int]],
        units: Sequence[list[list[int]]],
        batches: Sequence[list[tuple[int, int]]],
        confusions: Confusions | None = None,
        seed: Sequence[int] = (),
        share: float = 1.0,
    ) -> None:
        self.pieces, self.units, self.batches = pieces, units, batches
        self.confusions, self.seed, self.share = confusions, seed, share

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> PairBatch:
        batch = self.batches[number]
        draw = np.random.default_rng([*self.seed, number])
        recognised = [self.recognised_pieces(self.pieces[row], draw) for row, _ in batch]
        units = [torch.tensor([BOS, *self.units[row][turn], EOS]) for row, turn in batch]
        return PairBatch(
            pad_sequence([pieces for pieces, _ in recognised], batch_first=True),
            pad_sequence([weights for _, weights in recognised], batch_first=True),
            torch.tensor([len(pieces) for pieces, _ in recognised]),
            pad_sequence(units, batch_first=True, padding_value=PAD),
            torch.tensor([len(row) for row in units]),
            [row for row, _ in batch],
        )

    def recognised_pieces(self, text: Sequence[int], draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return what the reader gets for a sentence: source pieces (N, K) and their probabilities (N, K).

        They are the exact text, or the text with imitated errors of a CTC head.

        Args:
            text: The sentence's piece ids.
        """
        if self.confusions is not None and draw.random() < self.share:
            return self.confusions.imitate(text, draw)
        best = 1 if self.confusions is None else self.confusions.pieces.shape[1]
        return F.pad(torch.tensor(text)[:, None], (0, best - 1)), F.pad(torch.ones(len(text), 1), (0, best - 1))


class PairData(LightningDataModule):
    """A data module: sentence pairs from several folders.

    Args:
        text: Folders with {train,dev}.tsv.
        shares: The approximate share of each folder in the training sentences.
        pieces: File of the source pieces, the same as the CTC head's.
        english: File of the target pieces. If a file does not exist, `count` source pieces or `written` target pieces
            are learned from the training text and saved there.
        batch_pieces: The most pieces in one process's batch, of both languages together, padding included.
        longest: Leave out sentences and translations with more pieces than this.
        imitation: File with a CTC head's typical errors (`recipes/reader/imitation.py` writes it). They are put into a
            share `imitated` of the training sentences, and into all validation sentences. None: text without errors.
        dev_rows: Number of sentences of the first folder's dev split that are translated at each validation.
    """

    def __init__(
        self,
        text: list[str],
        shares: list[float],
        pieces: str,
        english: str,
        count: int = 1001,
        written: int = 2000,
        batch_pieces: int = 1400,
        longest: int = 40,
        steps_per_epoch: int = 200,
        imitation: str | None = None,
        imitated: float = 0.8,
        dev_rows: int = 200,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if len(shares) != len(text) or min(shares) <= 0:
            raise InputError(
                f"`shares` must be a positive number for each folder of `text`, but is {shares}. "
                "Give one number for each folder."
            )
        self.shares, self.batch_pieces, self.longest = shares, batch_pieces, longest
        self.steps_per_epoch, self.dev_rows, self.seed = steps_per_epoch, dev_rows, seed
        self.confusions = None if imitation is None else Confusions.read(Path(imitation))
        self.imitated = imitated
        self.train = read_training_pairs(text)
        self.dev = evenly_spaced(read_text_pairs(text[0], "dev"), dev_rows)
        everything = [pair for pairs in self.train for pair in pairs]
        self.pieces = PieceTokenizer.load_or_learn(
            Path(pieces),
            lambda: map(normalise_for_speech, (pair.source for pair in everything)),
            count,
            CTC_SPECIAL_PIECES,
        )
        self.english = PieceTokenizer.load_or_learn(
            Path(english),
            lambda: (text for pair in everything for text in pair.references),
            written,
            DECODER_SPECIAL_PIECES,
        )

    @property
    def units(self) -> list[list[str]]:
        """The source pieces and the target pieces, each ordered by id.

        The command line passes them to the model.
        """
        return [self.pieces.names, self.english.names]

    def setup(self, stage: str) -> None:
        self.folders = [self.encode_pairs(pairs) for pairs in self.train]

    def encode_pairs(self, pairs: Sequence[TextPair]) -> tuple[list[list[int]], list[list[list[int]]]]:
        """Encode the sentences that are not too long.

        Returns:
            The source piece ids of each sentence, and [sentence][reference] target piece ids.
        """
        pieces, units = [], []
        for pair in pairs:
            source = self.pieces.encode(normalise_for_speech(pair.source))
            targets = [self.english.encode(text) for text in pair.references]
            targets = [target for target in targets if 0 < len(target) <= self.longest]
            if 0 < len(source) <= self.longest and targets:
                pieces.append(source)
                units.append(targets)
        return pieces, units

    def train_dataloader(self) -> DataLoader:
        """Load the batches of an epoch, drawn at random from (seed, epoch).

        Each folder has its share of the sentences. Each sentence has one random reference.
        """
        assert self.trainer is not None
        draw = np.random.default_rng([self.seed, self.trainer.current_epoch])
        pieces = [row for rows, _ in self.folders for row in rows]
        units = [row for _, rows in self.folders for row in rows]
        weights = np.concatenate(
            [np.full(len(rows), share / len(rows)) for (rows, _), share in zip(self.folders, self.shares, strict=True)]
        )
        rank, max_pieces = self.trainer.global_rank, self.batch_pieces * self.trainer.world_size
        sample_count = self.steps_per_epoch * max_pieces // 12
        rows = draw.choice(len(pieces), min(sample_count, len(pieces)), replace=False, p=weights / weights.sum())
        chosen = [(int(row), int(draw.integers(len(units[row])))) for row in rows]
        sizes = [len(pieces[row]) + len(units[row][turn]) + 2 for row, turn in chosen]
        grouped = batches_by_size(sorted(range(len(chosen)), key=sizes.__getitem__), sizes, max_pieces)
        batches = rows_of([[chosen[at] for at in batch] for batch in grouped], rank, self.trainer.world_size)
        mine = [batches[at] for at in draw.permutation(len(batches))[: self.steps_per_epoch]]
        seed = [self.seed, self.trainer.current_epoch, 1 + rank]
        return DataLoader(Pairs(pieces, units, mine, self.confusions, seed, self.imitated), batch_size=None)

    def val_dataloader(self) -> DataLoader:
        """Load the dev sentences in order, each with its first reference.

        The imitated errors are the same at each validation.
        """
        pieces = [self.pieces.encode(normalise_for_speech(pair.source)) for pair in self.dev]
        units = [[self.english.encode(pair.references[0])] for pair in self.dev]
        rows = list(range(len(pieces)))
        batches = [[(row, 0) for row in rows[start : start + 32]] for start in range(0, len(rows), 32)]
        return DataLoader(Pairs(pieces, units, batches, self.confusions, [self.seed]), batch_size=None)
