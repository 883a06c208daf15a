"""The command line `mmdec`.

A file has the subcommand of its name, or a few related ones; the others hold what these share. `info` is defined here.

Results go to stdout. Progress, errors and log messages go to stderr. Exit codes: 0 done, 1 some inputs failed, 2 wrong
arguments; `EPILOG` lists all codes. Torch is imported only when a subcommand runs, so that `--help` is fast.
"""

from __future__ import annotations

import atexit
import errno
import json
import logging
import os
import sys
import threading
from contextlib import suppress
from typing import Annotated, Any, TextIO, cast

import typer

from mmdec import MmdecError, __version__, check_transformers
from mmdec.checks.extras import missing_extra
from mmdec.checks.files import error_reason, printable
from mmdec.cli import (
    bench,
    chat,
    convert,
    describe,
    doctor,
    evaluate,
    export,
    index,
    serve,
    train,
    transcribe,
    translate,
)
from mmdec.cli.options import AsJson, command_arguments
from mmdec.cli.progress import own_process
from mmdec.errors import EXIT_CODE_REFUSED

EPILOG = (
    "Exit codes: 0 done; 1 some inputs failed, or a benchmark was left out, or standard output took no more; 2 wrong "
    "arguments, a missing or damaged model, or an output that differs where it must not; 130 interrupted; 143 "
    "terminated. Results are on stdout, progress and errors on stderr. MMDEC_LOG=info (debug, warning, error) says "
    "more or less. Example: mmdec transcribe data/samples/english/*.flac"
)
INTERRUPTED, UNWRITTEN = 130, 1
# the errors of a full disk, a closed pipe, and other places that take no more output
UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE, errno.EROFS}
app = typer.Typer(
    name="mmdec",
    help="Parallel decoding for speech and pictures: translate French speech into English speech, transcribe speech, "
    "describe pictures, talk to language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog=EPILOG,
)


def info(as_json: AsJson = False) -> None:
    """Print versions, devices, which Triton kernels are active, or why not."""
    from mmdec.bench.kernels import describe_kernels

    report = describe_kernels()
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


app.command(**command_arguments("translate data/samples/*.wav --output out"))(translate.translate)
app.command(**command_arguments("transcribe data/samples/english/*.flac"))(transcribe.transcribe)
app.command(**command_arguments('describe data/samples/images/menu.png --prompt "How much is BURGER?"'))(
    describe.describe
)
app.command(**command_arguments("chat HuggingFaceTB/SmolLM2-135M-Instruct"))(chat.chat)
app.command(
    **command_arguments("index README.md docs/*.md --model HuggingFaceTB/SmolLM2-135M --output docs.safetensors")
)(index.index)
app.command(**command_arguments("demo --port 7860"))(serve.demo)
app.command(**command_arguments("serve --port 8000"))(serve.serve)
app.add_typer(train.app, name="train")
app.command(**command_arguments("doctor vlm-scenes/eagle vlm-scenes"))(doctor.doctor)
app.command(**command_arguments("info --json"))(info)
app.add_typer(evaluate.app, name="eval")
app.add_typer(bench.app, name="bench")
app.add_typer(convert.app, name="convert")
app.add_typer(export.app, name="export")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def run_script() -> None:
    """Run the command line as the process's only program: entry point of the script `mmdec`.

    The process ends without destroying the objects of torch and transformers, which would take most of a second.
    """
    try:
        main()
    except SystemExit as end:
        cast(Any, threading)._shutdown()  # waits for threads as Python does
        cast(Any, atexit)._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)
        os._exit(cast(int, end.code))


def main() -> None:
    """Run the command line, and exit. What it cannot do is one line on stderr."""
    show_logs()
    with own_process():
        code = _run()
    if error := _flush(sys.stdout):
        code = code or _unwritten(error)
    _flush(sys.stderr)
    sys.exit(code)


def _run() -> int:
    """Run the subcommand and return the exit code."""
    try:
        check_transformers()
        app()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except MmdecError as error:
        _say(str(error))
        return EXIT_CODE_REFUSED
    except ModuleNotFoundError as error:
        advice = missing_extra(error, next(iter(sys.argv[1:]), ""))
        if advice is None:
            raise
        _say(advice)
        return EXIT_CODE_REFUSED
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        _flush(sys.stdout)
        return _unwritten(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _unwritten(error: OSError) -> int:
    """Print that an output could not be written, and return the exit code."""
    # The reader of a pipe may leave when it has seen enough (`mmdec ... | head`): that is not an error.
    if error.errno != errno.EPIPE:
        name = "the output" if error.filename is None else f"'{printable(str(error.filename))}'"
        _say(f"{name} cannot be written: {error_reason(error)}. Free some space, or name another place.")
    return UNWRITTEN


def _flush(stream: TextIO | None) -> OSError | None:
    """Write out what a stream still holds.

    If that fails, return the error, and let the stream discard it, so that Python does not fail again when it exits.
    """
    if stream is None:
        return None
    try:
        stream.flush()
    except OSError as error:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None


def _say(message: str) -> None:
    """Print an error on stderr, if that can be written."""
    with suppress(OSError):
        print(f"error: {message}", file=sys.stderr)


def show_logs() -> None:
    """Send the library's log messages to stderr.

    Only the command line does this; a program that imports mmdec handles these messages itself.
    """
    level = logging.getLevelNamesMapping().get(os.environ.get("MMDEC_LOG", "warning").upper(), logging.WARNING)
    ours = logging.getLogger("mmdec")
    ours.setLevel(level)
    if not any(isinstance(handler, StderrHandler) for handler in ours.handlers):
        handler = StderrHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        ours.addHandler(handler)


class StderrHandler(logging.Handler):
    """Prints log messages to the present `sys.stderr`.

    While rich shows a progress bar, rich replaces `sys.stderr`, so that messages appear above the bar.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record; `logging` calls this."""
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:  # a log message must not end the program; `handleError` prints the traceback
            self.handleError(record)
