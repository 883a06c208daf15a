"""Tests `mmdec bench`: destinations of reports, arguments that are refused before measuring, and `bench all`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mmdec import cli
from mmdec.bench import description as bench_description
from mmdec.bench import language_models as bench_language_models
from mmdec.bench import transcription as bench_transcription
from mmdec.bench.report import load_run, to_json
from mmdec.cli import bench
from mmdec.errors import InputError
from mmdec.training.corpora.image_text import read_questions
from tests.support import bench_reports as findings


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Benchmarks that find what is known, and tell that they ran."""
    calls: list[str] = []

    def stand_in(name: str) -> Any:
        return lambda *_args, **_options: (calls.append(name), findings.ALL[name])[1]

    monkeypatch.setattr(bench_language_models, "bench_language", stand_in("core"))
    return calls


def test_one_report_goes_everywhere(measured: list[str], tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.json", "b.json", "c.md")]
    result = run("bench", "core", "-m", "model", "-o", files[0], "--json", files[1], "--markdown", files[2])
    assert result.exit_code == 0, result.output
    assert "lookup against prompt lookup" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert files[0].read_text() == files[1].read_text()
    assert load_run(files[0]).reports[0].bench == "core"
    assert "**lookup against prompt lookup" in files[2].read_text()


@pytest.mark.parametrize("words", [["--json"], ["--json", "-"], ["--json=-"], ["--json", "--repeats", "2"]])
def test_json_alone_is_printed(words: list[str], measured: list[str]) -> None:
    result = run("bench", "core", "-m", "model", *words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["format"] == "mmdec-bench"


def test_markdown_alone_is_printed(measured: list[str]) -> None:
    result = run("bench", "core", "-m", "model", "--markdown", "-")
    assert result.stdout.startswith("**Language models")
    assert "| --- |" in result.stdout


def test_impossible_benchmarks_are_refused_before_they_run(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for words, message in (
        (["--against", damaged], "must be JSON"),
        (["--json", "-", "--markdown", "-"], "must not both be printed"),
        (["--plots", tmp_path / "plots"], "matplotlib"),
    ):
        result = run("bench", "core", "-m", "model", *words)
        assert isinstance(result.exception, InputError)
        assert message in str(result.exception)
    assert measured == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "speech", "--json", "OWN", "other.wav"], r"`--json` must be a file that ends in \.json, or -"),
        (["bench", "core", "-m", "model", "-o", "OWN"], r"`--output` must be a file that ends in \.json, but"),
        (["bench", "core", "-m", "model", "--markdown", "OWN"], r"`--markdown` must be a file that ends in \.md, or -"),
        (["bench", "show", "--json", "OWN", "saved.json"], "`--json` must be"),
        (["bench", "all", "--json", "FOLDER"], "`--json` must be"),
        (["eval", "asr", "--json", "OWN"], "`--json` must be"),
        (["eval", "vlm", "--json=OWN"], "`--json` must be"),
        (["eval", "speech", "--output", "OWN"], "`--output` must be"),
    ],
)
def test_a_report_overwrites_no_file_of_another_kind(
    words: list[str], message: str, measured: list[str], tmp_path: Path
) -> None:
    """`--json` takes the next word as its file, which may be an input."""
    own, folder = tmp_path / "mine.wav", tmp_path / "folder.json"
    own.write_bytes(b"RIFF")
    folder.mkdir()
    result = run(*(word.replace("OWN", str(own)).replace("FOLDER", str(folder)) for word in words))
    assert isinstance(result.exception, InputError)
    assert re.search(message, str(result.exception))
    assert (own.read_bytes(), list(folder.iterdir()), measured) == (b"RIFF", [], [])


