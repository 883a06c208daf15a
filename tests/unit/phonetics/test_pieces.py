"""Tests pieces of words: the text without case and punctuation, special pieces first, files."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmdec.errors import InputError
from mmdec.phonetics.pieces import CTC_SPECIAL_PIECES, DECODER_SPECIAL_PIECES, PieceTokenizer, normalise_for_speech
from tests.support.tiny_sentences import TEXTS


@pytest.mark.parametrize(
    ("text", "expected"),
    [("Où est-elle ?!", "où est elle ?"), ("L’été, déjà…", "l'été déjà"), ("Quoi ? Rien.", "quoi ? rien")],
)
def test_the_sound_of_a_text_ignores_case_and_marks(text: str, expected: str) -> None:
    assert normalise_for_speech(text) == expected


def test_pieces_spell_their_text_and_leave_the_blank_free(tmp_path: Path) -> None:
    pieces = PieceTokenizer.learn(map(normalise_for_speech, TEXTS), 40, CTC_SPECIAL_PIECES)
    pieces.save(tmp_path / "pieces.json")
    again = PieceTokenizer.read(tmp_path / "pieces.json")
    assert again.names == pieces.names
    assert len(again) <= 40
    for text in TEXTS:
        assert again.decode(again.encode(normalise_for_speech(text))) == normalise_for_speech(text)
        assert 0 not in again.encode(normalise_for_speech(text))
    (tmp_path / "pieces.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="`pieces` must be"):
        PieceTokenizer.read(tmp_path / "pieces.json")


def test_written_text_keeps_case_and_marks() -> None:
    texts = ["I'm Tom, aren't I?", 'Tom is "here"!'] * 3
    pieces = PieceTokenizer.learn(texts, 60, DECODER_SPECIAL_PIECES)
    assert tuple(pieces.names[:4]) == DECODER_SPECIAL_PIECES
    for text in texts:
        assert pieces.decode([0, *pieces.encode(text), 2, 1]) == text
