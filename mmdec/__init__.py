"""Parallel decoding for speech and vision-language models. The public names load on first use, torch with them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mmdec.types import InputError, MmdecError

if TYPE_CHECKING:
    from mmdec.api import BatchError, Translation, load, translate_speech
    from mmdec.generation import Generation, generate, speculate, stream

__version__ = "0.1.0"
__all__ = [
    "BatchError",
    "Generation",
    "InputError",
    "MmdecError",
    "Translation",
    "__version__",
    "generate",
    "load",
    "speculate",
    "stream",
    "translate_speech",
]

_LAZY = dict.fromkeys(("BatchError", "Translation", "load", "translate_speech"), "mmdec.api") | dict.fromkeys(
    ("Generation", "generate", "speculate", "stream"), "mmdec.generation"
)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'mmdec' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
