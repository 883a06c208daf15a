"""Tests the pronunciation lexicon's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmdec.errors import InputError
from mmdec.phonetics.lexicon import read_lexicon


def test_a_lexicon_file_may_repeat_words(tmp_path: Path) -> None:
    (tmp_path / "lexicon.tsv").write_text("the\tdh ax\nthe\tdh iy\n", encoding="utf-8-sig")
    assert read_lexicon(tmp_path / "lexicon.tsv") == {"the": [("dh", "ax"), ("dh", "iy")]}
    (tmp_path / "lexicon.tsv").write_bytes(b"the\tdh ax\nth\xe9\tdh iy\n")
    with pytest.raises(InputError, match=r"line 2 of .*lexicon\.tsv has the byte 0xe9"):
        read_lexicon(tmp_path / "lexicon.tsv")
