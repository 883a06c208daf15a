"""Finds models by shipped name, path or hub id, loads them, and writes their folders atomically. Weights are
safetensors; only published drafters may be pickles."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mmdec.hub.find import find_model, model_kind, shipped_names

if TYPE_CHECKING:
    from mmdec.daspeech.checkpoint import DEFAULT_MODEL, resolve, save_model

__all__ = ["DEFAULT_MODEL", "find_model", "model_kind", "resolve", "save_model", "shipped_names"]


def __getattr__(name: str) -> Any:
    """Import names of `mmdec.daspeech.checkpoint` on first use: other models do not need DASpeech's networks."""
    if name in ("DEFAULT_MODEL", "resolve", "save_model"):
        return getattr(import_module("mmdec.daspeech.checkpoint"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
