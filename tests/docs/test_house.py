"""Tests rules for the repository: the README's tree lists exactly what exists, and files and functions stay small."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import mmdec
from mmdec import cli
from mmdec.drafters.registry import BUILT_IN

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mmdec"
MODULES = sorted(PACKAGE.rglob("*.py"))
TREE = re.search(r"^```\nmmdec/\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
RECIPES = ("LightningModule", "LightningDataModule")
WHISPERS = (  # Whisper's own rooms
    "targets/whisper",
    "hub/whisper",
    "nn/whisper_encoder",
    "hub/heard_translator",  # a translator that hears with its encoder
    "nn/heard_translator",
    "training/reader/",
    "pipelines/transcription/",
    "training/whisper/",
    "training/medusa/",
    "training/ctc/",  # heads on its encoder
    "cli/",
    "demo/",
)


def entries() -> set[str]:
    """What the README's tree names of mmdec/: the files and rooms of its top floor."""
    assert TREE is not None
    lines = TREE.group(1).partition("\nrecipes/")[0].splitlines()
    return {line.split()[0] for line in lines if not line.startswith("      ")}


def test_the_tree_names_every_file_and_room_of_the_top_floor_and_no_other() -> None:
    real = {path.name + "/" * path.is_dir() for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert entries() == real - {"py.typed"}


def test_the_changelog_names_modules_that_exist() -> None:
    """By their path in the package or the repository, or by their name after a room's."""
    names = set(re.findall(r"`([\w/]+\.(?:py|yaml))`", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")))
    absent = [
        name
        for name in names
        if not ((ROOT / name).is_file() or (PACKAGE / name).is_file() or [*PACKAGE.glob(f"*/{name}")])
    ]
    assert names
    assert absent == []


def test_unit_tests_mirror_the_package() -> None:
    """Folder by folder; tests/unit/data is for the scripts of data/build."""
    unit = ROOT / "tests" / "unit"
    tested = {path.parent.relative_to(unit) for path in unit.rglob("test_*.py")} - {Path("data")}
    rooms = {path.parent.relative_to(PACKAGE) for path in MODULES if path.stem != "__init__"}
    assert tested == rooms


def test_tests_share_what_lies_in_support() -> None:
    """No test module is imported; what fixtures need of a folder's conftest.py, pytest brings."""
    borrowed = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in imported(node)
        if name.startswith("tests.") and not name.startswith(("tests.support", "tests.conftest"))
    ]
    assert borrowed == []


def imported(node: ast.AST) -> list[str]:
    """The modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def test_top_floor_is_short() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 8


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 500
    assert ast.get_docstring(ast.parse(text))


def test_the_package_is_marked_as_typed() -> None:
    """`.ci/run` looks for the marker in the wheel, too."""
    assert (PACKAGE / "py.typed").is_file()


def test_long_functions_are_few() -> None:
    """Docstrings, which say a line of each argument, do not count."""
    long = [
        f"{path.relative_to(PACKAGE)}: {node.name}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and (node.end_lineno or 0) - node.lineno - len((ast.get_docstring(node) or "").splitlines()) >= 60
    ]
    assert len(long) <= 3, long


def test_functions_take_few_arguments() -> None:
    """At most eight, but for public calls, verbs of the command line, Triton kernels and the modules of recipes, whose
    arguments are those of a YAML."""
    groups = [cli.app, *(group.typer_instance for group in cli.app.registered_groups)]
    verbs = {command.callback for group in groups if group for command in group.registered_commands}
    free = {(str(verb.__module__), verb.__name__) for verb in verbs if verb}
    free |= {(str(getattr(mmdec, name).__module__), name) for name in mmdec.__all__ if callable(getattr(mmdec, name))}
    many: list[str] = []
    for path in MODULES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        of_recipes = [node for node in classes if any(ast.unparse(base).endswith(RECIPES) for base in node.bases)]
        excepted = {id(part) for node in of_recipes for part in node.body}
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or id(node) in excepted or (module, node.name) in free:
                continue
            kernel = any(ast.unparse(entry).partition("(")[0].endswith("jit") for entry in node.decorator_list)
            if not kernel and arguments(node) > 8:
                many.append(f"{path.relative_to(PACKAGE)}: {node.name}")
    assert many == []


def arguments(node: ast.FunctionDef) -> int:
    """The number of a function's arguments, `self` and `cls` aside."""
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    several = [entry for entry in (node.args.vararg, node.args.kwarg) if entry is not None]
    return sum(entry.arg not in ("self", "cls") for entry in named) + len(several)


def test_what_a_type_checker_is_told_to_ignore_has_its_reason() -> None:
    bare = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in MODULES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"# ((type|pyright): ignore(\[[\w, -]*\])?|noqa(: \w+)?)\s*$", line)
    ]
    assert bare == []


def test_whisper_lives_in_its_rooms() -> None:
    elsewhere = [
        name
        for path in MODULES
        for name in [str(path.relative_to(PACKAGE))]
        if not name.startswith(WHISPERS)
        and not re.fullmatch(r"evaluation/\w+/\w*transcription\.py", name)
        and re.search(r"whisper", path.read_text(encoding="utf-8"), re.IGNORECASE)
    ]
    assert len(elsewhere) <= 3, elsewhere


def test_only_the_registry_lists_drafters() -> None:
    """So a new drafter is its own files, one entry, and its name in the README's tree. hub/published.py names the
    formats that others publish."""
    lists = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict)) and len(texts(node) & BUILT_IN.keys()) > 1
    ]
    assert {line.partition(":")[0] for line in lists} == {"drafters/registry.py", "hub/published.py"}, lists


def texts(node: ast.List | ast.Tuple | ast.Set | ast.Dict) -> set[str]:
    """The strings that a list, or a dictionary's keys, hold."""
    parts = node.keys if isinstance(node, ast.Dict) else node.elts
    return {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def test_rooms_import_few_other_rooms() -> None:
    """A room is a folder of the package or a file of its top floor; imports for type checkers count, too."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in MODULES}
    pairs: set[tuple[str, str]] = set()
    for path in MODULES:
        room = path.relative_to(PACKAGE).parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                inside = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in files else node.module for name in inside]
            pairs |= {(room, files[name].relative_to(PACKAGE).parts[0]) for name in names if name in files}
    between = sorted(pair for pair in pairs if pair[0] != pair[1])
    assert len(between) <= 89, between


def test_imported_names_are_there() -> None:
    """Of the package's own modules; those that are imported when a function runs, too."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in MODULES}
    names = {module: top_names(path) for module, path in files.items()}
    absent = [
        f"{path.relative_to(PACKAGE)}: {node.module}.{alias.name}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module in files
        for alias in node.names
        if alias.name not in names[node.module] and f"{node.module}.{alias.name}" not in files
    ]
    assert absent == []


def top_names(path: Path) -> set[str]:
    """What a module defines, at its top or in a branch there; in `mmdec` itself also what it lists."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: set[str] = set()
    statements: list[ast.stmt] = list(tree.body)
    while statements:
        node = statements.pop()
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            statements += [part for field in ("body", "orelse", "finalbody") for part in getattr(node, field, ())]
            statements += [part for handler in getattr(node, "handlers", ()) for part in handler.body]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            names |= {
                part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
            }
    return names
