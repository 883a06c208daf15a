"""The demo page builds without a server, translates, and shows mmdec's errors.

It runs in a process of its own: Gradio leaves event loops open, which here would be errors.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import soundfile

from tests.conftest import RATE, buzz

CHILD = """
import json, sys
from runpy import run_path
import gradio as gr
from mmdec.demo import page
from mmdec.demo.translate import translate
from mmdec.hub import demo_file

model, good, silent = sys.argv[1:]
blocks = page.build()
(rate, samples), text, rows = translate(good, "lookahead", model)
errors = []
for path in (None, silent):
    try:
        translate(path, "lookahead", model)
    except gr.Error as error:
        errors.append(error.message)
print(json.dumps({
    "blocks": isinstance(blocks, gr.Blocks), "rate": rate, "dtype": str(samples.dtype), "samples": len(samples),
    "started": run_path(str(demo_file()))["serve"] is page.serve,
    "text": text, "stages": [row[0] for row in rows], "errors": errors,
}))
"""


def test_without_gradio_the_error_names_the_extra() -> None:
    code = "import sys; sys.modules['gradio'] = None\nfrom mmdec.cli import main\nsys.argv = ['mmdec', 'demo']\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: The demo needs gradio, which is not installed. pip install 'mmdec[demo]'\n"


def test_the_page(tiny_model: Path, tmp_path: Path) -> None:
    good, silent = tmp_path / "good.wav", tmp_path / "silent.wav"
    soundfile.write(good, buzz(1.0), RATE)
    soundfile.write(silent, np.zeros(RATE), RATE)
    command = [sys.executable, "-c", CHILD, str(tiny_model), str(good), str(silent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["blocks"] is True
    assert said["started"] is True
    assert (said["rate"], said["dtype"]) == (RATE, "int16")
    assert said["samples"] > 0
    assert said["stages"][:2] == ["features", "encoder"]
    assert "Record something" in said["errors"][0]
    assert "is silent" in said["errors"][1]
