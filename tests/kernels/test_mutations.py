"""Tests that the comparisons of this folder find mistakes: a mistake is put into a kernel's source, and the comparison
that passes for the right kernel must fail."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from triton.runtime.errors import InterpreterError

from mmdec.kernels import dag_triton, kv_gather_triton
from tests.kernels.interpreter import DEVICE  # noqa: F401 # before the kernels

from mmdec.kernels import tree_attention_triton  # isort: skip
from tests.kernels import dag_cases, kv_gather_cases, log_softmax_gather_cases, tree_attention_cases
from tests.support.grid import sample

Comparison = Callable[[ModuleType], bool]  # whether a kernel's results are right


@dataclass(frozen=True)
class Mutation:
    """A mistake that is put into a kernel's source, and the comparison that must find it."""

    name: str  # what goes wrong
    module: ModuleType
    old: str  # part of its source, which is there once
    new: str
    comparison: Comparison


def attention(name: str) -> Comparison:
    case = tree_attention_cases.CASES[name]
    return lambda module: tree_attention_cases.difference(module, case) < tree_attention_cases.NEAR[case[-1]]


def graph(name: str) -> Comparison:
    case = dag_cases.CASES[name]
    return lambda module: dag_cases.difference(module, case, seed=1) < dag_cases.NEAR[case.dtype]


def gather(name: str) -> Comparison:
    case = log_softmax_gather_cases.CASES[name]
    return lambda module: log_softmax_gather_cases.difference(module, case) < 2e-5


def cache(module: ModuleType) -> bool:
    return kv_gather_cases.agrees(module, (4, 3, 2, 12, 5), torch.float32, seed=0)


TREE, GRAPH, CACHE = tree_attention_triton, dag_triton, kv_gather_triton
MUTATIONS = [
    Mutation("a window one too short", TREE, "end - window + 1)", "end - window + 2)", attention("window")),
    Mutation("a split reads one column more", TREE, "column < stop", "column <= stop", attention("empty beside full")),
    Mutation(
        "a split runs past its row", TREE, "tl.minimum(begin + share, end)", "begin + share", attention("float16")
    ),
    Mutation("the tree is lost", TREE, "range(splits + 1)", "range(splits)", attention("bfloat16")),
    Mutation("a merge without fading", TREE, "total * fade + weight\n", "total + weight\n", attention("float16")),
    Mutation("sums that do not fade", TREE, "acc * fade[:, None] + added", "acc + added", attention("65 nodes")),
    Mutation("ancestors one bit off", TREE, ">> bit[None]", ">> (bit[None] ^ 1)", attention("seven heads a key")),
    Mutation(
        "a window of one more in the tree",
        TREE,
        "other_depth[None] < window",
        "other_depth[None] <= window",
        attention("window in the tree"),
    ),
    Mutation(
        "heads packed the other way",
        TREE,
        "real, query // nodes, 0",
        "real, query % GROUP, 0",
        attention("seven heads a key"),
    ),
    Mutation("one word of ancestors for all", TREE, "* WORDS + word", "* WORDS", attention("window")),
    Mutation("a column too far", CACHE, "(begin + step)", "(begin + step + 1)", cache),
    Mutation("a column too few", CACHE, "mask = (step < count)", "mask = (step < count - 1)", cache),
    Mutation("layers on top of each other", CACHE, "tl.load(offsets + layer)", "tl.load(offsets)", cache),
    Mutation(
        "a jump to itself", GRAPH, "real = (jump >= 1) & (i >= 0)", "real = (jump >= 0) & (i >= 0)", graph("ragged")
    ),
    Mutation(
        "no room left for later tokens", GRAPH, "(j <= end - final + t) & (t <= final)", "(t <= final)", graph("ragged")
    ),
    Mutation(
        "beta's last vertex is lost",
        GRAPH,
        "here + b_t + j, mask=open_j",
        "here + b_t + j, mask=open_j & (j < end)",
        graph("ragged"),
    ),
    Mutation(
        "the last jump is not counted",
        GRAPH,
        "for t in range(0, final):",
        "for t in range(0, final - 1):",
        graph("ragged"),
    ),
    Mutation(
        "half of the predecessors",
        GRAPH,
        "tl.minimum(lowest + NARROW - 1, size - 1), WIDE",
        "lowest, WIDE",
        graph("ragged"),
    ),
    Mutation(
        "a token's share counted once",
        GRAPH,
        "share += tl.sum(tl.where(token[:, None] == others[None], grad[None], 0.0), 1)",
        "share += tl.load(grads + m * g_m, mask=m < tokens, other=0.0).to(tl.float32)",
        gather("tokens twice"),
    ),
    Mutation(
        "the first block alone",
        GRAPH,
        "total * tl.exp(top - shift) + tl.sum(tl.exp",
        "tl.sum(tl.exp",
        gather("wider than a block"),
    ),
]


def mutant(mutation: Mutation, folder: Path) -> ModuleType:
    """Return the module with one place of its source changed. A kernel is compiled from a file."""
    assert mutation.module.__file__ is not None
    source = Path(mutation.module.__file__).read_text(encoding="utf-8")
    assert source.count(mutation.old) == 1, f"{mutation.old!r} is there {source.count(mutation.old)} times"
    path = folder / "mutant.py"
    path.write_text(source.replace(mutation.old, mutation.new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"mutant_{folder.name}", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, made.__name__, made)  # dataclasses look there
        spec.loader.exec_module(made)
    return made


# for each comparison one mistake or two
FEW = (
    "the tree is lost",
    "ancestors one bit off",
    "a window of one more in the tree",
    "a column too few",
    "beta's last vertex is lost",
    "a token's share counted once",
    "the first block alone",
)
PLANTED = {mutation.name: mutation for mutation in MUTATIONS}
NAMES = sample(PLANTED, FEW)


@pytest.mark.parametrize("name", NAMES)
def test_a_planted_mistake_is_caught(name: str, tmp_path: Path) -> None:
    mutation = PLANTED[name]
    try:
        caught = not mutation.comparison(mutant(mutation, tmp_path))
    except InterpreterError:  # NumPy warns of a NaN on its way, and warnings are errors here
        caught = True
    assert caught
