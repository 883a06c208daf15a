"""Tests the order in which transcripts of a list are reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmdec.whisper.recordings import ordered_reporter


@pytest.mark.parametrize("rejected", [(), (0,), (1,), (0, 1)])
def test_transcripts_are_reported_in_order_past_rejected_recordings(rejected: tuple[int, ...]) -> None:
    recordings = {index: torch.zeros(1) for index in range(3)}
    transcripts, errors, reported = dict[int, Any](), dict[int, Exception](), list[int]()
    report = ordered_reporter(recordings, transcripts, lambda index, _: reported.append(index), errors)
    for index in (2, 0, 1):
        if index in rejected:
            errors[index] = ValueError()
        else:
            transcripts[index] = "text"
        report()
    assert reported == [index for index in range(3) if index not in rejected]
