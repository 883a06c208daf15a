"""`mmdec train drafter`: trains a drafter for the user's model."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from mmdec.checks.arguments import check_finite
from mmdec.cli.options import AbsolutePaths, AsJson, Model, command_arguments, log
from mmdec.cli.progress import progress_bar
from mmdec.cli.reports import print_result
from mmdec.drafters.built_in import trainable_names
from mmdec.evaluation.options import VlmEvalOptions

app = typer.Typer(
    no_args_is_help=True,
    epilog="Example: mmdec train drafter --model vlm-scenes --data questions.json --output my-drafter",
)


@app.callback()
def root() -> None:
    """Train a drafter for your own model."""


@app.command(**command_arguments("train drafter --model vlm-scenes --data questions.json --output my-drafter"))
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
    system: Annotated[str, typer.Option(help=f"{', '.join(trainable_names())}.")] = "eagle3",
    head: Annotated[
        str | None,
        typer.Option(
            help="dflash: vanilla, gated or rnn (DSpark), dflash2, domino. heads: medusa, hydra, recurrent, mlp."
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.1, max=100_000, help="Time limit in minutes.")] = 30.0,
    images: Annotated[
        Path | None, typer.Option(help="Folder of the pictures that --data names. Default: images/ next to it.")
    ] = None,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="What to ask about each picture of a folder.")
    ] = VlmEvalOptions.prompt,
    questions: Annotated[int, typer.Option(min=2, help="Ask at most this many questions.")] = 20_000,
    max_tokens: Annotated[int, typer.Option(min=2, help="Maximum number of tokens of an answer.")] = 256,
    allow_absolute_paths: AbsolutePaths = False,
    as_json: AsJson = False,
) -> None:
    """Train a drafter for your own model, or continue a run.

    The model answers the questions, and the drafter learns to guess its answers.
    """
    start = time.time()
    check_finite("minutes", minutes, "Give 30, for instance.")
    from mmdec.drafters.networks.training.train_for_model import DrafterRun, train_drafter

    run = DrafterRun(
        model=model,
        data=data,
        output=output,
        system=system,
        head=head,
        minutes=minutes,
        images=images,
        prompt=prompt,
        questions=questions,
        max_tokens=max_tokens,
        allow_absolute_paths=allow_absolute_paths,
    )
    with _stdout_is_stderr(), progress_bar(count=True) as bar:
        task = bar.add_task("the model answers", total=None)
        result = train_drafter(run, lambda done, total: bar.update(task, completed=done, total=total), log, start=start)
    text = "" if as_json else _summary(model, result)
    print_result({"model": model, "system": system, **result}, as_json, text)


def _summary(model: str, result: Mapping[str, Any]) -> str:
    return (
        f"{result['output']}: {result['chain']:.2f} tokens per round on held-out answers in chains, "
        f"{result['tree']:.2f} in trees. Use it with `mmdec {_command(model)} --drafter {quote(str(result['output']))}`"
    )


def _command(model: str) -> str:
    """Return the command that decodes with a model, such as "chat my-llama"."""
    from mmdec.hub.find import find_model
    from mmdec.pretrained.vlm import PROCESSOR_FILES, is_vision_language_model

    directory = find_model(model, None, ("config.json", *PROCESSOR_FILES))
    return f"{'describe --model' if is_vision_language_model(directory) else 'chat'} {quote(model)}"


@contextmanager
def _stdout_is_stderr() -> Iterator[None]:
    """Send the output of training and its processes to stderr within the block; stdout is for the JSON only."""
    sys.stdout.flush()
    original = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(original, 1)
        os.close(original)
