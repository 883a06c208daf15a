"""Tests the reader for CVSS and Common Voice: rows that are used, and those left out, with counts and names."""

import shutil
from pathlib import Path

import pytest

from mmdec.errors import InputError
from mmdec.phonetics.lexicon import spoken_slice
from mmdec.training.corpora.admission import BadRows
from mmdec.training.corpora.cvss import (
    SPECIALS,
    normalise_source,
    parse_alignment,
    phone_names,
    read_pairs,
    unify_targets,
    vocabulary,
)
from tests.support.tiny_corpus import TinyCorpus, phones_of, read_table, write_corpus, write_table


@pytest.fixture(scope="module")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_corpus(tmp_path_factory.mktemp("written"))


@pytest.fixture
def corpus(tiny_corpus: TinyCorpus, tmp_path: Path) -> TinyCorpus:
    """Return a copy that a test may spoil."""
    shutil.copytree(tiny_corpus.root, tmp_path, dirs_exist_ok=True)
    return TinyCorpus(tmp_path)


def test_rows_hold_what_the_tables_say(corpus: TinyCorpus):
    rows, bad = read_pairs(corpus.common_voice, corpus.cvss, "train")
    assert bad.count == 0
    assert bad.report() == ""
    assert [row.name for row in rows] == [f"common_voice_fr_{number:08d}.mp3" for number in range(1, 13)]
    row = rows[1]
    assert (row.source_text, row.translation, row.speaker) == ("C'est bas.", "There, low.", "voice2")
    assert row.references == ("There, low.", "Low there.")
    assert [phone for phone, _ in row.alignment] == phones_of("There, low.")
    assert row.units == ["dh", "eh", "r", "pau", "l", "ow"]
    assert row.clip.is_file()
    assert row.recording.is_file()
    ends = [end for _, end in row.alignment]
    assert ends == sorted(ends)


def test_bad_rows_are_counted_and_named(corpus: TinyCorpus):
    names = [line[0] for line in read_table(corpus.cvss / "train.tsv")]
    clips, wavs = corpus.common_voice / "clips", corpus.cvss / "train"
    (clips / names[0]).unlink()
    (clips / names[1]).write_bytes(b"")
    (wavs / f"{names[2]}.wav").unlink()
    (wavs / f"{names[3]}.wav").write_bytes(b"RIFF" + bytes(40))
    translations = read_table(corpus.cvss / "train.tsv")
    translations[4][1] = "  "
    translations.append(["common_voice_fr_99999999.mp3", "Nobody said this."])
    translations.append(["common_voice_fr_00000006.mp3"])
    write_table(corpus.cvss / "train.tsv", translations)
    aligned = read_table(corpus.cvss / "train.alignment.tsv")
    del aligned[6]
    aligned[6][1] = "pau:0.1 hh"
    aligned[7][1] = "pau:0.1 hh:0.3 ax:0.2"
    aligned[8][1] = "pau:0.1 hh:nan"
    aligned[9][1] = "pau:0.1 pau:0.2"
    aligned[10] = aligned[10][:1]
    write_table(corpus.cvss / "train.alignment.tsv", aligned)
    rows, bad = read_pairs(corpus.common_voice, corpus.cvss, "train")
    assert bad.names == {
        "source recording missing or empty": names[:2],
        "target recording missing or empty": names[2:4],
        "no translation": [names[4], names[5]],
        "alignment that cannot be read": [names[7], names[8], names[9], names[11]],
        "no alignment": [names[6]],
        "alignment of pauses alone": [names[10]],
        "no source sentence": ["common_voice_fr_99999999.mp3"],
    }
    assert [row.name for row in rows] == [names[5]]


def test_scoring_needs_neither_sentence_nor_alignment(corpus: TinyCorpus):
    aligned = read_table(corpus.cvss / "train.alignment.tsv")
    aligned[0][1] = "pau:0.1 hh"
    aligned[1][1] = "pau:0.1"
    write_table(corpus.cvss / "train.alignment.tsv", aligned[:3])
    (corpus.common_voice / "train.tsv").unlink()
    pairs, bad = read_pairs(corpus.common_voice, corpus.cvss, "train", scoring=True)
    assert bad.count == 0
    assert len(pairs) == 12
    assert [bool(pair.units) for pair in pairs] == [False, False, True] + [False] * 9
    assert {pair.source_text for pair in pairs} == {""}


def test_a_report_names_the_first():
    bad = BadRows()
    for number in range(7):
        bad.add("too long", f"n{number}")
    bad.add("empty", "x")
    assert bad.count == 8
    assert bad.report(2) == "empty: 1 (x)\ntoo long: 7 (n0, n1, ...)"


