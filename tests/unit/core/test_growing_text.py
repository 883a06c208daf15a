"""Tests the text of tokens that come a few at a time."""

from __future__ import annotations

import pytest

from mmdec.core.growing_text import GrowingText


class ByteTokenizer:
    """Each token is a byte; 0 is special."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(token for token in ids if token or not skip_special_tokens).decode(errors="replace")


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_pieces_join_to_the_text_and_end_at_characters(count: int) -> None:
    whole = "dé — 🙂!"
    text, tokens, pieces = GrowingText(ByteTokenizer()), [*whole.encode(), 0], list[str]()
    for start in range(0, len(tokens), count):
        pieces.append(text.add(tokens[start : start + count], done=start + count >= len(tokens)))
        assert text.text == "".join(pieces) == whole[: len(text.text)]
        assert text.tokens == tokens[: start + count]
    assert text.text == whole
    if count == 1:
        assert [*filter(None, pieces)] == [*whole]


def test_an_incomplete_character_is_part_of_a_text_that_is_done() -> None:
    text = GrowingText(ByteTokenizer())
    assert text.add(b"a\xc3") == "a"
    assert text.add([], done=True) == "\ufffd"


def test_a_broken_character_within_the_text_is_not_withheld() -> None:
    text = GrowingText(ByteTokenizer())
    assert [text.add([byte]) for byte in b"a\xc3b"] == ["a", "", "\ufffdb"]
