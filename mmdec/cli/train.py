"""`mmdec train`: trains the shipped models, or a drafter for the user's model."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mmdec.checks.arguments import check_finite
from mmdec.checks.files import json_text
from mmdec.cli.jobs import progress_bar
from mmdec.cli.options import OWN_PROMPT, AbsolutePaths, AsJson, Model, VerbGroup, as_verb, log
from mmdec.cli.reports import print_result

app = typer.Typer(cls=VerbGroup, invoke_without_command=True, epilog="Example: mmdec train --minutes 25")
MINUTES = typer.Option(min=0.1, max=100_000, help="Time limit in minutes.")


@app.callback()
def root(
    context: typer.Context,
    minutes: Annotated[float, MINUTES] = 25.0,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="Start from random weights; working folders in runs/ are renamed, results replaced by better ones.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train or resume, in runs/, within a time limit: the small Whisper and its heads, the small model of pictures and
    its EAGLE, and a phrasebook's translator. Or a drafter for your own model: `mmdec train drafter`."""
    if context.invoked_subcommand is None:
        train(minutes, fresh, as_json)


@app.command(**as_verb("train drafter --model vlm-scenes --data questions.json --output my-drafter"))
def drafter(
    model: Model,
    data: Annotated[
        Path,
        typer.Option(
            help="What to ask: a .json as LLaVA's, a .jsonl of chats, a .txt with one question a line, or a folder of "
            "pictures. The model answers by itself."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder of the run; the drafter is in drafter/ there.")],
    system: Annotated[str, typer.Option(help="eagle3, dflash, eagle, msd, specvlm, vispec or flash.")] = "eagle3",
    minutes: Annotated[float, MINUTES] = 30.0,
    images: Annotated[
        Path | None, typer.Option(help="Folder of the pictures that --data names. Default: images/ beside it.")
    ] = None,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="What to ask about each picture of a folder.")
    ] = OWN_PROMPT,
    questions: Annotated[int, typer.Option(min=2, help="Ask at most this many questions.")] = 20_000,
    max_tokens: Annotated[int, typer.Option(min=2, help="Maximum number of tokens of an answer.")] = 256,
    allow_absolute_paths: AbsolutePaths = False,
    as_json: AsJson = False,
) -> None:
    """Train a drafter for your own model, or go on with a run: the model answers the questions, and the drafter learns
    to guess its answers."""
    start = time.time()
    check_finite("minutes", minutes, "Give 30, for instance.")
    from mmdec.training.vlm_drafters.own_model import DrafterRun, train_drafter

    run = DrafterRun(model, data, output, system, minutes, images, prompt, questions, max_tokens, allow_absolute_paths)
    with _stdout_is_stderr(), progress_bar(count=True) as bar:
        task = bar.add_task("the model answers", total=None)
        result = train_drafter(run, lambda done, total: bar.update(task, completed=done, total=total), log, begun=start)
    text = (
        f"{result['output']}: {result['chain']:.2f} tokens a round on held-out answers in chains, {result['tree']:.2f} "
        f"in trees. Use it with `mmdec describe --drafter {result['output']}`"
    )
    print_result({"model": model, "system": system, **result}, as_json, text)


def train(minutes: float, fresh: bool = False, as_json: bool = False) -> None:
    """Train or resume the models of `make train`, in runs/, within a time limit in minutes.

    fresh: start from random weights. as_json: print the outcomes as one JSON object.
    """
    start = time.time()  # measured from here, because importing the training code counts towards the minutes
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
    """Send the output of training and its processes to stderr within the block; stdout is for the JSON only."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
