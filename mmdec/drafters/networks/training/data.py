"""Training data of drafters: the questions of a corpus, with answers that the target generates."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel

from mmdec.drafters.networks.training.samples import Choice, Inputs, PromptBuilder, Questions, Sample, read_samples
from mmdec.drafters.networks.training.teacher import FeatureStore, Teacher, load_teacher_model, writer_number
from mmdec.errors import InputError
from mmdec.training.checkpoints import check_positive, token_list
from mmdec.training.corpora.admission import MAX_BAD_SHARE, Admission, check_apart
from mmdec.training.stores import TokenStore
from mmdec.types import Needs


@dataclass(frozen=True)
class Ramp:
    """The share of training samples with pictures, which rises over `epochs` epochs as in MSD's paper.

    It is 0 in the first half of the epochs, then rises linearly, and is 1 in the last epoch.
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
class Sampling:
    """How the target samples its answers, in the words of transformers' `generate`; the defaults change nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("temperature", self.temperature), ("repetition_penalty", self.repetition_penalty)):
            if not 0.0 < value < math.inf:
                raise InputError(f"`{name}` must be above 0 and finite, but is {value}. 1 changes nothing.")
        if self.top_k < 0:
            raise InputError(f"`top_k` must be 0 or more, but is {self.top_k}. 0 keeps all tokens.")
        if not 0.0 < self.top_p <= 1.0:
            raise InputError(f"`top_p` must be above 0 and at most 1, but is {self.top_p}. 1 keeps all tokens.")


@dataclass(frozen=True)
class DraftBatch:
    """A batch of questions with their answers.

    Args:
        rows: Names of the samples.
        answers: Token ids that the target generated.
        prompts: The target's input tensors for each sample; None if the features of all samples are stored, so that the
            target does not have to be run.
    """

    rows: list[str]
    answers: list[list[int]]
    prompts: list[Inputs] | None

    def to(self, device: torch.device) -> DraftBatch:
        """Return the batch unchanged.

        `Teacher`, which runs the target, moves the input tensors to the device itself.
        """
        return self


class QuestionDataset(Dataset[tuple[Sample, Inputs | None]]):
    """A dataset of questions.

    An item is a sample and the target's input tensors; None instead of the tensors if the sample's features are stored
    (`stored` contains its name).
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        prompting: PromptBuilder,
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
        """Make a batch of items.

        If the features of any sample are not stored, input tensors are made for all of them.
        """
        if all(inputs is None for _, inputs in items):
            prompts = None
        else:
            prompts = [self.prompting(sample) if inputs is None else inputs for sample, inputs in items]
        return DraftBatch([sample.name for sample, _ in items], [self.answers(sample) for sample, _ in items], prompts)


# first numbers of seeds, so that different random choices are independent
TRAIN_SEED, MIXING_SEED, GROUPING_SEED = 5, 6, 7
BATCHES_PER_GROUP = 16  # this number of batches is sorted by length together, so that a batch needs little padding
# a group, sorted by length of prompt and answer, is cut into 4 parts; each is sorted by length of answer
PARTS_PER_GROUP = 4
CHARACTERS_PER_TOKEN = 4  # estimated number of characters of a token


@dataclass(frozen=True)
class DraftDataOptions:
    """Options of `DraftData` that a recipe sets.

    Args:
        samples: Number of training questions; null: all.
        long_share: Share of these with long answers; null: any answers.
        max_tokens: Maximum tokens of an answer.
        sampling: How the target samples its answers; null: they are greedy. A drafter learns most from answers as they
            will be decoded.
        frames: Number of frames taken from a video.
        history: Maximum earlier turns in the prompt of a question without pictures.
        images: Folder of the pictures; null: next to the corpus file.
        ramp: Makes the share of samples with pictures rise over the epochs, as in MSD; null: the share is that of the
            corpus. If a corpus has only questions with pictures, these are also used without their pictures.
        base_dtype: Dtype of the target.
        cache_dir: Folder where answers and features are stored.
        answered: True: train only on questions with a stored answer; false: the target first answers the other
            questions.
        answer_batch: Number of questions answered at once.
        max_bad_share: Maximum share of unreadable rows or pictures.
        allow_absolute_paths: Whether rows may name pictures outside of the pictures' folder.
    """

    train_split: str = "train"
    dev_split: str | None = "dev"
    samples: int | None = None
    dev_samples: int = 64
    long_share: float | None = None
    batch_size: int = 16
    steps_per_epoch: int | None = None
    max_tokens: int = 256
    sampling: Sampling | None = None
    frames: int = 8
    history: int = 2
    images: str | None = None
    ramp: Ramp | None = None
    base_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    cache_dir: str = "runs/vlm_drafters/cache"
    answered: bool = False
    answer_batch: int = 32
    workers: int = 0
    seed: int = 0
    max_bad_share: float = MAX_BAD_SHARE
    allow_absolute_paths: bool = False

    def __post_init__(self) -> None:
        check_positive(batch_size=self.batch_size, dev_samples=self.dev_samples, max_tokens=self.max_tokens)
        check_positive(frames=self.frames, answer_batch=self.answer_batch)


