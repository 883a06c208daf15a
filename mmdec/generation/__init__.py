"""Speculative decoding for models of transformers: the calls, and the bridge between `generate` and the decoding
core."""

from __future__ import annotations

from importlib import import_module

REGISTER_THEMSELVES = ("mmdec.targets.attention", "mmdec.hub.auto_model")


def register() -> None:
    """Register mmdec's attention implementation and model folders with transformers.

    Afterwards `model.set_attn_implementation("mmdec_tree")`, `AutoConfig` and `AutoModel` accept mmdec's names.
    Importing `mmdec.generation.speculation` (as `mmdec.generate` does) calls this function, which imports transformers'
    model classes.
    """
    for module in REGISTER_THEMSELVES:
        import_module(module)
