"""Simple tokenizers: each token is a string of letters, and encoding takes the longest token that fits."""

from __future__ import annotations

import random
from typing import Any

import torch

SPECIAL = ("<pad>", "<bos>", "<eos>")


class Letters:
    """A tokenizer with the methods of transformers' tokenizers that a drafter needs. The first ids are special."""

    def __init__(self, words: list[str], special: tuple[str, ...] = SPECIAL) -> None:
        self.words = [*special, *words]
        self.all_special_ids = list(range(len(special)))
        self.ids = {word: number for number, word in enumerate(self.words) if number >= len(special)}

    def __len__(self) -> int:
        return len(self.words)

    def get_vocab(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return "".join(self.words[number] for number in ids if number not in self.all_special_ids)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids, longest = [], max(map(len, self.ids))
        while text:
            word = next((text[:size] for size in range(longest, 0, -1) if text[:size] in self.ids), text[0])
            ids.append(self.ids.get(word, 0))  # an unknown letter becomes the first special token
            text = text[len(word) :]
        return {"input_ids": ids}


def alphabet(count: int) -> list[str]:
    return [chr(0x100 + number) for number in range(count)]


def shuffled(count: int, pairs: int, seed: int) -> Letters:
    """Make a tokenizer with the letters of `alphabet` in random order, and `pairs` tokens of two letters."""
    source = random.Random(seed)
    letters = source.sample(alphabet(count), count)
    return Letters([*letters, *sorted({"".join(source.choices(letters, k=2)) for _ in range(pairs)})])


def renamed(model: Any, build: Any, own: Letters, other: Letters) -> Any:
    """Copy a model so that it uses the ids of `other` for the same letters. build: makes a model of the same sizes."""
    copy: Any = build()
    copy.load_state_dict(model.state_dict())
    order = torch.tensor([own.get_vocab()[word] for word in other.words])
    with torch.no_grad():
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]
        for mine, theirs in zip([copy.get_input_embeddings(), copy.get_output_embeddings()], ends, strict=True):
            mine.weight.copy_(theirs.weight[order])
    return copy.eval()
