"""Tests the command line: many files, a bad file, JSON, exit codes, and that slow imports happen only when needed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner, Result

import mmdec
from mmdec import cli
from mmdec.cli.inputs import AUDIO_FILES, IMAGE_FILES, combine_files, input_files, output_paths
from mmdec.cli.options import MmdecCommand
from mmdec.cli.translate import AUDIO_SUFFIXES
from mmdec.daspeech.options import STRATEGIES
from mmdec.drafters.networks.training import train_for_model
from mmdec.errors import InputError
from mmdec.evaluation.translation import DEFAULT_STRATEGIES
from mmdec.hub.cache import LoadedModels
from mmdec.io import audio
from mmdec.io.suffixes import SOUND_SUFFIXES
from tests.conftest import RATE, buzz
from tests.support.tiny_containers import CODECS

SUBCOMMANDS = [
    "",
    *("translate", "transcribe", "describe", "train", "train drafter", "demo", "doctor", "info"),
    *("chat", "index", "serve"),
    *("eval", "eval speech", "eval asr", "bench", "bench speech", "bench drafters", "bench peer"),
    *("eval vlm", "bench kernels", "bench all", "bench show"),
    *("convert", "convert medusa", "convert hifigan", "convert daspeech", "convert drafter"),
    *("export", "export drafter"),
]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture
def recordings(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "in" / name for name in ("a.wav", "b.flac", "c.wav")]
    paths[0].parent.mkdir()
    for seed, path in enumerate(paths):
        soundfile.write(path, buzz(1.0 + 0.3 * seed, seed), RATE)
    return paths


def test_each_recording_gets_its_own_output(recordings: list[Path], tmp_path: Path, tiny_model: Path) -> None:
    out = tmp_path / "out"
    result = run("translate", *recordings, "-o", out, "--model", tiny_model, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.iterdir()) == ["a.wav", "b.wav", "c.wav"]
    assert "1.30 s of audio in" in result.stdout
    assert "vocoder" in result.stdout


def test_without_an_output_the_text_is_printed(
    recordings: list[Path], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is written."""
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    options = ("--model", tiny_model, "--device", "cpu")
    one = run("translate", recordings[0], *options)
    assert one.exit_code == 0, one.output
    text = mmdec.translate_speech(recordings[0], model=tiny_model, device="cpu").text
    assert one.stdout == text + "\n"
    several = run("translate", *recordings, *options)
    assert several.stdout.startswith(f"{recordings[0]}:\n  {text}\n{recordings[1]}:\n")
    result = run("translate", recordings[0], "--json", *options)
    assert (json.loads(result.stdout)["text"], json.loads(result.stdout)["output"]) == (text, None)
    assert sorted(tmp_path.rglob("*")) == before


def test_json_has_one_object_a_line(recordings: list[Path], tmp_path: Path, tiny_model: Path) -> None:
    out = tmp_path / "out"
    result = run(
        "translate", *recordings, "-o", out, "--model", tiny_model, "--json", "--threads", 1, "--device", "cpu"
    )
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["input"] for line in lines] == [str(path) for path in recordings]
    assert [line["seconds_audio"] for line in lines] == [1.0, 1.3, 1.6]
    for line in lines:
        assert {
            "input",
            "output",
            "text",
            "units",
            "seconds_audio",
            "seconds_taken",
            "passes",
            "confidence",
            "timings",
            "note",
        } == line.keys()
        samples, rate = soundfile.read(line["output"])
        assert rate == RATE
        assert len(samples) > 0
        assert line["seconds_taken"] > 0


