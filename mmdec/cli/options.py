"""Options that several verbs have, and how they report: JSON to a file, progress to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmdec.checks.arguments import check_threads
from mmdec.cli.output_files import write_text

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

SPEECH_MODEL, SPEECH_CORPUS = "daspeech-phrasebook", Path("data/corpus")
WHISPER_MODEL, WHISPER_CORPUS = "whisper-phrasebook", Path("data/english")
VLM_MODEL, VLM_CORPUS = "vlm-scenes", Path("data/scenes")

Inputs = Annotated[list[Path], typer.Argument(metavar="IN...", help="Audio files.")]
Model = Annotated[
    str, typer.Option("--model", "-m", help="A model that comes with mmdec, a directory, or a Hugging Face id.")
]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda. Default: a GPU if there is one.")]
BenchDevice = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads. Default: torch's own choice.")]
BenchThreads = Annotated[int, typer.Option("--threads", min=1, help="CPU threads.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object for each file, one on each line.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Report = Annotated[
    Path | None, typer.Option("--output", "-o", dir_okay=False, help="Write the report to this JSON file, too.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Use only this many utterances, evenly spaced over the split.")]
WhisperCorpus = Annotated[
    Path, typer.Option("--corpus", help="A folder in LibriSpeech's layout, or a .tsv or .jsonl with path and text.")
]
Heads = Annotated[Path | None, typer.Option(help="A directory with Medusa heads. Default: the model's own.")]
Plan = Annotated[
    str,
    typer.Option(help="Draft size: learned, 8 (a chain of 8 tokens), or 16x6 (a tree of 16 tokens, at most 6 deep)."),
]
Questions = Annotated[
    Path,
    typer.Option(
        help="What is asked: a .jsonl with image, question and perhaps answer; the file of TextVQA, VQAv2 or "
        "LLaVA-Bench; a folder with MMMU's parquet; or drawn scenes."
    ),
]
Pictures = Annotated[
    Path | None, typer.Option("--images", help="Folder of the pictures. Default: beside the questions.")
]
AnswerTokens = Annotated[int | None, typer.Option(min=1, help="Maximum number of new tokens of an answer.")]
Language = Annotated[str, typer.Option(help="Language of the recordings; auto detects it.")]
MaxNewTokens = Annotated[int | None, typer.Option(min=1, help="Maximum number of new tokens in a 30 s window.")]


def language_or_none(language: str) -> str | None:
    """None, which asks for detection, for "auto"."""
    return None if language == "auto" else language


def set_threads(threads: int | None) -> None:
    """Set torch's CPU threads; None leaves them to torch. Raises InputError."""
    count = check_threads(threads)
    if count is not None:
        import torch

        torch.set_num_threads(count)


def print_report(
    report: dict[str, Any], output: Path | None, table: Callable[[dict[str, Any]], Table] | None = None
) -> None:
    """Print a report as a table, or as JSON where there is none; write it as JSON, too, if `output` names a file."""
    text = json.dumps(report, indent=2, ensure_ascii=False)
    if output is not None:
        write_text(output, text + "\n")
    if table is None:
        print(text)
    else:
        from rich.console import Console

        Console().print(table(report))


def log(line: str) -> None:
    """A line of progress on stderr."""
    print(line, file=sys.stderr)


@contextmanager
def progress_bar(count: bool) -> Iterator[Progress]:
    """A bar on stderr, off where stderr is no terminal. count: show how many of how many are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    counter = [MofNCompleteColumn()] if count else []
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *counter, TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield progress
