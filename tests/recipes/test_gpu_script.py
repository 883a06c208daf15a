"""Tests recipes/gpu.sh without a GPU: its commands parse, its files exist, and its time limits are short."""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.main import get_command

from mmdec.cli import app
from mmdec.cli.bench import COMMANDS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "recipes" / "gpu.sh"


def parts() -> dict[str, tuple[int, list[str]]]:
    """Name -> seconds at most, and the words of the command."""
    lines = re.findall(r"^part (.*)$", SCRIPT.read_text(encoding="utf-8").replace("\\\n", " "), re.MULTILINE)
    result = {}
    for line in lines:
        name, limit, *words = shlex.split(line)
        result[name] = int(limit), words
    return result


def test_the_parts_end_within_25_minutes() -> None:
    assert sum(limit for limit, _ in parts().values()) <= 25 * 60


def test_every_benchmark_is_there() -> None:
    given = [words[words.index("bench") + 1 :] for _, words in parts().values() if "bench" in words]
    assert [words[: len(named)] for words, named in zip(given, COMMANDS.values(), strict=True)] == [*COMMANDS.values()]


def test_commands_parse_and_their_inputs_exist(tmp_path: Path) -> None:
    tried = []
    for name, (_, words) in parts().items():
        for word in words:
            if re.match(r"(data|tests)/", word):
                assert glob.glob(str(ROOT / word)), (name, word)
        if words[-1] == "$parts/info.json":  # in a shell, for its output
            words = shlex.split(words[2])
            assert words[-2:] == [">", "$1"]
            del words[-2:]
        if "mmdec" not in words:
            continue
        arguments = [word.replace("$parts", str(tmp_path)) for word in words[words.index("mmdec") + 1 :]]
        command: Any = get_command(app)
        while arguments[0] in getattr(command, "commands", ()):  # `train` runs with and without a command of its own
            command = command.commands[arguments.pop(0)]
        command.make_context(name, arguments).close()
        tried.append(name)
    assert len(tried) >= len(COMMANDS) + 2  # info and train


def test_one_json_is_written_whatever_the_parts_do(tmp_path: Path) -> None:
    """A stand-in for Python reports, fails, writes half of a report, or warns on stderr."""
    fake = tmp_path / "python"
    fake.write_text(
        f"""#!/bin/sh
case "$*" in
  -c*) exit 0 ;;
  "- "*) exec {sys.executable} "$@" ;;
  *info*) echo warning >&2; echo '{{"gpus": 1}}' ;;
  *kernels*) while [ "$1" != --json ]; do shift; done; echo '{{"half' > "$2"; exit 3 ;;
  *speech*) while [ "$1" != --json ]; do shift; done; echo '{{"n": 5}}' > "$2" ;;
esac
""",
        encoding="utf-8",
    )
    fake.chmod(0o755)
    out = tmp_path / "out" / "gpu.json"
    environment = {**os.environ, "PYTHON": str(fake)}
    done = subprocess.run([str(SCRIPT), str(out)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report.keys() == parts().keys()
    assert report["info"]["report"] == {"gpus": 1}
    assert report["speech"]["report"] == {"n": 5}
    assert report["kernels"]["exit_code"] == 3
    assert "report" not in report["kernels"]
