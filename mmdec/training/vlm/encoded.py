"""A corpus's conversations as tokens in a few flat arrays, kept on disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from mmdec.corpora.image_text import Conversation
from mmdec.training.vlm.tokens import answered, asked


@dataclass(frozen=True)
class Encoded:
    """tokens: of all turns, one after the other; bounds: where question and answer of each turn end, (T, 2); first: the
    first turn of each conversation, (N + 1,); images: a path of each conversation."""

    tokens: np.ndarray
    bounds: np.ndarray
    first: np.ndarray
    images: np.ndarray

    def __len__(self) -> int:
        return len(self.first) - 1

    def turns(self, number: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(question, answer) tokens of one conversation."""
        turns = []
        for turn in range(self.first[number], self.first[number + 1]):
            begin = self.bounds[turn - 1, 1] if turn else 0
            middle, end = self.bounds[turn]
            turns.append((self.tokens[begin:middle], self.tokens[middle:end]))
        return turns

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        partial = path.with_name(f"{path.stem}.{os.getpid()}.part.npz")
        np.savez(partial, tokens=self.tokens, bounds=self.bounds, first=self.first, images=self.images)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Encoded:
        """Those of `save`."""
        with np.load(path, allow_pickle=False) as kept:
            return cls(*(kept[name] for name in ("tokens", "bounds", "first", "images")))


def encode(conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerFast) -> Encoded:
    """Tokens of every turn, as they stand after the picture's prefix."""
    tokens: list[np.ndarray] = []
    bounds: list[tuple[int, int]] = []
    first, end = [0], 0
    for conversation in conversations:
        texts = [text for question, answer in conversation.turns for text in (asked(question), answered(answer))]
        parts = tokenizer(texts, add_special_tokens=False)["input_ids"]
        for question, answer in zip(parts[::2], parts[1::2], strict=True):
            tokens += [np.asarray(question, np.uint16), np.asarray(answer, np.uint16)]
            bounds.append((end + len(question), end + len(question) + len(answer)))
            end = bounds[-1][1]
        first.append(len(bounds))
    images = np.array([str(conversation.images[0]) for conversation in conversations])
    return Encoded(np.concatenate(tokens), np.array(bounds, np.int64), np.array(first, np.int64), images)
