"""Pieces of words: a small BPE for the French transcript of a CTC head, or for a decoder's English text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.trainers import BpeTrainer

from mmdec.types import InputError

HEARD = ("<blank>",)  # special pieces of a CTC head's vocabulary
WRITTEN = ("<s>", "<pad>", "</s>", "<unk>")  # special pieces of a decoder's vocabulary
_SILENT = re.compile(r"[^\w' ?]")


def heard(text: str) -> str:
    """Reduce a sentence to what can be heard: lower case, and no marks but apostrophes and question marks. Other marks,
    such as hyphens, become spaces."""
    text = unicodedata.normalize("NFC", text).lower().replace("\u2019", "'")
    text = re.sub(r"\s*\?[\s?!.]*", " ? ", _SILENT.sub(" ", text))
    return " ".join(text.split())


class Pieces:
    """Encodes text as piece ids, and decodes it. The first ids are those of special pieces, which no text contains."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return self.tokenizer.get_vocab_size()

    @property
    def names(self) -> list[str]:
        """Return the pieces, in the order of their ids."""
        vocabulary = self.tokenizer.get_vocab()
        return sorted(vocabulary, key=vocabulary.__getitem__)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text's pieces. Letters that were not in the training texts are left out."""
        return self.tokenizer.encode(text).ids

    def decode(self, numbers: Sequence[int]) -> str:
        """Return the text of the pieces with these ids. Special ones are left out."""
        return self.tokenizer.decode(list(numbers)).strip()

    @classmethod
    def learn(cls, texts: Iterable[str], count: int, special: Sequence[str]) -> Pieces:
        """Learn `count` pieces from texts. The count includes the special ones, which come first."""
        tokenizer = Tokenizer(BPE())
        tokenizer.pre_tokenizer = Metaspace()  # type: ignore[assignment] # typed by the getter
        tokenizer.decoder = MetaspaceDecoder()  # type: ignore[assignment] # the same
        trainer = BpeTrainer(vocab_size=count, special_tokens=list(special), show_progress=False, min_frequency=2)
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def kept(cls, path: Path, texts: Callable[[], Iterable[str]], count: int, special: Sequence[str]) -> Pieces:
        """Read the pieces of a file; if there is no file, first learn `count` pieces of `texts()` and save them."""
        if not path.is_file():
            cls.learn(texts(), count, special).save(path)
        return cls.read(path)

    @classmethod
    def read(cls, path: Path) -> Pieces:
        """Read a file that `save` wrote. Raises InputError for any other file."""
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # tokenizers raises a bare Exception
            raise InputError(f"`pieces` must be a tokenizer's file, but '{path}' is not ({error}).") from None

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(str(path))
