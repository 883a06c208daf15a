"""Tokenises texts of callers so that special tokens in them are text.

In a question about HTML, `<image>` is not a picture.

A chat template and a processor make one string of a caller's texts, the marks of turns and the placeholders of
pictures, so the tokenizer cannot tell which `<image>` is a placeholder. Two replacements keep them apart, both of equal
length, because some processors count characters. Before the template, the first character of each special token in a
caller's text is replaced by a private one (`hide`), so that neither template nor processor finds the token. Behind the
processor, a copy of the tokenizer that takes special tokens for text reads the string with the first characters
restored, and with aliases instead of the template's and the processor's own special tokens.

A text without special tokens takes the usual way, and its tokens are the same on both.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from threading import Lock
from typing import Any, final

from tokenizers import AddedToken, Tokenizer

from mmdec.errors import InputError

PRIVATE_CODE_POINTS = range(0xF0100, 0xFFFFE)  # code points of Unicode's plane 15, which no script uses
_ALIAS_RNG = random.SystemRandom()  # nobody can guess the aliases, and write them into a text
_HIDING = Lock()  # held while characters get their aliases


@final
class PlainText:
    """Keeps a tokenizer's special tokens in texts of callers apart from those of the chat template and the processor.

    Special are the added tokens that the tokenizer calls so, those that the chat template writes, and the placeholders
    of the processor.

    Args:
        tokenizer: Of the model.
        processor: Of the model; None: it has none, and all added tokens are special.
    """

    def __init__(self, tokenizer: Any, processor: Any = None) -> None:
        self._tokenizer, self._processor = tokenizer, processor
        # made at the first text with a special token, because large tokenizers take seconds
        self._hidden_tokenizer: Any = None
        self._spelt: dict[str, bool] = {}  # special token -> whether text cannot have it
        special = sorted(_special(tokenizer, processor), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self._hidden: dict[str, str] = {}  # character -> the private character that hides it
        self._restored: dict[int, str] = {}  # code point of a private character -> the character it stands for
        self._in_texts: set[int] = set()  # the private code points that callers' texts or aliases have
        for first in sorted({each[0] for each in special}):
            self._hide_character(first, "prompt")
        added = tokenizer.get_added_vocab()
        # an alias has no character that is restored as another one
        free = [point for point in PRIVATE_CODE_POINTS if point not in self._restored]
        self._aliases = {
            each: "".join(chr(point) for point in _ALIAS_RNG.choices(free, k=len(each)))
            for each in special
            if each in added
        }
        self._in_texts.update(map(ord, "".join(self._aliases.values())))

    def hide(self, texts: Sequence[str], argument: str = "prompt") -> list[str]:
        """Return a caller's texts with the special tokens in them hidden, from template and processor alike.

        Texts may follow one another in the prompt, so tokens that only all of them together spell are hidden, too. A
        caller's own private character that hides another one is itself hidden by a third.

        Args:
            argument: The name of the texts, for the message.

        Raises:
            InputError: For a token that this tokenizer cannot read as text.
        """

        def hidden(match: re.Match[str]) -> str:
            token = match[0]
            if self._unreadable(token):
                raise InputError(
                    f"`{argument}` must have no {token!r}, but has one: the model's tokenizer cannot read it as text. "
                    "Write it in another way."
                )
            return self._hidden[token[0]] + token[1:]

        text = "".join(texts)
        private = {point for point in map(ord, set(text)) if point in PRIVATE_CODE_POINTS}
        with _HIDING:
            taken = {
                point: self._hide_character(chr(point), argument, private)
                for point in private
                if point in self._restored
            }
            self._in_texts |= private
        text, count = self._special.subn(hidden, text.translate(taken))
        while count:  # tokens may overlap, so that a hidden one lay over another
            text, count = self._special.subn(hidden, text)
        ends = [0, *accumulate(map(len, texts))]
        return [text[begin:end] for begin, end in pairwise(ends)]

    def hides(self, texts: Sequence[str]) -> bool:
        """Return whether any of these texts has a hidden special token."""
        marks = [*self._hidden.values()]  # a copy, because another thread may add one
        return any(mark in text for mark in marks for text in texts)

    def restore(self, text: str) -> str:
        """Return the text with its hidden special tokens restored."""
        return text.translate(self._restored)

    def encode(self, text: str) -> list[int]:
        """Return a caller's text as token ids, without any special token.

        Raises:
            InputError: As `hide` does.
        """
        return self.reader(self.hide([text]), add_special_tokens=False)["input_ids"][0]

    @property
    def reader(self) -> Any:
        """A tokenizer for prompts with hidden special tokens."""
        if self._hidden_tokenizer is None:
            self._hidden_tokenizer = _HiddenTokenizer(self._tokenizer, self._aliases, self.restore, self._special)
        return self._hidden_tokenizer

    @property
    def processor(self) -> Any:
        """The model's processor, for prompts with hidden special tokens."""
        reading = copy.copy(self._processor)
        reading.tokenizer = self.reader
        return reading

    def _hide_character(self, character: str, argument: str, private: Collection[int] = ()) -> str:
        """Return the private character that hides this one: random, in no text so far, and none of `private`."""
        if character not in self._hidden:
            used = {*self._restored, *self._in_texts, *private}
            free = [point for point in PRIVATE_CODE_POINTS if point not in used]
            if not free:
                raise InputError(
                    f"`{argument}` must not have every private character from U+{PRIVATE_CODE_POINTS[0]:X} to "
                    f"U+{PRIVATE_CODE_POINTS[-1]:X}, but this text and earlier ones do. Remove {character!r}."
                )
            point = _ALIAS_RNG.choice(free)
            self._restored[point] = character
            self._hidden[character] = chr(point)
        return self._hidden[character]

    def _unreadable(self, token: str) -> bool:
        """Return whether the special token cannot be told from text.

        The tokenizer makes the special token even of text, as a vocabulary of whole words may, or it has no parts that
        could be told from each other, as tokenizers in Python.
        """
        if token not in self._spelt:
            number = self._tokenizer.convert_tokens_to_ids(token) if token in self._aliases else None
            fast = isinstance(getattr(self._tokenizer, "backend_tokenizer", None), Tokenizer)
            self._spelt[token] = not fast or number in self.reader.plain_ids(token)
        return self._spelt[token]


