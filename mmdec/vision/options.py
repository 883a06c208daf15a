"""The options of `mmdec.describe`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, final

from mmdec.checks.arguments import check_callable, check_whole
from mmdec.drafters.built_in import AUTO, FALLBACK_DRAFTER, built_in_names
from mmdec.pretrained import DEFAULT_VLM
from mmdec.tasks.options import MAX_BATCH, GenerateOptions, option

if TYPE_CHECKING:
    import os

    from transformers import PreTrainedModel

    from mmdec.generation.drafter_choice import DrafterChoice
    from mmdec.pretrained.vlm import LoadedVlm
    from mmdec.vision.answer import Description

Model: TypeAlias = "str | os.PathLike[str] | PreTrainedModel | LoadedVlm"
OnText = Callable[[str], None]
OnDescription: TypeAlias = "Callable[[int, Description], None]"


@final
@dataclass(frozen=True, kw_only=True)
class DescribeOptions(GenerateOptions):
    """The options of `mmdec.describe`, checked as far as that needs no model."""

    model: Model = option(DEFAULT_VLM, "A shipped name, a folder, a Hugging Face id, or a loaded model.")
    drafter: DrafterChoice = option(
        AUTO,
        f"{', '.join(built_in_names('language_weights'))} (where the model has their weights), "
        f"{', '.join(built_in_names('ready'))} or another registered name; a folder with a drafter's weights; a "
        f"class as package.module:Class; none (no drafts); or {AUTO}: the model's own, else {FALLBACK_DRAFTER}.",
        str,
        short="-d",
    )
    batch_size: int = option(8, "Questions answered at a time.", int, metavar="N", minimum=1)
    on_text: OnText | None = option(None, "Called with each accepted piece of the answer; for one question.")
    on_description: OnDescription | None = option(None, "Called with the index and answer of each question.")

    def __post_init__(self) -> None:
        batch_size = check_whole("batch_size", self.batch_size, 1, MAX_BATCH, "Leave it out for 8.")
        super().__post_init__()
        check_callable("on_description", self.on_description, "a function of an index and a description")
        self._set(batch_size=batch_size)
