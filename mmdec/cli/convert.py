"""`mmdec convert`: published weights into mmdec's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Convert published weights to mmdec's format.", no_args_is_help=True)


@app.command()
def medusa(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Directory with the published checkpoint.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="New directory for the heads.")],
) -> None:
    """Convert aiola's Medusa heads for Whisper. Only safetensors files are read."""
    from mmdec.hub.whisper_medusa import convert

    print(convert(source, output))


@app.command()
def hifigan(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="The generator's checkpoint; config.json must lie beside it.")
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="New directory; pass it to --vocoder.")],
) -> None:
    """Convert a published HiFi-GAN generator. Of the pickle, only tensors are read."""
    from mmdec.nn.hifigan import convert

    print(convert(source, output))
