"""The options of `mmdec bench drafters`. They need no torch: the help of the command line reads them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from mmdec.checks.arguments import check_finite, check_whole
from mmdec.errors import InputError
from mmdec.evaluation.options import AsrEvalOptions, MeasurementOptions, VlmEvalOptions
from mmdec.tasks.options import option, option_help

MIN_NEW_TOKENS = 8  # a prompt after which the model has positions for fewer new tokens is left out


@final
@dataclass(frozen=True, kw_only=True)
class DrafterBenchOptions(MeasurementOptions):
    """What drafters are compared on, and how."""

    drafter: Sequence[str] = option(
        (),
        "A drafter's name, its folder or Hugging Face id, <model>/<drafter> for a shipped one, an index of `mmdec "
        "index`, or a smaller model. Repeat it. Default: lookup, recycling and those in the model's folder.",
        list[str],
        short="-d",
        metavar="NAME|FOLDER",
    )
    data: str | os.PathLike[str] | None = option(
        None,
        "Prompts, a line each or a .jsonl; for a model that sees, questions as `mmdec eval vlm` reads them. Default: "
        "built-in prompts, or questions about the sample pictures.",
        Path | None,
    )
    audio: Sequence[Path] = option(
        (),
        "Recordings for a model that hears. Repeat it. Default: the samples.",
        list[Path],
        metavar="FILE|FOLDER",
    )
    images: str | os.PathLike[str] | None = option(None, option_help(VlmEvalOptions, "images"), Path | None)
    prompt: str = option(VlmEvalOptions.prompt, option_help(VlmEvalOptions, "prompt"), str, short="-p")
    inner: str | None = option(
        None, "Also time each smaller model with its chains drafted by lookup or recycling.", str | None
    )
    draft_text: Sequence[Path] = option(
        (),
        "A folder with a text of each recording (.txt, .srt, .vtt), of its name: drafted as a hypothesis. Repeat it.",
        list[Path],
        metavar="FOLDER",
    )
    draft_model: Sequence[str] = option(
        (), "A faster recogniser, whose text is drafted. Repeat it.", list[str], metavar="MODEL"
    )
    language: str = option("en", option_help(AsrEvalOptions, "language"), str)
    per_kind: int | None = option(
        None,
        "Prompts or questions of each kind. Default: all of --data and --images, else 2.",
        int | None,
        minimum=1,
    )
    repeats: int = option(3, "Times that each method decodes each input.", int, minimum=1)
    max_new_tokens: int | None = option(None, option_help(VlmEvalOptions, "max_new_tokens"), int | None, minimum=1)
    minutes: float | None = option(
        None, "Stop after this time, with what was measured. Default: no limit.", float | None, minimum=0.01
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_kind is not None:
            check_whole("per_kind", self.per_kind, 1, 2**31, "2 of each kind give a first impression.")
        check_whole("repeats", self.repeats, 1, 10_000, "3 give quartiles.")
        if self.max_new_tokens is not None:
            check_whole("max_new_tokens", self.max_new_tokens, MIN_NEW_TOKENS, 2**31, "Give 128.")
        if self.minutes is not None:
            check_finite("minutes", self.minutes, "Try 10.")
            if self.minutes <= 0:
                raise InputError(f"`minutes` must be positive, but is {self.minutes}. Try 10.")
