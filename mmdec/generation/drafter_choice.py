"""What a caller may give as `drafter`: a name, a smaller model, an object, or None."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from transformers import PreTrainedModel, WhisperForConditionalGeneration

from mmdec.checks.arguments import check_methods, show
from mmdec.drafters.lookup import Lookup
from mmdec.drafters.recycling import Recycling
from mmdec.drafters.small_model import SmallModel
from mmdec.targets.text import TextTarget
from mmdec.targets.whisper import WhisperTarget
from mmdec.types import Drafter, InputError, Needs

DRAFTERS: Mapping[str, Callable[[], Drafter]] = {"lookup": Lookup, "recycling": Recycling}
DraftedBy = Drafter | PreTrainedModel | str | None
METHODS = ("check", "start", "propose", "update", "select")  # of `mmdec.types.Drafter`


def choose_drafter(given: DraftedBy) -> Drafter | None:
    """The drafter itself. Raises InputError for what is none."""
    if given is None:
        return None
    if isinstance(given, str):
        if given not in DRAFTERS:
            raise InputError(
                f"`drafter` must be one of {', '.join(DRAFTERS)}, a model or a Drafter, but is {show(given)}. Choose "
                "one."
            )
        return DRAFTERS[given]()
    if isinstance(given, PreTrainedModel):
        try:
            if isinstance(given, WhisperForConditionalGeneration):
                whisper = WhisperTarget(given)
                return SmallModel(whisper, memory=True, positions=whisper.positions)
            small = TextTarget(given)
            return SmallModel(small, positions=small.positions)
        except InputError as error:
            raise InputError(str(error).replace("`model`", "`drafter`", 1)) from error
    remedy = f"Choose one of {', '.join(DRAFTERS)}, a smaller model, or write one after `mmdec.types.Drafter`."
    check_methods("drafter", given, METHODS, remedy)
    if not isinstance(getattr(given, "name", None), str) or not isinstance(getattr(given, "needs", None), Needs):
        raise InputError(
            f"`drafter` must have a `name` and its `needs`, an mmdec.types.Needs, but {show(given)} has not. {remedy}"
        )
    return given
