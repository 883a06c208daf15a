"""`mmdec promote`: replace a model or a drafter in models/ by a better one from runs/."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmdec.cli.options import AsJson, BenchThreads, log
from mmdec.cli.reports import print_result


def promote(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="A model or a drafter that `mmdec train` wrote, such as runs/whisper-phrasebook, runs/vlm-scenes or "
            "runs/vlm_drafters/eagle/drafter.",
        ),
    ],
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace it even if the new one is not better, or lacks drafters that the old one has."
        ),
    ] = False,
    corpus: Annotated[
        Path | None,
        typer.Option(help="Corpus to measure on. Default: the system's own folder in data/."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, help="Use only this many utterances of each split, or questions of each task, evenly spaced."
        ),
    ] = None,
    threads: BenchThreads = 2,
    as_json: AsJson = False,
) -> None:
    """Replace a model or a drafter in models/ by a better one from runs/, and write its card from new measurements."""
    from mmdec.evaluation.release import promotion

    directory = promotion.promote(run, force=force, corpus=corpus, limit=limit, threads=threads, log=log)
    text = f"{directory}: weights, card and provenance are new. README.md still has the old tables."
    print_result({"run": str(run), "output": str(directory)}, as_json, text)
