"""Makes "mmdec_tree" known to transformers as soon as both are imported, in whatever order.

    import mmdec
    model.set_attn_implementation("mmdec_tree")

`import mmdec` alone loads neither torch nor transformers: where transformers is not there yet, its import is awaited.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import final

MODULE = "transformers.modeling_utils"  # where attention implementations are registered


def register_when_there() -> None:
    """At once where transformers' models are loaded, else right after they are."""
    if MODULE in sys.modules:
        _register()
    elif not any(isinstance(finder, _Awaited) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Awaited())


def _register() -> None:
    with suppress(ImportError):  # of another release; whatever needs the operator says so itself
        import_module("mmdec.targets.attention")  # it registers the operator


@final
class _Awaited(MetaPathFinder):
    """Finds one module as everybody would, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


@final
class _Registering(Loader):
    """Loads a module as its own loader does, and registers then."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = self.loader  # who asks for sources later asks the module's own
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        _register()
