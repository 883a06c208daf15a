"""Tests that errors know their arguments, and can be given the argument names of another call."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from mmdec import InputError
from mmdec.checks.arguments import check_choice, check_path, check_whole


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


def test_argument_given_beside_the_message_is_kept() -> None:
    error = InputError("The pictures must be RGB, but are not. Convert them.", argument="image")
    assert error.argument == pickle.loads(pickle.dumps(error)).argument == "image"
    assert error.with_names({"image": "--image"}).argument == "--image"


@pytest.mark.parametrize("check", [check_whole, check_choice, check_path])
def test_argument_of_any_spelling_is_known_from_a_check(check: Any) -> None:
    bounds = {check_whole: (1, 2), check_choice: (["a"],), check_path: ()}
    with pytest.raises(InputError) as caught:
        check("--batch-size", 0, *bounds[check], "Change it.")
    assert caught.value.argument == "--batch-size"


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
