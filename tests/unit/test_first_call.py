"""Tests that the first call of a process makes, imports and reads nothing that it does not use."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from mmdec import cli
from mmdec.checks import weights
from mmdec.checks.weights import load_pretrained, read_settings
from mmdec.cli.progress import own_process, show_loading
from mmdec.hub.find import find_model
from mmdec.whisper.checkpoint import WHISPER_FILES, WHISPER_KIND, read_whisper

SAMPLES = Path(__file__).parents[2] / "data" / "samples" / "english"
FIRST_CALL = """
import json, sys
import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor

before = set(sys.modules)
import mmdec
mmdec.transcribe(sys.argv[1], model="whisper-tiny.en", device="cpu")
import transformers.conversion_mapping as mapping
packages = {name.partition(".")[0] for name in set(sys.modules) - before} - {"transformers"} - sys.stdlib_module_names
print(json.dumps({
    "packages": sorted(packages),
    "modules": sorted(name for name in sys.modules if name.startswith("mmdec.")),
    "conversions": mapping._checkpoint_conversion_mapping_cache is not None,
}))
"""
READS_SOUND = {"soundfile", "_soundfile", "_soundfile_data", "_cffi_backend", "cffi", "soxr"}


@pytest.fixture(scope="module")
def first_call() -> dict[str, Any]:
    """What a fresh process imports and does in its first call of `mmdec.transcribe`."""
    sound = min(SAMPLES.glob("*.flac"))
    done = subprocess.run([sys.executable, "-c", FIRST_CALL, str(sound)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_first_call_imports_what_it_uses(first_call: dict[str, Any]) -> None:
    assert set(first_call["packages"]) <= {"mmdec", *READS_SOUND}, first_call["packages"]
    unused = ("mmdec.training", "mmdec.evaluation", "mmdec.cli", "mmdec.daspeech", "mmdec.vision", "mmdec.jobs")
    assert not [name for name in first_call["modules"] if name.startswith(unused)]


def test_whisper_is_loaded_without_the_table_of_conversions(first_call: dict[str, Any]) -> None:
    assert not first_call["conversions"]


def test_a_whisper_file_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, opened = find_model("whisper-tiny.en", WHISPER_KIND, WHISPER_FILES), []
    read = weights.safe_open
    monkeypatch.setattr(weights, "safe_open", lambda file, **options: opened.append(file) or read(file, **options))
    read_whisper(folder)
    assert sorted(opened) == sorted(folder.glob("model*.safetensors"))


def test_a_whisper_is_loaded_as_transformers_loads_it() -> None:
    folder = find_model("whisper-tiny.en", WHISPER_KIND, WHISPER_FILES)
    ours, stock = (
        load_pretrained(
            WhisperForConditionalGeneration,
            WhisperConfig.from_dict(read_settings(folder / "config.json")),
            folder,
            converted=converted,
        )
        for converted in (False, True)
    )
    expected = stock.state_dict()
    assert list(ours.state_dict()) == list(expected)
    assert all(torch.equal(value, expected[name]) for name, value in ours.state_dict().items())
    assert ours.proj_out.weight is ours.model.decoder.embed_tokens.weight
    assert ours.config == stock.config
    assert (ours.dtype, ours.training) == (stock.dtype, stock.training)


def test_the_command_line_leaves_its_model_out_of_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [gc.get_freeze_count()]

    def run() -> int:
        with show_loading("tiny", quiet=True):
            assert not gc.isenabled()
        assert gc.isenabled()
        counts.append(gc.get_freeze_count())
        return 0

    monkeypatch.setattr(cli, "_run", run)
    with pytest.raises(SystemExit):
        cli.main()
    assert counts[1] > counts[0]
    assert gc.get_freeze_count() == 0


def test_another_process_collects_as_ever() -> None:
    before = gc.get_freeze_count()
    with show_loading("tiny", quiet=True):
        assert gc.isenabled()
    assert gc.get_freeze_count() == before


def test_collection_goes_on_after_a_model_that_cannot_be_loaded() -> None:
    with own_process():
        with pytest.raises(ValueError, match="damaged"), show_loading("tiny", quiet=True):
            raise ValueError("damaged")
        assert gc.isenabled()
