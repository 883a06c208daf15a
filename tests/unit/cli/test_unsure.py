"""The command line warns on stderr where an output is likely wrong, if the model's confidence was fitted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import soundfile
from PIL import Image
from typer.testing import CliRunner

from mmdec import cli
from mmdec.cli.jobs import warn_of_unsure
from mmdec.pipelines.confidence import Calibration, write_calibrations
from tests.conftest import RATE, buzz
from tests.support import tiny_translator, tiny_vlm_folder, tiny_whisper
from tests.support.pictures import QUESTION, pixels

KINDS = ("graph", "transcript", "answer")


def fitted(folder: Path, bias: float) -> Path:
    """The folder with a curve that is always as sure as its bias says."""
    write_calibrations(folder, {kind: Calibration({}, bias) for kind in KINDS}, {})
    return folder


@pytest.mark.parametrize("verb", ["translate", "transcribe", "describe"])
def test_one_line_for_an_output_that_is_likely_wrong(verb: str, tmp_path: Path) -> None:
    source = tmp_path / ("a.png" if verb == "describe" else "a.wav")
    if verb == "describe":
        Image.fromarray(pixels(0)).save(source)
    else:
        soundfile.write(source, buzz(1.0, 0), RATE)
    write = {"translate": tiny_translator, "transcribe": tiny_whisper, "describe": tiny_vlm_folder}[verb].write
    more = {
        "translate": ["-o", tmp_path / "out"],
        "transcribe": ["--language", "en"],
        "describe": ["--prompt", QUESTION, "--max-new-tokens", 4],
    }[verb]
    plain = write(tmp_path / "plain")
    outputs = {}
    for name, model in (
        ("plain", plain),
        ("unsure", fitted(shutil.copytree(plain, tmp_path / "unsure"), -2.0)),
        ("sure", fitted(shutil.copytree(plain, tmp_path / "sure"), 2.0)),
    ):
        words = [verb, source, "--model", model, "--device", "cpu", "--json", *more]
        outputs[name] = CliRunner().invoke(cli.app, [str(word) for word in words])
        assert outputs[name].exit_code == 0, outputs[name].output
    warned = f"warning: {source}: the output is likely wrong: its confidence is 0.12, below 0.5."
    assert [line for line in outputs["unsure"].stderr.splitlines() if "wrong" in line] == [warned]
    assert all("wrong" not in outputs[name].stderr for name in ("plain", "sure"))
    found = {name: json.loads(done.stdout) for name, done in outputs.items()}  # one line, no other
    assert found["plain"].keys() == found["unsure"].keys() == found["sure"].keys()
    assert found["plain"]["text"] == found["unsure"]["text"]


def test_half_is_sure_enough_and_a_model_that_is_gone_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    model = str(fitted(tmp_path / "model", 0.0))
    warn_of_unsure([("a", 0.5), ("b", 0.49)], model)
    warn_of_unsure([("a", 0.1)], str(tmp_path / "gone"))
    said = capsys.readouterr()
    assert said.err == "warning: b: the output is likely wrong: its confidence is 0.49, below 0.5.\n"
    assert said.out == ""
