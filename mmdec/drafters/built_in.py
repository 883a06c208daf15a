"""The names of the built-in drafters. This module needs no torch: the help of the command line reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AUTO = "auto"  # the name that lets mmdec look for a drafter that was trained for the model
FALLBACK_DRAFTER = "lookup"  # name of the drafter that "auto" chooses if none was trained for the model
# What a built-in drafter is made from: nothing ("ready"), the loaded target model ("from_model"), or a folder with
# weights that were trained for a language model, with or without images, or for a speech model.
DrafterKind = Literal["ready", "from_model", "language_weights", "speech_weights"]


@dataclass(frozen=True)
class BuiltIn:
    """Where a built-in drafter is, and what it is made from.

    Lists of names are made from this, without importing a drafter.
    """

    module: str  # has the class
    kind: DrafterKind
    training: str = ""  # module of the class that `mmdec train drafter` trains it with; "" if it does not


BUILT_IN = {  # in the order of lists of names
    "lookup": BuiltIn("mmdec.drafters.lookup", "ready"),
    "recycling": BuiltIn("mmdec.drafters.recycling", "ready"),
    "jacobi": BuiltIn("mmdec.drafters.jacobi", "ready"),
    "mtp": BuiltIn("mmdec.pretrained.mtp", "from_model"),
    "early_exit": BuiltIn("mmdec.pretrained.early_exit", "from_model"),
    "medusa": BuiltIn("mmdec.drafters.medusa.drafter", "speech_weights"),
    "ctc": BuiltIn("mmdec.drafters.ctc.drafter", "speech_weights"),
    "eagle3": BuiltIn("mmdec.drafters.eagle.eagle3", "language_weights", "mmdec.drafters.eagle.training.eagle3"),
    "eagle": BuiltIn("mmdec.drafters.eagle.eagle", "language_weights", "mmdec.drafters.eagle.training.modules"),
    "msd": BuiltIn("mmdec.drafters.eagle.msd", "language_weights", "mmdec.drafters.eagle.training.modules"),
    "vispec": BuiltIn("mmdec.drafters.eagle.vispec", "language_weights", "mmdec.drafters.eagle.training.modules"),
    "specvlm": BuiltIn("mmdec.drafters.eagle.specvlm", "language_weights", "mmdec.drafters.eagle.training.modules"),
    "flash": BuiltIn("mmdec.drafters.flash.network", "language_weights", "mmdec.drafters.flash.training.module"),
    "dflash": BuiltIn("mmdec.drafters.dflash.network", "language_weights", "mmdec.drafters.dflash.training.module"),
    "heads": BuiltIn("mmdec.drafters.heads.network", "language_weights", "mmdec.drafters.heads.training.module"),
    "prompt_tokens": BuiltIn(
        "mmdec.drafters.prompt_tokens.network", "language_weights", "mmdec.drafters.prompt_tokens.training.module"
    ),
}


def built_in_names(*kinds: DrafterKind) -> list[str]:
    """Return the names of the built-in drafters of these kinds, in the order of `BUILT_IN`."""
    return [name for name, drafter in BUILT_IN.items() if drafter.kind in kinds]


def trainable_names() -> list[str]:
    """Return the names of the drafters that `mmdec train drafter` trains."""
    return [name for name, drafter in BUILT_IN.items() if drafter.training]
