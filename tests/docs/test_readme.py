"""Tests the README: its `mmdec` commands and make targets run. test_pages.py tests its Python code."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import soundfile
from typer.testing import CliRunner

from mmdec import cli
from tests.conftest import RATE, buzz

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.partition("  #")[0].strip()
    for language, text in BLOCKS
    if language == "bash" or text.startswith("make ")
    for line in text.splitlines()
    if line.strip()
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with recordings of the README's names."""
    samples = sorted((ROOT / "data" / "samples").glob("*.wav"))
    (tmp_path / "data" / "samples").mkdir(parents=True)
    names = [*sorted(set(re.findall(r"\"(\w+\.wav)\"", README)) - {"hello.wav"}), "data/samples/one.wav"]
    for number, name in enumerate(names):
        if samples:
            shutil.copy(samples[number % len(samples)], tmp_path / name)
        else:
            soundfile.write(tmp_path / name, buzz(1.5, number), RATE)
    for name in {"hello.flac", *re.findall(r"\"(\w+\.flac)\"", README)}:
        shutil.copy(ROOT / "data" / "samples" / "english" / "austen.flac", tmp_path / name)
    (tmp_path / "data" / "samples" / "english").mkdir()
    shutil.copy(tmp_path / "hello.flac", tmp_path / "data" / "samples" / "english" / "one.flac")
    (tmp_path / "data" / "samples" / "images").symlink_to(ROOT / "data" / "samples" / "images")
    (tmp_path / "models").symlink_to(ROOT / "models")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str) -> list[str]:
    """Its arguments as a shell gives them, after they were run."""
    words = [
        name
        for word in shlex.split(command)[3:]
        for name in (sorted(map(str, Path().glob(word))) if "*" in word else [word])
    ]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    return words


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("python -m mmdec translate")])
def test_translations_run(command: str, folder: Path) -> None:
    run(command)
    assert (folder / "out" / "one.wav").is_file()


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("python -m mmdec transcribe")])
def test_transcriptions_run(command: str, folder: Path) -> None:
    words = run(command)
    assert ((folder / "out" / "one.srt").is_file()) == ("srt" in words)


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("python -m mmdec describe")])
def test_descriptions_run(command: str, folder: Path) -> None:
    run(command)


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("python -m mmdec ")])
def test_options_exist(command: str) -> None:
    words = shlex.split(command)[3:]
    subcommands = [word for word in words[:2] if re.fullmatch(r"[a-z]+", word)]
    if words[0] in ("translate", "transcribe", "describe", "train", "demo"):
        subcommands = subcommands[:1]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, [*subcommands, "--help"])
    assert result.exit_code == 0
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in result.stdout


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("make ")])
def test_make_targets_exist(command: str) -> None:
    subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


def test_every_command_is_of_a_kind_that_is_checked() -> None:
    kinds = ("python -m mmdec ", "python -m mmdec.training fit --config ", "make ")
    assert [line for line in COMMANDS if not line.startswith(kinds)] == []
