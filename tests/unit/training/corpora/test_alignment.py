"""Phone alignments: what is read, and what is refused."""

import pytest

from mmdec.training.corpora.cvss import parse_alignment, phone_names
from mmdec.types import InputError


def test_phones_come_with_their_ends():
    assert parse_alignment("pau:0.2 a:b:0.3 w:0.3") == [("pau", 0.2), ("a:b", 0.3), ("w", 0.3)]


@pytest.mark.parametrize("text", ["", "  ", "w", ":0.1", "w:x", "w:nan", "w:inf", "w:-0.1", "w:0.2 a:0.1"])
def test_what_has_no_rising_finite_ends_is_refused(text: str):
    with pytest.raises(InputError, match="`alignment` must"):
        parse_alignment(text)


def test_names_leave_out_times_and_pauses_at_the_ends():
    assert phone_names("pau:0.1 w:0.2 pau:0.3 a:0.4 pau:0.5") == ["w", "pau", "a"]
    assert phone_names("pau:0.1") == phone_names("") == []
