"""The command line, `mmdec`: one file for each verb.

Results go to stdout, progress and errors to stderr. Exit codes: 0 done, 1 some inputs failed, 2 wrong arguments. Each
verb imports torch only when it runs, so that `mmdec --help` is fast.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mmdec import MmdecError, __version__
from mmdec.cli import bench, convert, demo, describe, evaluate, info, promote, train, transcribe, translate

app = typer.Typer(
    name="mmdec",
    help="Parallel decoding for speech and pictures: translate French speech into English speech, transcribe speech, "
    "describe pictures.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(translate.translate)
app.command()(transcribe.transcribe)
app.command()(describe.describe)
app.command()(demo.demo)
app.command()(train.train)
app.command()(promote.promote)
app.command()(info.info)
app.add_typer(evaluate.app, name="eval")
app.add_typer(bench.app, name="bench")
app.add_typer(convert.app, name="convert")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point of the `mmdec` script. Errors of mmdec's own print one line on stderr."""
    try:
        app()
    except MmdecError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
