"""Folders of parallel text: rows with all their translations; what is damaged is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmdec.training.corpora.text_pairs import TextPair, read_text_pairs
from mmdec.types import InputError


def test_each_row_has_its_translations(tmp_path: Path) -> None:
    (tmp_path / "dev.tsv").write_text('a\tg\tOui "oui".\tYes.\tAye.\nb\tg\tNon.\tNo.\n', encoding="utf-8")
    first, second = read_text_pairs(tmp_path, "dev")
    assert first == TextPair("a", "g", 'Oui "oui".', ("Yes.", "Aye."))
    assert second.references == ("No.",)


@pytest.mark.parametrize("content", [None, "", "a\tg\tOui.\n", "a\tg\t\tYes.\n"])
def test_rows_without_a_translation_and_missing_tables_are_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "dev.tsv").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=r"`folder` must hold .*dev\.tsv"):
        read_text_pairs(tmp_path, "dev")
