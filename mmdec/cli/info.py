"""`mmdec info`: versions, devices, and which kernels run here."""

from __future__ import annotations

import json

import typer

from mmdec.cli.options import AsJson


def info(as_json: AsJson = False) -> None:
    """Print versions, devices, and which kernels are active, or why not."""
    from mmdec.evaluation.machine import machine

    found = machine()
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