def test_validated_serves_all_splits(corpus: TinyCorpus):
    both = read_table(corpus.common_voice / "train.tsv") + read_table(corpus.common_voice / "dev.tsv")[1:]
    write_table(corpus.common_voice / "validated.tsv", both)
    expected = [read_pairs(corpus.common_voice, corpus.cvss, split)[0] for split in ("train", "dev")]
    (corpus.common_voice / "train.tsv").unlink()
    (corpus.common_voice / "dev.tsv").unlink()
    for split, rows in zip(("train", "dev"), expected, strict=True):
        assert read_pairs(corpus.common_voice, corpus.cvss, split) == (rows, BadRows())


def test_without_references_the_translation_is_the_only_one(corpus: TinyCorpus):
    (corpus.cvss / "train.references.tsv").unlink()
    rows, _ = read_pairs(corpus.common_voice, corpus.cvss, "train")
    assert all(row.references == (row.translation,) for row in rows)


def test_columns_are_found_by_name(corpus: TinyCorpus):
    expected = read_pairs(corpus.common_voice, corpus.cvss, "train")
    lines = read_table(corpus.common_voice / "train.tsv")
    write_table(corpus.common_voice / "train.tsv", [[*line[2:3], *line[1:2], *line[:1]] for line in lines])
    assert read_pairs(corpus.common_voice, corpus.cvss, "train") == expected
    write_table(corpus.common_voice / "train.tsv", [line[1:] for line in lines])
    with pytest.raises(InputError, match="must have the columns client_id, path and sentence"):
        read_pairs(corpus.common_voice, corpus.cvss, "train")


def test_a_short_line_of_common_voice_is_a_missing_sentence(corpus: TinyCorpus):
    lines = read_table(corpus.common_voice / "train.tsv")
    write_table(corpus.common_voice / "train.tsv", [[*line[1:], line[0]] for line in lines[:-1]] + [lines[-1][1:3]])
    rows, bad = read_pairs(corpus.common_voice, corpus.cvss, "train")
    assert len(rows) == 11
    assert list(bad.names) == ["no source sentence"]


@pytest.mark.parametrize("gone", ["cvss_c/train.tsv", "cvss_c/train.alignment.tsv", "cv/fr/train.tsv"])
def test_a_missing_table_is_an_error(corpus: TinyCorpus, gone: str):
    (corpus.root / gone).unlink()
    with pytest.raises(InputError, match="must exist"):
        read_pairs(corpus.common_voice, corpus.cvss, "train")


def test_a_split_without_usable_rows_is_an_error_that_says_why(corpus: TinyCorpus):
    for clip in (corpus.common_voice / "clips").iterdir():
        clip.unlink()
    with pytest.raises(InputError, match=r"(?s)'dev' has none.*source recording missing or empty: 3"):
        read_pairs(corpus.common_voice, corpus.cvss, "dev")


def test_canonical_takes_the_rendering_of_the_first_recording(corpus: TinyCorpus):
    rows, _ = read_pairs(corpus.common_voice, corpus.cvss, "train")
    assert len({row.translation for row in rows if row.source_text == "C'est bas."}) == 2
    made = unify_targets(reversed(rows))
    assert [row.name for row in made] == [row.name for row in rows]
    assert [row.clip for row in made] == [row.clip for row in rows]
    for row in made:
        first = next(other for other in rows if other.source_text == row.source_text)
        assert (row.translation, row.alignment, row.recording) == (first.translation, first.alignment, first.recording)


def test_equal_sentences_match_whatever_their_typography():
    assert normalise_source("  C\u2019est  ICI, n'est-ce pas ?") == normalise_source("c'est ici n'est-ce pas")
    assert normalise_source("e\u0301te\u0301") == "été"


@pytest.mark.parametrize(
    ("phones", "left"),
    [("pau pau a pau b pau", "a pau b"), ("a pau", "a"), ("a", "a"), ("pau", ""), ("", "")],
)
def test_pauses_are_trimmed_at_the_edges_only(phones: str, left: str):
    assert phones.split()[spoken_slice(phones.split())] == left.split()


def test_the_vocabulary_is_the_special_units_and_the_phones(corpus: TinyCorpus):
    rows, _ = read_pairs(corpus.common_voice, corpus.cvss, "train")
    units = vocabulary(rows)
    assert tuple(units[:4]) == SPECIALS
    assert units[4:] == sorted({unit for row in rows for unit in row.units})
    assert "pau" in units


def test_phones_come_with_their_ends():
    assert parse_alignment("pau:0.2 a:b:0.3 w:0.3") == [("pau", 0.2), ("a:b", 0.3), ("w", 0.3)]


@pytest.mark.parametrize("text", ["", "  ", "w", ":0.1", "w:x", "w:nan", "w:inf", "w:-0.1", "w:0.2 a:0.1"])
def test_phone_ends_must_be_finite_and_rise(text: str):
    with pytest.raises(InputError, match="`alignment` must"):
        parse_alignment(text)


def test_phone_names_omit_times_and_outer_pauses():
    assert phone_names("pau:0.1 w:0.2 pau:0.3 a:0.4 pau:0.5") == ["w", "pau", "a"]
    assert phone_names("pau:0.1") == phone_names("") == []
