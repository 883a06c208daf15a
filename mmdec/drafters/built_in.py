"""The names of the built-in drafters. This module needs no torch: the help of the command line reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AUTO = "auto"  # the name that lets mmdec look for a drafter that was trained for the model
FALLBACK_DRAFTER = "lookup"  # name of the drafter that "auto" chooses if none was trained for the model
# What a built-in drafter is made of: nothing ("ready"), the loaded target model ("of_model"), or a folder with weights
# that were trained for a language model, with or without images, or for a speech model.
DrafterKind = Literal["ready", "of_model", "language_weights", "speech_weights"]


@dataclass(frozen=True)
class BuiltIn:
    """Where a built-in drafter is, and what it is made of.

    Lists of names are made from this, without importing a drafter.
    """

    module: str  # has the class
    kind: DrafterKind


BUILT_IN = {  # in the order of lists of names
    "lookup": BuiltIn("mmdec.drafters.lookup", "ready"),
    "recycling": BuiltIn("mmdec.drafters.recycling", "ready"),
    "jacobi": BuiltIn("mmdec.drafters.jacobi", "ready"),
    "mtp": BuiltIn("mmdec.drafters.mtp", "of_model"),
    "early_exit": BuiltIn("mmdec.pretrained.early_exit", "of_model"),
    "medusa": BuiltIn("mmdec.drafters.medusa.drafter", "speech_weights"),
    "ctc": BuiltIn("mmdec.drafters.ctc.drafter", "speech_weights"),
    "eagle3": BuiltIn("mmdec.drafters.eagle.eagle3", "language_weights"),
    "eagle": BuiltIn("mmdec.drafters.eagle.eagle", "language_weights"),
    "msd": BuiltIn("mmdec.drafters.eagle.msd", "language_weights"),
    "vispec": BuiltIn("mmdec.drafters.eagle.vispec", "language_weights"),
    "specvlm": BuiltIn("mmdec.drafters.eagle.specvlm", "language_weights"),
    "flash": BuiltIn("mmdec.drafters.flash.network", "language_weights"),
    "dflash": BuiltIn("mmdec.drafters.dflash.network", "language_weights"),
    "heads": BuiltIn("mmdec.drafters.heads.network", "language_weights"),
    "prompt_tokens": BuiltIn("mmdec.drafters.prompt_tokens.network", "language_weights"),
}


def built_in_names(*kinds: DrafterKind) -> list[str]:
    """Return the names of the built-in drafters of these kinds, in the order of `BUILT_IN`."""
    return [name for name, drafter in BUILT_IN.items() if drafter.kind in kinds]
