"""Training samples of drafters, read from a corpus.

A sample is a single question with its pictures or video frames. The target's processor and chat template make its input
tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from transformers import AutoConfig, AutoProcessor

from mmdec.checks.files import quote_path
from mmdec.errors import InputError
from mmdec.hub.find import find_model
from mmdec.io.images import read_image, to_pil
from mmdec.io.suffixes import PICTURE_SUFFIXES
from mmdec.pretrained.vlm import VLM_FILES, read_processor
from mmdec.training.corpora.admission import STRICT, Admission, BadRows, PathResolver, sizes_of
from mmdec.training.corpora.chats import SUFFIXES, SYSTEM_KEY, Conversation, picture_folder, read_chats
from mmdec.training.corpora.librispeech import Utterance

Inputs = dict[str, Tensor]
MAX_CACHED_PROMPTS = 1 << 16  # maximum prompts without pictures whose tensors are kept in memory, about 1 kB each


class PromptBuilder:
    """Makes the target's input tensors for a question, as `mmdec.describe` does.

    It holds the target's processor, or the tokenizer of a language model. State: `remembered`, the tensors of the first
    questions without pictures, so that a later epoch does not make them again.
    """

    def __init__(self, base: str | Path) -> None:
        self.processor: Any = _processor(base)
        self.tokenizer: Any = getattr(self.processor, "tokenizer", self.processor)
        # None without the package torchvision, which video processors need
        reads_video = getattr(self.processor, "video_processor", None) is not None
        self.films = reads_video and getattr(self.processor, "video_token", None) is not None
        self.remembered: dict[tuple[object, ...], Inputs] = {}

    def __call__(self, sample: Sample) -> Inputs:
        """Return the input tensors of one sample, with batch size 1.

        Video frames are passed as a video if the processor supports videos, else as pictures. The tensors must not be
        changed.
        """
        if sample.visual:
            return self._inputs(sample)
        turns = (*sample.history, sample.question)
        inputs = self.remembered.get(turns)
        if inputs is None:
            inputs = self._inputs(sample)
            if len(self.remembered) < MAX_CACHED_PROMPTS:
                self.remembered[turns] = inputs
        return inputs

    def _inputs(self, sample: Sample) -> Inputs:
        turns = (*sample.history, ("user", sample.question))
        messages: list[dict[str, Any]]
        if self.tokenizer is not self.processor:
            messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
            messages[-1]["content"] = [*self._picture_entries(sample), *messages[-1]["content"]]
        elif self.tokenizer.chat_template:  # a language model: a tokenizer, no processor
            messages = [{"role": role, "content": text} for role, text in turns]
        else:
            return dict(self.tokenizer("\n".join(text for _, text in turns), return_tensors="pt"))
        return dict(
            self.processor.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
            )
        )

    def _picture_entries(self, sample: Sample) -> list[dict[str, Any]]:
        """Return the entries of a chat message for a sample's pictures and video, in the format of transformers."""
        if sample.video and self.films:
            return [{"type": "video", "video": np.stack([read_image(path) for path in sample.video])}]
        return [{"type": "image", "image": to_pil(read_image(path))} for path in (*sample.images, *sample.video)]


def _processor(base: str | Path) -> Any:
    """Load the processor of a model that reads pictures, or a language model's tokenizer.

    The processor is loaded as `mmdec.describe` does, without torchvision where possible.

    Args:
        base: Folder or Hugging Face id.
    """
    sees = getattr(AutoConfig.from_pretrained(base), "vision_config", None) is not None
    return read_processor(find_model(base, None, VLM_FILES)) if sees else AutoProcessor.from_pretrained(base)


def append(inputs: Inputs, tokens: Sequence[int]) -> Inputs:
    """Return input tensors of batch size 1 with text tokens appended.

    Args:
        tokens: Token ids.
    """
    ids = inputs["input_ids"]
    added = torch.tensor([list(tokens)], dtype=ids.dtype, device=ids.device)
    fills = {"input_ids": added, "attention_mask": torch.ones_like(added)}
    return {
        name: torch.cat([value, fills.get(name, torch.zeros_like(added)).to(value.dtype)], 1)
        if _of_text(name, inputs)
        else value
        for name, value in inputs.items()
    }


def _of_text(name: str, inputs: Inputs) -> bool:
    """Return whether the input tensor `name` has one number for each text token.

    A mask of sound features may have the same shape by chance, so names with "feature" do not count.
    """
    return inputs[name].shape == inputs["input_ids"].shape and "feature" not in name


