"""Describes the machine: versions, devices, and which kernels run on them."""

from __future__ import annotations

from typing import Any

import torch

from mmdec.ops.kernels import KERNELS, graphs_why_not, why_not
from mmdec.provenance import surroundings


def machine() -> dict[str, Any]:
    """A JSON-ready description: `provenance.surroundings`; and for each kernel and the fast pass `active` or
    `why_not`."""
    report = surroundings()
    reason = why_not(0 if report["gpus"] else None)
    report["kernels"] = [
        {"name": name, "what": what, "active": reason is None, "why_not": reason} for name, what in KERNELS.items()
    ]
    reason = graphs_why_not(torch.device("cuda" if report["gpus"] else "cpu"))
    report["fast_pass"] = {"what": "drafts' passes as CUDA graphs", "active": reason is None, "why_not": reason}
    return report
