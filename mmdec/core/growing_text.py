"""The text of tokens that come a few at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

REPLACEMENT_CHARACTER = "\ufffd"  # a tokenizer writes it for bytes that are not a complete UTF-8 character


@final
class GrowingText:
    """The text of the tokens so far. A character of several tokens comes with its last token.

    Args:
        tokenizer: Decodes the tokens; special tokens have no text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.tokens: list[int] = []
        self.text = ""

    def add(self, tokens: Sequence[int], done: bool = False) -> str:
        """Add tokens, and return the text that they add.

        Args:
            tokens: Token ids.
            done: Whether the text ends here; if so, an incomplete character at the end is part of it.
        """
        self.tokens += tokens
        before, self.text = self.text, str(self._tokenizer.decode(self.tokens, skip_special_tokens=True))
        if not done:
            self.text = self.text.rstrip(REPLACEMENT_CHARACTER)
        return self.text[len(before) :]
