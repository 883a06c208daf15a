"""Training batches of questions about synthetic pictures, several questions packed into one row; and held-out questions
for validation."""

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

LEARNED = 40_000  # the tokenizer is learned from at most this many conversations


@dataclass
class Question:
    """A question about a picture, with what is needed to judge an answer.

    reference: the corpus's answer, a sentence. task: the kind of question, such as "count" or "describe". expected: the
        right short answer.
    claims: for the task "describe", the facts that a right description states. A fact is a list of words that must
        occur in this order in one clause.
    """

    image: Path
    question: str
    reference: str
    task: str
    expected: str
    claims: list[list[str]]


def read_scenes(listed: Path, admission: Admission) -> list[Conversation]:
    """Read conversations about pictures.

    listed: a JSON file with one conversation per row. admission: which bad rows are left out, and which paths are
        allowed.
    Raises: InputError, which names the row, for a row without a picture, or with malformed `prints` (the texts printed
        in the picture, each with the image patch of each character).
    """
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
    """Return the questions and answers from which the tokenizer is learned."""
    turns = [turn for conversation in conversations[:LEARNED] for turn in conversation.turns]
    return [part for question, answer in turns for part in (question, f" {answer}")][: 40 * LEARNED]


def choose(conversations: Sequence[Conversation], count: int) -> list[Question]:
    """Choose validation questions: `count` of each task, at most two of the same task about one picture."""
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
    """Return for each question of a conversation a dict with the keys "task", "expected" (the right short answer) and
    "claims" (the facts of a right description). Raises InputError, which names the row, if these fields are
    malformed."""
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
    """A batch of Q validation questions, as inputs of `generate`. The questions are padded on the left to L tokens.

    pixels: (Q, 3, H, W) uint8. tokens, mask: (Q, L), token ids and attention mask.
    """

    pixels: Tensor
    tokens: Tensor
    mask: Tensor
    questions: tuple[Question, ...]


class Rows(Dataset[tuple[np.ndarray, ...]]):
    """A dataset of training rows: each has one picture, and questions about it packed one after another.

    An index is (conversation, seed). The seed sets the order of the conversation's questions; the questions that fit
    are packed in this order.
    encoded: all conversations as tokens. cells: for each conversation, the labels of its picture's cells. side: height
        and width of a picture in pixels. lead: ids of the tokens before the first question.
    length: number of tokens in a row. pad: id of the padding token. prefer_reading: from 0 to 1: how strongly questions
        about printed text are preferred if not all fit.
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
        if self.prefer_reading:  # questions about printed text get lower ranks, so that they come first
            ranks *= [1 - self.prefer_reading * bool((read != NOWHERE).any()) for _, _, read in turns]
        order = np.argsort(ranks)
        row = pack(self.lead, [turns[index] for index in order], self.length, self.pad)
        return (picture(Path(self.encoded.images[number]), self.side), *row, np.asarray(self.cells[number]))

    def collate(self, items: Sequence[tuple[np.ndarray, ...]]) -> Batch:
        return Batch(*(torch.from_numpy(np.stack(column)) for column in zip(*items, strict=True)))


class Questions(Dataset[Question]):
    """A dataset of the validation questions, one item each.

    side: height and width of a picture in pixels. lead: the text before a question, with the image tokens.
    """

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
    """Options of `SceneData` that a training configuration sets.

    pieces: vocabulary size of the tokenizer, if it is learned.
    rows: batch size of one process; each row has one picture. length: number of tokens in a row.
    dev_questions: number of validation questions of each task.
    image: height and width of a picture in pixels. patches: number of image patches of a picture.
    printed_share: share of pictures that contain printed letters or digits; None: as in the training set.
    prefer_reading: from 0 to 1: how strongly questions about printed text are preferred if not all questions fit in a
        row.
    max_bad_share: maximum share of rows that may be unusable. allow_absolute_paths: whether pictures may lie outside
        the folder of the training set.
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
    """A data module for questions about synthetic pictures, in the file format of llava_v1_5_mix665k, with labels of
    what each image patch shows.

    corpus: folder with {split}.json, {split}.cells.npy (the labels) and images/.
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
        # (N,) bool, for each conversation whether a question asks for printed text
        self.printed = reads[ends[1:]] > reads[ends[:-1]]
        # (N,) bool, for each picture whether its file can be read; `setup` fills it
        self.whole = np.ones(len(self.printed), bool)

    @property
    def units(self) -> list[str]:
        """Return the tokens, ordered by id. The command line passes them to `VlmModule`."""
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
        """Check all picture files, in one process only."""
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
        """Return (N,) bool: for each picture whether its file can be read. Bad files are logged.

        images: the pictures' paths. listed: the file that lists them, for messages.
        """
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
        """Make the loader of this epoch's batches. They continue an endless sequence of pictures: one shuffled pass
        over the training set after the other. Each process gets its share of the sequence."""
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
        """Return the number of pictures in one pass over the training set. To reach `printed_share`, a pass leaves out
        some pictures without printed text."""
        printed, count = int((self.printed & self.whole).sum()), int(self.whole.sum())
        rest = count - printed
        share = self.options.printed_share if printed else None
        return count if share is None else printed + min(rest, round(printed * (1 - share) / share))

    def order(self, lap: int, length: int) -> np.ndarray:
        """Return the picture indices of one pass over the training set, shuffled.

        lap: number of the pass, from 0. length: number of pictures, as `lap_length` returns it. If it is not the number
            of all pictures, the pass has all pictures with printed text and a random part of the other pictures.
        """
        draw = np.random.default_rng([self.options.seed, lap])
        if length == self.whole.sum():
            return draw.permutation(np.flatnonzero(self.whole))
        printed, rest = np.flatnonzero(self.printed & self.whole), np.flatnonzero(~self.printed & self.whole)
        return draw.permutation(np.concatenate([printed, draw.permutation(rest)[: length - len(printed)]]))

    def val_dataloader(self) -> DataLoader:
        """Make the loader of the validation questions of this process: every n-th question if there are n processes."""
        assert self.trainer is not None
        dataset = Questions(self.questions, self.tokenizer, self.options.image, self.lead)
        return question_loader(dataset, self.trainer.global_rank, self.trainer.world_size)


def question_loader(dataset: Questions, rank: int, world: int) -> DataLoader:
    """Make the loader of one process's validation questions, in batches of up to 40. Questions that ask for a
    description have separate batches, because their answers are longer.

    rank: index of this process. world: number of processes; each gets every `world`-th question.
    """
    batches = []
    for described in (False, True):
        numbers = [n for n, question in enumerate(dataset.questions) if (question.task == "describe") == described]
        mine = numbers[rank::world]
        batches += [mine[at : at + 40] for at in range(0, len(mine), 40)]
    return DataLoader(dataset, batch_sampler=batches, collate_fn=dataset.collate)


def picture(path: Path, side: int) -> np.ndarray:
    """Read a picture as (3, side, side) uint8. Raises InputError if it does not have `side` x `side` pixels."""
    pixels = read_image(path)
    if pixels.shape != (side, side, 3):
        raise InputError(f"'{path}' must be {side} x {side} pixels, but is {pixels.shape[1]} x {pixels.shape[0]}.")
    return pixels.transpose(2, 0, 1)