def test_one_bad_file_does_not_lose_the_others(recordings: list[Path], tmp_path: Path, tiny_model: Path) -> None:
    text, silent, empty = tmp_path / "text.wav", tmp_path / "silent.wav", tmp_path / "empty"
    empty.mkdir()
    text.write_text("bonjour")
    soundfile.write(silent, np.zeros(RATE), RATE)
    out = tmp_path / "out"
    mixed = [recordings[0], text, tmp_path / "missing.wav", recordings[2], silent, empty]
    result = run("translate", *mixed, "-o", out, "--model", tiny_model, "--json", "--device", "cpu")
    assert result.exit_code == 1
    assert sorted(path.name for path in out.iterdir()) == ["a.wav", "c.wav"]
    assert len(result.stdout.splitlines()) == 2
    for name in ("text.wav", "missing.wav", "silent.wav"):
        assert f"failed: {tmp_path / name}: `audio` must" in result.stderr
    assert f"'{empty}' is a folder without any that ends in .wav, " in result.stderr
    assert result.stderr.endswith("4 of 6 files failed\n")


def test_one_file_to_one_file(recordings: list[Path], tmp_path: Path, tiny_model: Path) -> None:
    target = tmp_path / "new" / "hello.wav"
    assert run("translate", recordings[0], "-o", target, "-m", tiny_model, "--device", "cpu").exit_code == 0
    assert target.is_file()
    assert [path.name for path in target.parent.iterdir()] == ["hello.wav"]


def paths(inputs: list[Path], output: Path) -> list[Path]:
    return output_paths(inputs, output, AUDIO_SUFFIXES, ".wav")


def test_outputs_go_beside_their_inputs_or_into_the_folder(tmp_path: Path) -> None:
    a, b = tmp_path / "x" / "a.wav", tmp_path / "y" / "a.mp3"
    assert paths([a, b], tmp_path) == [tmp_path / "a.wav", tmp_path / "a-2.wav"]
    assert paths([a], tmp_path / "o.flac") == [tmp_path / "o.flac"]
    with pytest.raises(InputError, match="must be a folder for 2 inputs"):
        paths([a, b], tmp_path / "o.wav")
    with pytest.raises(InputError, match="must not overwrite an input"):
        paths([a], tmp_path / "x")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"must be a folder or a \.wav file"):
        paths([a], tmp_path / "file")


def test_an_unknown_strategy_is_refused_before_files_are_read() -> None:
    result = run("translate", "x.wav", "--strategy", "nonsense")
    assert isinstance(result.exception, InputError)
    assert str(result.exception).startswith("`--strategy` must be one of lookahead, ")


def test_every_strategy_is_named() -> None:
    """There is one list; the help is its text, and an evaluation takes some of it."""
    output = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["translate", "--help"]).stdout
    assert all(strategy in output for strategy in STRATEGIES)
    assert set(DEFAULT_STRATEGIES) < set(STRATEGIES)


