"""DASpeech's training data: the corpus as tensors in reproducible batches.

The batches of an epoch follow from (seed, epoch) only. So a training that was killed and resumed has the same batches,
and losses, as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from mmdec.checks.files import atomic_file, quote_path, write_atomically
from mmdec.daspeech.acoustic import AcousticBatch
from mmdec.daspeech.training.acoustic import EnglishSpeech, acoustic_batch
from mmdec.daspeech.units import BOS, EOS, PAD, UNK
from mmdec.errors import MmdecError
from mmdec.io import audio
from mmdec.phonetics.lexicon import PAUSE_PHONE
from mmdec.training.corpora.admission import MAX_BAD_SHARE, Admission, BadRows, check_apart
from mmdec.training.corpora.cvss import (
    SpeechPair,
    no_rows_error,
    normalise_source,
    read_pairs,
    read_translations,
    unify_targets,
    vocabulary,
)
from mmdec.training.processes import end_with_parent

_FORMAT = 1  # version in the cache folder's name; after a change, features are computed again


def extract(clip: str) -> np.ndarray | str:
    """Compute the filterbank features (N, 80) fp16 of one recording.

    If that is impossible, return the reason, a text.
    """
    try:
        # these are the features that a finished model reads, too
        features = audio.fbank(audio.trim_silence(audio.load_audio(clip)))
    except MmdecError as error:
        return str(error)
    if features.shape[0] < 8 or not bool(torch.isfinite(features).all()):
        return "too short or not finite"
    return features.to(torch.float16).numpy()


def begin_worker(parent: int) -> None:
    """Prepare a worker process: it uses one thread, and ends when the process with the id `parent` ends."""
    end_with_parent(parent)
    torch.set_num_threads(1)


def extract_all(clips: Sequence[Path], jobs: int) -> Iterator[np.ndarray | str]:
    """Compute the features of recordings, in order.

    Args:
        clips: The recordings' files.
        jobs: Number of processes.

    Yields:
        Features (N, 80), or the reason why there are none.
    """
    names = map(str, clips)
    if jobs <= 1:
        yield from map(extract, names)
        return
    with ProcessPoolExecutor(jobs, initializer=begin_worker, initargs=(os.getpid(),)) as pool:
        yield from pool.map(extract, names, chunksize=32)


class FilterbankStore:
    """Filterbank features of a list of recordings, in one file on disk: store[i] has those (N, 80) of recording i.

    If there is no file, `jobs` processes compute it. The attribute `lengths` has the number of frames of each
    recording, 0 for a bad recording; `reasons` maps the name of a bad recording to what is wrong with it.
    """

    def __init__(self, folder: Path, clips: Sequence[Path], jobs: int) -> None:
        self.folder = self.cache_folder(folder, clips)
        index_file = self.folder / "index.json"
        if not index_file.is_file():
            self._build(clips, jobs)
        index = json.loads(index_file.read_text(encoding="utf-8"))
        written = index_file.stat().st_mtime_ns
        if any(clip.name in index["bad"] and clip.stat().st_mtime_ns > written for clip in clips):
            self._build(clips, jobs)  # the file of a recording that was bad has changed since: try it again
            index = json.loads(index_file.read_text(encoding="utf-8"))
        self.lengths = np.asarray(index["lengths"], dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self.reasons: dict[str, str] = index["bad"]
        stored = self.folder / "fbank.f16"  # an empty file (all recordings are bad) cannot be memory-mapped
        empty = stored.stat().st_size == 0
        data = np.zeros(0, np.float16) if empty else np.memmap(stored, np.float16, "r")
        self.data = data.reshape(-1, audio.MELS)

    @staticmethod
    def cache_folder(folder: Path, clips: Sequence[Path]) -> Path:
        """Return the folder for the features of these recordings.

        Its name is a hash of the recordings' names and sizes.
        """
        digest = hashlib.blake2b("\n".join(f"{c.name} {c.stat().st_size}" for c in clips).encode(), digest_size=8)
        return folder / f"{_FORMAT}-{digest.hexdigest()}"

    @classmethod
    def ready(cls, folder: Path, clips: Sequence[Path]) -> bool:
        """Return whether the features of these recordings are stored already."""
        return (cls.cache_folder(folder, clips) / "index.json").is_file()

    def _build(self, clips: Sequence[Path], jobs: int) -> None:
        lengths, bad = [], {}
        with atomic_file(self.folder / "fbank.f16") as file:
            for clip, features in zip(clips, extract_all(clips, jobs), strict=True):
                if isinstance(features, str):
                    bad[clip.name] = features
                    lengths.append(0)
                else:
                    file.write(features.tobytes())
                    lengths.append(len(features))
        write_atomically(self.folder / "index.json", json.dumps({"lengths": lengths, "bad": bad}).encode())

    def __getitem__(self, index: int) -> Tensor:
        part = self.data[self.starts[index] : self.starts[index + 1]]
        return torch.from_numpy(part.astype(np.float32))


CHARACTERS = " abcdefghijklmnopqrstuvwxyzàâæçèéêëîïôœùûüÿ'-"  # the CTC head's classes, from 1; class 0 is the blank


@dataclass
class SpeechBatch:
    """A training batch of B items: source speech, phones of the translation, and the source sentence."""

    features: Tensor  # (B, N, 80) filterbank features of the source speech, padded with 0
    lengths: Tensor  # (B,) number of frames of each item
    units: Tensor  # (B, M) ids of the phones, with <s> and </s>, padded with <pad>
    unit_lengths: Tensor  # (B,) number of phones, <s> and </s> included
    text: Tensor  # (B, C) characters of the source sentence, as indices from 1 into `CHARACTERS`, padded with 0
    text_lengths: Tensor  # (B,) number of characters
    rows: list[tuple[int, ...]]  # indices of the dataset's rows that are joined in each item
    acoustic: AcousticBatch | None = None  # the acoustic model's targets; None unless it is trained jointly


@dataclass(frozen=True)
class Item:
    """One training item: an utterance, or several that are joined with pauses between them."""

    features: Tensor  # (N, 80) filterbank features
    units: list[int]  # ids of the phones, without <s> and </s>
    text: list[int]  # the characters of the source sentence, as indices from 1 into `CHARACTERS`
    rows: tuple[int, ...]  # indices of the dataset's rows whose recordings are joined in this item
    phones: Tensor | None  # (3, K) duration in frames, pitch in Hz and energy of the English phones and </s>
    mel: Tensor | None  # (F, 80) mel of the English speech, natural logarithms


class SpeechDataset(Dataset[Item]):
    """A dataset indexed by tuples of row numbers.

    The rows of a tuple are joined to one item, with pauses.

    Args:
        store: Features of the source speech.
        indices: The index in `store` of each row's features.
        units: The vocabulary.
        english: Acoustic targets of the rows' English speech; only needed to train the acoustic model jointly.
    """

    def __init__(
        self,
        rows: Sequence[SpeechPair],
        store: FilterbankStore,
        indices: Sequence[int],
        units: Sequence[str],
        english: EnglishSpeech | None = None,
    ) -> None:
        self.rows = list(rows)
        self.store = store
        self.indices = list(indices)
        index = {unit: number for number, unit in enumerate(units)}
        letters = {letter: number for number, letter in enumerate(CHARACTERS, start=1)}
        self.pause = [index[PAUSE_PHONE]] if PAUSE_PHONE in index else []
        self.units = [[index.get(unit, UNK) for unit in row.units] for row in self.rows]
        self.text = [
            [letters[letter] for letter in normalise_source(row.source_text) if letter in letters] for row in self.rows
        ]
        self.lengths = [int(store.lengths[index]) for index in self.indices]
        self.english = english
        if english is not None:
            english_clips = english.by_key()
            self.spoken = [english_clips[row.translation, tuple(row.units)] for row in self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: tuple[int, ...]) -> Item:
        features = torch.cat([self.store[self.indices[number]] for number in item])
        units, text = list(self.units[item[0]]), list(self.text[item[0]])
        for number in item[1:]:
            units += self.pause + self.units[number]
            text += [1, *self.text[number]]
        phones = mel = None
        if self.english is not None:
            phones, mel = self.english.join([self.spoken[number] for number in item], bool(self.pause))
        return Item(features, units, text, item, phones, mel)


def collate(items: Sequence[Item]) -> SpeechBatch:
    """Make a batch: put <s> and </s> around the phones, and pad everything to the longest item."""
    targets = [torch.tensor([BOS, *item.units, EOS]) for item in items]
    text = [torch.tensor(item.text, dtype=torch.long) for item in items]
    acoustic = None
    if items[0].phones is not None:
        phones = [item.phones.T for item in items if item.phones is not None]
        acoustic = acoustic_batch(phones, [item.mel for item in items if item.mel is not None])
    return SpeechBatch(
        pad_sequence([item.features for item in items], batch_first=True),
        torch.tensor([len(item.features) for item in items]),
        pad_sequence(targets, batch_first=True, padding_value=PAD),
        torch.tensor([len(row) for row in targets]),
        pad_sequence(text, batch_first=True),
        torch.tensor([len(row) for row in text]),
        [item.rows for item in items],
        acoustic,
    )


def draw_batches(
    lengths: Sequence[int],
    batch_size: int,
    steps: int,
    seed: int,
    epoch: int,
    concatenate: float,
    rank: int,
    world: int,
) -> list[list[tuple[int, ...]]]:
    """Draw one epoch's `steps` batches for process `rank` of `world`.

    Args:
        lengths: Number of frames of each row. A batch has items of similar length.
        batch_size: Number of items in one process's batch.
        concatenate: Share of the items that join two rows.

    Returns:
        For each batch its items: tuples of row numbers to join.
    """
    generator = np.random.default_rng([seed, epoch])
    count = steps * world * batch_size
    rounds = [generator.permutation(len(lengths)) for _ in range(-(-2 * count // len(lengths)))]
    numbers = np.concatenate(rounds).tolist()
    is_joined = generator.random(count) < concatenate
    items = [(numbers.pop(), numbers.pop()) if join else (numbers.pop(),) for join in is_joined]
    items.sort(key=lambda item: sum(lengths[number] for number in item))
    batches = [items[start : start + batch_size] for start in range(0, count, batch_size)]
    # at each step all processes get items of similar length, so that none waits for another
    groups = [batches[start : start + world] for start in range(0, len(batches), world)]
    return [groups[number][rank] for number in generator.permutation(len(groups))]


class SpeechTranslationData(LightningDataModule):
    """A data module for the corpus CVSS with Common Voice, or for the phrasebook corpus, which has the same format.

    Args:
        common_voice: Folder of Common Voice.
        cvss: Folder of CVSS.
        rendering: "all": each row's own translation; "canonical": the same translation for all rows with the same
            source sentence.
        concatenate: Share of items that join two utterances.
        steps_per_epoch: Number of steps in an epoch; a checkpoint may be written after each epoch.
        max_frames: Leave out rows with more frames of source speech.
        jobs: Number of processes that compute features.
        upsample: Vertices per frame of the model's graph. Rows whose target does not fit in the graph are left out.
        min_vertices: Minimum number of vertices of a graph.
        acoustic: Also load acoustic targets of the English speech, to train the acoustic model jointly.
        limit: Use only the first `limit` training rows; features are computed for these only.
        max_bad_share: The largest share of rows that may be bad.
        allow_absolute_paths: Allow files outside the folders.
    """

    def __init__(
        self,
        common_voice: str = "data/corpus/cv/fr",
        cvss: str = "data/corpus/cvss_c",
        batch_size: int = 32,
        steps_per_epoch: int = 100,
        rendering: str = "all",
        concatenate: float = 0.0,
        upsample: float = 0.5,
        min_vertices: int = 2,
        max_frames: int = 2048,
        acoustic: bool = False,
        seed: int = 0,
        jobs: int = 2,
        validation_rows: int = 200,
        validation_split: str = "dev",
        limit: int | None = None,
        max_bad_share: float = MAX_BAD_SHARE,
        allow_absolute_paths: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.admission = Admission(allow_absolute_paths, max_bad_share)
        self.limit = limit
        self.common_voice, self.cvss = Path(common_voice), Path(cvss)
        self.batch_size, self.steps_per_epoch = batch_size, steps_per_epoch
        self.rendering, self.concatenate, self.seed, self.jobs = rendering, concatenate, seed, jobs
        self.upsample, self.min_vertices, self.max_frames = upsample, min_vertices, max_frames
        self.acoustic = acoustic
        self.validation_rows, self.validation_split = validation_rows, validation_split
        self.bad = BadRows()
        self.train_set: SpeechDataset | None = None
        self.validation_set: SpeechDataset | None = None

    @cached_property
    def units(self) -> list[str]:
        """The vocabulary: the special tokens, and the phones of the training split's alignments."""
        return vocabulary(read_pairs(self.common_voice, self.cvss, "train", admission=self.admission)[0])

    def prepare_data(self) -> None:
        """Check that the splits share no recordings, and compute missing features.

        Lightning calls this in one process only.
        """
        splits = ("train", self.validation_split)
        names = ([name for name, _ in read_translations(self.cvss, split, self.admission)] for split in splits)
        check_apart(names, "recordings", "Remove them from train.tsv.")
        for split in splits:
            self._dataset(split, BadRows())

    def _dataset(self, split: str, bad: BadRows, limit: int | None = None) -> SpeechDataset:
        """Make the dataset of a split's usable rows; the others are counted in `bad` with the reason."""
        rows, bad_rows = read_pairs(self.common_voice, self.cvss, split, admission=self.admission)
        table, unread = f"rows of '{quote_path(self.cvss / f'{split}.tsv')}'", BadRows()
        self.admission.check(bad_rows, len(rows) + bad_rows.count, table)
        max_rows = self.limit if split == "train" else None
        rows = rows[:max_rows]
        store = FilterbankStore(self.cvss.parent / "cache" / split, [row.clip for row in rows], self.jobs)
        indices = {row.name: number for number, row in enumerate(rows)}
        if self.rendering == "canonical":
            rows = unify_targets(rows)
        english = EnglishSpeech(self.cvss, split, max_rows, self.admission) if self.acoustic else None
        english_clips = english.by_key() if english is not None else None
        usable = []
        for row in rows:
            frames = int(store.lengths[indices[row.name]])
            if frames == 0:
                reason = store.reasons.get(row.clip.name, "").partition(", but ")[0]
                unread.add(f"source recording unusable: {reason}", row.name)
            elif reason := self.exclusion_reason(row, frames):
                bad.add(reason, row.name)
            elif english_clips is not None and (row.translation, tuple(row.units)) not in english_clips:
                unread.add("no acoustic targets", row.name)
            else:
                usable.append(row)
        for reason, name in (*bad_rows, *unread):
            bad.add(reason, name)
        if not usable:
            raise no_rows_error(split, bad)
        self.admission.check(unread, len(rows), table)
        usable = usable[:limit]
        return SpeechDataset(usable, store, [indices[row.name] for row in usable], self.units, english)

    def exclusion_reason(self, row: SpeechPair, frames: int) -> str | None:
        """Return the reason why a row is left out of training; None if it is used.

        Args:
            frames: The length of its source speech.
        """
        if frames > self.max_frames:
            return f"longer than {self.max_frames} frames"
        vertices = max(int(self.upsample * frames), self.min_vertices)
        return "text does not fit the graph" if len(row.units) + 2 > vertices else None

    def setup(self, stage: str) -> None:
        if self.train_set is None:
            self.train_set = self._dataset("train", self.bad)
            self.validation_set = self._dataset(self.validation_split, self.bad, self.validation_rows)
            rank_zero_info(f"corpus: {len(self.train_set)} training rows, {self.bad.count} left out")
            if self.bad.count:
                rank_zero_info(self.bad.report())

    def train_dataloader(self) -> DataLoader[SpeechBatch]:
        assert self.train_set is not None
        assert self.trainer is not None
        batches = draw_batches(
            self.train_set.lengths,
            self.batch_size,
            self.steps_per_epoch,
            self.seed,
            self.trainer.current_epoch,
            self.concatenate,
            self.trainer.global_rank,
            self.trainer.world_size,
        )
        # Any: torch types a loader by the dataset's items, but this loader yields the batches that `collate` makes.
        loader: Any = DataLoader(self.train_set, batch_sampler=batches, collate_fn=collate)
        return loader

    def val_dataloader(self) -> DataLoader[SpeechBatch]:
        assert self.validation_set is not None
        assert self.trainer is not None
        numbers = range(self.trainer.global_rank, len(self.validation_set), self.trainer.world_size)
        lengths = self.validation_set.lengths
        items = sorted(((number,) for number in numbers), key=lambda item: lengths[item[0]])
        batches = [items[start : start + 16] for start in range(0, len(items), 16)]
        loader: Any = DataLoader(self.validation_set, batch_sampler=batches, collate_fn=collate)
        return loader
