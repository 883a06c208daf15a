"""The tree in CONTRIBUTING.md lists what exists, tests mirror the package, and imported names are there."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from mmdec.drafters.built_in import BUILT_IN

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mmdec"
FOLDERS = ("mmdec", "tests", "data", "demos", "docs", "recipes")
MODULES = sorted(PACKAGE.rglob("*.py"))
CI_SCRIPT = ROOT / ".ci/run"
TREE = re.search(
    r"^```text\nmmdec/\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)


@cache
def syntax_tree(path: Path) -> ast.Module:
    """Parse a file, once for all tests."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a module's syntax tree."""
    return [*ast.walk(syntax_tree(path))]


def entries() -> set[str]:
    """List the files and folders that the tree shows directly under mmdec/."""
    assert TREE is not None
    lines = TREE.group(1).partition("\nrecipes/")[0].splitlines()
    return {line.split()[0] for line in lines if not line.startswith("      ")}


def test_the_code_map_lists_the_top_level_of_mmdec() -> None:
    real = {path.name + "/" * path.is_dir() for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert entries() == real - {"py.typed"}


def test_the_code_map_lists_folders_beside_the_package() -> None:
    assert TREE is not None
    lines = [line for line in TREE.group(1).splitlines() if not line.startswith(" ")]
    assert [line for line in lines if not (ROOT / line.split()[0]).exists()] == []


def test_the_code_map_names_all_recipes() -> None:
    """The folders of recipes/, in the lines that describe it."""
    assert TREE is not None
    described = re.search(r"^recipes/ .*?(?=^\w+/ |^recipes/gpu)", TREE.group(1), re.MULTILINE | re.DOTALL)
    assert described is not None
    folders = {path.name for path in (ROOT / "recipes").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - set(re.findall(r"\w+", described.group())) == set()


def test_unit_tests_mirror_the_package() -> None:
    """Folder by folder; tests/unit/data is for the scripts of data/build."""
    unit = ROOT / "tests" / "unit"
    tested = {path.parent.relative_to(unit) for path in unit.rglob("test_*.py")} - {Path("data")}
    folders = {path.parent.relative_to(PACKAGE) for path in MODULES if path.stem != "__init__"}
    assert tested == folders


def test_tests_import_only_support_modules() -> None:
    """From tests/support or their own folder; never a test module."""
    tests = ROOT / "tests"
    misplaced = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {name}"
        for path in sorted(tests.rglob("*.py"))
        for node in nodes(path)
        for name in imported(node)
        if name.startswith("tests.") and not name.startswith(("tests.support.", "tests.conftest"))
        if ".test_" in name or not name.startswith(".".join(path.parent.relative_to(ROOT).parts) + ".")
    ]
    assert misplaced == []


def imported(node: ast.AST) -> list[str]:
    """Return the modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def test_pages_and_help_say_folder_and_hugging_face_id() -> None:
    """One word for one thing; `directory` is an argument's name, never a word for a folder."""
    other_word = re.compile(r"\b(?:a|the|this|new|model's|own) directory\b|\bhub ids?\b", re.IGNORECASE)
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "models").rglob("*.md")]
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in [*pages, *(PACKAGE / "cli").rglob("*.py")]
        for match in other_word.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_file_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(syntax_tree(path))


def test_docstrings_of_properties_are_noun_phrases() -> None:
    """A property is read like a value, so its docstring says what the value is."""
    verbs = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.name}"
        for path in MODULES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef)
        if {ast.unparse(decorator) for decorator in node.decorator_list} & {"property", "cached_property"}
        if (ast.get_docstring(node) or "").startswith("Return ")
    ]
    assert verbs == []


def test_the_package_is_marked_as_typed() -> None:
    """`.ci/run` looks for the marker in the wheel, too."""
    assert (PACKAGE / "py.typed").is_file()


def test_ignored_type_errors_have_a_reason() -> None:
    bare = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in MODULES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"# ((type|pyright): ignore(\[[\w, -]*\])?|noqa(: \w+)?)\s*$", line)
    ]
    assert bare == []


def test_only_the_registry_lists_drafters() -> None:
    """A new drafter is its own files and one line; eagle/checkpoint.py names the formats that others publish."""
    lists = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in MODULES
        for node in nodes(path)
        if isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict)) and len(texts(node) & BUILT_IN.keys()) > 1
    ]
    assert {line.partition(":")[0] for line in lists} == {"drafters/built_in.py", "drafters/eagle/checkpoint.py"}, lists


