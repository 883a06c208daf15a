"""Tests the fit of confidence: the file that it writes is the calibration that the next calls use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

import mmdec
from mmdec.daspeech.translate import load_translator
from mmdec.tasks.confidence import read_calibrations
from recipes.confidence.fit import decode, main
from tests.conftest import buzz
from tests.support.tiny_whisper import write

RATE = 16_000


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    rows = ["path\ttext"]
    for number in range(4):
        soundfile.write(tmp_path / f"{number}.wav", buzz(0.6 + number / 10), RATE, subtype="FLOAT")
        rows.append(f"{number}.wav\t{'' if number == 3 else 'some words'}")
    path = tmp_path / "list.tsv"
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_fitted_curve_is_what_the_next_transcript_is_judged_by(manifest: Path, tmp_path: Path) -> None:
    model = write(tmp_path / "tiny")
    samples = np.asarray(buzz(0.9), dtype=np.float32)
    assert not mmdec.transcribe(samples, sample_rate=RATE, model=model).calibrated
    main(["transcribe", f"--model={model}", f"--fit={manifest}", f"--proof={manifest}", f"--out={model}"])
    assert mmdec.transcribe(samples, sample_rate=RATE, model=model).calibrated


@pytest.mark.slow
def test_a_translators_curve_is_fitted_to_the_evidence_of_its_units(
    manifest: Path, tmp_path: Path, tiny_heard_model: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    main(["translate", f"--model={tiny_heard_model}", f"--fit={manifest}", f"--proof={manifest}", f"--out={out}"])
    calibrations = read_calibrations(out)
    samples = np.asarray(buzz(0.9), dtype=np.float32)
    _, evidence = decode("translate", str(tiny_heard_model), None, samples)
    (spoken,) = load_translator(tiny_heard_model).translate([torch.from_numpy(samples)])
    assert calibrations.keys() == {"graph"}
    assert calibrations["graph"].weights.keys() == evidence.keys() == spoken.evidence.keys()
