"""Whisper in 8 bits: drafts and batches change nothing, and its text is nearly that of float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mmdec
from mmdec import InputError
from mmdec.io.audio import load_audio
from mmdec.nn.int8 import Int8Linear, has_int8_layers, levels
from mmdec.training.metrics.text import rate, word_edits
from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper
from tests.conftest import RATE, buzz

SAMPLES = sorted((Path(__file__).parents[2] / "data/samples/english").glob("*.flac"))
SOUNDS = [load_audio(path)[: 9 * RATE] for path in SAMPLES]

try:
    levels()
except InputError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(scope="module")
def whisper() -> LoadedWhisper:
    return load_whisper("whisper-tiny.en", "cpu", torch.int8)


@pytest.fixture(scope="module")
def single_transcripts(whisper: LoadedWhisper) -> list[mmdec.Transcript]:
    return [transcribe_sound(whisper, sound, drafter=None) for sound in SOUNDS]


def transcribe_sound(whisper: LoadedWhisper, sound: Any, **options: Any) -> Any:
    return mmdec.transcribe(sound, sample_rate=16_000, model=whisper, timestamps="segment", **options)


@pytest.mark.parametrize("drafter", ["ctc", "lookup", "recycling"])
def test_drafts_change_nothing(
    whisper: LoadedWhisper, single_transcripts: list[mmdec.Transcript], drafter: str
) -> None:
    for nodes in (5, (7, 3)):
        result = [transcribe_sound(whisper, sound, drafter=drafter, num_speculative_tokens=nodes) for sound in SOUNDS]
        assert [one.tokens for one in result] == [one.tokens for one in single_transcripts]
        assert drafter != "ctc" or any(one.tokens_per_round > 1.5 for one in result)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("drafter", [None, "ctc"])
def test_batches_change_nothing(
    whisper: LoadedWhisper, single_transcripts: list[mmdec.Transcript], drafter: str | None, size: int
) -> None:
    result = transcribe_sound(whisper, SOUNDS, drafter=drafter, batch_size=size)
    assert [one.tokens for one in result] == [one.tokens for one in single_transcripts]


def test_the_text_is_nearly_that_of_float32(single_transcripts: list[mmdec.Transcript]) -> None:
    expected = [transcribe_sound(load_whisper("whisper-tiny.en", "cpu"), sound, drafter=None) for sound in SOUNDS]
    assert (
        rate([word_edits(one.text, other.text) for one, other in zip(expected, single_transcripts, strict=True)])[
            "value"
        ]
        < 0.05
    )


def test_a_row_has_the_same_bits_beside_any_others() -> None:
    layer = Int8Linear(nn.Linear(96, 40))
    rows = torch.from_numpy(buzz(1.0))[: 96 * 50].view(50, 96)
    whole = layer(rows)
    for count in (1, 2, 7):
        assert torch.equal(torch.cat([layer(part) for part in rows.split(count)]), whole)
    exact = nn.functional.linear(rows, layer.weight, layer.bias)
    assert (whole - exact).abs().max() < 0.03 * exact.abs().max()


def test_int8_is_used_only_when_named() -> None:
    assert has_int8_layers(mmdec.load("whisper-tiny.en", device="cpu", dtype="int8").model)
    assert not has_int8_layers(load_whisper("whisper-tiny.en", "cpu").model)
    with pytest.raises(InputError, match="float16 or float64, but is 'int8'"):
        mmdec.translate_speech(SOUNDS[0], sample_rate=16_000, dtype="int8")