def join(rows: Sequence[Inputs], pad: int, left: bool) -> Inputs:
    """Join the input tensors of several samples, each with batch size 1, into one batch.

    Tensors as long as the text are padded like the text. Other tensors belong to pictures or sounds and are
    concatenated; if their sizes differ (LLaVA-NeXT's tiles, a sound's frames), the smaller ones are padded with zeros.

    Args:
        pad: Id of the padding token.
        left: Pad on the left, as generation needs it, else on the right.
    """
    width = max(row["input_ids"].shape[1] for row in rows)
    batch: Inputs = {}
    for name in {name for row in rows for name in row}:
        parts = []
        for row in rows:
            if name not in row:
                if any(name in other and _of_text(name, other) for other in rows):
                    parts.append(torch.zeros(1, width, dtype=torch.long))
                continue
            value = row[name]
            if _of_text(name, row):
                missing_tokens = width - value.shape[1]
                fill = pad if name == "input_ids" else 0
                value = torch.nn.functional.pad(value, (missing_tokens, 0) if left else (0, missing_tokens), value=fill)
            parts.append(value)
        shapes = {part.shape[1:] for part in parts}
        if len(shapes) > 1:
            longest = [max(sizes) for sizes in zip(*shapes, strict=True)]
            for index, part in enumerate(parts):
                missing = [largest - size for largest, size in zip(longest, part.shape[1:], strict=True)]
                # `pad` takes (before, after) of each dimension, the last one first
                ends = [number for count in reversed(missing) for number in (0, count)]
                parts[index] = torch.nn.functional.pad(part, ends)
        batch[name] = torch.cat(parts)
    return batch


SAMPLE_FORMAT = 1  # part of each sample's name (a hash); if it changes, stored answers are not found and are made again
LONG_ANSWER_WORDS = 20  # an answer in the corpus counts as long from this number of words on
SUBSET_SEED = 4  # first number of the seed for choosing questions; other random choices have other first numbers


@dataclass(frozen=True)
class Sample:
    """One question with its pictures, video or sound.

    Args:
        words: Number of words of the answer in the corpus, an estimate of the length of the target's answer.
    """

    name: str  # a hash of the question, its pictures and their sizes
    question: str
    images: tuple[Path, ...] = ()
    video: tuple[Path, ...] = ()  # files of a video's frames, in their order
    words: int = 0
    history: tuple[tuple[str, str], ...] = ()  # (role, text) of the messages before the question
    place: str = field(default="", compare=False)  # file and row of the question, for error messages
    sound: Utterance | None = field(default=None, compare=False)  # a recording; then `question` is its transcript

    @property
    def visual(self) -> bool:
        """Whether the prompt has pictures, a video or a sound."""
        return bool(self.images or self.video or self.sound)

    def without_pictures(self) -> Sample:
        """Return the same question without its pictures, under another name."""
        return replace(self, name=f"{self.name}/text", images=(), video=()) if self.visual else self


@dataclass(frozen=True)
class Choice:
    """Which questions of a corpus to take.

    Args:
        count: Number of questions, which are chosen at random; None: all, in the corpus's order.
        long_share: Share of the chosen questions that have long answers; None: answers of any length. The random order
            begins with up to two questions of each conversation, one with a long and one with a short answer.
    """

    count: int | None = None
    long_share: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Questions:
    """How the rows of a corpus file become questions.

    Args:
        frames: Number of frames taken from a video.
        history: Maximum earlier turns in the prompt of a question without pictures.
        images: Folder of the pictures; None: next to the corpus file.
    """

    frames: int = 8
    history: int = 2
    images: Path | None = None


def read_samples(
    corpus: Path,
    split: str,
    reading: Questions,
    choice: Choice | None = None,
    admission: Admission = STRICT,
    cache: Path | None = None,
) -> list[Sample]:
    """Read questions of a split of a corpus.

    Each picture is read once as a check. Questions about unreadable pictures are left out; their names and number are
    logged.

    Args:
        corpus: A folder with {split}.json, .jsonl or .txt, or such a file.
        reading: How rows become questions.
        choice: Which questions to take; None: all, in their order.
        admission: How many rows and pictures may be bad.
        cache: Folder where results of picture checks are stored, or None not to store them.

    Raises:
        InputError: For a bad row, or if too many questions are left out.
    """
    files = [corpus] if corpus.is_file() else [corpus / f"{split}{suffix}" for suffix in SUFFIXES]
    list_file = next((file for file in files if file.is_file()), None)
    if list_file is None:
        raise InputError(f"`corpus` must hold {split}.json, but '{corpus}' does not. Build or download it first.")
    conversations = read_chats(list_file, reading.images, admission)
    choice, resolve = choice or Choice(), admission.path_resolver(picture_folder(list_file, reading.images))
    if choice.count is None:
        questions: Iterable[Sample] = (
            question for row in conversations for question in _questions(row, resolve, reading)
        )
    else:
        draw = np.random.default_rng([SUBSET_SEED, choice.seed])
        order = draw.permutation(len(conversations)).tolist()
        laps = (
            _shuffle_questions([conversations[number] for number in order], resolve, reading, choice.seed, lap)
            for lap in (0, 1)
        )
        questions = chain.from_iterable(laps)
    noun = f"chosen questions of '{quote_path(list_file)}'"
    readable = _keep_readable_questions(choose(questions, choice), admission, cache, noun)
    return [replace(question, name=_name(question)) for question in readable]


