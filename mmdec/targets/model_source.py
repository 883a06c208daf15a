"""Where a model of transformers was loaded from, and the name under which what runs learn about it is kept."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from mmdec.nn.fingerprint import fingerprint


def source_of(model: PreTrainedModel) -> str:
    """The folder or hub id that `from_pretrained` was given; "" for a model made from a configuration."""
    return str(model.config._name_or_path or "")


def source_folder(model: PreTrainedModel) -> Path | None:
    """The folder that the model was loaded from; None where it came from elsewhere."""
    source = source_of(model)
    return Path(source) if source and Path(source).is_dir() else None


def model_name(model: PreTrainedModel) -> str:
    """Where the model is from, and a digest of its weights."""
    return f"{Path(source_of(model)).name or type(model).__name__}-{fingerprint(model)}"
