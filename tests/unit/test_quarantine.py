"""Only targets/ and generation/ know what transformers keeps to itself, as far as the syntax tells."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "mmdec"
ROOMS = ("targets/", "generation/")
EXCEPTIONS = {
    # Writes where a model is from, as `from_pretrained` does: the models of hub, one floor up, get their names by it.
    ("checks/weights.py", "_name_or_path"),
}


def private_names(tree: ast.AST) -> Iterator[str]:
    """Attributes that begin with one underscore, of objects that are neither `self` nor `cls`, and that the module does
    not define itself."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    of_self = {id(node) for node in attributes if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")}
    own |= {node.attr for node in attributes if id(node) in of_self and isinstance(node.ctx, ast.Store)}
    for node in attributes:
        private = node.attr.startswith("_") and not node.attr.startswith("__")
        if private and id(node) not in of_self and node.attr not in own:
            yield node.attr


def inner_imports(tree: ast.AST) -> Iterator[str]:
    """Modules of single models of transformers that are imported."""
    for node in ast.walk(tree):
        names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
        yield from (name for name in names if name.startswith("transformers.models."))


def leaks(source: str) -> list[str]:
    tree = ast.parse(source)
    return [*private_names(tree), *inner_imports(tree)]


def test_transformers_internals_stay_in_their_rooms() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), name)
        for path in PACKAGE.rglob("*.py")
        if not path.relative_to(PACKAGE).as_posix().startswith(ROOMS)
        for name in leaks(path.read_text(encoding="utf-8"))
    }
    assert found <= EXCEPTIONS


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("model.config._attn_implementation = 'eager'", ["_attn_implementation"]),
        ("from transformers.models.whisper.modeling_whisper import WhisperDecoder", ["transformers.models."]),
        ("from transformers.models import whisper", ["transformers.models."]),
        ("import transformers.models.llama", ["transformers.models."]),
        ("self._attn", []),
        ("class A:\n    def __init__(self):\n        self._a = 1\n\ndef of(a):\n    return a._a", []),
        ("from transformers import WhisperModel\nmodel.__class__", []),
    ],
)
def test_leaks_are_seen(source: str, found: list[str]) -> None:
    names = leaks(source)
    assert len(names) >= len(found)
    assert bool(names) == bool(found)
    assert all(name.startswith(tuple(found)) for name in names)
