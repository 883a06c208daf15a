"""`mmdec index`: index texts, so that they draft answers that resemble them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mmdec.cli.options import AsJson, silence_transformers


def index(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Texts in UTF-8: documents, code, transcripts.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The index (.safetensors); pass it to --drafter.")
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="The model to draft for: a shipped name, a folder, or a Hugging Face id. Only its tokenizer is "
            "loaded.",
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Index texts that answers may resemble. The index drafts for the model; the answers stay the model's own."""
    from mmdec.generation.corpus_source import write_index

    silence_transformers()
    path, tokens = write_index(files, model, output)
    print(json.dumps({"path": str(path), "tokens": tokens}) if as_json else f"wrote {path}: {tokens} tokens")
