"""Where a model was loaded from, and the name under which its measurements are stored."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from mmdec.nn.fingerprint import fingerprint


def source_of(model: PreTrainedModel) -> str:
    """The folder or hub id given to `from_pretrained`; "" for a model made from a configuration."""
    return str(model.config._name_or_path or "")


def source_folder(model: PreTrainedModel) -> Path | None:
    """The folder that the model was loaded from; None if it was not loaded from a folder."""
    source = source_of(model)
    return Path(source) if source and Path(source).is_dir() else None


def model_name(model: PreTrainedModel) -> str:
    """Names the model's source and a digest of its weights."""
    return f"{Path(source_of(model)).name or type(model).__name__}-{fingerprint(model)}"
