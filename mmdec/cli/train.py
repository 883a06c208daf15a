"""`mmdec train`: train or resume the models that come with mmdec."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from mmdec.checks.arguments import check_finite


def train(
    minutes: Annotated[float, typer.Option(min=0.1, max=100_000, help="Time limit in minutes.")] = 25.0,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start from random weights; the folder runs/ is renamed, not deleted.")
    ] = False,
) -> None:
    """Train or resume each model that comes with mmdec, in runs/, within a time limit."""
    start = time.time()  # the import of what trains counts towards the minutes
    check_finite("minutes", minutes, "Give 25, for instance.")
    from mmdec.training.make_train import main

    main(minutes, fresh, begun=start)
