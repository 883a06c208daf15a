"""Makes what mmdec adds known to transformers."""

from __future__ import annotations

from importlib import import_module

REGISTER_THEMSELVES = ("mmdec.targets.attention", "mmdec.hub.auto_config", "mmdec.hub.auto_model")


def register() -> None:
    """Make transformers know mmdec's attention implementation and model folders.

    After it `model.set_attn_implementation("mmdec_tree")`, `AutoConfig` and `AutoModel` take mmdec's. Importing
    `mmdec.generation.speculation`, which `mmdec.generate` does, calls it. It loads transformers' model classes.
    """
    for module in REGISTER_THEMSELVES:
        import_module(module)
