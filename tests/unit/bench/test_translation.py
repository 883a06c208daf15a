"""Tests the benchmark of speech translation: the check before timing, and the report; no test depends on times."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch

from mmdec.bench import translation as bench
from mmdec.daspeech.ar_decoder import ArConfig, ArDecoder
from mmdec.daspeech.translate import Translation
from mmdec.errors import InputError, MmdecError
from tests.conftest import RATE, buzz
from tests.support.bench_reports import check_form


def decoder() -> ArDecoder:
    torch.manual_seed(1)
    return ArDecoder(ArConfig(d_model=16, ffn=32, heads=2, layers=2), 30, 16).eval()


def test_the_gate_lets_a_right_decoder_pass() -> None:
    with torch.inference_mode():
        bench.check_baseline(decoder(), torch.randn(1, 12, 16), torch.tensor([12]))


def test_the_gate_stops_a_wrong_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, step = decoder(), ArDecoder.step
    monkeypatch.setattr(wrong, "step", lambda tokens, cache: -step(wrong, tokens, cache))
    with torch.inference_mode(), pytest.raises(MmdecError, match="disagrees with its full pass"):
        bench.check_baseline(wrong, torch.randn(1, 12, 16), torch.tensor([12]))


def test_speech_is_timed_through_the_public_call(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the path of a file, and by the seconds that the call returns."""
    path = tmp_path / "x.wav"
    soundfile.write(path, buzz(1.0), RATE)
    asked: list[tuple[Path, str]] = []
    translate = bench.translate_speech

    def listen(audio: Path, model: Any, strategy: str = "lookahead") -> Translation:
        asked.append((audio, strategy))
        translation = translate(audio, model=model, strategy=strategy)
        seconds = {"lookahead": 1.0, "reranked": 1.5, "verified": 2.0, "autoregressive": 6.0}[strategy]
        return replace(translation, timings={"linguistic": seconds})

    monkeypatch.setattr(bench, "translate_speech", listen)
    monkeypatch.setattr(bench, "WHOLE_CALL_SECONDS", (0.5, 1.5))
    judge = Judge()
    result = bench.bench_speech([path], str(tiny_model), seconds=(0.5,), repeats=2, threads=1, judge=judge)
    check_form(result)
    timed = [(row.subject, row.times) for row in result.comparisons[1:4]]
    assert timed == [("lookahead", 6.0), ("reranked", 4.0), ("verified", 3.0)]
    assert (result.comparisons[3].subject_ms, result.comparisons[3].baseline_ms) == (2000.0, 6000.0)
    assert [row.pairs for row in result.comparisons] == [2] * 8
    whole = [(row.subject, row.baseline, row.timed, row.size) for row in result.comparisons[4:]]
    assert whole == [
        ("lookahead", "autoregressive", "file to samples", 0.5),
        ("lookahead", "autoregressive", "file to samples", 1.5),
        ("lookahead", "deaf", "file to samples, its to text", 0.5),
        ("lookahead", "deaf", "file to samples, its to text", 1.5),
    ]
    assert judge.seconds == pytest.approx([0.5] * 4 + [1.5] * 4)  # what it says, a warm-up, two in turn with ours
    rates = result.quantities[2:]
    assert [(quantity.name, quantity.n) for quantity in rates] == [
        ("the same, 0.5 s of speech", 6),
        ("the same, 1.5 s of speech", 6),
    ]
    assert all(0 < rate.low <= rate.value <= rate.high for rate in rates)
    single = [strategy for audio, strategy in asked if audio == path]
    assert {audio.name for audio, _ in asked} == {path.name, "0.5.wav", "1.5.wav"}
    pairs = [each for name in bench.TIMED_STRATEGIES for each in [name, "autoregressive"] * 4]
    assert single == [*pairs, *["lookahead"] * 4]
    strategies = [strategy for audio, strategy in asked if audio.name == "1.5.wav"]
    assert strategies == ["lookahead", "autoregressive", *["lookahead", "autoregressive"] * 3, *["lookahead"] * 3]
    texts = result.details["texts of whole calls"]
    assert [texts[f"deaf, {seconds} s"] for seconds in ("0.5", "1.5")] == ["Pardon?"] * 2
    assert result.quantities[0].value >= 1
    assert result.quantities[1].n == 3
    machine = result.hardware
    assert (machine["threads"], machine["dtype"], machine["batch"], machine["target"]) == (1, "float32", 1, "cpu")
    with pytest.raises(InputError, match="must name at least one sound file"):
        bench.bench_speech([], str(tiny_model))


@dataclass
class Judge:
    """Translates nothing, and remembers how long it heard."""

    name: str = "deaf"
    seconds: list[float] = field(default_factory=list)

    def check_french(self) -> None: ...

    def translate(self, recording: Path) -> Judge:
        self.seconds.append(soundfile.info(recording).duration)
        return self

    @property
    def text(self) -> str:
        return "Pardon?"


def test_no_timing_of_verified_units_that_differ(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.wav"
    soundfile.write(path, buzz(1.0), RATE)
    translate = bench.translate_speech

    def wrong(audio: Path, model: Any, strategy: str = "lookahead") -> Translation:
        translation = translate(audio, model=model, strategy=strategy)
        return replace(translation, units=[*translation.units, "ax"]) if strategy == "verified" else translation

    monkeypatch.setattr(bench, "translate_speech", wrong)
    with pytest.raises(MmdecError, match="not the baseline's"):
        bench.bench_speech([path], str(tiny_model), seconds=(0.5,), repeats=1, threads=1)