def texts(node: ast.List | ast.Tuple | ast.Set | ast.Dict) -> set[str]:
    """Return the strings that a list, or a dictionary's keys, hold."""
    parts = node.keys if isinstance(node, ast.Dict) else node.elts
    return {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def test_imported_names_are_there() -> None:
    """This covers imports of mmdec in all folders, inside functions, and in the script of CI, which no test runs."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in MODULES}
    names = {module: top_names(path) for module, path in files.items()}
    script = re.findall(r"<<'PYTHON'\n(.*?)^PYTHON$", CI_SCRIPT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert script
    sources = {path: nodes(path) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}
    sources[CI_SCRIPT] = [*ast.walk(ast.parse("".join(script)))]
    absent = [
        f"{path.relative_to(ROOT)}: {node.module}.{alias.name}"
        for path, statements in sources.items()
        for node in statements
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("mmdec.")
        for alias in node.names
        if alias.name not in names.get(node.module, ()) and f"{node.module}.{alias.name}" not in files
    ]
    assert absent == []


def top_names(path: Path) -> set[str]:
    """List the names that a module defines, at its top or in a branch there."""
    tree = syntax_tree(path)
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
            names |= assigned_names(node)
    return names


def test_no_script_is_named_like_a_package() -> None:
    """Python puts a script's folder first on its path, where the script would hide the package."""
    packages = {*sys.stdlib_module_names, *packages_distributions()}
    assert "hypothesis" in packages
    scripts = [path for folder in ("data", "demos", "recipes") for path in (ROOT / folder).rglob("*.py")]
    assert [str(path.relative_to(ROOT)) for path in scripts if path.stem in packages] == []


def test_names_in_comments_and_docstrings_exist() -> None:
    """A name in backticks is a constant or an attribute of a class of mmdec, a module's function, or a file.

    A file of another folder is named with its folder.

    Attributes of classes that mmdec does not define, and of objects that are named like a module, pass if the code
    uses their names anywhere.
    """
    trees = {path: syntax_tree(path) for path in MODULES}
    code = {name for tree in trees.values() for name in names_in_code(tree)} | {path.parent.name for path in MODULES}
    members = class_members(trees.values())
    stems = {path.parent.name if path.stem == "__init__" else path.stem for path in MODULES}
    files = {path.as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}

    def exists(name: str, folder: Path) -> bool:
        owner, _, attribute = name.partition(".")
        if re.fullmatch(r"[A-Z][A-Z0-9]+(_[A-Z0-9]+)*", name):
            return name in code
        if re.fullmatch(r"\w+\.py", name):
            return (folder / name).is_file()
        if re.fullmatch(r"[\w/]+\.py", name):
            return any(file.endswith(f"/{name}") for file in files)
        if re.fullmatch(r"[A-Z]\w*\.\w+", name):
            return attribute in members[owner] if owner in members else owner in code
        if re.fullmatch(r"[a-z_]\w*\.[a-z_]\w*", name) and owner in stems:
            return attribute in code
        return True

    stale = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in MODULES
        for line, text in comments_and_docstrings(path)
        for name in re.findall(r"(?<!`)`([\w./]+)(?:\([^`]*\))?`(?!`)", text)
        if not exists(name, path.parent)
    ]
    assert stale == []


def names_in_code(tree: ast.AST) -> set[str]:
    """Identifiers, and words of the strings that are not docstrings, such as configuration keys."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    names: set[str] = set()
    for node in ast.walk(tree):
        identifiers = (getattr(node, field, None) for field in ("id", "attr", "arg", "name", "asname"))
        names.update(part for name in identifiers if isinstance(name, str) for part in name.split("."))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            names.update(re.findall(r"\w+", node.value))
    return names


def class_members(trees: Iterable[ast.AST]) -> dict[str, frozenset[str]]:
    """Return each class's fields and methods with those of its bases; of classes with one name, all."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)

    @cache
    def members(name: str) -> frozenset[str]:
        bodies = classes.get(name, ())
        bases = {ast.unparse(base).rpartition(".")[2].partition("[")[0] for body in bodies for base in body.bases}
        names = frozenset(name for body in bodies for name in fields_and_methods(body))
        return names.union(*map(members, bases - {name}))

    return {name: members(name) for name in classes}


def fields_and_methods(body: ast.ClassDef) -> Iterator[str]:
    """Yield what a class defines in its body, and what its methods assign to `self`."""
    for node in body.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            yield from assigned_names(node)
    for node in ast.walk(body):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def assigned_names(node: ast.Assign | ast.AnnAssign) -> set[str]:
    """Return the names that an assignment gives a value."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}


def comments_and_docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield them with their line numbers."""
    source = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in nodes(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
