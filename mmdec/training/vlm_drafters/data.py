"""Training data of drafters: a corpus's questions with the answers that the target gives."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel

from mmdec.training.checkpoints import check_counts, token_list
from mmdec.training.corpora.admission import MAX_BAD_SHARE, Admission, check_apart
from mmdec.training.stores import TokenStore
from mmdec.training.vlm_drafters.samples import Choice, Inputs, Prompting, Questions, Sample, read_samples
from mmdec.training.vlm_drafters.teacher import ReadingStore, Teacher, load_target, writer_number
from mmdec.types import InputError, Needs


@dataclass(frozen=True)
class Ramp:
    """The share of samples with pictures in each of `epochs`: 0 in the first half, then rising, 1 in the last epoch.

    With the 40 epochs of MSD's paper: 0 up to epoch 20, then 2 (epoch - 20) / 40, which is .05 to .95, and 1 in epoch
    40.
    """

    epochs: int = 40

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise InputError(f"`epochs` must be at least 1, but is {self.epochs}. The paper has 40.")

    def share(self, epoch: int) -> float:
        """Return the share of samples with pictures in `epoch`, counted from 0 as in Lightning; 1 after the last."""
        number, half = epoch + 1, self.epochs / 2
        if number >= self.epochs:
            return 1.0
        return max(0.0, 2 * (number - half) / self.epochs)


@dataclass(frozen=True)
class DraftBatch:
    """B questions with their answers. rows: names of the samples. answers: the target's tokens. prompts: the target's
    input tensors; None if the features of all samples are stored, so that the target need not run."""

    rows: list[str]
    answers: list[list[int]]
    prompts: list[Inputs] | None

    def to(self, device: torch.device) -> DraftBatch:
        """Return the batch unchanged, because the teacher moves its own inputs to the device."""
        return self


class QuestionDataset(Dataset[tuple[Sample, Inputs | None]]):
    """A dataset of samples, each with the target's input tensors, or with None if its features are in `stored`."""

    def __init__(
        self,
        samples: Sequence[Sample],
        prompting: Prompting,
        answers: Callable[[Sample], list[int]],
        stored: Container[str],
    ) -> None:
        self.samples, self.prompting, self.answers, self.stored = samples, prompting, answers, stored

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> tuple[Sample, Inputs | None]:
        sample = self.samples[number]
        return sample, None if sample.name in self.stored else self.prompting(sample)

    def collate(self, items: Sequence[tuple[Sample, Inputs | None]]) -> DraftBatch:
        """Batch the items. If the features of one sample are missing, the input tensors of the whole batch are
        built."""
        if all(inputs is None for _, inputs in items):
            prompts = None
        else:
            prompts = [self.prompting(sample) if inputs is None else inputs for sample, inputs in items]
        return DraftBatch([sample.name for sample, _ in items], [self.answers(sample) for sample, _ in items], prompts)


TRAIN, MIXED, GROUPED = 5, 6, 7  # first numbers of seeds, so that each kind of random choice has its own generator
GROUP = 16  # number of batches whose samples are sorted by length together, so that a batch needs little padding


@dataclass(frozen=True)
class DraftDataOptions:
    """Options of `DraftData` that a recipe sets.

    samples: number of training questions; null: all. long_share: share of these with long answers; null: any answers.
    max_tokens: the most tokens of an answer. frames, history, images: see `Questions`.
    ramp: the share of samples with pictures in each epoch, which rises as in MSD; null: as in the corpus. If a corpus
        has only questions with pictures, these are also used without their pictures.
    base_dtype: dtype of the target. kept: folder where answers and features are stored. answered: train only on
        questions with a stored answer; false: the target first answers the other questions.
    answer_batch: number of questions answered at once.
    max_bad_share, allow_absolute_paths: see `Admission`.
    """

    train_split: str = "train"
    dev_split: str | None = "dev"
    samples: int | None = None
    dev_samples: int = 64
    long_share: float | None = None
    batch_size: int = 16
    steps_per_epoch: int | None = None
    max_tokens: int = 256
    frames: int = 8
    history: int = 2
    images: str | None = None
    ramp: Ramp | None = None
    base_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    kept: str = "runs/vlm_drafters/kept"
    answered: bool = False
    answer_batch: int = 32
    workers: int = 0
    seed: int = 0
    max_bad_share: float = MAX_BAD_SHARE
    allow_absolute_paths: bool = False

    def __post_init__(self) -> None:
        check_counts(batch_size=self.batch_size, dev_samples=self.dev_samples, max_tokens=self.max_tokens)
        check_counts(frames=self.frames, answer_batch=self.answer_batch)


