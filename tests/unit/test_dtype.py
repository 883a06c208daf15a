"""`dtype=` on every public call that takes a model."""

from __future__ import annotations

import inspect

import pytest

import mmdec
from mmdec.vision.describe import DescribeOptions
from mmdec.whisper.live import StreamOptions

CALLS = ("describe", "load", "transcribe", "translate_speech")


@pytest.mark.parametrize("name", CALLS)
def test_a_call_takes_a_dtype(name: str) -> None:
    """`generate` and `stream` take it among their options: `tests/unit/generation/test_speculation.py`."""
    assert inspect.signature(getattr(mmdec, name)).parameters["dtype"].default is None


@pytest.mark.parametrize("options", [DescribeOptions, StreamOptions])
def test_a_chat_and_a_stream_take_a_dtype(options: type) -> None:
    assert "dtype" in options.__annotations__
