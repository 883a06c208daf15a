"""Speculative decoding for models of transformers: the calls, and the bridge between `generate` and the decoding
core."""

from __future__ import annotations

from importlib import import_module


def register() -> None:
    """Register mmdec's attention implementation with transformers: afterwards
    `model.set_attn_implementation("mmdec_tree")` works.

    Importing `mmdec.generation.speculation` (as `mmdec.generate` does) calls this function, which imports transformers'
    model classes.
    """
    import_module("mmdec.targets.attention")  # registers itself
