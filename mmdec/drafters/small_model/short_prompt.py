"""A shorter prompt for the small model: of a long context it reads the beginning, the end, and what is like the end.

A short cache makes the small model's passes cheap; the target still reads the whole prompt and decides every token.

References:
    RAPID (Chen et al. 2025) retrieves chunks of the context for the drafter by embeddings. Here chunks are compared by
    their n-grams, which needs no other model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from mmdec.checks.arguments import check_whole, format_value
from mmdec.errors import InputError

Shorten = Callable[[list[int]], Sequence[int]]  # the prompt's token ids -> those that the small model reads
MIN_PROMPT_TOKENS = 16
MAX_PROMPT_TOKENS = 2**31
MAX_FIRST_TOKENS = 64  # tokens of the beginning that stay, where chat templates have their instructions
CHUNK_TOKENS = 32  # the longest chunks; shorter ones fill a small room
QUERY_TOKENS = 64  # the last tokens of the prompt, to which chunks are compared: a question stands there
MAX_NGRAM = 3


def check_prompt(prompt: int | Shorten | None) -> int | Shorten | None:
    """Return the argument `prompt` of a small model.

    Raises:
        InputError: If it is not None, a number of tokens or a function.
    """
    if prompt is None or callable(prompt):
        return prompt
    remedy = "Give the number of tokens that the small model reads, a function of the prompt's ids, or None for all."
    return check_whole("prompt", prompt, MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS, remedy)


def shorten_prompt(ids: list[int], prompt: int | Shorten, vocab_size: int) -> list[int]:
    """Return the tokens of a prompt that the small model reads.

    Args:
        ids: The prompt.
        prompt: Maximum number of tokens to read, or the caller's function.
        vocab_size: The small model's vocabulary size.

    Raises:
        InputError: If the caller's function returns no tokens, or none of this vocabulary.
    """
    if isinstance(prompt, int):
        return most_alike(ids, prompt)
    given: Any = prompt(list(ids))
    try:
        tokens = [int(token) for token in given]
    except (TypeError, ValueError):
        tokens = []
    if not tokens or min(tokens) < 0 or max(tokens) >= vocab_size:
        raise InputError(
            f"`prompt` must return token ids below {vocab_size}, at least one, but returned {format_value(given)}. "
            "Return a part of the ids that it gets."
        )
    return tokens


def most_alike(ids: list[int], size: int) -> list[int]:
    """Return `size` tokens of a text, in their order: the first, the chunks most like the end, and the last.

    A chunk is the likelier, the more n-grams it shares with the last tokens, at most `QUERY_TOKENS` of them, and the
    rarer these are. The last chunk that is chosen is cut to the room that is left. Texts of up to `size` tokens are
    returned whole.
    """
    if len(ids) <= size:
        return ids
    first = min(MAX_FIRST_TOKENS, size // 4)
    last = (size - first) // 2
    room, end = size - first - last, len(ids) - last
    length = math.ceil(room / math.ceil(room / CHUNK_TOKENS))
    chunks = [ids[start : min(start + length, end)] for start in range(first, end, length)]
    query = _ngrams(ids[max(end, len(ids) - QUERY_TOKENS) :])
    shared = [_ngrams(chunk) & query for chunk in chunks]
    counts = Counter(ngram for ngrams in shared for ngram in ngrams)
    scores = [sum(math.log(1 + len(chunks) / counts[ngram]) for ngram in sorted(ngrams)) for ngrams in shared]
    chosen = dict[int, list[int]]()
    for index in sorted(range(len(chunks)), key=lambda index: (-scores[index], -index)):
        chosen[index] = chunks[index][:room]
        room -= len(chosen[index])
    middle = [token for index in sorted(chosen) for token in chosen[index]]
    return [*ids[:first], *middle, *ids[end:]]


def _ngrams(tokens: list[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[at : at + n]) for n in range(1, MAX_NGRAM + 1) for at in range(len(tokens) - n + 1)}
