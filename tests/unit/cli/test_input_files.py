"""Files and folders that people name: which files are meant, in which order, and what is wrong with a path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import soundfile
from typer.testing import CliRunner

from mmdec import audio, cli
from mmdec.audio.containers import SUFFIXES
from mmdec.cli.files import PICTURES, SOUNDS, input_files, output_paths, together_as_one
from mmdec.hub.find import LoadedModels
from mmdec.types import InputError
from tests.conftest import RATE, buzz


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sounds in folders; what is hidden or of another kind is none of them."""
    for name in ("b.wav", "a.FLAC", "x/a.wav", "y/a.mp3", "y/z/c.webm", "notes.txt", ".hidden.wav", ".git/d.wav"):
        path = tmp_path / "talks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "talks"


def names(folder: Path, output: Path | None = None) -> list[str]:
    files = input_files([folder], "audio", SOUNDS, output)
    assert not any(file.refusal for file in files)
    return [file.path.relative_to(folder).as_posix() for file in files]


def test_a_folders_files(folder: Path) -> None:
    assert names(folder) == ["a.FLAC", "b.wav", "x/a.wav", "y/a.mp3", "y/z/c.webm"]


def test_outputs_are_no_inputs(folder: Path) -> None:
    """A second call would translate what the first one wrote."""
    assert names(folder, folder / "x") == ["a.FLAC", "b.wav", "y/a.mp3", "y/z/c.webm"]


def test_outputs_of_one_name_are_kept_apart(folder: Path) -> None:
    files = input_files([folder], "audio", SOUNDS, None)
    made = output_paths([file.path for file in files], folder.parent / "out", (".txt",), ".txt")
    assert [path.name for path in made] == ["a.txt", "b.txt", "a-2.txt", "a-3.txt", "c.txt"]


def test_what_was_named_stays_in_its_place(folder: Path) -> None:
    given = [folder / "b.wav", folder / "y", "nowhere.wav", folder / "notes.txt"]
    files = input_files(given, "audio", SOUNDS, None)
    assert [file.path.name for file in files] == ["b.wav", "a.mp3", "c.webm", "nowhere.wav", "notes.txt"]
    assert [bool(file.refusal) for file in files] == [False, False, False, True, False]
    assert "'nowhere.wav' does not exist" in files[3].refusal


def test_a_folder_without_any(folder: Path) -> None:
    (only,) = input_files([folder], "image", PICTURES, None)
    assert only.refusal.startswith(
        f"`image` must be a file or hold some, but '{folder}' is a directory without any that"
    )


@pytest.mark.parametrize("address", ["https://example.org/a.png", "data:image/png;base64,aaaa"])
def test_an_address_is_no_file(address: str) -> None:
    (only,) = input_files([address], "image", PICTURES, None)
    assert only.name == address
    assert "Download it first" in only.refusal


def test_a_folder_that_cannot_be_entered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def closed(path: str) -> object:
        if Path(path).name == "x":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    files = input_files([folder], "audio", SOUNDS, None)
    assert [file.name for file in files if file.refusal] == [str(folder / "x")]
    assert "(Permission denied)" in files[-1].refusal
    assert len(files) == 5


def test_together_they_are_one(folder: Path) -> None:
    one = together_as_one(input_files([folder / "b.wav", "x.png", "y.png"], "image", PICTURES, None))
    assert one.name == f"{folder / 'b.wav'}, x.png, y.png"
    assert "'x.png' does not exist" in one.refusal


def test_every_sound_that_is_read_is_meant() -> None:
    assert {*audio.WRITABLE, *SUFFIXES} <= {*SOUNDS}


@pytest.mark.parametrize("verb", ["transcribe", "translate", "describe"])
def test_a_wrong_path_is_told_before_a_model_is_loaded(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadedModels, "get", lambda *_: pytest.fail("it is loaded"))
    given = [verb, str(tmp_path / "a.wav"), str(tmp_path), "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(cli.app, given)
    assert result.exit_code == 1
    assert f"failed: {tmp_path / 'a.wav'}: `" in result.stderr
    assert f"'{tmp_path}' is a directory without any that ends in ." in result.stderr
    assert result.stderr.endswith("2 of 2 files failed\n")
    assert not (tmp_path / "out").exists()


def test_an_output_below_a_file_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, buzz(0.5), RATE)
    result = CliRunner().invoke(cli.app, ["transcribe", str(path), "-o", str(path / "out" / "b"), "-m", "nowhere"])
    assert isinstance(result.exception, InputError)
    assert str(result.exception).startswith("`--output` must lie in a directory")


def test_a_folder_is_translated(folder: Path, tmp_path: Path, tiny_model: Path) -> None:
    recordings = tmp_path / "in" / "deep"
    recordings.mkdir(parents=True)
    for seed, name in enumerate(("b.wav", "a.flac")):
        soundfile.write(recordings / name, buzz(1.0, seed), RATE)
    given = ["translate", recordings.parent, "-o", tmp_path / "out", "-m", tiny_model, "--device", "cpu"]
    result = CliRunner().invoke(cli.app, [str(one) for one in given])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.wav", "b.wav"]
    assert result.stdout.index("a.flac") < result.stdout.index("b.wav ->")
