"""What the recipes of all systems load."""

from __future__ import annotations

import subprocess
import sys


def test_the_callbacks_of_all_recipes_load_no_system() -> None:
    code = (
        "import sys, mmdec.training.callbacks, mmdec.training.__main__\n"
        "print(*(m for m in sys.modules if m.startswith('mmdec.nn') or m.endswith('.speech')))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
