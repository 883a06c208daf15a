"""Prepares Triton's interpreter. Import this module before any kernel.

Triton 3.6 converts an array of one element to an integer, which NumPy 2.4 allows only for arrays without dimensions. So
loops over a number that a kernel has as argument or has loaded end in a TypeError. Here the element is taken out. The
interpreter also patches triton.language again for every helper that a kernel calls, which takes a third of the time:
here it patches once a launch.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

_patch: Any = interpreter._patch_lang_tensor
_patch_all: Any = interpreter._patch_lang
_LANGUAGE: Any = SimpleNamespace(__globals__={"kernels write": tl, "helpers write": tl.core})


class _Scope:
    """Passes patches on, but replaces the conversion to an integer."""

    def __init__(self, scope: Any) -> None:
        self.scope = scope

    def set_attr(self, owner: Any, name: str, value: Any) -> None:
        if name == "__index__":
            value = _integer
        self.scope.set_attr(owner, name, value)


def _integer(tensor: Any) -> int:
    return int(tensor.handle.data.item())


class _Launch:
    """The patches of one launch. The helpers that the launch calls do not patch again."""

    now: _Launch | None = None

    def __init__(self, scope: Any) -> None:
        self.scope = scope
        if scope is not None:
            _Launch.now = self

    @classmethod
    def of(cls, function: Any) -> _Launch:
        return cls(None if cls.now is not None else _patch_all(_LANGUAGE))

    def restore(self) -> None:
        if self.scope is not None:
            _Launch.now = None
            self.scope.restore()


interpreter._patch_lang = _Launch.of
interpreter._patch_lang_tensor = lambda tensor, scope: _patch(tensor, _Scope(scope))
