"""Training batches of packed questions about computer-drawn scenes, and held-out questions for validation."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerFast

from mmdec.checks.files import reason
from mmdec.images import read_image
from mmdec.training.checkpoints import token_list
from mmdec.training.corpora.admission import MAX_BAD_SHARE, Admission, BadRows, check_apart, sizes_of
from mmdec.training.corpora.chats import Conversation, read_conversations
from mmdec.training.corpora.text_files import shown
from mmdec.training.vlm.tokens import FIELDS, NOWHERE, Batch, Encoded, asked, encode, kept_tokenizer, pack, prefix
from mmdec.types import InputError

LEARNED = 40_000  # the most conversations that the tokenizer is learned from


@dataclass
class Question:
    """A question and its answer. reference: the corpus's answer. expected: the right short answer. claims: what a right
    description states, for the task "describe"."""

    image: Path
    question: str
    reference: str
    task: str
    expected: str
    claims: list[list[str]]


def read_scenes(listed: Path, admission: Admission) -> list[Conversation]:
    """Read the conversations listed in the file `listed`. Raises InputError for a row without a picture, or whose
    `prints` (the printed texts and their patches) are malformed, naming the row."""
    conversations = read_conversations(listed, admission=admission)
    for row in conversations:
        if not row.images:
            raise InputError(f"`corpus` must have a picture in each row, but {row.place} has none. Leave the row out.")
        try:
            for text, patches in row.notes.get("prints", ()):
                assert isinstance(text, str)
                np.asarray(patches, np.uint8)
        except (TypeError, ValueError, OverflowError, AssertionError):
            raise InputError(
                f"`corpus` must have texts with their patches as `prints`, but {row.place} has something else. Build "
                "it again."
            ) from None
    return conversations


def texts(conversations: Sequence[Conversation]) -> list[str]:
    """Return the questions and answers that the tokenizer is learned from."""
    turns = [turn for conversation in conversations[:LEARNED] for turn in conversation.turns]
    return [part for question, answer in turns for part in (question, f" {answer}")][: 40 * LEARNED]


def choose(conversations: Sequence[Conversation], count: int) -> list[Question]:
    """Choose `count` questions of each task, at most two of a task about one picture."""
    chosen: dict[str, list[Question]] = defaultdict(list)
    for conversation in conversations:
        used: dict[str, int] = defaultdict(int)
        for (question, answer), note in zip(conversation.turns, notes_of(conversation), strict=True):
            task = note["task"]
            if used[task] < 2 and len(chosen[task]) < count:
                used[task] += 1
                image = conversation.images[0]
                chosen[task].append(Question(image, question, answer, task, note["expected"], note["claims"]))
    return [question for task in sorted(chosen) for question in chosen[task]]


def notes_of(conversation: Conversation) -> list[dict[str, Any]]:
    """Return the note of each turn: its task and the right answer. Raises InputError if notes are malformed, naming the
    row."""
    notes = conversation.notes.get("turns")
    kinds = {"task": str, "expected": str, "claims": list}
    if (
        not isinstance(notes, list)
        or len(notes) != len(conversation.turns)
        or not all(isinstance(note, dict) for note in notes)
        or not all(isinstance(note.get(name), kind) for note in notes for name, kind in kinds.items())
    ):
        raise InputError(
            f"`corpus` must have task, expected and claims of each question as `turns`, but {conversation.place} has "
            "not. Build it again."
        )
    return notes


@dataclass
class Asked:
    """A batch of Q questions as inputs of `generate`, padded on the left. pixels: (Q, 3, H, W) uint8. tokens, mask: (Q,
    L)."""

    pixels: Tensor
    tokens: Tensor
    mask: Tensor
    questions: tuple[Question, ...]


class Rows(Dataset[tuple[np.ndarray, ...]]):
    """A dataset of packed rows. Its index is (conversation, seed). The seed sets the order of the conversation's
    questions, which are packed in this order as far as they fit.

    cells: labels of each picture's cells. side: pixels of a picture's side. lead: tokens before the first question.
    length: number of tokens in a row. pad: the padding token. prefer_reading: see `SceneOptions`.
    """

    def __init__(
        self,
        encoded: Encoded,
        cells: np.ndarray,
        side: int,
        lead: np.ndarray,
        length: int,
        pad: int,
        prefer_reading: float = 0.0,
    ) -> None:
        self.encoded, self.cells, self.side = encoded, cells, side
        self.lead, self.length, self.pad = lead, length, pad
        self.prefer_reading = prefer_reading

    def __getitem__(self, item: tuple[int, int]) -> tuple[np.ndarray, ...]:
        number, seed = item
        turns = self.encoded.turns(number)
        draw = np.random.default_rng(seed)
        ranks = draw.random(len(turns))
        if self.prefer_reading:  # questions that need reading get lower ranks, so that they come first
            ranks *= [1 - self.prefer_reading * bool((read != NOWHERE).any()) for _, _, read in turns]
        order = np.argsort(ranks)
        row = pack(self.lead, [turns[index] for index in order], self.length, self.pad)
        return (picture(Path(self.encoded.images[number]), self.side), *row, np.asarray(self.cells[number]))

    def collate(self, items: Sequence[tuple[np.ndarray, ...]]) -> Batch:
        return Batch(*(torch.from_numpy(np.stack(column)) for column in zip(*items, strict=True)))


class Questions(Dataset[Question]):
    """A dataset of the development split's questions, one by one. side: pixels of a picture's side. lead: text before a
    question, see `prefix`."""

    def __init__(self, questions: Sequence[Question], tokenizer: PreTrainedTokenizerFast, side: int, lead: str) -> None:
        self.questions, self.tokenizer, self.side, self.lead = questions, tokenizer, side, lead

    def __getitem__(self, number: int) -> Question:
        return self.questions[number]

    def collate(self, items: Sequence[Question]) -> Asked:
        texts = [self.lead + asked(item.question) for item in items]
        encoded = self.tokenizer(
            texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
        )
        pixels = torch.from_numpy(np.stack([picture(item.image, self.side) for item in items]))
        return Asked(pixels, encoded["input_ids"], encoded["attention_mask"], tuple(items))


@dataclass(frozen=True)
class SceneOptions:
    """Options of `SceneData` that a recipe sets.

    pieces: number of tokens of the tokenizer if it is learned.
    rows: number of pictures in one process's batch, one in each row. length: number of tokens in a row.
    dev_questions: number of questions of each task that are answered at each validation.
    image, patches: pixels of a picture's side, and number of patches of a picture.
    printed_share: share of pictures with printed letters or digits; None: as in the corpus.
    prefer_reading: from 0 to 1: how strongly questions that need reading are preferred if not all fit in a row.
    max_bad_share, allow_absolute_paths: see `Admission`.
    """

    pieces: int = 1024
    rows: int = 20
    length: int = 256
    steps_per_epoch: int = 100
    dev_split: str = "dev"
    dev_questions: int = 24
    image: int = 128
    patches: int = 64
    workers: int = 0
    seed: int = 0
    printed_share: float | None = None
    prefer_reading: float = 0.0
    max_bad_share: float = MAX_BAD_SHARE
    allow_absolute_paths: bool = False

    def __post_init__(self) -> None:
        if self.printed_share is not None and not 0 < self.printed_share <= 1:
            raise InputError(f"`printed_share` must be above 0 and up to 1, but is {self.printed_share}. Leave it out.")


class SceneData(LightningDataModule):
    """A data module: scenes in the layout of llava_v1_5_mix665k, with labels of what each image patch shows.

    corpus: folder with {split}.json, {split}.cells.npy and images/.
    tokenizer: folder of the tokenizer. If it is empty, a tokenizer is learned from the training text and saved there,
        together with the encoded text.
    options: fields of `SceneOptions`.
    """

    def __init__(self, corpus: str, tokenizer: str, **options: Any) -> None:
        super().__init__()
        self.options = SceneOptions(**options)
        self.admission = Admission(self.options.allow_absolute_paths, self.options.max_bad_share)
        self.corpus, self.kept = Path(corpus), Path(tokenizer)
        conversations: list[Conversation] | None = None
        if not (self.kept / "tokenizer.json").is_file():
            conversations = read_scenes(self.corpus / "train.json", self.admission)
        self.tokenizer = kept_tokenizer(self.kept, texts(conversations or []), self.options.pieces)
        self.lead = prefix(self.options.patches)
        lead = self.tokenizer(self.lead, add_special_tokens=False)["input_ids"]
        self.lead_tokens = np.asarray(lead, np.int64)
        self.encoded = self._encoded(conversations)
        reads = np.concatenate([[0], np.cumsum(self.encoded.patches != NOWHERE)])
        ends = np.concatenate([[0], self.encoded.bounds[:, 1]])[self.encoded.first]
        self.printed = reads[ends[1:]] > reads[ends[:-1]]  # (N,) whether each conversation asks for printed text
        self.whole = np.ones(len(self.printed), bool)  # (N,) whether each picture's file is readable; set in `setup`

    @property
    def units(self) -> list[str]:
        """Return the tokens, ordered by id. The command line passes them to the model."""
        return token_list(self.tokenizer)

    def _encoded(self, conversations: list[Conversation] | None) -> Encoded:
        listed = self.corpus / "train.json"
        if not listed.is_file():
            raise InputError(f"`corpus` must hold train.json, but '{self.corpus}' does not. Build it first.")
        stamp = f"{FIELDS} {listed.resolve()} {listed.stat().st_size} {listed.stat().st_mtime_ns}"
        stamp += " anywhere" * self.admission.allow_absolute_paths
        kept = self.kept / f"encoded-{hashlib.blake2b(stamp.encode(), digest_size=8).hexdigest()}.npz"
        if not kept.is_file():
            encode(conversations or read_scenes(listed, self.admission), self.tokenizer).save(kept)
        return Encoded.load(kept)

    def prepare_data(self) -> None:
        """Check all pictures, in one process only."""
        self.setup("fit")

    def setup(self, stage: str) -> None:
        cells = self.corpus / "train.cells.npy"
        try:
            self.cells = np.load(cells, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise InputError(
                f"`corpus` must hold the cells of its pictures, but '{cells}' cannot be read ({reason(error)}). Build "
                "it again."
            ) from None
        if len(self.cells) != len(self.encoded):
            raise InputError(
                f"`corpus` must have cells of each picture, but has {len(self.cells)} of {len(self.encoded)}. "
                "Build it again."
            )
        listed = self.corpus / f"{self.options.dev_split}.json"
        held = read_scenes(listed, self.admission)
        both = (
            [os.path.realpath(image) for image in images]
            for images in (self.encoded.images, [row.images[0] for row in held])
        )
        check_apart(both, "pictures", "Take them out of train.json.")
        self.whole = self._whole([Path(image) for image in self.encoded.images], self.corpus / "train.json")
        chosen = choose(held, self.options.dev_questions)
        seen = self._whole([question.image for question in chosen], listed)
        self.questions = [question for question, whole in zip(chosen, seen, strict=True) if whole]
        if not self.whole.any() or not self.questions:
            raise InputError(
                f"`corpus` must hold pictures and questions for both splits, but '{self.corpus}' has none for one. "
                "Build it again."
            )

    def _whole(self, images: Sequence[Path], listed: Path) -> np.ndarray:
        """Return for each picture whether its file can be read. Bad files are logged. listed: the list, for
        messages."""
        bad = BadRows()
        found = sizes_of(images, self.kept, self.options.image)
        for image, value in zip(images, found, strict=True):
            if isinstance(value, str):
                bad.add(value, str(image))
        if bad.count:
            of = f"pictures of {shown(listed)}"
            self.admission.check(bad, len(images), of, rule="hold its pictures")
            rank_zero_info(f"{bad.count} of the {len(images)} {of} left out: {bad.report()}")
        return np.array([not isinstance(value, str) for value in found], bool)

    def train_dataloader(self) -> DataLoader:
        """Load the next batches of an endless sequence that all processes share: the shuffled pictures, repeated."""
        assert self.trainer is not None
        world, rank = self.trainer.world_size, self.trainer.global_rank
        begin = self.trainer.current_epoch * self.options.steps_per_epoch * self.options.rows * world
        length = self.lap_length()
        orders: dict[int, np.ndarray] = {}
        batches = []
        for step in range(self.options.steps_per_epoch):
            first = begin + (step * world + rank) * self.options.rows
            batch = []
            for index in range(first, first + self.options.rows):
                lap, at = divmod(index, length)
                if lap not in orders:
                    orders[lap] = self.order(lap, length)
                batch.append((int(orders[lap][at]), self.options.seed * 2**40 + index))
            batches.append(batch)
        pad = int(self.tokenizer.pad_token_id)  # type: ignore[arg-type] # a single number
        rows = (self.options.image, self.lead_tokens, self.options.length, pad, self.options.prefer_reading)
        dataset = Rows(self.encoded, self.cells, *rows)
        return DataLoader(dataset, batch_sampler=batches, collate_fn=dataset.collate, num_workers=self.options.workers)

    def lap_length(self) -> int:
        """Return the number of pictures in one pass over the corpus. With `printed_share`, pictures without print may
        be left out."""
        printed, count = int((self.printed & self.whole).sum()), int(self.whole.sum())
        rest = count - printed
        share = self.options.printed_share if printed else None
        return count if share is None else printed + min(rest, round(printed * (1 - share) / share))

    def order(self, lap: int, length: int) -> np.ndarray:
        """Shuffle the picture indices of pass `lap` over the corpus, `length` in all: every picture; or, with
        `printed_share`, every picture with print, filled up with others."""
        draw = np.random.default_rng([self.options.seed, lap])
        if length == self.whole.sum():
            return draw.permutation(np.flatnonzero(self.whole))
        printed, rest = np.flatnonzero(self.printed & self.whole), np.flatnonzero(~self.printed & self.whole)
        return draw.permutation(np.concatenate([printed, draw.permutation(rest)[: length - len(printed)]]))

    def val_dataloader(self) -> DataLoader:
        """Load every n-th question in each of n processes, see `question_loader`."""
        assert self.trainer is not None
        dataset = Questions(self.questions, self.tokenizer, self.options.image, self.lead)
        return question_loader(dataset, self.trainer.global_rank, self.trainer.world_size)


def question_loader(dataset: Questions, rank: int, world: int) -> DataLoader:
    """Load the questions of process `rank` of `world` processes (every `world`-th), in batches of up to 40. Questions
    that ask for a description have separate batches, because their answers are longer."""
    batches = []
    for described in (False, True):
        numbers = [n for n, question in enumerate(dataset.questions) if (question.task == "describe") == described]
        mine = numbers[rank::world]
        batches += [mine[at : at + 40] for at in range(0, len(mine), 40)]
    return DataLoader(dataset, batch_sampler=batches, collate_fn=dataset.collate)


def picture(path: Path, side: int) -> np.ndarray:
    """Read a picture as (3, side, side) uint8. Raises InputError if it has another size."""
    pixels = read_image(path)
    if pixels.shape != (side, side, 3):
        raise InputError(f"'{path}' must be {side} x {side} pixels, but is {pixels.shape[1]} x {pixels.shape[0]}.")
    return pixels.transpose(2, 0, 1)
