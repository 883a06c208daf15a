"""Samples of rows at equal distances."""

from mmdec.training.corpora.text_files import evenly_spaced


def test_a_sample_is_evenly_spaced_and_in_order():
    assert evenly_spaced(range(10), 4) == [0, 2, 5, 7]
    assert evenly_spaced(range(10), 0) == []


def test_all_rows_where_there_are_no_more():
    assert evenly_spaced(range(3), None) == evenly_spaced(range(3), 3) == evenly_spaced(range(3), 9) == [0, 1, 2]
