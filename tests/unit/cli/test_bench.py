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
from mmdec.bench import drafters as bench_drafters
from mmdec.bench.options import DrafterBenchOptions
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
        return lambda *_args, **_options: (calls.append(name), findings.run(name))[1]

    monkeypatch.setattr(bench_drafters, "bench_drafters", stand_in("drafters-text"))
    return calls


def test_one_report_goes_everywhere(measured: list[str], tmp_path: Path) -> None:
    report, page = tmp_path / "a.json", tmp_path / "b.md"
    result = run("bench", "drafters", "-m", "model", "--json", report, "--markdown", page)
    assert result.exit_code == 0, result.output
    assert "Times faster than each column's method" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert load_run(report).reports[0].bench == "drafters-text"
    assert "| recycling | 15 of 16 | - |" in page.read_text()


@pytest.mark.parametrize("words", [["--json"], ["--json", "-"], ["--json=-"], ["--json", "--repeats", "2"]])
def test_json_alone_is_printed(words: list[str], measured: list[str]) -> None:
    result = run("bench", "drafters", "-m", "model", *words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["format"] == "mmdec-bench"


def test_markdown_alone_is_printed(measured: list[str]) -> None:
    result = run("bench", "drafters", "-m", "model", "--markdown", "-")
    assert result.stdout.startswith("**Drafters for")
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
        (["--plot", tmp_path / "plots"], "matplotlib"),
    ):
        result = run("bench", "drafters", "-m", "model", *words)
        assert isinstance(result.exception, InputError)
        assert message in str(result.exception)
    assert measured == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "speech", "--json", "OWN", "other.wav"], r"`--json` must be a file that ends in \.json, or -"),
        (
            ["bench", "drafters", "-m", "model", "--plot", "OWN"],
            r"`--plot` must be a folder, or a file that ends in \.png",
        ),
        (["bench", "show", "saved.json", "--plot", "OWN"], "`--plot` must be a folder, but is"),
        (
            ["bench", "drafters", "-m", "model", "--markdown", "OWN"],
            r"`--markdown` must be a file that ends in \.md, or -",
        ),
        (["bench", "show", "--json", "OWN", "saved.json"], "`--json` must be"),
        (["bench", "all", "--json", "FOLDER"], "`--json` must be"),
        (["eval", "asr", "--json", "OWN"], "`--json` must be"),
        (["eval", "vlm", "--json=OWN"], "`--json` must be"),
        (["eval", "speech", "--json", "OWN"], "`--json` must be"),
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
    saved.write_text(to_json(findings.run("drafters-text")), encoding="utf-8")
    result = run("bench", "drafters", "-m", "model", "--against", saved)
    assert "Against saved.json" in result.stdout
    assert "other surroundings" not in result.stdout
    content = json.loads(saved.read_text())
    content["reports"][0]["hardware"]["cpu"] = "another"
    saved.write_text(json.dumps(content))
    result = run("bench", "drafters", "-m", "model", "--against", saved, "--json")
    assert json.loads(result.stdout)["against"]["warnings"] == [
        f"drafters-text: cpu another then, {findings.HARDWARE['cpu']} now"
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
        if "vlm-scenes" in command:
            return "not done in 3 minutes"
        assert seconds == 180
        name = "drafters-audio" if name == "drafters" else name
        Path(command[command.index("--json") + 1]).write_text(to_json(findings.run(name)), encoding="utf-8")
        return ""

    monkeypatch.setattr(bench, "_run", pretend)
    path = tmp_path / "all.json"
    result = run("bench", "all", "--minutes", 3, "--quick", "--json", path)
    assert result.exit_code == 1
    assert [command[4] for command in commands] == [words[0] for words in bench.COMMANDS.values()]
    assert all("--repeats" in command for command in commands)
    assert "drafters-images: not done in 3 minutes" in result.stdout
    saved = load_run(path)
    assert [report.bench for report in saved.reports] == [*bench.COMMANDS][:-1]
    assert saved.left_out == {"drafters-images": "not done in 3 minutes"}
    commands.clear()
    assert run("bench", "all", "--only", "speech", "--minutes", 3).exit_code == 0
    assert [command[4] for command in commands] == ["speech"]
    assert isinstance(run("bench", "all", "--only", "vlm").exception, InputError)


def first_options(monkeypatch: pytest.MonkeyPatch, *words: object) -> DrafterBenchOptions:
    """Return the options with which `mmdec bench drafters` begins the measurement."""
    given: list[DrafterBenchOptions] = []
    monkeypatch.setattr(
        bench_drafters,
        "bench_drafters",
        lambda _, options, *__: (given.append(options), findings.run("drafters-audio"))[1],
    )
    result = run("bench", "drafters", "-m", "whisper-tiny.en", *words)
    assert result.exit_code == 0, result.output
    return given[0]


def test_folders_of_recordings_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = Path(__file__).parents[3] / "data" / "samples" / "english"
    assert first_options(monkeypatch) == DrafterBenchOptions(drafter=[], audio=[], draft_text=[], draft_model=[])
    found = first_options(monkeypatch, "--audio", samples, "--audio", "own.wav").audio
    assert sorted(found) == sorted([*samples.glob("*.flac"), Path("own.wav")])


def test_a_plot_is_written_whole_or_refused_before_measuring(measured: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wrong in ("plot.pdf", "file"):
        result = run("bench", "drafters", "-m", "model", "--plot", tmp_path / wrong)
        assert "`--plot` must be a folder, or a file that ends in .png or .svg" in str(result.exception)
    result = run("bench", "speech", "x.wav", "--plot", tmp_path / "plot.png")
    assert "`--plot` must be a folder, but is" in str(result.exception)
    assert measured == []
    for name, begin in (("plot.png", b"\x89PNG"), ("plot.svg", b"<?xml")):
        result = run("bench", "drafters", "-m", "model", "--plot", tmp_path / name)
        assert result.exit_code == 0, result.output
        assert (tmp_path / name).read_bytes().startswith(begin)
    assert run("bench", "drafters", "-m", "model", "--plot", tmp_path / "all").exit_code == 0
    assert list((tmp_path / "all").glob("*.png"))


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
