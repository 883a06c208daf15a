"""Whisper in 8 bits: drafts and batches change nothing, and its text is nearly that of float32."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mmdec
from mmdec import InputError
from mmdec.io.audio import load_audio
from mmdec.kernels import cpu_features
from mmdec.nn.int8 import Bfloat16Linear, Int8Linear, has_int8_layers, max_exact_level, quantise_linears
from mmdec.training.metrics.text import rate, word_edits
from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper, read_whisper
from mmdec.whisper.features import recording_features
from mmdec.whisper.window_encoder import encode
from tests.conftest import RATE, buzz
from tests.support.grid import slow_but

SAMPLES = sorted((Path(__file__).parents[2] / "data/samples/english").glob("*.flac"))
SOUNDS = [load_audio(path)[: 9 * RATE] for path in SAMPLES]

try:
    max_exact_level()
except InputError as error:
    pytest.skip(str(error), allow_module_level=True)


INSTRUCTIONS = {
    "AMX": {"amx_tile", "amx_bf16", "avx512_bf16", "avx512_vnni"},
    "VNNI and bfloat16": {"avx512_bf16", "avx512_vnni"},
    "VNNI": {"avx512_vnni"},
    "neither": set[str](),
}


@pytest.fixture(scope="module", params=INSTRUCTIONS)
def whisper(request: pytest.FixtureRequest) -> Iterator[LoadedWhisper]:
    """A Whisper in 8 bits, as on a CPU with these instructions."""
    flags = INSTRUCTIONS[request.param]
    if not flags <= cpu_features.cpu_flags():
        pytest.skip(f"this CPU has no {request.param}")
    loaded = load_whisper("whisper-tiny.en", "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_features, "cpu_flags", lambda: frozenset(flags))
        assert loaded.directory is not None
        model = read_whisper(loaded.directory).eval()
        quantise_linears(model)
        yield LoadedWhisper(model, loaded.processor, loaded.directory)


@pytest.fixture(scope="module")
def single_transcripts(whisper: LoadedWhisper) -> list[mmdec.Transcript]:
    return [transcribe_sound(whisper, sound, drafter=None) for sound in SOUNDS]


def transcribe_sound(whisper: LoadedWhisper, sound: Any, **options: Any) -> Any:
    return mmdec.transcribe(sound, sample_rate=16_000, model=whisper, timestamps="segment", **options)


@pytest.mark.parametrize("drafter", slow_but(["ctc", "lookup", "recycling"], ["ctc"]))
def test_drafts_change_nothing(
    whisper: LoadedWhisper, single_transcripts: list[mmdec.Transcript], drafter: str
) -> None:
    for nodes in (5, (7, 3)):
        result = [transcribe_sound(whisper, sound, drafter=drafter, num_speculative_tokens=nodes) for sound in SOUNDS]
        assert [transcript.tokens for transcript in result] == [transcript.tokens for transcript in single_transcripts]
        assert drafter != "ctc" or any(transcript.tokens_per_round > 1.5 for transcript in result)


@pytest.mark.parametrize(("drafter", "size"), slow_but(itertools.product((None, "ctc"), (2, 3, 4)), [("ctc", 3)]))
def test_batches_change_nothing(
    whisper: LoadedWhisper, single_transcripts: list[mmdec.Transcript], drafter: str | None, size: int
) -> None:
    result = transcribe_sound(whisper, SOUNDS, drafter=drafter, batch_size=size)
    assert [transcript.tokens for transcript in result] == [transcript.tokens for transcript in single_transcripts]


def test_the_text_is_nearly_that_of_float32(single_transcripts: list[mmdec.Transcript]) -> None:
    expected = [transcribe_sound(load_whisper("whisper-tiny.en", "cpu"), sound, drafter=None) for sound in SOUNDS]
    assert (
        rate(
            [
                word_edits(reference.text, transcript.text)
                for reference, transcript in zip(expected, single_transcripts, strict=True)
            ]
        )["value"]
        < 0.05
    )


def test_encoder_states_are_near_those_of_float32(whisper: LoadedWhisper) -> None:
    features = recording_features(whisper.extractor, SOUNDS[0], RATE, long=False)["input_features"]
    exact, states = (
        encode(speech_model.model.model.encoder, features, features.shape[-1])
        for speech_model in (load_whisper("whisper-tiny.en", "cpu"), whisper)
    )
    assert (states - exact).norm() < 0.06 * exact.norm()


@pytest.mark.parametrize("flags", [frozenset(), cpu_features.cpu_flags()], ids=["fbgemm", "this CPU"])
@pytest.mark.parametrize(("fine", "error"), [(False, 0.03), (True, 0.01)])
def test_a_row_has_the_same_bits_beside_any_others(
    flags: frozenset[str], fine: bool, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_features, "cpu_flags", lambda: flags)
    layer = Int8Linear(nn.Linear(96, 40), fine)
    rows = torch.from_numpy(buzz(1.0))[: 96 * 50].view(50, 96)
    whole = layer(rows)
    for count in (1, 2, 7):
        assert torch.equal(torch.cat([layer(part) for part in rows.split(count)]), whole)
    exact = nn.functional.linear(rows, layer.weight, layer.bias)
    assert (whole - exact).abs().max() < error * exact.abs().max()
    assert torch.equal(layer(rows.bfloat16()), layer(rows.bfloat16().float()))


def test_fine_inputs_do_not_amplify_noise() -> None:
    layer, rows = Int8Linear(nn.Linear(96, 40), fine=True), torch.from_numpy(buzz(1.0))[: 96 * 50].view(50, 96)
    noisy = rows * (1 + 1e-6 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(0)))
    assert (layer(noisy) - layer(rows)).abs().max() < 1e-4 * layer(rows).abs().max()


def test_bfloat16_rows_of_a_batch_have_the_bits_of_single_ones() -> None:
    layer, batch = Bfloat16Linear(nn.Linear(96, 40)), torch.from_numpy(buzz(1.0))[: 96 * 50].view(5, 10, 96)
    whole = layer(batch)
    assert whole.dtype == torch.float32
    assert torch.equal(whole, torch.cat([layer(row[None]) for row in batch]))
    exact = nn.functional.linear(batch, layer.weight, layer.bias)
    assert (whole - exact).abs().max() < 0.03 * exact.abs().max()


def test_int8_is_used_only_when_named() -> None:
    assert has_int8_layers(mmdec.load("whisper-tiny.en", device="cpu", dtype="int8").model)
    assert not has_int8_layers(load_whisper("whisper-tiny.en", "cpu").model)
    with pytest.raises(InputError, match="float16 or float64, but is 'int8'"):
        mmdec.translate_speech(SOUNDS[0], sample_rate=16_000, dtype="int8")