def _special(tokenizer: Any, processor: Any) -> set[str]:
    added: Mapping[int, AddedToken] = tokenizer.added_tokens_decoder
    template = str(getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None) or "")
    marks = [
        token.content
        for token in added.values()
        if token.special or processor is None or (token.content in template and not token.content.isspace())
    ]
    attributes: Mapping[str, Any] = {} if processor is None else vars(processor)
    placeholders = [value for name, value in attributes.items() if name.endswith("_token") and isinstance(value, str)]
    return {each for each in (*tokenizer.all_special_tokens, *marks, *placeholders) if each}


@final
class _HiddenTokenizer:
    """A tokenizer that reads prompts with hidden special tokens; for everything else it is the model's own."""

    def __init__(
        self, tokenizer: Any, aliases: Mapping[str, str], restore: Callable[[str], str], special: re.Pattern[str]
    ) -> None:
        self._own, self._aliases, self._restore, self._special = tokenizer, aliases, restore, special
        added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
        backend = copy.deepcopy(tokenizer.backend_tokenizer)
        # special ones are those that `split_special_tokens` takes for text
        backend.add_special_tokens([_token(name, added[name], True) for name in aliases])
        backend.add_tokens([_token(alias, added[name], False) for name, alias in aliases.items()])
        self._ids = {backend.token_to_id(alias): backend.token_to_id(name) for name, alias in aliases.items()}
        self._plain = copy.copy(tokenizer)
        self._plain._tokenizer = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __len__(self) -> int:
        return len(self._own)

    def __call__(self, text: Any, *args: Any, return_tensors: Any = None, **options: Any) -> Any:
        texts = self._read(text) if isinstance(text, str) else [self._read(each) for each in text]
        encoding = self._plain(texts, *args, split_special_tokens=True, **options)
        encoding["input_ids"] = self._map_ids(encoding["input_ids"])
        return encoding.convert_to_tensors(return_tensors)

    def plain_ids(self, text: str) -> list[int]:
        """Return the token ids of a text in which nothing is special."""
        return self._plain(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def _read(self, text: str) -> str:
        return self._restore(self._special.sub(lambda match: self._aliases.get(match[0], match[0]), text))

    def _map_ids(self, ids: Any) -> Any:
        return [self._map_ids(each) if isinstance(each, list) else self._ids.get(each, each) for each in ids]


def _token(content: str, like: AddedToken, special: bool) -> AddedToken:
    flags = {name: getattr(like, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
    return AddedToken(content, special=special, **flags)
