"""Tests confidence: its evidence, its file, refused outputs, and its values for speech and noise."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmdec
from mmdec.errors import InputError
from mmdec.tasks.confidence import (
    CONFIDENCE_FILE,
    UNCERTAINTY_OFFSET,
    Calibration,
    confidence_error,
    estimate_confidence,
    read_calibrations,
    token_evidence,
    write_calibrations,
)
from mmdec.tasks.options import check_min_confidence
from mmdec.whisper.recordings import log_compression_ratio

SAMPLES = Path(__file__).parents[3] / "data" / "samples"


def test_evidence_is_the_mean_the_worst_stretch_and_the_count() -> None:
    seen = token_evidence([-0.1] * 6 + [-1.1, -0.6], "own ")
    assert seen["own mean"] == pytest.approx(math.log(2.3 / 8 + UNCERTAINTY_OFFSET))
    assert seen["own worst"] == pytest.approx(math.log((0.3 + 1.1 + 0.6) / 5 + UNCERTAINTY_OFFSET))
    assert seen["own count"] == pytest.approx(math.log(8))
    short = token_evidence([-0.1, -0.6])  # a stretch of five that ends after two is one of two
    assert short["worst"] == short["mean"] == pytest.approx(math.log(0.35 + UNCERTAINTY_OFFSET))


def test_evidence_of_extreme_numbers_is_finite() -> None:
    for logprobs in ([], [0.0], [-math.inf, -1.0], [math.nan, -1.0], [0.3]):
        assert all(math.isfinite(value) for value in token_evidence(logprobs).values())


def test_a_text_that_repeats_itself_is_seen() -> None:
    assert log_compression_ratio("") == log_compression_ratio("It was the best of times.") == 0
    assert log_compression_ratio("you are good night, " * 40) > math.log(8)


def test_a_calibration_is_a_logistic_curve_and_survives_its_file(tmp_path: Path) -> None:
    calibration = Calibration({"mean": -2.0, "count": 0.5}, 0.25)
    seen = {"mean": -1.0, "worst": 3.0, "count": 2.0}
    assert calibration(seen) == pytest.approx(1 / (1 + math.exp(-(0.25 + 2.0 + 1.0))))
    write_calibrations(tmp_path, {"answer": calibration}, {"outputs": 3})
    assert read_calibrations(tmp_path) == {"answer": calibration}
    assert [path.name for path in tmp_path.iterdir()] == [CONFIDENCE_FILE]


def test_absent_evidence_counts_as_typical(tmp_path: Path) -> None:
    calibration = Calibration({"mean": -2.0, "structure": 3.0}, 0.25, {"mean": -1.5, "structure": -2.0})
    assert calibration({"mean": -1.0}) == calibration({"mean": -1.0, "structure": -2.0})
    assert calibration({"mean": -1.0, "structure": -1.9}) > calibration({"mean": -1.0})
    assert Calibration({"structure": 3.0}, 0.25)({}) == pytest.approx(1 / (1 + math.exp(-0.25)))
    write_calibrations(tmp_path, {"answer": calibration}, {})
    assert read_calibrations(tmp_path) == {"answer": calibration}


def test_a_file_without_typical_values_is_read(tmp_path: Path) -> None:
    entry = {"bias": 0.5, "weights": {"mean": -1.0}}
    (tmp_path / CONFIDENCE_FILE).write_text(
        json.dumps({"format": "mmdec confidence 1", "calibrations": {"answer": entry}})
    )
    assert read_calibrations(tmp_path) == {"answer": Calibration({"mean": -1.0}, 0.5)}


def test_without_a_file_the_mean_probability_is_the_confidence(tmp_path: Path) -> None:
    assert read_calibrations(tmp_path) == read_calibrations(None) == {}
    assert estimate_confidence(token_evidence([math.log(0.25), math.log(1.0)]), {}, "answer") == pytest.approx(0.5)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format": "other", "calibrations": {}}',
        '{"format": "mmdec confidence 1", "calibrations": {"a": {"bias": "x", "weights": {}}}}',
        '{"format": "mmdec confidence 1", "calibrations": {"a": {"bias": Infinity, "weights": {}}}}',
        '{"format": "mmdec confidence 1", "calibrations": {"a": {"bias": 0, "weights": {}, "typical": {"x": NaN}}}}',
        '{"format": "mmdec confidence 1", "calibrations": {"a": {"bias": 0, "weights": {}, "typical": 1}}}',
        '{"format": "mmdec confidence 1", "calibrations": []}',
        "[" * 100_000,
    ],
)
def test_a_damaged_file_is_one_clear_error(tmp_path: Path, content: str) -> None:
    (tmp_path / CONFIDENCE_FILE).write_text(content)
    with pytest.raises(InputError, match=CONFIDENCE_FILE):
        read_calibrations(tmp_path)


def test_a_link_that_leads_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_calibrations(tmp_path, {"a": Calibration({}, 0.0)}, {})
    (tmp_path / "model" / CONFIDENCE_FILE).symlink_to(tmp_path / CONFIDENCE_FILE)
    assert read_calibrations(tmp_path)
    with pytest.raises(InputError, match="leads out of the folder"):
        read_calibrations(tmp_path / "model")


@pytest.mark.parametrize("value", [-0.1, 1.1, "0.5", True, math.nan])
def test_min_confidence_is_between_zero_and_one(value: float) -> None:
    with pytest.raises(InputError, match="min_confidence"):
        check_min_confidence(value)


@pytest.mark.parametrize("kind", [float, np.float32, np.float64, np.float16])
def test_min_confidence_takes_any_kind_of_number(kind: Any) -> None:
    result = check_min_confidence(kind(0.5))
    assert type(result) is float
    assert result == 0.5
    assert check_min_confidence(np.int64(1)) == 1.0  # type: ignore[arg-type] # numpy's numbers are numbers
    for wrong in (np.float32("nan"), np.float32(1.5), np.bool_(True), np.array(0.5)):
        with pytest.raises(InputError, match="min_confidence"):
            check_min_confidence(wrong)  # type: ignore[arg-type] # what a caller may pass by mistake


@pytest.mark.parametrize(
    "call",
    [
        lambda **options: mmdec.describe("x.png", **options),
        lambda **options: mmdec.Chat(**options),
        lambda **options: mmdec.transcribe("x.wav", **options),
        lambda **options: mmdec.translate_speech("x.wav", **options),
    ],
)
def test_min_confidence_is_checked_before_a_model_is_loaded(call: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`min_confidence` must be"):
        call(model=tmp_path / "none", min_confidence=2)


def test_a_refusal_names_both_numbers() -> None:
    assert confidence_error(0.5, None, "audio") is None
    assert confidence_error(0.5, 0.5, "audio") is None
    assert "0.75" in str(confidence_error(0.5, 0.75, "audio"))


def test_each_call_refuses_what_is_too_unsure_and_keeps_the_rest() -> None:
    speech = sorted(SAMPLES.glob("*.wav"))[0]
    backwards = mmdec.audio.load_audio(speech).numpy()[::-1].copy()
    sure = mmdec.translate_speech(speech).confidence
    unsure = mmdec.translate_speech(backwards, sample_rate=16000).confidence
    assert 0 <= unsure < 0.3 < sure <= 1
    with pytest.raises(InputError, match="confidence"):
        mmdec.translate_speech(backwards, sample_rate=16000, min_confidence=0.5)
    noise = 0.1 * np.random.default_rng(0).normal(size=32000)
    english = next((SAMPLES / "english").glob("*.flac"))
    # a fixed size of drafts: one that follows measured times would change the last bits
    sizes: dict[str, Any] = {"num_speculative_tokens": 4}
    sure = mmdec.transcribe(english, **sizes).confidence
    unsure = mmdec.transcribe(noise, sample_rate=16000, **sizes).confidence
    assert 0 <= unsure < sure <= 1
    with pytest.raises(mmdec.BatchError) as error:
        mmdec.transcribe([english, noise], sample_rate=16000, min_confidence=(sure + unsure) / 2, **sizes)
    assert error.value.results[0].confidence == pytest.approx(sure, abs=1e-6)  # decoded beside another row
    assert list(error.value.errors) == [1]


def test_how_sure_a_transcript_is_does_not_depend_on_the_drafter() -> None:
    english = sorted((SAMPLES / "english").glob("*.flac"))[0]
    drafted, plain = (mmdec.transcribe(english, drafter=name) for name in ("ctc", None))
    assert drafted.tokens == plain.tokens
    assert drafted.confidence == pytest.approx(plain.confidence, abs=1e-4)
    assert "evidence" not in drafted.to_dict()
    assert json.dumps(drafted.to_dict())


def test_verified_and_autoregressive_are_equally_sure() -> None:
    speech = sorted(SAMPLES.glob("*.wav"))[1]
    one, other = (mmdec.translate_speech(speech, strategy=name) for name in ("verified", "autoregressive"))
    assert one.units == other.units
    assert one.confidence == pytest.approx(other.confidence, abs=1e-4)
