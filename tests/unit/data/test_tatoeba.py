"""Tests Tatoeba's pairs: cleaned, grouped by shared sentences, split by a hash of the group, without rare words."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "data" / "build"))
import tatoeba

PAIRS = (
    "Go.\tVa !\n"
    "Hi.\tSalut !\n"
    "Hi.\tSalut.\n"
    "Hello!\tSalut !\n"
    "Hello there!\tBien le bonjour.\n"
    "hello\tBonjour\u202f!\tmore\n"
    "Only English.\t\n"
    "Кто?\tQui ?\n"
    "It’s “so”.\tC’est « ainsi ».\n"
)


@pytest.fixture(scope="module")
def zipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "fra-eng.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("__MACOSX/fra-eng/._fra.txt", "nothing")
        archive.writestr("fra-eng/fra.txt", PAIRS)
    return path


@pytest.mark.parametrize(
    ("written", "cleaned"),
    [
        ("C’est «\u202fainsi\u202f»\u00a0!", 'C\'est "ainsi"!'),
        ("Il part … à  5 h ;\tvite", "Il part... à 5 h; vite"),
        ("e\u0301te\u0301 –\u00ad oui", "été - oui"),
    ],
)
def test_quotes_spaces_and_accents_are_written_in_one_way(written: str, cleaned: str) -> None:
    assert tatoeba.clean(written) == cleaned


def test_lines_without_a_pair_in_both_languages_are_left_out(zipped: Path) -> None:
    pairs = list(tatoeba.read_pairs(zipped))
    assert len(pairs) == 7
    assert pairs[-1] == ('C\'est "ainsi".', 'It\'s "so".')
    assert ("Bonjour!", "hello") in pairs


def test_pairs_that_share_a_sentence_through_others_are_one_group(zipped: Path) -> None:
    rows = {row.french: row for row in tatoeba.rows_of(tatoeba.read_pairs(zipped))}
    assert rows["Salut!"].english == ("Hi.", "Hello!")
    linked = {rows[french].group for french in ("Salut!", "Salut.", "Bonjour!")}
    assert len(linked) == 1
    assert {rows["Va!"].group, rows["Bien le bonjour."].group}.isdisjoint(linked)


def test_the_split_is_the_hash_of_the_smallest_english_sentence() -> None:
    names = [f"sentence {number}" for number in range(400)]
    rows = tatoeba.rows_of([(f"phrase {n}", f"Sentence, {n}!") for n in range(400)])
    for name, row in zip(names, rows, strict=True):
        number = int(hashlib.sha1(name.encode()).hexdigest(), 16) % 100
        assert row.split == ("test" if number < 2 else "dev" if number == 2 else "train")
    assert {row.split for row in rows} == {"train", "dev", "test"}


def test_training_says_common_words_alone_and_tests_say_all(zipped: Path, tmp_path: Path) -> None:
    tatoeba.build(zipped, tmp_path / "once", 3)
    tatoeba.build(zipped, tmp_path / "again", 3)
    files = sorted(path.name for path in (tmp_path / "once").iterdir())
    assert files == ["NOTICE", "dev.tsv", "test.tsv", "train.tsv", "words.tsv"]
    for name in files:
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    words = {line.split("\t")[0] for line in (tmp_path / "once" / "words.tsv").read_text().splitlines()}
    assert "hi" in words
    assert len(words) == 3
    for line in (tmp_path / "once" / "train.tsv").read_text().splitlines():
        assert all(words.issuperset(tatoeba.english_words(text)) for text in line.split("\t")[3:])
    assert "Creative Commons Attribution 2.0" in (tmp_path / "once" / "NOTICE").read_text()


def test_no_group_is_in_two_splits() -> None:
    pairs = [(f"fr {n // 3}", f"en {n * 7 % 500}") for n in range(900)]
    rows = tatoeba.rows_of(pairs)
    split = {}
    for row in rows:
        for text in (row.french, *row.english):
            assert split.setdefault(text, row.split) == row.split
