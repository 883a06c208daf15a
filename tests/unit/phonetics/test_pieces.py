"""Tests pieces of words: the text without case and punctuation, special pieces first, files."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmdec.errors import InputError
from mmdec.phonetics.pieces import HEARD, WRITTEN, Pieces, heard
from tests.support.tiny_sentences import TEXTS


@pytest.mark.parametrize(
    ("text", "said"),
    [("Où est-elle ?!", "où est elle ?"), ("L’été, déjà…", "l'été déjà"), ("Quoi ? Rien.", "quoi ? rien")],
)
def test_what_is_heard_of_a_text(text: str, said: str) -> None:
    assert heard(text) == said


def test_pieces_spell_their_text_and_leave_the_blank_free(tmp_path: Path) -> None:
    pieces = Pieces.learn(map(heard, TEXTS), 40, HEARD)
    pieces.save(tmp_path / "pieces.json")
    again = Pieces.read(tmp_path / "pieces.json")
    assert again.names == pieces.names
    assert len(again) <= 40
    for text in TEXTS:
        assert again.decode(again.encode(heard(text))) == heard(text)
        assert 0 not in again.encode(heard(text))
    (tmp_path / "pieces.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="`pieces` must be"):
        Pieces.read(tmp_path / "pieces.json")


def test_written_text_keeps_case_and_marks() -> None:
    texts = ["I'm Tom, aren't I?", 'Tom is "here"!'] * 3
    pieces = Pieces.learn(texts, 60, WRITTEN)
    assert tuple(pieces.names[:4]) == WRITTEN
    for text in texts:
        assert pieces.decode([0, *pieces.encode(text), 2, 1]) == text
