"""The former home of Medusa heads. It goes with the next release: call `mmdec.load_drafter(folder, model)`."""

from __future__ import annotations

import os
import warnings

from transformers import PreTrainedModel

from mmdec.hub import medusa


def load_heads(directory: str | os.PathLike[str], model: PreTrainedModel) -> medusa.Medusa:
    """The drafter with the heads in `directory`, as `mmdec.load_drafter` gives it. Warns of its end."""
    warnings.warn(
        "`mmdec.medusa.load_heads` goes with the next release. Call `mmdec.load_drafter(folder, model)`.",
        DeprecationWarning,
        stacklevel=2,
    )
    return medusa.load_heads(directory, model)
