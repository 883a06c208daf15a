"""Replaces IPython when a notebook's code is tested: it checks that the files to display exist."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType


class Audio:
    """A sound that is read when it is shown."""

    def __init__(self, filename: str | Path) -> None:
        self.data = Path(filename).read_bytes()
        assert self.data


display = ModuleType("IPython.display")
display.Audio = Audio  # type: ignore[attr-defined] # a module made here
sys.modules["IPython.display"] = display  # without a package above it, by which matplotlib would know a notebook
