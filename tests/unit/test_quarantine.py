"""Tests that only targets/, generation/ and whisper/ use transformers' private names, as far as the syntax shows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "mmdec"
ROOMS = ("targets/", "generation/", "whisper/")
EXCEPTIONS = {
    # Writes where a model is from, as `from_pretrained` does: the models of hub, one floor up, get their names by it.
    ("checks/weights.py", "_name_or_path"),
    # Settings that a config.json may have and that are not followed: named as they stand in the file.
    ("checks/weights.py", "_attn_implementation"),
    ("checks/weights.py", "_experts_implementation"),
    # Labels are kept for a model: where it lies is no part of what it is.
    ("drafters/medusa/training/data.py", "_name_or_path"),
    # Lightning's: the class that a checkpoint names, whether one was read when an error came, and the count of steps
    # that its loggers go by.
    ("training/__main__.py", "_class_path"),
    ("training/__main__.py", "_checkpoint_connector"),
    ("training/__main__.py", "_loaded_checkpoint"),
    ("training/callbacks.py", "_batches_that_stepped"),
    # torch's: the only name of its fused product by oneDNN.
    ("kernels/onednn.py", "_linear_pointwise"),
    # torch's: the counter of changes of a tensor.
    ("kernels/float16_linear.py", "_version"),
    # Python's: the end of a process that runs its exit handlers and destroys nothing.
    ("cli/__init__.py", "_exit"),
    ("cli/__init__.py", "_run_exitfuncs"),
    ("cli/__init__.py", "_shutdown"),
    # mmdec's own folders in a wheel, and the end of a tensor's name.
    ("demo/samples.py", "_samples"),
    ("hub/find.py", "_models"),
    ("daspeech/hifigan.py", "_v"),
}
PRIVATE = re.compile("_[a-z][a-z_]*")


def private_names(nodes: list[ast.AST]) -> Iterator[str]:
    """Attributes that begin with one underscore, of objects that are neither `self` nor `cls`, names of keyword
    arguments and whole texts that look the same; none that the module defines itself."""
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    of_self = {id(node) for node in attributes if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")}
    own |= {node.attr for node in attributes if id(node) in of_self and isinstance(node.ctx, ast.Store)}
    for node in attributes:
        private = node.attr.startswith("_") and not node.attr.startswith("__")
        if private and id(node) not in of_self and node.attr not in own:
            yield node.attr
    pieces = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        text = node.arg if isinstance(node, ast.keyword) else None
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces:
            text = node.value
        if text and PRIVATE.fullmatch(text) and text not in own:
            yield text


def inner_imports(nodes: list[ast.AST]) -> Iterator[str]:
    """Modules of single models of transformers that are imported."""
    for node in nodes:
        names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
        yield from (name for name in names if name.startswith("transformers.models."))


def leaks(source: str) -> list[str]:
    nodes = [*ast.walk(ast.parse(source))]
    return [*private_names(nodes), *inner_imports(nodes)]


def test_transformers_internals_are_used_only_where_allowed() -> None:
    result = {
        (path.relative_to(PACKAGE).as_posix(), name)
        for path in PACKAGE.rglob("*.py")
        if not path.relative_to(PACKAGE).as_posix().startswith(ROOMS)
        for name in leaks(path.read_text(encoding="utf-8"))
    }
    assert result == EXCEPTIONS


@pytest.mark.parametrize(
    ("source", "result"),
    [
        ("model.config._attn_implementation = 'eager'", ["_attn_implementation"]),
        ("from transformers.models.whisper.modeling_whisper import WhisperDecoder", ["transformers.models."]),
        ("from transformers.models import whisper", ["transformers.models."]),
        ("import transformers.models.llama", ["transformers.models."]),
        ("self._attn", []),
        ("class A:\n    def __init__(self):\n        self._a = 1\n\ndef of(a):\n    return a._a", []),
        ("from transformers import WhisperModel\nmodel.__class__", []),
        ("GenerationConfig.from_pretrained(folder, _from_model_config=True)", ["_from_model_config"]),
        ("getattr(config, '_attn_implementation')", ["_attn_implementation"]),
        ("f'{name}_exact', '__main__'", []),
        ("class A:\n    __slots__ = ('_a',)\n\n    def __init__(self):\n        self._a = 1", []),
    ],
)
def test_internal_imports_are_detected(source: str, result: list[str]) -> None:
    names = leaks(source)
    assert len(names) >= len(result)
    assert bool(names) == bool(result)
    assert all(name.startswith(tuple(result)) for name in names)
