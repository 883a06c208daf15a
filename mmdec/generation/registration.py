"""Makes what mmdec adds known to transformers."""

from __future__ import annotations


def register() -> None:
    """Make transformers know mmdec's attention implementation and model folders.

    After it `model.set_attn_implementation("mmdec_tree")`, `AutoConfig` and `AutoModel` take mmdec's. Importing
    `mmdec.generation.speculation`, which `mmdec.generate` does, calls it. It loads transformers' model classes.
    """
    import mmdec.hub.auto_config
    import mmdec.hub.auto_model
    import mmdec.targets.attention  # noqa: F401 # each registers itself when it is imported
