"""A corpus's conversations as tokens in a few flat arrays, kept on disk."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from mmdec.checks.files import write_whole
from mmdec.training.corpora.image_text import Conversation
from mmdec.training.vlm.tokens import answered, asked

NOWHERE = 255
FIELDS = ("tokens", "patches", "bounds", "first", "images")
READ = re.compile(r"(?<![A-Za-z0-9])(?:[A-Z0-9][A-Z0-9.:-]*[A-Z0-9]|[0-9])(?![A-Za-z0-9])")  # a printed word or number


@dataclass(frozen=True)
class Encoded:
    """tokens: of all turns, one after the other; patches: where the character that a token of an answer reads is
    printed, NOWHERE for others; bounds: where question and answer of each turn end, (T, 2); first: the first turn of
    each conversation, (N + 1,); images: a path of each conversation."""

    tokens: np.ndarray
    patches: np.ndarray
    bounds: np.ndarray
    first: np.ndarray
    images: np.ndarray

    def __len__(self) -> int:
        return len(self.first) - 1

    def turns(self, number: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Of each turn of a conversation: the question's tokens, the answer's, and the answer's patches."""
        turns = []
        for turn in range(self.first[number], self.first[number + 1]):
            begin = self.bounds[turn - 1, 1] if turn else 0
            middle, end = self.bounds[turn]
            turns.append((self.tokens[begin:middle], self.tokens[middle:end], self.patches[middle:end]))
        return turns

    def save(self, path: Path) -> None:
        """Write the file in one step: on an error the old one stays."""
        content = io.BytesIO()
        np.savez(content, **{name: getattr(self, name) for name in FIELDS})
        write_whole(path, content.getvalue())

    @classmethod
    def load(cls, path: Path) -> Encoded:
        """Those of `save`."""
        with np.load(path, allow_pickle=False) as kept:
            return cls(*(kept[name] for name in FIELDS))


def encode(conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerFast) -> Encoded:
    """Tokens of every turn, as they stand after the picture's prefix."""
    tokens: list[np.ndarray] = []
    patches: list[np.ndarray] = []
    bounds: list[tuple[int, int]] = []
    first, end = [0], 0
    for conversation in conversations:
        texts = [text for question, answer in conversation.turns for text in (asked(question), answered(answer))]
        encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        prints = conversation.notes.get("prints", [])
        for number in range(0, len(texts), 2):
            question, answer = encoded["input_ids"][number : number + 2]
            tokens += [np.asarray(question, np.uint16), np.asarray(answer, np.uint16)]
            read = patches_read(texts[number + 1], encoded["offset_mapping"][number + 1], prints)
            patches += [np.full(len(question), NOWHERE, np.uint8), read]
            bounds.append((end + len(question), end + len(question) + len(answer)))
            end = bounds[-1][1]
        first.append(len(bounds))
    images = np.array([str(conversation.images[0]) for conversation in conversations])
    ends = np.array(bounds, np.int64)
    return Encoded(np.concatenate(tokens), np.concatenate(patches), ends, np.array(first, np.int64), images)


def patches_read(
    answer: str, offsets: Sequence[tuple[int, int]], prints: Sequence[tuple[str, Sequence[int]]]
) -> np.ndarray:
    """The patch that each token of an answer reads. offsets: the characters of each token; prints: printed texts, each
    with its characters' patches. A word or number that is printed twice is left out: the answer may mean either."""
    where: dict[int, int] = {}
    for word in READ.finditer(answer):
        printed = [
            patches[match.start() : match.end()]
            for text, patches in prints
            for match in re.finditer(rf"(?<![A-Z0-9]){re.escape(word[0])}(?![A-Z0-9])", text)
        ]
        if len(printed) == 1:
            where |= dict(zip(range(word.start(), word.end()), printed[0], strict=True))
    read = [where.get(begin + (answer[begin : begin + 1] == " "), -1) for begin, _ in offsets]
    return np.array([NOWHERE if patch < 0 else patch for patch in read], np.uint8)