def test_a_saved_run_stands_beside_the_new_one(measured: list[str], tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    saved.write_text(to_json(findings.run("core")), encoding="utf-8")
    result = run("bench", "core", "-m", "model", "--against", saved)
    assert "Against saved.json" in result.stdout
    assert "other surroundings" not in result.stdout
    content = json.loads(saved.read_text())
    content["reports"][0]["hardware"]["cpu"] = "another"
    saved.write_text(json.dumps(content))
    result = run("bench", "core", "-m", "model", "--against", saved, "--json")
    assert json.loads(result.stdout)["against"]["warnings"] == [
        f"core: cpu another then, {findings.HARDWARE['cpu']} now"
    ]


def test_saved_runs_are_shown_again(tmp_path: Path) -> None:
    paths = []
    for name in ("asr", "vlm"):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(to_json(findings.run(name)), encoding="utf-8")
    result = run("bench", "show", *paths)
    assert result.exit_code == 0, result.output
    assert "medusa against greedy" in result.stdout
    assert "eagle against greedy" in result.stdout
    assert isinstance(run("bench", "show", *paths, "--metrics", "x.csv").exception, InputError)


def test_bench_all_runs_each_and_names_what_it_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []

    def pretend(command: list[str], seconds: float) -> str:
        commands.append(command)
        name = command[command.index("bench") + 1]
        if name == "vlm":
            return "not done in 3 minutes"
        assert seconds == 180
        Path(command[command.index("--json") + 1]).write_text(to_json(findings.run(name)), encoding="utf-8")
        return ""

    monkeypatch.setattr(bench, "_run", pretend)
    path = tmp_path / "all.json"
    result = run("bench", "all", "--minutes", 3, "--quick", "--json", path)
    assert result.exit_code == 1
    assert [command[4] for command in commands] == list(bench.ORDER)
    assert all("--repeats" in command for command in commands)
    assert "vlm: not done in 3 minutes" in result.stdout
    saved = load_run(path)
    assert [report.bench for report in saved.reports] == [name for name in bench.ORDER if name != "vlm"]
    assert saved.left_out == {"vlm": "not done in 3 minutes"}
    commands.clear()
    assert run("bench", "all", "--only", "speech", "--minutes", 3).exit_code == 0
    assert [command[4] for command in commands] == ["speech"]
    assert isinstance(run("bench", "all", "--only", "core").exception, InputError)


@pytest.fixture
def bare_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The working folder has the samples, and no corpus."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/samples").symlink_to(Path(__file__).parents[3] / "data" / "samples")


def first_argument_and_output(bench: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[Any, str]:
    """Return the first argument of the measurement behind `mmdec bench asr` or `vlm`, and what was said."""
    module, given = {"asr": bench_transcription, "vlm": bench_description}[bench], []
    monkeypatch.setattr(module, f"bench_{bench}", lambda first, *_, **__: (given.append(first), findings.ALL[bench])[1])
    result = run("bench", bench, *words)
    assert result.exit_code == 0, result.output
    return given[0], result.stderr


@pytest.mark.usefixtures("bare_checkout")
def test_without_a_corpus_the_sample_recordings_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    recordings, output = first_argument_and_output("asr", monkeypatch)
    assert "no corpus is here" in output
    assert [path.suffix for path in recordings] == [".flac"] * 3
    assert first_argument_and_output("asr", monkeypatch, "own.wav")[0] == [Path("own.wav")]
    assert sorted(first_argument_and_output("asr", monkeypatch, "data/samples/english", "own.wav")[0]) == sorted(
        [*recordings, Path("own.wav")]
    )
    assert first_argument_and_output("asr", monkeypatch, "--corpus", "elsewhere")[0] == []
    Path("data/english").mkdir()
    assert first_argument_and_output("asr", monkeypatch) == ([], "")


@pytest.mark.parametrize("lines", [[], ["file\tquestion"], ["a.png\tb\tWhat?"], ["../a.png\tb\tWhat?\tThat."]])
def test_a_table_of_questions_is_checked(lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "samples.tsv"
    path.write_text("\n".join(["file\ttask\tquestion\tanswer", *lines] if lines[-1:] != ["file\tquestion"] else lines))
    if not lines:
        assert read_questions(path) == []
        path.unlink()
    with pytest.raises(InputError, match="must have"):
        read_questions(path)


def test_a_timed_out_or_failed_benchmark_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    def python(code: str, seconds: float) -> str:
        return bench._run([sys.executable, "-c", code], seconds)

    assert python("import time; time.sleep(600)", 0.06) == "not done in 0.001 minutes"
    assert python("pass", 60) == ""
    wrong = "import sys; print('half way', file=sys.stderr); sys.exit(3)"
    assert python(wrong, 60) == "it ended with exit code 3"
    assert "half way" in capfd.readouterr().err
