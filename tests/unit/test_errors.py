"""Tests that errors know their arguments, and can be given the argument names of another call."""

from __future__ import annotations

import pytest

from mmdec import InputError


@pytest.mark.parametrize(
    ("message", "argument"),
    [
        ("`batch_size` must be at least 1, but is 0. Raise it, or leave `batch_size` out.", "batch_size"),
        ("a request must have at most 2 `rows`", None),
        ("`--split` must be test", None),
    ],
)
def test_argument(message: str, argument: str | None) -> None:
    assert InputError(message).argument == argument


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("`model` must fit `inner`", "`drafter` must fit `inner`"),
        ('Use `model="a"`, or leave `model` out', 'Use `drafter="a"`, or leave `drafter` out'),
        ("The model 'model' of `my_model` and `model.config`", "The model 'model' of `my_model` and `model.config`"),
    ],
)
def test_with_names_replaces_only_names_in_backquotes(message: str, expected: str) -> None:
    assert str(InputError(message).with_names({"model": "drafter"})) == expected
