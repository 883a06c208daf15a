"""What this machine has to measure on: versions, devices, and which kernels run. `mmdec info` prints it."""

from __future__ import annotations

from typing import Any

from mmdec.ops.kernels import KERNELS, why_not
from mmdec.provenance import surroundings


def machine() -> dict[str, Any]:
    """`surroundings`, and of each kernel whether it is active, or why not; as JSON."""
    found = surroundings()
    reason = why_not(0 if found["gpus"] else None)
    found["kernels"] = [
        {"name": name, "what": what, "active": reason is None, "why_not": reason} for name, what in KERNELS.items()
    ]
    return found
