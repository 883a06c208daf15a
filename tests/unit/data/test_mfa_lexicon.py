"""Dictionaries of the Montreal Forced Aligner become the lexicon that the word decoder is built from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mmdec.phonetics.decoder import WordDecoder
from mmdec.phonetics.lexicon import read_lexicon

sys.path.insert(0, str(Path(__file__).parents[3] / "data" / "build"))
import mfa_lexicon as mfa

DICTIONARY = (
    "<unk>\tspn\n[laughter]\t0.5\tspn\n"
    "The\t0.2\t0.1\t1.0\t1.0\tDH IY0\nthe\t0.8\t0.1\t1.0\t1.0\tDH AH0\n"
    "hotel\tHH OW0 T EH1 L\nold\t0.99\tOW1 L D\nit’s\tIH1 T S\n\nold\t0.9\tOW1 L D\n"
)


def test_words_in_lower_case_with_the_most_probable_first():
    assert mfa.read_dictionary(DICTIONARY) == {
        "the": [("DH", "AH0"), ("DH", "IY0")],
        "hotel": [("HH", "OW0", "T", "EH1", "L")],
        "old": [("OW1", "L", "D")],
        "it's": [("IH1", "T", "S")],
    }
    assert mfa.read_dictionary("HELLO  HH AH0 L OW1\n1st 0.5 F ER1 S T") == {
        "hello": [("HH", "AH0", "L", "OW1")],
        "1st": [("F", "ER1", "S", "T")],
    }
    with pytest.raises(ValueError, match=r"line 2 has no phones: 'b\\t0.5"):
        mfa.read_dictionary("a\tAH0\nb\t0.5\t")


def test_a_corpus_can_be_exported_once_every_word_has_phones(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "us.dict").write_text(DICTIONARY, encoding="utf-8")
    table, out = tmp_path / "train.tsv", tmp_path / "lexicon.tsv"
    table.write_text("a.mp3\tIt's the old-hotel, Zoé.\nb.mp3\tThe old.\nalone\n", encoding="utf-8")
    arguments = ["--dictionary", str(tmp_path / "us.dict"), "--transcripts", str(table), "--lexicon", str(out)]
    assert mfa.main(arguments) == 1
    assert "1 words have no pronunciation" in capsys.readouterr().err
    assert (tmp_path / "lexicon.tsv.missing").read_text(encoding="utf-8") == "zoé\n"
    (tmp_path / "more.dict").write_text("zoé\tZ OW1 IY0\nunheard\tAH0\n", encoding="utf-8")
    assert mfa.main([*arguments, "--dictionary", str(tmp_path / "more.dict")]) == 0
    assert not (tmp_path / "lexicon.tsv.missing").exists()
    lexicon = read_lexicon(out)
    assert sorted(lexicon) == ["it's", "old", "old-hotel", "the", "zoé"]
    words = WordDecoder.build(lexicon, ["It's the old-hotel, Zoé.", "The old."])
    assert words.decode(["DH", "AH0", "OW1", "L", "D"]).rstrip(".") == "The old"


def test_what_is_no_dictionary_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "bad.dict").write_text("word\n", encoding="utf-8")
    for name, reason in (("bad.dict", "line 1 has no phones"), ("absent.dict", "does not exist")):
        with pytest.raises(SystemExit):
            mfa.main(["--dictionary", str(tmp_path / name), "--lexicon", str(tmp_path / "out.tsv")])
        assert reason in capsys.readouterr().err
    assert not (tmp_path / "out.tsv").exists()
