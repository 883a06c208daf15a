"""Batches of Whisper's windows for training, and those of the development split."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import WhisperTokenizer

from mmdec.audio import sound_seconds
from mmdec.checks.errors import InputError
from mmdec.checks.files import write_whole
from mmdec.corpora.librispeech import Utterance, read_splits, read_utterances
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

SHORTEST = 4.0  # seconds: most sentences fit


class Windows(Dataset[Composed]):
    """Composed where they are asked for."""

    def __init__(self, utterances: Sequence[Utterance], tokenizer: WhisperTokenizer, how: Composition) -> None:
        self.utterances, self.tokenizer, self.how = utterances, tokenizer, how

    def __getitem__(self, window: Window) -> Composed:
        return compose(window, self.utterances, self.tokenizer, self.how)

    def collate(self, items: Sequence[Composed]) -> Batch:
        return collate(items, int(self.tokenizer.convert_tokens_to_ids(END)))  # type: ignore[arg-type] # one for one


class Plan(Sampler[list[Window]]):
    """The batches of one epoch, planned."""

    def __init__(self, batches: Sequence[list[Window]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Window]]:
        return iter(self.batches)


class WindowData(LightningDataModule):
    """Windows of up to 30 s from a corpus of utterances in chapters.

    corpus: as `read_utterances` takes it. train_split: one or several. tokenizer: a folder; where it is empty, one of
    `pieces` is learned from the training text and kept there. batch_seconds: sound in a batch of one process. lengths:
    (epoch, seconds) pairs: from that epoch on, windows are up to so long. whole: share of the batches that are padded
    to 30 s. longer: below 1, long windows are drawn more often than short ones.
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
    ) -> None:
        super().__init__()
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
        self.train_rows = read_splits(corpus, train_split)
        self.dev_rows = read_utterances(corpus, "dev")
        self.tokenizer = kept_tokenizer(Path(tokenizer), self.train_rows, pieces)

    @property
    def units(self) -> list[str]:
        """The tokens by their number: what the model must know of the data."""
        return token_list(self.tokenizer)

    def setup(self, stage: str) -> None:
        self.train_seconds = durations(self.train_rows, Path(self.corpus))
        self.chapters = list(chapters_of(self.train_rows))

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
        return DataLoader(dataset, batch_sampler=Plan(batches), collate_fn=dataset.collate, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader:
        """Paragraphs of the development split, the same each time: no noise of ours, padded to 30 s, without times."""
        assert self.trainer is not None
        draw = np.random.default_rng([self.seed, 1])
        dataset = Windows(self.dev_rows, self.tokenizer, replace(PLAIN, pause=self.composition.pause))
        order = draw.permutation(len(self.dev_rows)).tolist()
        windows = [
            Window(tuple(order[(8 * number + item) % len(order)] for item in range(8)), number, SECONDS)
            for number in range(self.dev_windows)
        ]
        mine = windows[self.trainer.global_rank :: self.trainer.world_size]
        batches = [mine[start : start + 12] for start in range(0, len(mine), 12)]
        return DataLoader(dataset, batch_sampler=Plan(batches), collate_fn=dataset.collate)


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


def durations(rows: Sequence[Utterance], root: Path) -> list[float]:
    """Seconds of each utterance, kept beside the corpus once measured."""
    digest = hashlib.blake2b("\n".join(str(row.path) for row in rows).encode(), digest_size=8).hexdigest()
    kept = (root if root.is_dir() else root.parent) / f".durations-{digest}.json"
    if kept.is_file():
        return json.loads(kept.read_text(encoding="utf-8"))
    seconds = [round(sound_seconds(row.path), 3) for row in rows]
    write_whole(kept, json.dumps(seconds).encode())
    return seconds
