"""Tests that the library logs instead of printing, and does not change the root logger."""

from __future__ import annotations

import ast
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
from huggingface_hub import constants

from mmdec import cli
from tests.conftest import RATE, buzz

PACKAGE = Path(__file__).parents[2] / "mmdec"
PRODUCT = ("cli", "demo", "training")  # whose product is what they print


def prints(tree: ast.AST) -> list[int]:
    """Lines with a call of print, but for those of a module's own `main`, which is a command."""
    result: list[int] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            result.append(node.lineno)
        result += prints(node)
    return result


def test_the_library_does_not_print() -> None:
    result = {
        str(path.relative_to(PACKAGE)): prints(ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(PACKAGE.rglob("*.py"))
        if not set(PRODUCT) & set(path.relative_to(PACKAGE).parts)
    }
    assert {path: lines for path, lines in result.items() if lines} == {}
    assert prints(ast.parse("def f():\n    print(1)\ndef main():\n    print(2)")) == [2]


def test_the_root_logger_is_not_configured_anywhere() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert "basicConfig" not in text, path
        assert "getLogger()" not in text, path


def test_importing_shows_nothing_and_adds_no_handler() -> None:
    code = (
        "import logging, mmdec\n"
        "assert logging.getLogger().handlers == []\n"
        "assert [type(handler).__name__ for handler in logging.getLogger('mmdec').handlers] == ['NullHandler']\n"
        "logging.getLogger('mmdec.hub').error('nobody asked')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""


def test_the_program_shows_what_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = logging.getLogger("mmdec")
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(ours, "level", logging.NOTSET)
    monkeypatch.setenv("MMDEC_LOG", "info")
    cli.show_logs()
    cli.show_logs()  # once is enough
    logging.getLogger("mmdec.hub.find").info("fetching %s", "x")
    logging.getLogger("mmdec.hub.find").debug("too much")
    assert capsys.readouterr().err == "INFO: fetching x\n"


@pytest.mark.parametrize(("asked", "shown"), [("info", True), ("warning", False)])
def test_the_command_line_shows_what_mmdec_log_says(
    asked: str, shown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Importing mmdec has given the logger a handler that shows nothing."""
    ours = logging.getLogger("mmdec")
    monkeypatch.setattr(ours, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(ours, "level", logging.NOTSET)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("MMDEC_LOG", asked)
    soundfile.write(tmp_path / "x.wav", buzz(0.5), RATE)
    given = ["mmdec", "transcribe", str(tmp_path / "x.wav"), "--model", "someone/no-such-model"]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    output = capsys.readouterr().err.splitlines()
    lines = ["INFO: fetching someone/no-such-model from the hub, or from this machine's cache"] if shown else []
    assert output[:-1] == lines
    assert output[-1].startswith("error: `--model` must be on this machine")


def test_errors_of_the_library_are_shown_unasked() -> None:
    code = (
        "import logging\n"
        "from contextlib import suppress\n"
        "from mmdec import cli\n"
        "cli.app = lambda: logging.getLogger('mmdec.demo.html').error('the demo failed')\n"
        "for _ in range(2):  # a second call adds no second handler\n"
        "    with suppress(SystemExit):\n"
        "        cli.main()\n"
    )
    surroundings = {name: value for name, value in os.environ.items() if name != "MMDEC_LOG"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=surroundings)
    assert done.stderr == "ERROR: the demo failed\n" * 2
