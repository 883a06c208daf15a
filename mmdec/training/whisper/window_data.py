"""Batches of Whisper's windows for training, and those of the development split."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader, Dataset
from transformers import WhisperTokenizer

from mmdec.training.corpora.admission import MAX_BAD_SHARE, Admission, BadRows, check_apart
from mmdec.training.corpora.librispeech import Utterance, read_splits, read_utterances
from mmdec.training.inspection import seconds_of
from mmdec.training.options import token_list
from mmdec.training.whisper.tokenizer import END, build_tokenizer
from mmdec.training.whisper.windows import (
    PLAIN,
    SECONDS,
    Batch,
    Composed,
    Composition,
    Window,
    chapters_of,
    collate,
    compose,
    plan_windows,
)
from mmdec.types import InputError

SHORTEST = 4.0  # seconds: most sentences fit


class Windows(Dataset[Composed]):
    """Composed where they are asked for."""

    def __init__(self, utterances: Sequence[Utterance], tokenizer: WhisperTokenizer, how: Composition) -> None:
        self.utterances, self.tokenizer, self.how = utterances, tokenizer, how

    def __getitem__(self, window: Window) -> Composed:
        return compose(window, self.utterances, self.tokenizer, self.how)

    def collate(self, items: Sequence[Composed]) -> Batch:
        return collate(items, int(self.tokenizer.convert_tokens_to_ids(END)))  # type: ignore[arg-type] # one for one


class WindowData(LightningDataModule):
    """Windows of up to 30 s from a corpus of utterances in chapters.

    corpus: as `read_utterances` takes it. train_split: one or several. tokenizer: a folder; where it is empty, one of
    `pieces` is learned from the training text and kept there. batch_seconds: sound in a batch of one process. lengths:
    (epoch, seconds) pairs: from that epoch on, windows are up to so long. whole: share of the batches that are padded
    to 30 s. longer: below 1, long windows are drawn more often than short ones. max_bad_share, allow_absolute_paths:
    see `Admission`.
    """

    def __init__(
        self,
        corpus: str,
        tokenizer: str,
        train_split: str | list[str] = "train",
        pieces: int = 800,
        batch_seconds: float = 90.0,
        steps_per_epoch: int = 100,
        lengths: Sequence[tuple[int, float]] = ((0, 30.0),),
        whole: float = 0.25,
        longer: float = 1.0,
        composition: Composition | None = None,
        dev_windows: int = 48,
        workers: int = 0,
        seed: int = 0,
        max_bad_share: float = MAX_BAD_SHARE,
        allow_absolute_paths: bool = False,
    ) -> None:
        super().__init__()
        self.admission = Admission(allow_absolute_paths, max_bad_share)
        self.corpus, self.batch_seconds, self.steps_per_epoch = corpus, batch_seconds, steps_per_epoch
        self.lengths, self.whole, self.composition = (
            [(int(a), float(b)) for a, b in lengths],
            whole,
            composition or Composition(),
        )
        self.dev_windows, self.workers, self.seed, self.longer = dev_windows, workers, seed, longer
        if not self.lengths or self.lengths[0][0] != 0 or any(not 0 < b <= SECONDS for _, b in self.lengths):
            raise InputError(
                f"`lengths` must begin at epoch 0 and be up to {SECONDS} s, but is {lengths}. Set [[0, 30]]."
            )
        self.train_rows = read_splits(corpus, train_split, self.admission)
        self.dev_rows = read_utterances(corpus, "dev", self.admission)
        check_utterances_apart(self.train_rows, self.dev_rows)
        self.tokenizer = kept_tokenizer(Path(tokenizer), self.train_rows, pieces)

    @property
    def units(self) -> list[str]:
        """The tokens by their number: what the model must know of the data."""
        return token_list(self.tokenizer)

    def prepare_data(self) -> None:
        """Durations, once for all ranks."""
        self._seconds()

    def _seconds(self) -> list[list[float]]:
        """Of the rows to train on, and of those for development."""
        root = Path(self.corpus)
        kept = root if root.is_dir() else root.parent
        named = (("train", self.train_rows), ("dev", self.dev_rows))
        return [durations(rows, kept, self.admission, f"{part} recordings in '{root}'") for part, rows in named]

    def setup(self, stage: str) -> None:
        self.train_seconds, heard = self._seconds()
        self.dev_order = [row for row, seconds in enumerate(heard) if seconds > 0]
        chapters = ([row for row in chapter if self.train_seconds[row] > 0] for chapter in chapters_of(self.train_rows))
        self.chapters = [chapter for chapter in chapters if chapter]
        if not self.chapters or not self.dev_order:
            raise InputError(
                f"`corpus` must hold usable recordings in both splits, but '{self.corpus}' has none in one. Check them."
            )

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        epoch, rank = self.trainer.current_epoch, self.trainer.global_rank
        longest = [seconds for begin, seconds in self.lengths if begin <= epoch][-1]
        # All processes take batches of one length, for they wait for each other.
        shared, own = np.random.default_rng([self.seed, epoch]), np.random.default_rng([self.seed, epoch, 1 + rank])
        batches = []
        for _ in range(self.steps_per_epoch):
            shortest = min(SHORTEST, longest)
            length = shortest + (longest - shortest) * shared.random() ** self.longer
            whole = shared.random() < self.whole
            padded = SECONDS if whole else min(SECONDS, length + shared.uniform(0.3, 2.0))
            batches.append(
                plan_windows(
                    self.chapters, self.train_seconds, own, self.batch_seconds, length, padded, self.composition.pause
                )
            )
        dataset = Windows(self.train_rows, self.tokenizer, self.composition)
        return DataLoader(dataset, batch_sampler=batches, collate_fn=dataset.collate, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader:
        """Paragraphs of the development split, the same each time: no noise of ours, padded to 30 s, without times."""
        assert self.trainer is not None
        draw = np.random.default_rng([self.seed, 1])
        dataset = Windows(self.dev_rows, self.tokenizer, replace(PLAIN, pause=self.composition.pause))
        order = draw.permutation(self.dev_order).tolist()
        windows = [
            Window(tuple(order[(8 * number + item) % len(order)] for item in range(8)), number, SECONDS)
            for number in range(self.dev_windows)
        ]
        mine = windows[self.trainer.global_rank :: self.trainer.world_size]
        batches = [mine[start : start + 12] for start in range(0, len(mine), 12)]
        return DataLoader(dataset, batch_sampler=batches, collate_fn=dataset.collate)


def check_utterances_apart(train: Sequence[Utterance], dev: Sequence[Utterance]) -> None:
    """Raise InputError where a recording is both trained on and developed on, under whatever name."""
    both = ((os.path.realpath(row.path) for row in rows) for rows in (train, dev))
    check_apart(both, "recordings", "Name splits that do not overlap.")


def data_options(recipe: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a recipe's data, as its class takes them."""
    options = dict(recipe["data"]["init_args"])
    if options.get("composition") is not None:
        options["composition"] = Composition(**options["composition"])
    return options


def kept_tokenizer(folder: Path, rows: Sequence[Utterance], pieces: int) -> WhisperTokenizer:
    """The one in `folder`, or one learned from `rows` and kept there."""
    if not (folder / "tokenizer.json").is_file():
        tokenizer = build_tokenizer(sorted({row.text for row in rows}), pieces)
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(folder)
        (folder / "normalizer.json").write_text("{}\n", encoding="utf-8")
    return WhisperTokenizer.from_pretrained(folder)


def durations(rows: Sequence[Utterance], kept: Path, admission: Admission, of: str) -> list[float]:
    """Seconds of each utterance; NaN, which fits nowhere, of one that cannot be used. Those are named and counted.

    kept: a folder for what was found. of: what the rows are called. Raises InputError where too many are bad.
    """
    found, bad = seconds_of([row.path for row in rows], kept), BadRows()
    for row, value in zip(rows, found, strict=True):
        if isinstance(value, str):
            bad.add(value, f"{row.path.name} in {row.place}")
    if bad.count:
        admission.check(bad, len(rows), of, rule="hold usable recordings")
        rank_zero_info(f"{bad.count} of the {len(rows)} {of} left out: {bad.report()}")
    return [math.nan if isinstance(value, str) else value for value in found]
