"""Makes what mmdec adds known to transformers as soon as both are imported, in whatever order; and so between floors.

    import mmdec
    model.set_attn_implementation("mmdec_tree")
    AutoModel.from_pretrained("<owner>/<drafter>")

`import mmdec` alone loads neither torch nor transformers: where a module of transformers is not there yet, its import
is awaited. Which module of mmdec registers itself after which of transformers, `mmdec/__init__.py` says; there `hub`
is made to follow `generation`, too, which may not import it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import final


def register_when_there(modules: Mapping[str, str]) -> None:
    """For each module, of transformers for example, the one of mmdec that registers itself when it is imported: at once
    where the former is loaded, else right after it is."""
    waiting = {finder.module for finder in sys.meta_path if isinstance(finder, _Awaited)}
    for module, ours in modules.items():
        if module in sys.modules:
            _register(ours)
        elif module not in waiting:
            sys.meta_path.insert(0, _Awaited(module, ours))


def _register(ours: str) -> None:
    """Import `ours`. Only the absence of an optional package is passed over: whatever needs the package says so itself.
    Any other ImportError is a defect, and what was not registered would be missed without a word."""
    try:
        import_module(ours)
    except ModuleNotFoundError as error:
        package = (error.name or "mmdec").partition(".")[0]
        if find_spec(package) is not None:  # it is there, but has no such module
            raise


@final
class _Awaited(MetaPathFinder):
    """Finds one module as everybody would, once."""

    def __init__(self, module: str, ours: str) -> None:
        self.module, self.ours = module, ours

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader, self.ours)
        return spec


@final
class _Registering(Loader):
    """Loads a module as its own loader does, and registers then."""

    def __init__(self, loader: Loader, ours: str) -> None:
        self.loader, self.ours = loader, ours

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = self.loader  # who asks for sources later asks the module's own
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        _register(self.ours)
