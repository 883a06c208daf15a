"""Tests folders of parallel text: rows with all their translations, and errors that name the damaged place."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmdec.errors import InputError
from mmdec.training.corpora.text_files import TextPair, held_out_sources, read_text_pairs, read_training_pairs


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


def test_training_shares_no_sentence_with_what_another_folder_holds_back(tmp_path: Path) -> None:
    rows = {
        "a": {"train": ["Oui !\tYes.", "Non.\tNo.", "Peut-être\tMaybe."], "test": ["Bonjour.\tHello."]},
        "b": {"train": ["bonjour\tGood day.", "Salut.\tHello!", "Merci.\tThanks."], "dev": ["oui\tYep.", "Si.\tNo!"]},
    }
    for folder, splits in rows.items():
        (tmp_path / folder).mkdir()
        for split, lines in splits.items():
            text = "".join(f"{number}\tg\t{line}\n" for number, line in enumerate(lines))
            (tmp_path / folder / f"{split}.tsv").write_text(text, encoding="utf-8")
    first, second = read_training_pairs([tmp_path / "a", tmp_path / "b"])
    assert [pair.source for pair in first] == ["Peut-être"]
    assert [pair.source for pair in second] == ["Merci."]
    assert held_out_sources([tmp_path / "a", tmp_path / "b"]) == {"bonjour", "oui", "si"}
    assert len(read_training_pairs([tmp_path / "a"])[0]) == 3