def _keep_readable_questions(
    questions: list[Sample], admission: Admission, cache: Path | None, noun: str
) -> list[Sample]:
    """Return the questions whose pictures can all be read.

    Args:
        admission: How many may be bad.
        cache: Folder where results of picture checks are stored, or None.
        noun: What the questions are called in messages.
    """
    pictures = list(dict.fromkeys(path for question in questions for path in (*question.images, *question.video)))
    sizes = dict(zip(pictures, sizes_of(pictures, cache), strict=True))
    readable, bad = [], BadRows()
    for question in questions:
        looks = [(path, sizes[path]) for path in (*question.images, *question.video)]
        path, reason = next(((path, sizes) for path, sizes in looks if isinstance(sizes, str)), (None, ""))
        if path is None:
            readable.append(question)
        else:
            bad.add(str(reason), f"{path.parent.name}/{path.name} of {question.place}")
    if bad.count:
        admission.check(bad, len(questions), noun, rule="hold its pictures")
        rank_zero_info(f"{bad.count} of the {len(questions)} {noun} left out: {bad.report()}")
    return readable


def _shuffle_questions(
    rows: Sequence[Conversation], resolve: PathResolver, reading: Questions, seed: int, lap: int
) -> Iterator[Sample]:
    """Yield questions of conversations in a random order.

    Args:
        rows: The conversations.
        resolve: Finds their pictures.
        lap: 0: of each conversation one question with a long answer and one with a short answer; 1: the other
            questions.
    """
    for number, row in enumerate(rows):
        questions = list(_questions(row, resolve, reading))
        kinds: set[bool] = set()
        for index in np.random.default_rng([SUBSET_SEED, seed, number]).permutation(len(questions)).tolist():
            kind = questions[index].words >= LONG_ANSWER_WORDS
            if (kind not in kinds) == (lap == 0):
                yield questions[index]
            kinds.add(kind)


def choose(questions: Iterable[Sample], choice: Choice) -> list[Sample]:
    """Return the first questions with long answers and the first with short answers, as many as `choice` asks for.

    If there are too few questions with long answers, more with short answers are taken; and the other way round.
    """
    count, share = choice.count, choice.long_share
    if count is None or share is None:
        return list(questions if count is None else islice(questions, count))
    counts = {True: round(count * share), False: count - round(count * share)}
    chosen: dict[bool, list[Sample]] = {True: [], False: []}
    for question in questions:
        chosen[question.words >= LONG_ANSWER_WORDS].append(question)
        if all(len(chosen[kind]) >= counts[kind] for kind in counts):
            break
    spare = {kind: max(counts[not kind] - len(chosen[not kind]), 0) for kind in counts}
    return [question for kind in (True, False) for question in chosen[kind][: counts[kind] + spare[kind]]]


def _questions(conversation: Conversation, resolve: PathResolver, reading: Questions) -> Iterator[Sample]:
    """Yield the questions of a conversation.

    If it has pictures or a video, each question is asked alone, else after the turns before it.

    Args:
        resolve: Finds the pictures.
        reading: Says how many turns and frames are used.
    """
    video = _frames(conversation, resolve, reading.frames)
    system = conversation.notes.get(SYSTEM_KEY)
    system_turn = () if system is None else ((SYSTEM_KEY, str(system)),)
    for index, (question, answer) in enumerate(conversation.turns):
        before = () if conversation.images or video else conversation.turns[max(0, index - reading.history) : index]
        history = tuple(pair for q, a in before for pair in (("user", q), ("assistant", a)))
        words = len(answer.split())
        yield Sample("", question, conversation.images, video, words, (*system_turn, *history), conversation.place)


def _name(sample: Sample) -> str:
    digest = hashlib.blake2b(f"{SAMPLE_FORMAT} {sample.question}\n".encode(), digest_size=12)
    for role, text in sample.history:
        digest.update(f"{role}: {text}\n".encode())
    for path in (*sample.images, *sample.video):
        digest.update(f"{path.parent.name}/{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()


def _frames(conversation: Conversation, resolve: PathResolver, count: int) -> tuple[Path, ...]:
    named = conversation.notes.get("video")
    if named is None:
        return ()
    if not isinstance(named, str):
        raise InputError(
            f"`video` must be a folder of frames next to the images, but in {conversation.place} is {named!r:.80}. Fix "
            "the row."
        )
    folder = resolve(named, conversation.place)
    files = (
        sorted(path for path in folder.glob("*") if path.suffix.lower() in PICTURE_SUFFIXES) if folder.is_dir() else []
    )
    if not files:
        raise InputError(
            f"`video` must be a folder of frames, but '{folder}' of {conversation.place} holds none. Extract them, "
            "e.g. with ffmpeg."
        )
    indices = np.linspace(0, len(files) - 1, min(count, len(files))).round().astype(int)
    return tuple(files[index] for index in indices)
