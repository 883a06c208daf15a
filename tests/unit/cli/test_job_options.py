"""Lists, `--shard` and `--engine` of the subcommands; a process killed in the middle."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import soundfile
from PIL import Image
from typer.testing import CliRunner, Result

import mmdec
from mmdec import cli
from mmdec.jobs.many import ROWS_PER_PART
from tests.conftest import RATE, buzz
from tests.support import tiny_piece_translator as tiny_heard
from tests.support import tiny_vlm_folder, tiny_whisper
from tests.support.many_rows import check_once, table
from tests.support.pictures import QUESTION, pixels
from tests.support.warm_processes import start

pytestmark = pytest.mark.slow

COUNT = ROWS_PER_PART + 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, sounds and pictures, and lists of them."""
    folder = tmp_path_factory.mktemp("many")
    tiny_whisper.write(folder / "whisper")
    tiny_vlm_folder.write(folder / "vlm")
    tiny_heard.write(folder / "translator")
    for seed in range(3):
        soundfile.write(folder / f"{seed}.wav", buzz(0.5, seed), RATE)
        Image.fromarray(pixels(seed)).save(folder / f"{seed}.png")
    rows = [{"path": f"{index % 3}.wav", "id": f"n{index}"} for index in range(COUNT)]
    rows[4] = {"path": "missing.wav"}
    (folder / "sounds.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "pictures.tsv").write_text(f"image\tprompt\n0.png\t{QUESTION}\n1.png\t\n2.png\t{QUESTION}\n")
    return folder


def run(folder: Path, *words: object) -> Result:
    given = [*words, "--device", "cpu", "--threads", 1]
    return CliRunner().invoke(cli.app, [str(word) for word in given])


def transcribed(folder: Path, output: Path, *words: object) -> Result:
    given = ("--model", folder / "whisper", "--language", "en", "--output", output)
    return run(folder, "transcribe", folder / "sounds.jsonl", *given, *words)


def test_a_list_in_shards_gives_what_the_call_gives(folder: Path, tmp_path: Path) -> None:
    for shard in ("2/2", "1/2", "1/1"):
        done = transcribed(folder, tmp_path / "out", "--shard", shard)
        assert done.exit_code == (shard != "2/2"), done.output  # the missing file is in the first part
    report = json.loads(done.stdout)
    assert (report["rows"], report["failed"], report["done_now"]) == (COUNT, 1, 0)
    check_once(tmp_path / "out", COUNT)
    expected = mmdec.transcribe([folder / f"{n}.wav" for n in range(3)], model=folder / "whisper", language="en")
    for row in table(tmp_path / "out", "results"):
        assert (row["text"], row["id"]) == (expected[row["row"] % 3].text, f"n{row['row']}")
    (failed,) = table(tmp_path / "out", "failed")
    assert failed["row"] == 4
    assert "does not exist" in failed["error"]


def test_questions_of_a_table(folder: Path, tmp_path: Path) -> None:
    words = ("--model", folder / "vlm", "--max-new-tokens", 6, "--prompt", "What?", "--output", tmp_path / "out")
    done = run(folder, "describe", folder / "pictures.tsv", *words)
    assert done.exit_code == 0, done.output
    pictures, asked = [folder / f"{n}.png" for n in range(3)], [QUESTION, "What?", QUESTION]
    expected = mmdec.describe([*map(str, pictures)], asked, model=folder / "vlm", max_new_tokens=6)
    assert [row["text"] for row in table(tmp_path / "out", "results")] == [each.text for each in expected]


def test_a_folder_of_speech(folder: Path, tmp_path: Path) -> None:
    words = ("--model", folder / "translator", "--engine", "local", "--output", tmp_path / "out")
    done = run(folder, "translate", folder, *words)
    assert done.exit_code == 0, done.output
    rows = table(tmp_path / "out", "results")
    assert [Path(row["input"]).name for row in rows] == ["0.wav", "1.wav", "2.wav"]
    expected = mmdec.translate_speech(folder / "1.wav", model=folder / "translator")
    assert rows[1]["text"] == expected.text
    assert soundfile.info(tmp_path / "out" / rows[1]["output"]).frames == len(expected.audio)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shard", "0/2"], "I from 1 to N"),
        (["--shard", "3/2"], "I from 1 to N"),
        (["--engine", "slurm"], "local or ray"),
        (["--workers", "2"], "`--workers` must come with `--engine ray`"),
        (["--compare"], "`--compare` must be left out for a list"),
        (["--table", "csv"], "jsonl or parquet"),
    ],
)
def test_impossible_runs_are_refused(folder: Path, tmp_path: Path, words: list[str], message: str) -> None:
    done = transcribed(folder, tmp_path / "out", *words)
    assert done.exception is not None
    assert message in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_list_and_an_output_folder_are_required(folder: Path, tmp_path: Path) -> None:
    single = run(folder, "transcribe", folder / "sounds.jsonl")
    both = transcribed(folder, tmp_path / "out", folder / "0.wav")
    lone = run(folder, "transcribe", folder / "0.wav", "--table", "parquet")
    result = [str(done.exception) for done in (single, both, lone)]
    assert "must be a folder" in result[0]
    assert "must be the only input" in result[1]
    assert "must come with a list" in result[2]


def test_killed_and_started_again_until_all_is_done(folder: Path, tmp_path: Path) -> None:
    """The command runs in a process of its own, which is killed three times at random moments of its work."""
    words = ["mmdec", "transcribe", str(folder / "long.jsonl"), "--output", str(tmp_path / "out")]
    words += ["--model", str(folder / "whisper"), "--language", "en", "--device", "cpu", "--threads", "1"]
    rows = [{"path": f"{index % 3}.wav"} for index in range(6 * ROWS_PER_PART)]
    (folder / "long.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    rng, results = random.Random(0), tmp_path / "out" / "results"
    for _ in range(3):
        before = len(done_in(results))
        child = start(words)
        for _ in range(60_000):  # ten minutes, on a busy machine
            if child.poll() is not None or len(done_in(results)) > before:
                break
            time.sleep(0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(rng.random() * 0.1)
        child.kill()
        assert child.wait() == -signal.SIGKILL
        assert before < len(done_in(results)) < 6
    with (tmp_path / "told.json").open("wb") as file:
        assert start(words, streams=(subprocess.DEVNULL, file, subprocess.DEVNULL)).wait() == 0
    report: dict[str, Any] = json.loads((tmp_path / "told.json").read_text())
    assert 0 < report["done_now"] < report["rows"] == 6 * ROWS_PER_PART
    check_once(tmp_path / "out", 6 * ROWS_PER_PART)


def done_in(results: Path) -> list[Path]:
    return [*results.glob("[0-9]*")]
