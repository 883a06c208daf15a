"""`mmdec train`: train or resume the models that come with mmdec."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from typing import Annotated

import typer

from mmdec.checks.arguments import check_finite
from mmdec.cli.files import json_text
from mmdec.cli.options import AsJson


def train(
    minutes: Annotated[float, typer.Option(min=0.1, max=100_000, help="Time limit in minutes.")] = 25.0,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start from random weights; the folder runs/ is renamed, not deleted.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train or resume each model that comes with mmdec, in runs/, within a time limit."""
    start = time.time()  # importing the training code counts towards the minutes
    check_finite("minutes", minutes, "Give 25, for instance.")
    from mmdec.training.make_train import main

    if not as_json:
        main(minutes, fresh, begun=start)
        return
    with _stdout_is_stderr():
        outcomes = main(minutes, fresh, begun=start)
    systems = [{key: _plain(value) for key, value in asdict(outcome).items()} for outcome in outcomes]
    print(json_text({"systems": systems}))


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


@contextmanager
def _stdout_is_stderr() -> Iterator[None]:
    """A context that sends the output of training and its processes to stderr; stdout is for the JSON only."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
