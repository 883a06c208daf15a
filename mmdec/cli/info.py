"""`mmdec info`: versions, devices, which kernels run here, and whether drafts' passes are replayed as CUDA graphs."""

from __future__ import annotations

import json

import typer

from mmdec.cli.options import AsJson


def info(as_json: AsJson = False) -> None:
    """Print versions, devices, which kernels are active, or why not, and whether CUDA graphs are."""
    from mmdec.evaluation.bench.kernels import machine

    report = machine()
    if as_json:
        print(json.dumps(report, indent=2))
        return
    for name, version in report["versions"].items():
        typer.echo(f"{name:<14}{version or 'not installed'}")
    typer.echo(f"{'cpu':<14}{report['cpu']}, {report['cores']} cores, {report['threads']} threads")
    for device in report["gpus"]:
        typer.echo(
            f"{'gpu':<14}{device['name']}, {device['memory_gib']} GiB, compute capability {device['capability']}"
        )
    if not report["gpus"]:
        typer.echo(f"{'gpu':<14}none")
    for kernel in report["kernels"]:
        state = "active" if kernel["active"] else f"torch instead: {kernel['why_not']}"
        typer.echo(f"{'kernel':<14}{kernel['name']}, {state}")
    graphs = report["fast_pass"]
    state = "active" if graphs["active"] else f"one launch for each operation instead: {graphs['why_not']}"
    typer.echo(f"{'fast pass':<14}CUDA graphs, {state}")
