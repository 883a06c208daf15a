"""The options of `mmdec.translate_speech`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from mmdec.checks.arguments import check_choice, check_switch
from mmdec.tasks.options import STRICT_HELP, TaskOptions, option

if TYPE_CHECKING:
    import os

    from mmdec.daspeech.passes import OnPass
    from mmdec.daspeech.translator import SpeechTranslator

DASPEECH_KIND = "daspeech"  # "system" in config.json, see `model_kind`
DEFAULT_TRANSLATOR = "daspeech-everyday"
GRAPH_STRATEGIES = ("lookahead", "greedy", "viterbi", "joint-viterbi", "beam")
AUTOREGRESSIVE_OUTPUT = ("autoregressive", "verified")  # those whose text is that of the autoregressive decoder
STRATEGIES_WITH_AR_DECODER = ("reranked", *AUTOREGRESSIVE_OUTPUT)  # those that need this decoder
STRATEGIES = (*GRAPH_STRATEGIES, *STRATEGIES_WITH_AR_DECODER)


@final
@dataclass(frozen=True, kw_only=True)
class TranslateOptions(TaskOptions):
    """The options of `mmdec.translate_speech`, checked as far as that needs no model."""

    sample_rate: int | None = option(None, "Hz of samples; files name it themselves.")
    model: str | os.PathLike[str] | SpeechTranslator = option(
        DEFAULT_TRANSLATOR, "A shipped name, a folder, a Hugging Face id, or a loaded translator."
    )
    strategy: str | None = option(
        None,
        "How text is decoded: lookahead, greedy, viterbi, joint-viterbi or beam through the DAG; reranked (the best of "
        "the DAG's texts); autoregressive; or verified (its output, in fewer passes). Default: what the model's "
        "config.json says.",
        str | None,
        short="-s",
    )
    vocoder: str | os.PathLike[str] | None = option(
        None, "HiFi-GAN weights: a folder or a Hugging Face id. Default: the model's own.", str | None
    )
    strict: bool = option(False, STRICT_HELP, bool)
    on_pass: OnPass | None = option(None, "Called after each pass of the decoder; for one recording.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategy is not None:
            check_choice("strategy", self.strategy, STRATEGIES)
        self._set(strict=check_switch("strict", self.strict))
