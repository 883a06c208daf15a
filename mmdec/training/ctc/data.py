"""Training data of a CTC head: stored encoder states of recordings, and the pieces of their transcripts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mmdec.phonetics.pieces import HEARD, Pieces, heard
from mmdec.training.corpora.librispeech import Utterance, read_utterances
from mmdec.training.corpora.text_files import held_sources, read_training_pairs, sentence_key
from mmdec.training.ctc.states import Distortion, keep_states, load_speech_encoder, state_name
from mmdec.training.optim import rows_of, sized_batches
from mmdec.training.stores import FrameStore
from mmdec.types import InputError


@dataclass
class CtcBatch:
    """B sounds, padded to S encoder states, and the pieces of their transcripts."""

    states: Tensor  # (B, S, D) encoder states of width D
    lengths: Tensor  # (B,) number of states of each sound
    pieces: Tensor  # (B, T) ids of the pieces, padded with 0
    piece_lengths: Tensor  # (B,)
    rows: list[str]  # the sounds' names in the store


class KeptStates(Dataset[CtcBatch]):
    """Batches whose states are read from the store when they are asked for. texts: ids of each sound's pieces, by name.
    batches: the names in each."""

    def __init__(self, store: FrameStore, texts: dict[str, list[int]], batches: Sequence[Sequence[str]]) -> None:
        self.store, self.texts, self.batches = store, texts, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> CtcBatch:
        names = list(self.batches[number])
        states = [self.store.get(name) for name in names]
        texts = [torch.tensor(self.texts[name]) for name in names]
        return CtcBatch(
            torch.nn.utils.rnn.pad_sequence(states, batch_first=True),
            torch.tensor([len(row) for row in states]),
            torch.nn.utils.rnn.pad_sequence(texts, batch_first=True),
            torch.tensor([len(row) for row in texts]),
            names,
        )


class StoredBatches(LightningDataModule):
    """The loaders that the data modules of CTC heads share. A subclass's `setup` sets the fields.

    A process's part of a batch has at most `batch_states` encoder states, padding included.
    """

    store: FrameStore
    texts: dict[str, list[int]]  # ids of the pieces of each training sound's transcript, by its name
    dev_texts: dict[str, list[int]]
    batch_states: int
    steps_per_epoch: int
    seed: int

    def train_dataloader(self) -> DataLoader:
        """Load batches of about equal length, drawn anew in each epoch. All recordings are used once before one
        is repeated."""
        assert self.trainer is not None
        world, names = self.trainer.world_size, list(self.texts)
        batches: list[list[str]] = []
        turn = 0
        while len(batches) < self.steps_per_epoch:
            draw = np.random.default_rng([self.seed, self.trainer.current_epoch, turn])
            shared = [batch for batch in self.grouped(names, draw, world) if len(batch) >= world]
            if not shared:
                raise InputError(
                    f"`batch_states` must hold a recording for each of {world} processes, but no batch has so many. "
                    "Raise it, add recordings, or train in one process."
                )
            batches += shared
            turn += 1
        mine = rows_of(batches[: self.steps_per_epoch], self.trainer.global_rank, world)
        return DataLoader(KeptStates(self.store, self.texts, mine), batch_size=None, shuffle=False)

    def val_dataloader(self) -> DataLoader:
        batches = self.grouped(list(self.dev_texts))
        return DataLoader(KeptStates(self.store, self.dev_texts, batches), batch_size=None, shuffle=False)

    def grouped(self, names: list[str], draw: np.random.Generator | None = None, world: int = 1) -> list[list[str]]:
        """Group all names into batches of about equal length for `world` processes; in random order if `draw` is given,
        else by length."""
        noise = np.zeros(len(names)) if draw is None else draw.normal(0, 0.15, len(names))
        lengths = [self.store.length(name) for name in names]
        order = sorted(range(len(names)), key=lambda at: np.log(lengths[at]) + noise[at])
        batches = [[names[at] for at in batch] for batch in sized_batches(order, lengths, self.batch_states * world)]
        return batches if draw is None else [batches[at] for at in draw.permutation(len(batches))]


class SentenceData(StoredBatches, LightningDataModule):
    """A data module: sentence recordings as stored encoder states, with their transcripts.

    corpus: manifest or folder, as `read_utterances` takes it.
    encoder: name, folder or hub id of a Whisper, wav2vec 2.0, HuBERT or similar model. Its width is the head's
        `d_states`.
    states: folder where the encoder states are stored. Missing states are computed first, so a corpus may grow between
        runs.
    pieces: the tokenizer's file. If it does not exist, a tokenizer with `count` pieces is learned from the training
        sentences of `text` (folders of text pairs) and saved there.
    views: number of versions of each recording. 1: one distorted version; 2: also the undistorted recording; above 2:
        also further distorted versions.
    batch_states: the most encoder states in one process's batch, padding included.
    limit: use only the first `limit` training recordings; None: all.
    top: number of last Whisper layers that are trained together with the head; the stored states are taken before them.
    """

    def __init__(
        self,
        corpus: str,
        encoder: str,
        states: str,
        pieces: str,
        text: list[str],
        top: int = 0,
        count: int = 1001,
        train_split: str = "train",
        dev_split: str = "dev",
        views: int = 1,
        distortion: Distortion | None = None,
        batch_states: int = 4000,
        steps_per_epoch: int = 200,
        limit: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.corpus, self.encoder, self.top, self.views = corpus, encoder, top, views
        self.folder = Path(states) / f"below_{top}" if top else Path(states)
        self.distortion = distortion or Distortion()
        self.splits, self.limit = (train_split, dev_split), limit
        self.batch_states, self.steps_per_epoch, self.seed = batch_states, steps_per_epoch, seed
        self.text = text
        self.texts: dict[str, list[int]] = {}
        self.pieces = Pieces.kept(Path(pieces), self._sentences, count, HEARD)

    def _sentences(self) -> Iterator[str]:
        return (heard(pair.source) for pairs in read_training_pairs(self.text) for pair in pairs)

    @property
    def units(self) -> list[str]:
        """Return the pieces, ordered by id. The command line passes them to the model."""
        return self.pieces.names

    def rows(self, split: str) -> list[Utterance]:
        """List the recordings of a split whose transcript is not empty. The training split has at most `limit` of them,
        and none that a folder in `text` holds out for dev or test."""
        rows = [row for row in read_utterances(self.corpus, split) if self.pieces.encode(heard(row.text))]
        if split != self.splits[0]:
            return rows
        held = held_sources(self.text)
        return [row for row in rows if sentence_key(row.text) not in held][: self.limit]

    def prepare_data(self) -> None:
        """Compute the missing states in one process only: two processes would corrupt the store's files."""
        self.setup("fit")

    def setup(self, stage: str) -> None:
        if self.texts:
            return
        train, dev = (self.rows(split) for split in self.splits)
        views = (*range(1, max(self.views, 2)), *([0] if self.views > 1 else []))
        train_views = [(row, view) for view in views for row in train]
        encoder = load_speech_encoder(self.encoder, self.top)
        self.store = keep_states([*((row, 0) for row in dev), *train_views], encoder, self.folder, self.distortion)
        self.texts = {state_name(row, view): self.pieces.encode(heard(row.text)) for row, view in train_views}
        self.dev_texts = {state_name(row, 0): self.pieces.encode(heard(row.text)) for row in dev}
