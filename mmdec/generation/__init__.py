"""Speculative decoding for transformers' models: the calls, and the bridge from `generate` to the decoding core."""

from __future__ import annotations

from importlib import import_module


def register_attention() -> None:
    """Register mmdec's attention implementation with transformers.

    Afterwards `model.set_attn_implementation("mmdec_tree")` works. Importing `mmdec.generation.generate` (as
    `mmdec.generate` does) calls this function, which imports transformers' model classes.
    """
    import_module("mmdec.targets.attention")  # registers itself
