"""`mmdec export`: writes drafters and translators in the file formats of other engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from mmdec.cli.options import AsJson, command_arguments
from mmdec.cli.reports import print_written

app = typer.Typer(
    help="Write drafters and translators in the layouts of other engines.",
    no_args_is_help=True,
    epilog="Example: mmdec export drafter runs/eagle3 served --to speculators --model models/mine",
)


@app.command(**command_arguments("export drafter runs/eagle3 served --to speculators --model models/mine"))
def drafter(
    source: Annotated[
        str, typer.Argument(metavar="IN", help="A drafter's folder or Hugging Face id, or <model>/<drafter>.")
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for the export.")],
    to: Annotated[
        str,
        typer.Option("--to", help="speculators (vLLM, mlx-vlm) or flat (SGLang, llama.cpp; heads: as published)."),
    ],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The target. Default: the one that the drafter was trained for.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Tokens drafted each round, for speculators. Default: 3; for DFlash all of its block.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write an EAGLE-3, P-EAGLE or DFlash network for vLLM, SGLang, llama.cpp or mlx-vlm, or heads as published."""
    from mmdec.pretrained.export import export_drafter

    folder = export_drafter(source, output, cast(Any, to), model=model, num_speculative_tokens=num_speculative_tokens)
    print_written(folder, as_json)


@app.command(**command_arguments("export fairseq2 runs/units/network.safetensors s2t_conformer.safetensors"))
def fairseq2(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A DASpeech network's safetensors.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="File (.safetensors) with fairseq2's names.")],
    as_json: AsJson = False,
) -> None:
    """Write a network's encoder as fairseq2's s2t_conformer has it."""
    from mmdec.daspeech.fairseq2 import export

    path = export(source, output)
    print_written(path, as_json)