def test_wrong_calls_end_with_2_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["translate", "x.wav", "-o", str(tmp_path / "out"), "--strategy", "fast"]
    monkeypatch.setattr(sys, "argv", ["mmdec", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    output = capsys.readouterr().err
    assert output.startswith("error: `--strategy` must be one of")
    assert output.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_progress_stays_off_stdout_and_off_pipes(recordings: list[Path], tmp_path: Path, tiny_model: Path) -> None:
    result = run("translate", *recordings, "-o", tmp_path / "out", "--model", tiny_model, "--json", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert len(result.stdout.splitlines()) == 3


HEAVY = ("torch", "numpy", "transformers", "lightning", "matplotlib", "gradio", "huggingface_hub")


@pytest.mark.slow
def test_no_help_imports_torch() -> None:
    """All subcommands in one process: what one of them loads, the ones after it would show."""
    code = (
        "import sys, contextlib, io\n"
        "from mmdec.cli import app\n"
        "for subcommand in sys.argv[1:]:\n"
        "    output = io.StringIO()\n"
        "    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):\n"
        "        app([*subcommand.split(), '--help'])\n"
        "    assert 'Usage' in output.getvalue(), subcommand\n"
        f"    loaded = [name for name in {HEAVY} if name in sys.modules]\n"
        "    assert not loaded, (subcommand, loaded)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *SUBCOMMANDS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_names_the_commands_and_the_exit_codes() -> None:
    output = run("--help").stdout
    for subcommand in ("translate", "transcribe", "describe", "eval", "bench", "train", "demo", "--install-completion"):
        assert subcommand in output
    assert "1 some inputs failed, or a benchmark was left out" in " ".join(output.split()).replace("│ ", "")
    page = (Path(__file__).parents[3] / "docs" / "guide" / "command_line.md").read_text(encoding="utf-8")
    assert "| 1 | some inputs failed, a benchmark was left out" in page


@pytest.mark.parametrize(
    "subcommand", sorted({*SUBCOMMANDS} - {"", "train", "eval", "bench", "convert", "export", "demo", "chat", "serve"})
)
def test_every_finite_command_has_json(subcommand: str) -> None:
    """All but `demo`, `chat` and `serve`, which run until they are stopped."""
    assert "--json" in CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, [*subcommand.split(), "--help"]).stdout


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupt)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 130


@pytest.mark.parametrize("subcommand", SUBCOMMANDS)
def test_help_keeps_its_brackets(subcommand: str) -> None:
    """rich reads [name] as markup and drops it, unless a backslash stands before it."""
    command = get_command(cli.app)
    for word in subcommand.split():
        assert isinstance(command, TyperGroup)
        command = command.commands[word]
    output = re.sub(
        r"[\s│]+", " ", CliRunner(env={"COLUMNS": "500"}).invoke(cli.app, [*subcommand.split(), "--help"]).stdout
    )
    texts = [command.help, *(getattr(option, "help", None) for option in command.params)]
    for text in texts:
        for word in (text or "").replace("\\[", "[").split():
            assert word in output, text


def test_version_is_the_packages() -> None:
    import mmdec

    assert run("--version").stdout.strip() == mmdec.__version__


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sounds in folders; what is hidden or of another kind is none of them."""
    for name in ("b.wav", "a.FLAC", "x/a.wav", "y/a.mp3", "y/z/c.webm", "notes.txt", ".hidden.wav", ".git/d.wav"):
        path = tmp_path / "talks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "talks"


def names(folder: Path, output: Path | None = None) -> list[str]:
    files = input_files([folder], AUDIO_FILES, output)
    assert not any(file.refusal for file in files)
    return [file.path.relative_to(folder).as_posix() for file in files]


def test_a_folder_gives_the_sound_files_below_it(folder: Path) -> None:
    assert names(folder) == ["a.FLAC", "b.wav", "x/a.wav", "y/a.mp3", "y/z/c.webm"]


def test_outputs_are_not_read_as_inputs(folder: Path) -> None:
    """A second call would translate what the first one wrote."""
    assert names(folder, folder / "x") == ["a.FLAC", "b.wav", "y/a.mp3", "y/z/c.webm"]


def test_outputs_of_one_name_are_kept_apart(folder: Path) -> None:
    files = input_files([folder], AUDIO_FILES, None)
    made = output_paths([file.path for file in files], folder.parent / "out", (".txt",), ".txt")
    assert [path.name for path in made] == ["a.txt", "b.txt", "a-2.txt", "a-3.txt", "c.txt"]


@pytest.mark.parametrize("twins", [("x/Talk.wav", "y/talk.wav"), ("x/\u00e9.wav", "y/e\u0301.wav")])
def test_outputs_differ_where_the_file_system_ignores_capitals_or_unicode_forms(
    twins: tuple[str, str], tmp_path: Path
) -> None:
    first, second = paths([Path(name) for name in twins], tmp_path)
    assert first.name == Path(twins[0]).name
    assert second.name == f"{Path(twins[1]).stem}-2.wav"


def test_named_files_keep_their_order(folder: Path) -> None:
    given = [folder / "b.wav", folder / "y", "nowhere.wav", folder / "notes.txt"]
    files = input_files(given, AUDIO_FILES, None)
    assert [file.path.name for file in files] == ["b.wav", "a.mp3", "c.webm", "nowhere.wav", "notes.txt"]
    assert [bool(file.refusal) for file in files] == [False, False, False, True, False]
    assert "'nowhere.wav' does not exist" in files[3].refusal


def test_a_folder_without_inputs_is_an_error(folder: Path) -> None:
    (only,) = input_files([folder], IMAGE_FILES, None)
    assert only.refusal.startswith(f"`image` must be a file or hold some, but '{folder}' is a folder without any that")


@pytest.mark.parametrize("address", ["https://example.org/a.png", "data:image/png;base64,aaaa"])
def test_addresses_are_refused_as_files(address: str) -> None:
    (only,) = input_files([address], IMAGE_FILES, None)
    assert only.name == address
    assert "Download it first" in only.refusal


def test_a_folder_that_cannot_be_entered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def closed(path: str) -> object:
        if Path(path).name == "x":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    files = input_files([folder], AUDIO_FILES, None)
    assert [file.name for file in files if file.refusal] == [str(folder / "x")]
    assert "(Permission denied)" in files[-1].refusal
    assert len(files) == 5


def test_combined_files_are_one_input(folder: Path) -> None:
    one = combine_files(input_files([folder / "b.wav", "x.png", "y.png"], IMAGE_FILES, None))
    assert one.name == f"{folder / 'b.wav'}, x.png, y.png"
    assert "'x.png' does not exist" in one.refusal


def test_every_readable_sound_format_is_listed() -> None:
    assert {*audio.WRITABLE, *CODECS} <= {*SOUND_SUFFIXES}


@pytest.mark.parametrize("subcommand", ["transcribe", "translate", "describe"])
def test_a_wrong_path_is_told_before_a_model_is_loaded(
    subcommand: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadedModels, "get", lambda *_: pytest.fail("it is loaded"))
    given = [subcommand, str(tmp_path / "a.wav"), str(tmp_path), "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(cli.app, given)
    assert result.exit_code == 1
    assert f"failed: {tmp_path / 'a.wav'}: `" in result.stderr
    assert f"'{tmp_path}' is a folder without any that ends in ." in result.stderr
    assert result.stderr.endswith("2 of 2 files failed\n")
    assert not (tmp_path / "out").exists()


def test_an_output_below_a_file_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, buzz(0.5), RATE)
    result = CliRunner().invoke(cli.app, ["transcribe", str(path), "-o", str(path / "out" / "b"), "-m", "nowhere"])
    assert isinstance(result.exception, InputError)
    assert str(result.exception).startswith("`--output` must lie in a folder")


def test_a_folder_is_translated(folder: Path, tmp_path: Path, tiny_model: Path) -> None:
    recordings = tmp_path / "in" / "deep"
    recordings.mkdir(parents=True)
    for seed, name in enumerate(("b.wav", "a.flac")):
        soundfile.write(recordings / name, buzz(1.0, seed), RATE)
    given = ["translate", recordings.parent, "-o", tmp_path / "out", "-m", tiny_model, "--device", "cpu"]
    result = CliRunner().invoke(cli.app, [str(argument) for argument in given])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.wav", "b.wav"]
    assert result.stdout.index("a.flac") < result.stdout.index("b.wav ->")


ENDING = [
    subcommand for subcommand in SUBCOMMANDS if subcommand not in ("", "train", "eval", "bench", "convert", "export")
]


def find_command(subcommand: str) -> Any:
    result: Any = get_command(cli.app)
    for word in subcommand.split():
        result = result.commands[word]
    return result


@cache
def help_text(subcommand: str) -> str:
    return CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, [*subcommand.split(), "--help"]).stdout


@pytest.mark.parametrize("subcommand", SUBCOMMANDS)
def test_names_are_whole_at_80_columns(subcommand: str) -> None:
    shown = help_text(subcommand)
    assert "…" not in shown
    for option in find_command(subcommand).params:
        assert all(f"{name} " in shown for name in option.opts if name.startswith("--"))


@pytest.mark.parametrize("subcommand", SUBCOMMANDS)
def test_each_help_page_has_one_example(subcommand: str) -> None:
    assert help_text(subcommand).count("Example: mmdec ") == 1


@pytest.mark.parametrize("subcommand", ENDING)
def test_the_example_is_of_this_command_and_parses(subcommand: str) -> None:
    result = find_command(subcommand)
    assert isinstance(result, MmdecCommand)
    words = shlex.split(result.epilog.removeprefix("Example: mmdec "))
    count = len(subcommand.split())
    assert words[:count] == subcommand.split()
    result.make_context(subcommand, words[count:])  # raises for what is no option


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("`batch_size` must be 1.", "`--batch-size` must be 1."),
        ("`kind` or `model`", "`--format` or `--model`"),
        ("`audio` must be a file, `nothing` else", "`audio` must be a file, `nothing` else"),
        ('unsure; `model="openai/whisper-base"` knows', 'unsure; `--model="openai/whisper-base"` knows'),
        ("cut at 20 tokens; set `max_new_tokens`", "cut at 20 tokens; set `--max-new-tokens`"),
        ("the model's prompt, batch_size and 'model=x'", "the model's prompt, batch_size and 'model=x'"),
        ("Call `mmdec.translate_speech` for it.", "Call `mmdec translate` for it."),
    ],
)
def test_errors_name_options_as_typed(message: str, typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise InputError(message)

    command = find_command("transcribe")
    monkeypatch.setattr(command, "callback", refuse)
    with pytest.raises(InputError) as caught:
        command.invoke(command.make_context("transcribe", ["x.wav"]))
    assert str(caught.value) == typed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("transcribe x.wav --threads -1", "`--threads` must be a whole number of at least 1, but is -1."),
        ("describe x.png --threads=x", "`--threads` must be a whole number of at least 1, but is x."),
        ("bench drafters --threads 0", "`--threads` must be a whole number of at least 1, but is 0."),
        ("translate x.wav --min-confidence 3", "`--min-confidence` must be a number from 0 to 1, but is 3."),
        ("serve --port 99999", "`--port` must be a whole number from 1 to 65535, but is 99999."),
        ("train drafter --minutes 0", "`--minutes` must be a number from 0.1 to 100000, but is 0."),
        ("train drafter --questions 1", "`--questions` must be a whole number of at least 2, but is 1."),
    ],
)
def test_a_number_that_is_out_of_range(
    arguments: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mmdec", *arguments.split()])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: {expected} See `--help`.\n"


@pytest.mark.parametrize("reads_images", [False, True])
def test_training_names_the_command_for_the_model(
    reads_images: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: Any, **__: Any) -> dict[str, Any]:
        return {"output": "out/drafter", "chain": 2.0, "tree": 3.0}

    monkeypatch.setattr(train_for_model, "train_drafter", train)
    model, data = tmp_path / "model", tmp_path / "questions.txt"
    data.write_text("One?\nTwo?\n", encoding="utf-8")
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llava" if reads_images else "llama"}))
    if reads_images:
        (model / "processor_config.json").write_text("{}")
    result = run("train", "drafter", "--model", model, "--data", data, "--output", tmp_path / "out")
    expected = f"describe --model {model}" if reads_images else f"chat {model}"
    assert result.stdout.endswith(f"Use it with `mmdec {expected} --drafter out/drafter`\n")


@pytest.mark.parametrize("subcommand", ["translate x.wav -o out", "transcribe x.wav", "describe x.wav"])
def test_an_unknown_dtype_is_refused(subcommand: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.wav").touch()
    result = CliRunner().invoke(cli.app, [*subcommand.split(), "--dtype", "float8", "--device", "cpu"])
    others = ", int8" * subcommand.startswith("transcribe")
    expected = f"`--dtype` must be float32, bfloat16, float16{others} or float64, but is 'float8'."
    assert str(result.exception).startswith(expected)
