"""`mmdec convert`: convert published weights to mmdec's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from mmdec.cli.options import AsJson, command_arguments
from mmdec.cli.reports import print_written

app = typer.Typer(
    help="Convert published weights to mmdec's format.",
    no_args_is_help=True,
    epilog="Example: mmdec convert medusa whisper-medusa-v1 heads",
)


@app.command(**command_arguments("convert medusa whisper-medusa-v1 heads"))
def medusa(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Folder with the published checkpoint.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for the heads.")],
    as_json: AsJson = False,
) -> None:
    """Convert aiola's published Medusa heads for Whisper; those of language models: `mmdec convert drafter`."""
    from mmdec.drafters.medusa.checkpoint import convert_medusa

    print_written(convert_medusa(source, output), as_json)


@app.command(**command_arguments("convert hifigan g_02500000 vocoder"))
def hifigan(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="The generator's checkpoint; config.json must lie next to it.")
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="New folder; pass it to --vocoder.")],
    as_json: AsJson = False,
) -> None:
    """Convert a published HiFi-GAN generator. Of the pickle, only tensors are read."""
    from mmdec.daspeech.hifigan import convert_hifigan

    print_written(convert_hifigan(source, output), as_json)


@app.command(**command_arguments("convert daspeech published models/published"))
def daspeech(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            help="Folder: checkpoint (.pt), config.yaml, dictionary, gcmvn_stats.npz, generator, config.json.",
        ),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="New folder; pass it to --model.")],
    as_json: AsJson = False,
) -> None:
    """Convert DASpeech as its authors publish it, a checkpoint of fairseq. Of the pickle, only tensors are read."""
    from mmdec.daspeech.fairseq import convert_fairseq

    print_written(convert_fairseq(source, output), as_json)


@app.command(**command_arguments("convert fairseq2 s2t_conformer.pt encoder.safetensors"))
def fairseq2(
    source: Annotated[Path, typer.Argument(metavar="IN", help="fairseq2's .pt or .safetensors of an s2t_conformer.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="File (.safetensors) that a recipe begins from.")],
    as_json: AsJson = False,
) -> None:
    """Convert the encoder of fairseq2's s2t_conformer. Of a pickle, only tensors are read."""
    from mmdec.daspeech.fairseq2 import convert_fairseq2

    print_written(convert_fairseq2(source, output), as_json)


@app.command(**command_arguments("convert drafter EAGLE-Vicuna-7B-v1.3 eagle"))
def drafter(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            help="Folder with a published draft network: EAGLE-1/2/3, P-EAGLE, MSD, ViSpec, DFlash, Medusa, Hydra, ...",
        ),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="New folder; pass it to --drafter.")],
    system: Annotated[
        str | None, typer.Option(help="eagle, msd or vispec. Default: as its tensors and config say.")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Tokens of the target, where it has more than the network was trained with.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Load a published draft network, and save it in mmdec's format. Of a pickle, only tensors are read."""
    from mmdec.pretrained.drafters import convert

    print_written(convert(source, output, system=cast(Any, system), vocab_size=vocab_size), as_json)
