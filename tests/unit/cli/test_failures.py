"""Tests what the command line says when output cannot be written, or a package of an extra is missing: one line."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.metadata import metadata
from pathlib import Path

import pytest

from mmdec.checks.extras import missing_extra
from tests.support.warm_processes import COMMANDS, TRAINING, start

MAIN = "import sys; from mmdec.cli import main; "
# in a fork whose modules may have been imported with the package that is to be missing
ANEW = "import sys; [sys.modules.pop(name) for name in [*sys.modules] if name.startswith('mmdec')]; "


def call(code: str, *arguments: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", ["--version", "--help", "train --help"])
def test_a_full_disk_is_one_line(arguments: str) -> None:
    with open("/dev/full", "wb") as full:
        done = call(f"{MAIN}main()", *arguments.split(), stdout=full.fileno())
    assert done.returncode == 1
    assert done.stderr.startswith("error: the output cannot be written: No space left on device.")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("printing", ["print('x' * 100_000)", "print('x')", "print('x', flush=True)"])
@pytest.mark.parametrize("full", [True, False])
def test_a_full_disk_ends_every_way_to_print_alike(printing: str, full: bool) -> None:
    if full and not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    code = f"from mmdec import cli; cli.app = lambda: {printing}; cli.main()"
    reading, writing = os.pipe()
    os.close(reading)
    target = os.open("/dev/full", os.O_WRONLY) if full else writing
    done = call(code, stdout=target)
    for descriptor in {writing, target}:
        os.close(descriptor)
    assert done.returncode == 1
    assert done.stderr.count("\n") == full, done.stderr  # a reader that has left, as `head` does, is no error


SUBCOMMANDS = {  # subcommand -> a module of its extra
    "train drafter --model vlm-scenes --data q.txt --output o": "jsonargparse",
    "demo": "gradio",
    "serve": "fastapi",
    "bench peer data/samples/english/austen.flac": "ctranslate2",
}


@pytest.mark.parametrize("subcommand", SUBCOMMANDS)
def test_a_missing_extra_is_reported_in_one_line(subcommand: str, tmp_path: Path) -> None:
    module = SUBCOMMANDS[subcommand]
    with tempfile.TemporaryFile() as told:
        code = f"{ANEW}{MAIN}sys.modules[{module!r}] = None; main()"
        streams = (subprocess.DEVNULL, subprocess.DEVNULL, told)
        ended = start(["-c", code, *subcommand.split()], (*COMMANDS, *TRAINING), streams=streams).wait()
        told.seek(0)
        lines = told.read().decode().splitlines()
    assert ended == 2, lines
    assert len(lines) == 1, lines
    assert "pip install 'mmdec[" in lines[0]
    assert module in lines[0]


@pytest.mark.parametrize(
    ("module", "preferred", "extra"),
    [
        ("lightning.pytorch", "train", "train"),
        ("rapidfuzz", "train", "train"),
        ("rapidfuzz", "eval", "eval"),
        ("pyarrow.parquet", "", "parquet"),
        ("ray", "", "ray"),
        ("av", "", "av"),
        ("multipart", "serve", "serve"),
        ("torchaudio", "", "test"),
    ],
)
def test_a_package_names_its_extra(module: str, preferred: str, extra: str) -> None:
    assert extra in (metadata("mmdec").get_all("Provides-Extra") or ())
    message = missing_extra(ModuleNotFoundError(name=module), preferred)
    assert message is not None
    assert f"pip install 'mmdec[{extra}]'" in message


@pytest.mark.parametrize("module", ["mmdec.nothing", "torch", "no_such_package", ""])
def test_another_missing_module_is_raised(module: str) -> None:
    assert missing_extra(ModuleNotFoundError(name=module)) is None


@pytest.mark.parametrize(("argument", "code"), [("--version", 0), ("--no-such-option", 2)])
def test_the_script_ends_with_its_exit_code_after_exit_handlers(argument: str, code: int) -> None:
    script = "import atexit; atexit.register(print, 'handler'); from mmdec.cli import run_script; run_script()"
    done = call(script, argument)
    assert done.returncode == code
    assert done.stdout.splitlines()[-1] == "handler"
