"""The gate of the timings, and what a report holds; the timings themselves are no test's business."""

from __future__ import annotations

from pathlib import Path

import pytest
import soundfile
import torch

from mmdec.evaluation import bench_translation as bench
from mmdec.nn.ar_decoder import ArConfig, ArDecoder
from mmdec.nn.daspeech import DASpeechConfig
from mmdec.types import InputError, MmdecError
from tests.conftest import RATE, buzz
from tests.support.tiny_corpus import tiny_sizes


def decoder() -> ArDecoder:
    torch.manual_seed(1)
    return ArDecoder(ArConfig(d_model=16, ffn=32, heads=2, layers=2), 30, 16).eval()


@pytest.mark.parametrize("least", [0, bench.GATE_UNITS])
def test_the_gate_lets_a_right_decoder_pass(least: int) -> None:
    with torch.inference_mode():
        bench.gate(decoder(), torch.randn(1, 12, 16), torch.tensor([12]), least)


def test_the_gate_stops_a_wrong_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, step = decoder(), ArDecoder.step
    monkeypatch.setattr(wrong, "step", lambda tokens, cache: -step(wrong, tokens, cache))
    with torch.inference_mode(), pytest.raises(MmdecError, match="disagrees with its full pass"):
        bench.gate(wrong, torch.randn(1, 12, 16), torch.tensor([12]), bench.GATE_UNITS)


def test_the_gate_stops_a_wrong_beam_search(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = decoder()
    monkeypatch.setattr(wrong, "beam_search", lambda *arguments: [5])
    with torch.inference_mode(), pytest.raises(MmdecError, match="one beam is not greedy"):
        bench.gate(wrong, torch.randn(1, 12, 16), torch.tensor([12]), bench.GATE_UNITS)


def test_speech_is_timed_from_the_path(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.wav"
    soundfile.write(path, buzz(1.0), RATE)
    asked: list[object] = []
    translate = bench.translate_speech
    monkeypatch.setattr(
        bench, "translate_speech", lambda audio, **more: (asked.append(audio), translate(audio, **more))
    )
    report = bench.bench_speech([path], str(tiny_model), seconds=(0.5,), repeats=2, threads=1)
    assert asked == [path] * 4
    assert report["curve"][0]["n"] == 2
    assert report["curve"][0]["passes"] == 6
    assert report["wav_to_wav_per_second"]["n"] == 3
    assert "reading included" in report["wav_to_wav_per_second"]["what"]
    assert report["hardware"]["threads"] == 1
    with pytest.raises(InputError, match="must name at least one sound file"):
        bench.bench_speech([], str(tiny_model))


def test_the_paper_sized_timing_is_gated(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = DASpeechConfig.small().to_dict()
    for name, value in tiny_sizes().items():
        part, _, key = name.partition(".")
        if key:
            sizes[part][key] = value
    monkeypatch.setattr(DASpeechConfig, "paper", lambda: DASpeechConfig.from_dict(sizes))
    monkeypatch.setattr(bench, "S2UT", ArConfig(d_model=16, ffn=16, heads=2, layers=1))
    gated: list[int] = []
    gate = bench.gate
    monkeypatch.setattr(bench, "gate", lambda *arguments: (gated.append(arguments[-1]), gate(*arguments)))
    report = bench.bench_paper(seconds=(0.5,), repeats=1, threads=1, beams=2)
    assert gated == [bench.GATE_UNITS]
    assert {"greedy", "beam 2"} < report["curve"][0].keys()
