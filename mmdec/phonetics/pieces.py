"""Word pieces: a small BPE vocabulary, for the French transcripts of a CTC head or the English text of a decoder."""

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

from mmdec.errors import InputError

CTC_SPECIAL_PIECES = ("<blank>",)  # special pieces of a CTC head's vocabulary
DECODER_SPECIAL_PIECES = ("<s>", "<pad>", "</s>", "<unk>")  # special pieces of a decoder's vocabulary
_SILENT = re.compile(r"[^\w' ?]")


def normalise_for_speech(text: str) -> str:
    """Normalise a sentence to what its sound can tell.

    It becomes lower case, without punctuation except apostrophes and question marks. Other marks, such as hyphens,
    become spaces.
    """
    text = unicodedata.normalize("NFC", text).lower().replace("\u2019", "'")
    text = re.sub(r"\s*\?[\s?!.]*", " ? ", _SILENT.sub(" ", text))
    return " ".join(text.split())


class PieceTokenizer:
    """A tokenizer: encodes text as ids of word pieces, and decodes them.

    The first ids are special pieces, which encoding never gives.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return self.tokenizer.get_vocab_size()

    @property
    def names(self) -> list[str]:
        """The pieces, in the order of their ids."""
        vocabulary = self.tokenizer.get_vocab()
        return sorted(vocabulary, key=vocabulary.__getitem__)

    def encode(self, text: str) -> list[int]:
        """Encode a text as piece ids. Letters that the training texts did not have are left out."""
        return self.tokenizer.encode(text).ids

    def decode(self, numbers: Sequence[int]) -> str:
        """Decode piece ids to text. Special pieces are left out."""
        return self.tokenizer.decode(list(numbers)).strip()

    @classmethod
    def learn(cls, texts: Iterable[str], count: int, special: Sequence[str]) -> PieceTokenizer:
        """Learn a BPE vocabulary from texts.

        Args:
            count: Its size, special pieces included.
            special: The special pieces, which get the first ids.
        """
        tokenizer = Tokenizer(BPE())
        tokenizer.pre_tokenizer = Metaspace()  # type: ignore[assignment] # typed by the getter
        tokenizer.decoder = MetaspaceDecoder()  # type: ignore[assignment] # the same
        trainer = BpeTrainer(vocab_size=count, special_tokens=list(special), show_progress=False, min_frequency=2)
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def load_or_learn(
        cls, path: Path, texts: Callable[[], Iterable[str]], count: int, special: Sequence[str]
    ) -> PieceTokenizer:
        """Load the tokenizer from the file `path`; if there is no such file, learn it from `texts()` and save it there.

        Args:
            count: Size of the vocabulary.
            special: The special pieces, which get the first ids.
        """
        if not path.is_file():
            cls.learn(texts(), count, special).save(path)
        return cls.read(path)

    @classmethod
    def read(cls, path: Path) -> PieceTokenizer:
        """Load a tokenizer from its JSON file.

        Raises:
            InputError: For any other file.
        """
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # all exceptions, because the package tokenizers raises a bare `Exception`
            raise InputError(
                f"`pieces` must be a tokenizer's file, but '{path}' is not ({error}). "
                "Give the file of the model's folder."
            ) from None

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(str(path))