class DraftData(LightningDataModule):
    """A data module: single questions of a corpus in the layout of llava_v1_5_mix665k, answered by the target.

    base: the target's folder, a vision-language or a language model. corpus: folder with {split}.json and images/; a
        row may have "video", a folder of frames in images/. options: fields of `DraftDataOptions`.
    """

    def __init__(self, base: str, corpus: str, **options: Any) -> None:
        super().__init__()
        self.options = DraftDataOptions(**options)
        self.admission = Admission(self.options.allow_absolute_paths, self.options.max_bad_share)
        self.base, self.corpus, self.kept = base, Path(corpus), Path(self.options.kept)
        self.batch_size, self.ramp, self.seed = self.options.batch_size, self.options.ramp, self.options.seed
        self.base_dtype: torch.dtype = getattr(torch, self.options.base_dtype)
        self.stored: Container[str] = ()  # names of samples whose features are stored: they need no input tensors

    # Files are read at first use: the command line's parser hides an error of `__init__` behind an error of its own.
    @cached_property
    def prompting(self) -> Prompting:
        return Prompting(self.base)

    @cached_property
    def model(self) -> PreTrainedModel:
        return load_target(self.base, self.base_dtype)

    @cached_property
    def teacher(self) -> Teacher:
        return Teacher(self.model)

    @property
    def target_name(self) -> str:
        """Return the name of the target's folder, or its hub id."""
        folder = Path(self.base)
        return folder.resolve().name if folder.is_dir() else self.base

    @cached_property
    def samples(self) -> dict[str, list[Sample]]:
        """Return the chosen questions of the splits "train" and "dev". Without `dev_split`, the last training questions
        are held out as "dev"."""
        many, few, options = self.options.samples, self.options.dev_samples, self.options
        if options.dev_split is not None:
            both = {"train": self._read(options.train_split, many), "dev": self._read(options.dev_split, few)}
            named = ([f"{one.question[:60]} ({one.name})" for one in both[split]] for split in ("train", "dev"))
            check_apart(named, "questions", "Name splits that do not overlap.")
            return both
        chosen = self._read(options.train_split, None if many is None else many + few)
        if len(chosen) <= few:
            raise InputError(
                f"`dev_samples` must leave questions to train on, but takes {few} of {len(chosen)}. Give fewer, "
                "or name a `dev_split`."
            )
        held = {sample.name for sample in chosen[-few:]}  # by name, because a question may be listed twice
        return {"train": [sample for sample in chosen[:-few] if sample.name not in held], "dev": chosen[-few:]}

    def _read(self, split: str, count: int | None) -> list[Sample]:
        choice = Choice(count, self.options.long_share, self.seed)
        images = None if self.options.images is None else Path(self.options.images)
        reading = Questions(self.options.frames, self.options.history, images)
        return read_samples(self.corpus, split, reading, choice, self.admission, self.kept)

    @property
    def units(self) -> list[str]:
        """Return the tokens, ordered by id. The command line passes them to every model."""
        return token_list(self.prompting.tokenizer)

    @property
    def mark(self) -> str:
        """Return the part of folder names that tells apart runs whose answers may differ: the target's hash, its dtype
        and the token limit."""
        return f"{self.teacher.name}-{str(self.base_dtype).removeprefix('torch.')}-{self.options.max_tokens}"

    def store(self, locks: ExitStack, rank: int = 0) -> TokenStore:
        """Open the store of the target's answers, whose keys are the samples' names. locks: until it is closed, no
        other run writes to the same file. rank: number of this process, which has a file of its own."""
        folder = self.kept / f"answers-{self.mark}"
        return TokenStore(folder, writer_number(folder, rank, locks))

    def feature_store(self, needs: Needs, half: bool, rank: int = 0) -> ReadingStore:
        """Open the store of the target's features, whose keys are the samples' names. needs: which features. half:
        compute them in bfloat16. rank: number of this process, which has files of its own."""
        named = "_".join(str(layer) for layer in needs.layers)
        named += ("" if needs.embeds else "-placeholders") + ("-half" if half else "")
        return ReadingStore(self.kept / f"features-{self.mark}-{named}", self.teacher, needs, half, rank)

    def regenerate(
        self,
        part: int = 0,
        parts: int = 1,
        device: str | torch.device | None = None,
        until: float = math.inf,
        shown: Callable[[int, int], None] | None = None,
    ) -> int:
        """Let the target answer the questions that have no stored answer yet; only part `part` of `parts` parts of
        them.

        Answers are stored at once, so an interrupted run can continue.

        until: the time, in seconds since 1970, after which no batch is begun. shown: is called with the number of
            answered questions and the number of all; None: progress is logged.
        Returns: the number of new answers.
        """
        if device is not None:
            self.model.to(device)  # type: ignore[call-arg] # pyright does not bind a decorated `to`
        fresh = 0
        with ExitStack() as locks:
            store = self.store(locks, part)
            questions = {sample.name: sample for sample in mixed_parts(self.samples["dev"], self.samples["train"])}
            missing = [sample for sample in questions.values() if store.get(sample.name) is None][part::parts]
            # Sort by expected length within groups only, so that a run out of time does not have short answers only.
            size = GROUP * self.options.answer_batch
            groups = [missing[begin : begin + size] for begin in range(0, len(missing), size)]
            missing = [sample for group in groups for sample in sorted(group, key=lambda sample: sample.words)]
            line = None if shown else "the target has answered {} of {} questions"
            for batch in _batches(missing, self.options.answer_batch, line):
                if fresh and time.time() >= until:
                    break
                answers = self.teacher.answer([self.prompting(sample) for sample in batch], self.options.max_tokens)
                store.add({sample.name: tokens for sample, tokens in zip(batch, answers, strict=True)})
                fresh += len(batch)
                if shown is not None:
                    shown(len(questions) - len(missing) + fresh, len(questions))
        return fresh

    def keep_features(self, needs: Needs, half: bool, part: int = 0, parts: int = 1) -> int:
        """Compute and store the features that are not stored yet; only part `part` of `parts` parts of the samples.

        A training run with the option `keep_features` does the same batch by batch. All drafters with the same `needs`
        and `half` can use the stored features. Returns: the number of samples that were computed.
        """
        self.setup("fit")
        store = self.feature_store(needs, half, part)
        rows = [sample for split in ("dev", "train") for sample in self.parts[split]]
        rows += self.text_samples() if self.ramp is not None else []
        missing = [sample for sample in rows if sample.name not in store][part::parts]
        missing.sort(key=self._length)
        for batch in _batches(missing, self.options.answer_batch, "the target has read {} of {} answers"):
            names = [sample.name for sample in batch]
            store.read(names, [self.prompting(sample) for sample in batch], [self._answer(sample) for sample in batch])
        return len(missing)

    def prepare_data(self) -> None:
        """Let the target answer questions without a stored answer, in one process only. Large targets take long: run
        `python -m mmdec.training.vlm_drafters.regenerate` in several processes before."""
        if self.options.answered:
            return
        on_gpu = torch.cuda.is_available() and (
            self.trainer is None or self.trainer.strategy.root_device.type == "cuda"
        )
        self.regenerate(device="cuda" if on_gpu else None)

    def setup(self, stage: str) -> None:
        with ExitStack() as locks:
            self.tokens = self.store(locks).tokens
        for split, chosen in self.samples.items():
            rank_zero_info(f"{split}: {len(chosen)} questions")
            answered = [sample for sample in chosen if sample.name in self.tokens]
            if len(answered) < len(chosen) and not self.options.answered:
                raise InputError(
                    f"`kept` must hold the target's answers, but lacks {len(chosen) - len(answered)} of {len(chosen)}. "
                    "Run python -m mmdec.training.vlm_drafters.regenerate first."
                )
        # The target itself gives the first token; an answer of one token leaves nothing to draft.
        self.parts = {
            split: [sample for sample in rows if len(self.tokens.get(sample.name, ())) > 1]
            for split, rows in self.samples.items()
        }
        for split, rows in self.parts.items():
            if not rows:
                raise InputError(
                    f"`corpus` must have questions that the model answers with two tokens or more, but {split} has "
                    "none. Ask it with `mmdec describe`."
                )

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        samples, batches = self.plan(self.trainer.current_epoch, self.trainer.global_rank, self.trainer.world_size)
        return self._loader(samples, batches)

    def val_dataloader(self) -> DataLoader[Any]:
        """Load every n-th question in each of n processes. The longest answers are batched together."""
        assert self.trainer is not None
        rows = self.parts["dev"]
        order = sorted(range(len(rows)), key=lambda index: (len(self.tokens[rows[index].name]), index))
        indices = order[self.trainer.global_rank :: self.trainer.world_size]
        return self._loader(
            rows,
            [indices[start : start + self.batch_size] for start in range(0, len(indices), self.batch_size)],
        )

    def plan(self, epoch: int, rank: int = 0, world: int = 1) -> tuple[list[Sample], list[list[int]]]:
        """Return the samples, and the batches of process `rank` of `world` in `epoch` (from 0) as lists of their
        indices.

        Samples with pictures are one endless sequence: all of them, shuffled, again and again. Text-only samples are
        another. Each epoch takes the next samples of both, in the ramp's share. A batch has samples of about equal
        length. Every process gets the same number of batches.
        """
        visual = [sample for sample in self.parts["train"] if sample.visual]
        text = self.text_samples()
        pool = visual + text
        size = self.batch_size * world
        count = size * (self.options.steps_per_epoch or max(len(self.parts["train"]) // size, 1))
        share = len(visual) / len(pool) if self.ramp is None else None
        counts = [
            round(count * (self.ramp.share(earlier) if self.ramp else share or 0.0)) for earlier in range(epoch + 1)
        ]
        visual_indices = self._row(len(visual), sum(counts[:-1]), counts[-1], 0)
        before = sum(count - drawn for drawn in counts[:-1])
        text_indices = [len(visual) + index for index in self._row(len(text), before, count - counts[-1], 1)]
        draw = np.random.default_rng([MIXED, self.seed, epoch])
        chosen = np.array(visual_indices + text_indices)[draw.permutation(count)].tolist()
        batches: list[list[int]] = []
        for first in range(0, count, GROUP * size):
            group = sorted(chosen[first : first + GROUP * size], key=lambda index: (self._length(pool[index]), index))
            batches += [group[start : start + self.batch_size] for start in range(0, len(group), self.batch_size)]
        # In one step, all processes get batches of about equal length: a step waits for the slowest process.
        steps = [batches[start : start + world] for start in range(0, len(batches), world)]
        order = np.random.default_rng([GROUPED, self.seed, epoch]).permutation(len(steps)).tolist()
        return pool, [steps[index][rank] for index in order]

    def text_samples(self) -> list[Sample]:
        """Return the training samples without pictures. If the corpus has none and `ramp` is set, return all samples
        with their pictures removed."""
        text = [sample for sample in self.parts["train"] if not sample.visual]
        return text or ([sample.without_pictures() for sample in self.parts["train"]] if self.ramp is not None else [])

    def _row(self, length: int, first: int, count: int, kind: int) -> list[int]:
        if not count:
            return []
        if not length:
            raise InputError("`ramp` needs samples with pictures, but the corpus has none. Leave it out.")
        orders: dict[int, list[int]] = {}
        indices = []
        for position in range(first, first + count):
            lap, index = divmod(position, length)
            if lap not in orders:
                orders[lap] = np.random.default_rng([TRAIN, self.seed, kind, lap]).permutation(length).tolist()
            indices.append(orders[lap][index])
        return indices

    def _length(self, sample: Sample) -> int:
        return len(self._answer(sample)) + 10_000 * sample.visual

    def _answer(self, sample: Sample) -> list[int]:
        return self.tokens[sample.name.removesuffix("/text")]

    def _loader(self, samples: Sequence[Sample], batches: Sequence[list[int]]) -> DataLoader[Any]:
        dataset = QuestionDataset(samples, self.prompting, self._answer, self.stored)
        return DataLoader(dataset, batch_sampler=batches, collate_fn=dataset.collate, num_workers=self.options.workers)


def mixed_parts(held: Sequence[Sample], others: Sequence[Sample]) -> list[Sample]:
    """Order both splits' samples so that every tenth is from `held`, the development split, until it is used up. If
    time runs out before all are answered, both splits then have answers."""
    places = [(10 * number, sample) for number, sample in enumerate(held)]
    places += [(number + number // 9 + 1, sample) for number, sample in enumerate(others)]
    return [sample for _, sample in sorted(places, key=lambda place: place[0])]


def _batches(samples: Sequence[Sample], size: int, line: str | None) -> Iterator[Sequence[Sample]]:
    """Yield batches of `size` samples, and log progress from time to time. line: the message, with places for two
    numbers; None: log nothing."""
    for number, begin in enumerate(range(0, len(samples), size)):
        yield samples[begin : begin + size]
        done = min(begin + size, len(samples))
        if line is not None and (done == len(samples) or number % 10 == 9):
            rank_zero_info(line.format(done, len(samples)))
