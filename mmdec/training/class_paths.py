"""Class paths of earlier releases, which recipes and checkpoints may still name. They go with the next release."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from jsonargparse import set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser

set_parsing_settings(config_read_mode_fsspec_enabled=False)  # a recipe names what is run: none comes from an address

MOVED = {
    "mmdec.training.acoustic.AcousticData": "mmdec.training.daspeech.acoustic.AcousticData",
    "mmdec.training.acoustic.AcousticModule": "mmdec.training.daspeech.acoustic.AcousticModule",
    "mmdec.training.augment.Augmentation": "mmdec.training.daspeech.augment.Augmentation",
    "mmdec.training.callbacks.InitialWeights": "mmdec.training.daspeech.initial_weights.InitialWeights",
    "mmdec.training.corpus.SpeechTranslationData": "mmdec.training.daspeech.corpus.SpeechTranslationData",
    "mmdec.training.medusa.MedusaModule": "mmdec.training.medusa.module.MedusaModule",
    "mmdec.training.medusa_data.HeadData": "mmdec.training.medusa.data.HeadData",
    "mmdec.training.speech.DASpeechModule": "mmdec.training.daspeech.module.DASpeechModule",
    "mmdec.training.vocoder.VocoderData": "mmdec.training.daspeech.vocoder.VocoderData",
    "mmdec.training.vocoder.VocoderModule": "mmdec.training.daspeech.vocoder.VocoderModule",
    "mmdec.training.whisper.Shape": "mmdec.training.whisper.module.Shape",
    "mmdec.training.whisper.WhisperModule": "mmdec.training.whisper.module.WhisperModule",
    "mmdec.training.window_data.WindowData": "mmdec.training.whisper.window_data.WindowData",
    "mmdec.training.windows.Composition": "mmdec.training.whisper.windows.Composition",
}
_OLD = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, MOVED))})(?![\w.])")


def renamed(text: str, source: str) -> str:
    """A text with the class paths of this release; a FutureWarning names each old one. source: for the warning."""

    def replace(match: re.Match[str]) -> str:
        old, new = match.group(1), MOVED[match.group(1)]
        warnings.warn(
            f"{source} names {old}, which is now {new}. Change it: the next release does not read the old name.",
            FutureWarning,
            stacklevel=2,
        )
        return new

    return _OLD.sub(replace, text)


def renamed_in(value: Any, source: str) -> Any:
    """The same for all texts in nested mappings and lists; other values stay as they are."""
    if isinstance(value, str):
        return renamed(value, source)
    if isinstance(value, dict):
        return {key: renamed_in(part, source) for key, part in value.items()}
    if isinstance(value, list):
        return [renamed_in(part, source) for part in value]
    return value


class RecipeParser(LightningArgumentParser):
    """Reads recipes, options and checkpoints' hyperparameters with the class paths of earlier releases, too."""

    def parse_args(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:  # type: ignore[override] # jsonargparse patches its methods
        given = sys.argv[1:] if args is None else args
        return super().parse_args([renamed(arg, "the command line") for arg in given], *rest, **options)

    def parse_string(self, content: str, *rest: Any, **options: Any) -> Any:  # type: ignore[override] # jsonargparse patches its methods
        return super().parse_string(renamed(content, "the recipe"), *rest, **options)

    def parse_object(self, cfg_obj: Any, *rest: Any, **options: Any) -> Any:  # type: ignore[override] # jsonargparse patches its methods
        return super().parse_object(renamed_in(cfg_obj, "the checkpoint"), *rest, **options)
