"""Tests `mmdec describe` and `mmdec eval vlm`: printed and written output, and bad files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

import mmdec
from mmdec import cli
from tests.support.pictures import QUESTION, pixels
from tests.support.tiny_vlm_folder import write


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("in")
    for seed, name in enumerate("abc"):
        Image.fromarray(pixels(seed)).save(folder / f"{name}.png")
    return [folder / f"{name}.png" for name in "abc"]


@pytest.fixture
def call(model: Path):
    def run(*arguments: object) -> Result:
        given = ["describe", *arguments, "--prompt", QUESTION, "--model", model, "--device", "cpu"]
        return CliRunner().invoke(cli.app, [str(argument) for argument in given])

    return run


def answers(model: Path, *asked: object) -> list[str]:
    return [answer.text for answer in mmdec.describe(list(asked), QUESTION, model=model, device="cpu", drafter=None)]


def test_text_to_stdout(call, model: Path, pictures: list[Path]) -> None:
    expected = answers(model, *pictures, tuple(pictures))
    assert call(pictures[0]).stdout == expected[0] + "\n"
    several = "".join(f"{path}:\n  {text}\n" for path, text in zip(pictures, expected, strict=False))
    assert call(*pictures, "--batch-size", 2).stdout == several
    assert call(*pictures, "--together").stdout == expected[3] + "\n"
    assert call(pictures[0], "--stream").stdout.rstrip() == expected[0].rstrip()
    streamed = call(*pictures, "--stream", "--drafter", "none").stdout
    assert streamed.startswith(f"{pictures[0]}:\n{expected[0][:3]}")


def test_json_has_one_object_a_line(call, model: Path, pictures: list[Path]) -> None:
    result = call(*pictures, "--json", "--drafter", "recycling", "--max-new-tokens", 4)
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["input"] for line in found] == [str(path) for path in pictures]
    for line in found:
        assert {
            "text",
            "tokens",
            "rounds",
            "tokens_per_round",
            "timings",
            "lossless",
            "compressor",
            "visual_weights",
        } <= line.keys()
        assert len(line["tokens"]) <= 4
        assert line["output"] is None
    together = json.loads(call(*pictures, "--together", "--json").stdout)
    assert together["input"] == [str(path) for path in pictures]


def test_answers_are_written_into_a_folder_or_a_named_file(
    call, model: Path, pictures: list[Path], tmp_path: Path
) -> None:
    expected = answers(model, *pictures)
    result = call(*pictures, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert f"{pictures[1]} -> " in result.stdout
    assert {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "out").iterdir()} == {
        f"{name}.txt": text + "\n" for name, text in zip("abc", expected, strict=True)
    }
    assert call(pictures[0], "-o", tmp_path / "one.json").exit_code == 0
    assert json.loads((tmp_path / "one.json").read_text(encoding="utf-8"))["text"] == expected[0]


def test_one_bad_image_does_not_lose_the_others(call, model: Path, pictures: list[Path], tmp_path: Path) -> None:
    text, out = tmp_path / "text.png", tmp_path / "out"
    text.write_text("no picture")
    address = "https://example.org/a.png"
    mixed = [pictures[0], text, tmp_path / "missing.png", address, pictures[2]]
    for options in (["--batch-size", 1], []):
        result = call(*mixed, "-o", out, *options)
        assert result.exit_code == 1
        assert sorted(path.name for path in out.iterdir()) == ["a.txt", "c.txt"]
        for name in (text, tmp_path / "missing.png"):
            assert f"failed: {name}: " in result.stderr
        assert "is the address 'https://example.org/a.png'" in result.stderr
        assert result.stderr.endswith("3 of 5 files failed\n")
    streamed = call(*mixed, "--stream")
    assert streamed.exit_code == 1
    assert streamed.stderr.endswith("3 of 5 files failed\n")
    together = call(pictures[0], text, "--together")
    assert together.exit_code == 1
    assert f"failed: {pictures[0]}, {text}: " in together.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "eagle"], "`--drafter` must have weights for this model"),
        (["--drafter", "eagel"], "`--drafter` must be one of"),
        (["--drafter", "eagel", "--stream"], "`--drafter` must be one of"),
        (["--stream", "--json"], "`--stream` cannot be combined with"),
        (["--device", "tpu"], "`--device` must be"),
        (["--model", "nothing"], "`--model` must be"),
    ],
)
def test_wrong_calls_end_with_2_and_one_line(
    arguments: list[str],
    message: str,
    model: Path,
    pictures: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["mmdec", "describe", str(pictures[0]), "--model", str(model), "--device", "cpu", *arguments]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"error: {message}")
    assert stderr.count("\n") == 1


@pytest.mark.slow
def test_the_command_runs_as_a_process(model: Path, pictures: list[Path]) -> None:
    command = [sys.executable, "-m", "mmdec", "describe", *map(str, pictures), "--together", "--prompt", QUESTION]
    command += ["--model", str(model), "--device", "cpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "set `--max-new-tokens`" in done.stderr  # the small model cuts its text
    assert len(done.stderr.splitlines()) == 1
    assert json.loads(done.stdout)["text"] == answers(model, tuple(pictures))[0]


@pytest.mark.slow
def test_eval_prints_and_writes_one_report(model: Path, pictures: list[Path], tmp_path: Path) -> None:
    rows = [{"image": path.name, "question": QUESTION, "answer": "x"} for path in pictures]
    asked = tmp_path / "asked.jsonl"
    asked.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    common = ["--questions", asked, "--images", pictures[0].parent, "--model", model, "--drafter", "lookup"]
    common += ["--max-new-tokens", 5, "--threads", 1]
    report = tmp_path / "report.json"
    given = [str(argument) for argument in ("eval", "vlm", *common, "--swap", "--json")]
    table = CliRunner(env={"COLUMNS": "150"}).invoke(cli.app, [*given, str(report)])
    assert table.exit_code == 0, table.output
    assert "a round" in table.stdout
    printed = CliRunner().invoke(cli.app, given)
    assert json.loads(printed.stdout).keys() == json.loads(report.read_text(encoding="utf-8")).keys()
    with open(asked, "a", encoding="utf-8") as file:
        file.write("\n" + json.dumps({**rows[0], "image": "absent.png"}))
    done = CliRunner().invoke(cli.app, [str(argument) for argument in ("eval", "vlm", *common)])
    assert done.exit_code == 1, done.output
    assert "refused" in done.stdout
