"""What a drafter is trained on: questions of a corpus, each by itself, with its pictures or the frames of its video;
and how the target reads them: its processor's own chat, and batches of such inputs."""

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
from transformers import AutoProcessor

from mmdec.images import read_image, to_pil
from mmdec.training.corpora.admission import STRICT, Admission, BadRows, Names
from mmdec.training.corpora.image_text import Conversation, read_conversations
from mmdec.training.corpora.text_files import shown
from mmdec.training.inspection import sizes_of
from mmdec.types import InputError

Inputs = dict[str, Tensor]


class Prompting:
    """A target's processor (or tokenizer, for a language model): what `mmdec.describe` sends for a question."""

    def __init__(self, base: str | Path) -> None:
        self.processor: Any = AutoProcessor.from_pretrained(base)
        self.tokenizer: Any = getattr(self.processor, "tokenizer", self.processor)
        self.films = getattr(self.processor, "video_token", None) is not None

    def __call__(self, sample: Sample) -> Inputs:
        """A batch of one. Frames are a video where the processor knows videos, else pictures."""
        if self.tokenizer is self.processor:  # a language model has no processor, only a tokenizer, and no pictures
            return self._text(sample.question)
        content: list[dict[str, Any]] = []
        if sample.video and self.films:
            content.append({"type": "video", "video": np.stack([read_image(path) for path in sample.video])})
        else:
            pictures = [to_pil(read_image(path)) for path in (*sample.images, *sample.video)]
            content += [{"type": "image", "image": picture} for picture in pictures]
        content.append({"type": "text", "text": sample.question})
        return dict(
            self.processor.apply_chat_template(
                [{"role": "user", "content": content}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
        )

    def _text(self, question: str) -> Inputs:
        if not self.tokenizer.chat_template:
            return dict(self.tokenizer(question, return_tensors="pt"))
        messages = [{"role": "user", "content": question}]
        return dict(
            self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        )


def append(inputs: Inputs, tokens: Sequence[int]) -> Inputs:
    """A batch of one, with text tokens after it."""
    ids = inputs["input_ids"]
    added = torch.tensor([list(tokens)], dtype=ids.dtype, device=ids.device)
    fills = {"input_ids": added, "attention_mask": torch.ones_like(added)}
    return {
        name: torch.cat([value, fills.get(name, torch.zeros_like(added)).to(value.dtype)], 1)
        if value.shape == ids.shape
        else value
        for name, value in inputs.items()
    }


def join(rows: Sequence[Inputs], pad: int, left: bool) -> Inputs:
    """Batches of one as one batch, padded on the left (to be continued) or on the right.

    What is as long as the text is padded with it. The rest belongs to pictures and follows one after the other; where
    their numbers of tiles differ (LLaVA-NeXT), these are padded with zeros.
    """
    width = max(row["input_ids"].shape[1] for row in rows)
    joined: Inputs = {}
    for name in {name for row in rows for name in row}:
        parts = []
        for row in rows:
            if name not in row:
                if any(name in other and other[name].shape == other["input_ids"].shape for other in rows):
                    parts.append(torch.zeros(1, width, dtype=torch.long))
                continue
            value = row[name]
            if value.shape == row["input_ids"].shape:
                lacking = width - value.shape[1]
                fill = pad if name == "input_ids" else 0
                value = torch.nn.functional.pad(value, (lacking, 0) if left else (0, lacking), value=fill)
            parts.append(value)
        shapes = {part.shape[1:] for part in parts}
        if len(shapes) > 1:
            longest = max(part.shape[1] for part in parts)
            parts = [torch.cat([p, p.new_zeros(p.shape[0], longest - p.shape[1], *p.shape[2:])], 1) for p in parts]
        joined[name] = torch.cat(parts)
    return joined


FORMAT = 1  # of the samples' names; a change makes stored answers void
LONG = 20  # words of the corpus's own answer, from which it counts as a long one
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
SUBSET = 4  # of a random stream: which questions are taken


@dataclass(frozen=True)
class Sample:
    """One question. words: of the corpus's own answer, a guess at the length of the target's."""

    name: str  # of the question, its pictures and their sizes
    question: str
    images: tuple[Path, ...] = ()
    video: tuple[Path, ...] = ()  # frames, in their order
    words: int = 0
    place: str = field(default="", compare=False)  # where it is listed

    @property
    def visual(self) -> bool:
        return bool(self.images or self.video)

    def without_pictures(self) -> Sample:
        """The same question, without its pictures."""
        return replace(self, name=f"{self.name}/text", images=(), video=()) if self.visual else self


@dataclass(frozen=True)
class Choice:
    """Which questions: `count` in a random order, at first one long and one short one of each conversation, and
    `long_share` of them with long answers; None: all, in their order."""

    count: int | None = None
    long_share: float | None = None
    seed: int = 0


def read_samples(
    corpus: Path,
    split: str,
    frames: int,
    choice: Choice | None = None,
    admission: Admission = STRICT,
    kept: Path | None = None,
) -> list[Sample]:
    """Questions of {corpus}/{split}.json, those of the choice; None: all, in their order. frames: of a video, a
    folder of pictures, so many are taken. kept: a folder for what was found of the pictures; None: nowhere.

    Pictures are read once; questions about one that cannot be read are left out, named and counted. Raises InputError,
    naming the row, and where too many are left out.
    """
    listed = corpus / f"{split}.json"
    if not listed.is_file():
        raise InputError(f"`corpus` must hold {split}.json, but '{corpus}' does not. Build or download it first.")
    conversations = read_conversations(listed, admission=admission)
    choice, root = choice or Choice(), admission.names(corpus / "images")
    if choice.count is None:
        questions: Iterable[Sample] = (question for row in conversations for question in _questions(row, root, frames))
    else:
        draw = np.random.default_rng([SUBSET, choice.seed])
        order = draw.permutation(len(conversations)).tolist()
        laps = (_drawn([conversations[number] for number in order], root, frames, choice.seed, lap) for lap in (0, 1))
        questions = chain.from_iterable(laps)
    whole = _whole(choose(questions, choice), admission, kept, f"chosen questions of {shown(listed)}")
    return [replace(question, name=_name(question)) for question in whole]


def _whole(questions: list[Sample], admission: Admission, kept: Path | None, of: str) -> list[Sample]:
    """The questions whose pictures can all be read."""
    pictures = list(dict.fromkeys(path for question in questions for path in (*question.images, *question.video)))
    found = dict(zip(pictures, sizes_of(pictures, kept), strict=True))
    whole, bad = [], BadRows()
    for question in questions:
        looks = [(path, found[path]) for path in (*question.images, *question.video)]
        path, reason = next(((path, found) for path, found in looks if isinstance(found, str)), (None, ""))
        if path is None:
            whole.append(question)
        else:
            bad.add(str(reason), f"{path.parent.name}/{path.name} of {question.place}")
    if bad.count:
        admission.check(bad, len(questions), of, rule="hold its pictures")
        rank_zero_info(f"{bad.count} of the {len(questions)} {of} left out: {bad.report()}")
    return whole


def _drawn(rows: Sequence[Conversation], root: Names, frames: int, seed: int, lap: int) -> Iterator[Sample]:
    """Lap 0: of each conversation one question of each kind; lap 1: the rest."""
    for number, row in enumerate(rows):
        questions = list(_questions(row, root, frames))
        kinds: set[bool] = set()
        for index in np.random.default_rng([SUBSET, seed, number]).permutation(len(questions)).tolist():
            kind = questions[index].words >= LONG
            if (kind not in kinds) == (lap == 0):
                yield questions[index]
            kinds.add(kind)


def choose(questions: Iterable[Sample], choice: Choice) -> list[Sample]:
    """The first of the questions of each kind, as many as the choice says; where one kind has too few, the other fills
    up."""
    count, share = choice.count, choice.long_share
    if count is None or share is None:
        return list(questions if count is None else islice(questions, count))
    counts = {True: round(count * share), False: count - round(count * share)}
    chosen: dict[bool, list[Sample]] = {True: [], False: []}
    for question in questions:
        chosen[question.words >= LONG].append(question)
        if all(len(chosen[kind]) >= counts[kind] for kind in counts):
            break
    spare = {kind: max(counts[not kind] - len(chosen[not kind]), 0) for kind in counts}
    return [question for kind in (True, False) for question in chosen[kind][: counts[kind] + spare[kind]]]


def _questions(conversation: Conversation, root: Names, frames: int) -> Iterator[Sample]:
    video = _frames(conversation, root, frames)
    for question, answer in conversation.turns:
        yield Sample("", question, conversation.images, video, len(answer.split()), conversation.place)


def _name(sample: Sample) -> str:
    digest = hashlib.blake2b(f"{FORMAT} {sample.question}\n".encode(), digest_size=12)
    for path in (*sample.images, *sample.video):
        digest.update(f"{path.parent.name}/{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()


def _frames(conversation: Conversation, root: Names, count: int) -> tuple[Path, ...]:
    named = conversation.notes.get("video")
    if named is None:
        return ()
    if not isinstance(named, str):
        raise InputError(
            f"`video` must be a folder of frames beside the images, but in {conversation.place} is {named!r:.80}. Mend "
            "the row."
        )
    folder = root(named, conversation.place)
    files = sorted(path for path in folder.glob("*") if path.suffix.lower() in PICTURES) if folder.is_dir() else []
    if not files:
        raise InputError(
            f"`video` must be a folder of frames, but '{folder}' of {conversation.place} holds none. Extract them, "
            "e.g. with ffmpeg."
        )
    indices = np.linspace(0, len(files) - 1, min(count, len(files))).round().astype(int)
    return tuple(files[index] for index in indices)
