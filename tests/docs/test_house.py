"""The house keeps its shape: the README's tree is true in both directions, files and functions stay small."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mmdec"
MODULES = sorted(PACKAGE.rglob("*.py"))
TREE = re.search(r"^```\nmmdec/\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
WHISPERS = (  # Whisper's own rooms
    "targets/whisper",
    "hub/whisper",
    "pipelines/transcription/",
    "training/whisper/",
    "training/medusa/",
    "cli/",
    "demo/",
)


def entries() -> dict[str, list[str]]:
    """What the README's tree says of mmdec/: each file or room, and the modules that it names inside a room.

    A room's line names it; the deeper lines below list its modules, subfolders with a slash.
    """
    assert TREE is not None
    found: dict[str, list[str]] = {}
    for line in TREE.group(1).splitlines():
        if not line.startswith("  "):
            break
        if line.startswith("      "):
            found[list(found)[-1]] += line.split()
        else:
            found[line.split()[0]] = []
    return found


def test_the_tree_names_every_file_and_room_of_the_top_floor_and_no_other() -> None:
    real = {path.name + "/" * path.is_dir() for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert set(entries()) == real - {"py.typed"}


def test_the_tree_names_every_module_of_a_room_and_no_other() -> None:
    for room, named in entries().items():
        folder = PACKAGE / room
        if folder.is_dir():
            paths = [path for path in folder.rglob("*.py") if path.stem != "__init__"]
            modules = {str(path.relative_to(folder).with_suffix("")) for path in paths}
            spelled, inside = set[str](), ""
            for name in named:
                if name.endswith("/"):
                    inside = name
                else:
                    spelled.add(inside + name)
            assert spelled == modules, room


def test_top_floor_is_short() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 8


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 320
    assert ast.get_docstring(ast.parse(text))


def test_long_functions_are_few() -> None:
    long = [
        f"{path.relative_to(PACKAGE)}: {node.name}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 60
    ]
    assert len(long) <= 3, long


def test_what_a_type_checker_is_told_to_ignore_has_its_reason() -> None:
    bare = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in MODULES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"# (type: ignore(\[[\w, -]*\])?|noqa(: \w+)?)\s*$", line)
    ]
    assert bare == []


def test_whisper_lives_in_its_rooms() -> None:
    elsewhere = [
        name
        for path in MODULES
        for name in [str(path.relative_to(PACKAGE))]
        if not name.startswith(WHISPERS)
        and not re.fullmatch(r"evaluation/\w*transcription\.py", name)
        and re.search(r"whisper", path.read_text(encoding="utf-8"), re.IGNORECASE)
    ]
    assert len(elsewhere) <= 3, elsewhere
