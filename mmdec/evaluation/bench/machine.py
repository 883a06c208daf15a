"""What a machine has: versions, devices, and which kernels run on them."""

from __future__ import annotations

from typing import Any

import torch

from mmdec.ops.kernels import KERNELS, graphs_why_not, why_not
from mmdec.provenance import surroundings


def machine() -> dict[str, Any]:
    """`provenance.surroundings`, kernels and the fast pass, with `active` and, where not, `why_not`; as JSON."""
    report = surroundings()
    reason = why_not(0 if report["gpus"] else None)
    report["kernels"] = [
        {"name": name, "what": what, "active": reason is None, "why_not": reason} for name, what in KERNELS.items()
    ]
    reason = graphs_why_not(torch.device("cuda" if report["gpus"] else "cpu"))
    report["fast_pass"] = {"what": "drafts' passes as CUDA graphs", "active": reason is None, "why_not": reason}
    return report
