"""English text as tokens of the word model: words, punctuation marks, and the case of words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import pairwise

CLOSING, INNER = ".?!", ",;:"
TOKEN = re.compile(rf"[^\W_]+(?:['’.\-][^\W_]+)*|[{re.escape(CLOSING + INNER)}]")


def tokenize(text: str) -> list[str]:
    """Words and marks. The mark that closes a sentence comes first, and is appended to each of its inner marks.

    >>> tokenize("Hello. Where is it, please?")
    ['.', 'Hello', '?', 'Where', 'is', 'it', ',?', 'please']
    """
    tokens: list[str] = []
    sentence: list[str] = []
    for token in TOKEN.findall(text.replace("’", "'")):
        if token not in CLOSING:
            sentence.append(token)
        elif sentence:
            tokens += [token, *(word + token if word in INNER else word for word in sentence)]
            sentence = []
    return tokens + (["."] if tokens and sentence else []) + sentence


def render(tokens: Iterable[str]) -> str:
    """The inverse of `tokenize`, with a capital at the start of each sentence. A sentence's last mark closes it."""
    text, pending, start = "", "", True
    for token in tokens:
        if token in CLOSING:
            text, pending, start = text + pending, token, True
        elif token[0] in INNER:
            text, pending = text + token[0], token[1:]
        else:
            text += (" " if text else "") + (token[0].upper() + token[1:] if start else token)
            start = False
    return text + ("" if start else pending)


def is_mark(token: str) -> bool:
    """Whether a token has no phones: "?", ",", or the comma of a question, ",?"."""
    return token[0] in CLOSING + INNER


def restore_case(texts: list[list[str]]) -> list[list[str]]:
    """Lower the capital of each sentence's first word, unless the word usually has a capital elsewhere."""
    inside: Counter[str] = Counter()
    for tokens in texts:
        inside.update(token for before, token in pairwise([".", *tokens]) if before not in CLOSING)

    def plain(word: str) -> str:
        lowered = word[0].lower() + word[1:]
        return lowered if inside[lowered] >= inside[word] and not _shouted(word) else word

    return [
        [plain(token) if before in CLOSING else token for before, token in pairwise([".", *tokens])] for tokens in texts
    ]


def case_of_stem(word: str, used: Collection[str]) -> str:
    """For a word that only the lexicon has: copy the case of its stem (Mondays, Paul's)."""
    stem = word.removesuffix("s").removesuffix("'")
    capital = stem[:1].upper() + stem[1:]
    return capital + word[len(stem) :] if stem not in used and capital in used else word


def _shouted(word: str) -> bool:
    """Whether the word has its capital anywhere in a sentence: I, I'd, TV."""
    return word.split("'")[0] == "I" or (len(word) > 1 and word.isupper())