class DraftData(LightningDataModule):
    """A data module: single questions of a corpus, with answers by the target.

    The corpus has the JSON format of LLaVA's llava_v1_5_mix665k.

    Args:
        base: Folder or Hugging Face id of the target, a vision-language or language model.
        corpus: Folder with {split}.json and images/; a row may have "video", a folder of frames in images/.
        options: Fields of `DraftDataOptions`.
    """

    def __init__(self, base: str, corpus: str, **options: Any) -> None:
        super().__init__()
        self.options = DraftDataOptions(**options)
        self.admission = Admission(self.options.allow_absolute_paths, self.options.max_bad_share)
        self.base, self.corpus, self.cache_dir = base, Path(corpus), Path(self.options.cache_dir)
        self.batch_size, self.ramp, self.seed = self.options.batch_size, self.options.ramp, self.options.seed
        self.base_dtype: torch.dtype = getattr(torch, self.options.base_dtype)
        # names of samples whose features are stored, so that no input tensors are made for them
        self.stored: Container[str] = ()

    # Files are read at first use, not in `__init__`: the parser of the command line would hide its error messages.
    @cached_property
    def prompting(self) -> PromptBuilder:
        return PromptBuilder(self.base)

    @cached_property
    def model(self) -> PreTrainedModel:
        return load_teacher_model(self.base, self.base_dtype)

    @cached_property
    def teacher(self) -> Teacher:
        return Teacher(self.model)

    @property
    def target_name(self) -> str:
        """The name of the target's folder, or the target's Hugging Face id."""
        folder = Path(self.base)
        return folder.resolve().name if folder.is_dir() else self.base

    @cached_property
    def samples(self) -> dict[str, list[Sample]]:
        """The chosen questions: "train" and "dev" -> samples.

        Without `dev_split`, the last training questions are held out as "dev".
        """
        many, few, options = self.options.samples, self.options.dev_samples, self.options
        if options.dev_split is not None:
            both = {"train": self.read_split(options.train_split, many), "dev": self.read_split(options.dev_split, few)}
            named = ([f"{sample.question[:60]} ({sample.name})" for sample in both[name]] for name in ("train", "dev"))
            check_apart(named, "questions", "Name splits that do not overlap.")
            return both
        chosen = self.read_split(options.train_split, None if many is None else many + few)
        if len(chosen) <= few:
            raise InputError(
                f"`dev_samples` must leave questions to train on, but takes {few} of {len(chosen)}. Give fewer, "
                "or name a `dev_split`."
            )
        # compared by name, because the same question may occur several times
        validation_names = {sample.name for sample in chosen[-few:]}
        return {
            "train": [sample for sample in chosen[:-few] if sample.name not in validation_names],
            "dev": chosen[-few:],
        }

    def read_split(self, split: str, count: int | None) -> list[Sample]:
        """Read the samples of a split.

        Args:
            split: Its name.
            count: Number of samples, chosen at random; None: all.
        """
        choice = Choice(count, self.options.long_share, self.seed)
        images = None if self.options.images is None else Path(self.options.images)
        reading = Questions(self.options.frames, self.options.history, images)
        return read_samples(self.corpus, split, reading, choice, self.admission, self.cache_dir)

    @property
    def units(self) -> list[str]:
        """The target's tokens as strings, ordered by id. The command line passes them to the training module."""
        return token_list(self.prompting.tokenizer)

    @property
    def mark(self) -> str:
        """A name for the folder of stored answers.

        It differs if answers may differ: it is made of the hash of the target's weights, its dtype, the maximum tokens
        of an answer, and the options of sampling.
        """
        parts = [self.teacher.name, str(self.base_dtype).removeprefix("torch."), str(self.options.max_tokens)]
        if self.options.sampling is not None:
            parts += [f"{name}_{value:g}" for name, value in asdict(self.options.sampling).items()]
        return "-".join(parts)

    def store(self, locks: ExitStack, rank: int = 0) -> TokenStore:
        """Open the store of the target's answers: sample name -> token ids.

        Args:
            locks: Until it is closed, no other training writes to the same file.
            rank: Number of this process; each process writes to a separate file.
        """
        folder = self.cache_dir / f"answers-{self.mark}"
        return TokenStore(folder, writer_number(folder, rank, locks))

    def feature_store(self, needs: Needs, half: bool, rank: int = 0) -> FeatureStore:
        """Open the store of the target's features: sample name -> features.

        Args:
            needs: Which layers' hidden states, and whether embeddings are stored.
            half: Compute them in bfloat16.
            rank: Number of this process; each process writes to separate files.
        """
        named = "_".join(str(layer) for layer in needs.layers)
        named += ("" if needs.embeds else "-placeholders") + ("-half" if half else "")
        return FeatureStore(self.cache_dir / f"features-{self.mark}-{named}", self.teacher, needs, half, rank)

    def regenerate(
        self,
        part: int = 0,
        parts: int = 1,
        device: str | torch.device | None = None,
        until: float = math.inf,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Let the target answer the questions that have no stored answer yet.

        Each batch of answers is stored at once, so that the work can be interrupted and continued.

        Args:
            part, parts: Answer every `parts`-th of these questions, beginning with number `part` (from 0), so that
                several processes can share the work.
            device: Where the target runs; None: the device that it is on.
            until: Time in seconds since 1970, after which no batch is started.
            on_progress: Called with (number of answered questions, number of all); None: progress is logged.

        Returns:
            The number of new answers.
        """
        if device is not None:
            self.model.to(device)  # type: ignore[call-arg] # pyright misreads the decorated `to`
        fresh = 0
        sampling = None if self.options.sampling is None else asdict(self.options.sampling)
        with ExitStack() as locks:
            store = self.store(locks, part)
            questions = {sample.name: sample for sample in mix_splits(self.samples["dev"], self.samples["train"])}
            missing = [sample for sample in questions.values() if store.get(sample.name) is None][part::parts]
            # Sort by expected length only within groups: if time runs out, there are not just short answers.
            size = BATCHES_PER_GROUP * self.options.answer_batch
            groups = [missing[begin : begin + size] for begin in range(0, len(missing), size)]
            missing = [sample for group in groups for sample in sorted(group, key=lambda sample: sample.words)]
            line = None if on_progress else "the target has answered {} of {} questions"
            for batch in _batches(missing, self.options.answer_batch, line):
                if fresh and time.time() >= until:
                    break
                prompts = [self.prompting(sample) for sample in batch]
                answers = self.teacher.answer(prompts, self.options.max_tokens, sampling)
                store.add({sample.name: tokens for sample, tokens in zip(batch, answers, strict=True)})
                fresh += len(batch)
                if on_progress is not None:
                    on_progress(len(questions) - len(missing) + fresh, len(questions))
        return fresh

    def keep_features(self, needs: Needs, half: bool, part: int = 0, parts: int = 1) -> int:
        """Compute and store the target's features of all samples, unless they are stored.

        Training with the option `keep_features` does the same batch by batch.

        Args:
            needs: Which layers' hidden states, and whether embeddings are stored.
            half: Compute in bfloat16. Drafters with the same `needs` and `half` can share the stored features.
            part, parts: Compute every `parts`-th of these samples, beginning with number `part` (from 0), so that
                several processes can share the work.

        Returns:
            The number of samples that were computed.
        """
        self.setup("fit")
        store = self.feature_store(needs, half, part)
        rows = [sample for split in ("dev", "train") for sample in self.parts[split]]
        rows += self.text_samples() if self.ramp is not None else []
        missing = [sample for sample in rows if sample.name not in store][part::parts]
        missing.sort(key=self._length)
        for batch in _batches(missing, self.options.answer_batch, "the target has read {} of {} answers"):
            names = [sample.name for sample in batch]
            store.load_or_compute(
                names, [self.prompting(sample) for sample in batch], [self._answer(sample) for sample in batch]
            )
        return len(missing)

    def prepare_data(self) -> None:
        """Let the target answer the questions without a stored answer, in one process.

        For large targets this takes long: run `python -m mmdec.drafters.networks.training.regenerate` before, in
        several processes.
        """
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
                    f"`cache_dir` must hold the target's answers, but lacks {len(chosen) - len(answered)} of "
                    f"{len(chosen)}. Run python -m mmdec.drafters.networks.training.regenerate first."
                )
        # The first token of an answer is never drafted, so an answer of one token is useless.
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
        """Return the loader of the development questions; each of n processes gets every n-th.

        Answers of similar length are batched together.
        """
        assert self.trainer is not None
        rows = self.parts["dev"]
        order = sorted(range(len(rows)), key=lambda index: (len(self.tokens[rows[index].name]), index))
        indices = order[self.trainer.global_rank :: self.trainer.world_size]
        return self._loader(
            rows,
            [indices[start : start + self.batch_size] for start in range(0, len(indices), self.batch_size)],
        )

    def plan(self, epoch: int, rank: int = 0, world: int = 1) -> tuple[list[Sample], list[list[int]]]:
        """Plan the batches of one process in one epoch.

        Samples with pictures are taken in shuffled order, again and again; text-only samples likewise. Each epoch takes
        the next samples of both kinds, in the shares of `ramp`. A batch has prompts of similar length, and answers of
        similar length. Every process gets the same number of batches.

        Args:
            epoch: From 0.
            rank, world: Number of this process, and number of processes.

        Returns:
            All samples, and for each batch the indices of its samples.
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
        before = sum(count - count_drawn for count_drawn in counts[:-1])
        text_indices = [len(visual) + index for index in self._row(len(text), before, count - counts[-1], 1)]
        draw = np.random.default_rng([MIXING_SEED, self.seed, epoch])
        chosen = np.array(visual_indices + text_indices)[draw.permutation(count)].tolist()
        batches: list[list[int]] = []
        for first in range(0, count, BATCHES_PER_GROUP * size):
            group = sorted(
                chosen[first : first + BATCHES_PER_GROUP * size], key=lambda index: (self._whole(pool[index]), index)
            )
            for begin in range(0, len(group), BATCHES_PER_GROUP // PARTS_PER_GROUP * size):
                part = group[begin : begin + BATCHES_PER_GROUP // PARTS_PER_GROUP * size]
                part.sort(key=lambda index: (self._length(pool[index]), index))
                batches += [part[start : start + self.batch_size] for start in range(0, len(part), self.batch_size)]
        # In one training step, all processes get batches of similar length, because the step waits for the slowest
        # process.
        steps = [batches[start : start + world] for start in range(0, len(batches), world)]
        order = np.random.default_rng([GROUPING_SEED, self.seed, epoch]).permutation(len(steps)).tolist()
        return pool, [steps[index][rank] for index in order]

    def text_samples(self) -> list[Sample]:
        """Return the training samples without pictures.

        If the corpus has none and `ramp` is set, return all samples with their pictures removed.
        """
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
                orders[lap] = np.random.default_rng([TRAIN_SEED, self.seed, kind, lap]).permutation(length).tolist()
            indices.append(orders[lap][index])
        return indices

    def training_answers(self) -> Iterator[list[int]]:
        """Yield the answers of the training questions as token ids, each once."""
        return (self.tokens[name] for name in sorted({row.name for row in self.parts["train"]}))

    def _length(self, sample: Sample) -> int:
        return len(self._answer(sample)) + 10_000 * sample.visual

    def _whole(self, sample: Sample) -> int:
        """Estimate the number of tokens in a sample's prompt and answer. A sample with pictures counts as longer."""
        length = len(sample.question) + sum(len(text) for _, text in sample.history)
        return self._length(sample) + length // CHARACTERS_PER_TOKEN

    def _answer(self, sample: Sample) -> list[int]:
        return self.tokens[sample.name.removesuffix("/text")]

    def _loader(self, samples: Sequence[Sample], batches: Sequence[list[int]]) -> DataLoader[Any]:
        dataset = QuestionDataset(samples, self.prompting, self._answer, self.stored)
        return DataLoader(dataset, batch_sampler=batches, collate_fn=dataset.collate, num_workers=self.options.workers)


def frequent_tokens(answers: Iterable[Sequence[int]], size: int) -> Tensor:
    """Return the ids of the `size` most frequent tokens of the answers, (size,) int64, ascending.

    Of equally frequent tokens, those with lower ids are taken. If the answers have fewer different tokens, the lowest
    other ids are added.

    Args:
        answers: Token ids of each.
        size: Number of tokens.
    """
    counts = Counter(token for answer in answers for token in answer)
    chosen = sorted(counts, key=lambda token: (-counts[token], token))[:size]
    others = (token for token in range(size + len(chosen)) if token not in counts)
    return torch.tensor(sorted([*chosen, *(next(others) for _ in range(size - len(chosen)))]))


def mix_splits(validation: Sequence[Sample], others: Sequence[Sample]) -> list[Sample]:
    """Mix the samples of both splits: every tenth is from `validation`, the development split, until it is used up.

    So both splits have answers, even if time runs out before all questions are answered.

    Args:
        others: Samples of the training split.
    """
    places = [(10 * number, sample) for number, sample in enumerate(validation)]
    places += [(number + number // 9 + 1, sample) for number, sample in enumerate(others)]
    return [sample for _, sample in sorted(places, key=lambda place: place[0])]


def _batches(samples: Sequence[Sample], size: int, line: str | None) -> Iterator[Sequence[Sample]]:
    """Yield batches of `size` samples, and log progress after every tenth batch.

    Args:
        line: The message, with "{}" for the number of samples done and for the number of all; None: log nothing.
    """
    for number, begin in enumerate(range(0, len(samples), size)):
        yield samples[begin : begin + size]
        done = min(begin + size, len(samples))
        if line is not None and (done == len(samples) or number % 10 == 9):
            rank_zero_info(line.format(done, len(samples)))
