"""Tests the registry of drafters: lists of names, and what they import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mmdec.drafters.built_in import BUILT_IN
from mmdec.drafters.registry import drafter_entry

NAMES = """
import sys
from mmdec.drafters.registry import auto_names, drafter_names, loader_names
print(*drafter_names(), *loader_names(), *auto_names(), *auto_names(speech=True))
print(*sorted(name for name in sys.modules if name.startswith("mmdec.drafters.")))
"""


def test_lists_of_names_import_no_drafter() -> None:
    output = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, check=True).stdout
    names, modules = (line.split() for line in output.splitlines())
    assert {"lookup", "medusa", "eagle"} <= set(names)
    assert modules == ["mmdec.drafters.built_in", "mmdec.drafters.registry"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_kind_of_a_built_in_drafter_is_how_it_is_made(name: str) -> None:
    entry, kind = drafter_entry(name), BUILT_IN[name].kind
    assert entry is not None
    assert (entry.factory is not None) == (kind == "ready")
    assert (entry.from_model is not None) == (kind == "from_model")
    assert entry.has_weights == (kind in ("language_weights", "speech_weights"))
    assert entry.speech == (kind == "speech_weights")
