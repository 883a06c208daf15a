"""`mmdec info`: versions, devices, which kernels run here, and whether drafts' passes are replayed as CUDA graphs."""

from __future__ import annotations

import json

import typer

from mmdec.cli.options import AsJson


def info(as_json: AsJson = False) -> None:
    """Print versions, devices, which kernels are active, or why not, and whether CUDA graphs are."""
    import torch

    from mmdec.ops.kernels import KERNELS, graphs_why_not, why_not
    from mmdec.provenance import surroundings

    found = surroundings()
    reason = why_not(0 if found["gpus"] else None)
    found["kernels"] = [
        {"name": name, "what": what, "active": reason is None, "why_not": reason} for name, what in KERNELS.items()
    ]
    reason = graphs_why_not(torch.device("cuda" if found["gpus"] else "cpu"))
    found["fast_pass"] = {"what": "drafts' passes as CUDA graphs", "active": reason is None, "why_not": reason}
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for name, version in found["versions"].items():
        typer.echo(f"{name:<14}{version or 'not installed'}")
    typer.echo(f"{'cpu':<14}{found['cpu']}, {found['cores']} cores, {found['threads']} threads")
    for device in found["gpus"]:
        typer.echo(
            f"{'gpu':<14}{device['name']}, {device['memory_gib']} GiB, compute capability {device['capability']}"
        )
    if not found["gpus"]:
        typer.echo(f"{'gpu':<14}none")
    for kernel in found["kernels"]:
        state = "active" if kernel["active"] else f"torch instead: {kernel['why_not']}"
        typer.echo(f"{'kernel':<14}{kernel['name']}, {state}")
    state = "active" if reason is None else f"one launch for each operation instead: {reason}"
    typer.echo(f"{'fast pass':<14}CUDA graphs, {state}")
