"""What transformers' `AutoConfig` reads of the folders that mmdec writes: one class for translators, one for drafters.

`mmdec.register` makes `AutoConfig` know them. They carry the settings as the folder's config.json has
them; the networks are built by mmdec's own readers, which check them.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

DASPEECH, DRAFTER = "mmdec-daspeech", "mmdec-drafter"


class DASpeechModelConfig(PreTrainedConfig):
    """A translator's settings: `architecture`, `vocoder`, `decoding`."""

    model_type = DASPEECH

    def __init__(self, **settings: Any) -> None:
        self.settings = _own(settings)
        named: dict[str, Any] = {"name_or_path": str(settings.get("name_or_path") or "")}
        super().__init__(**named)


class DrafterModelConfig(PreTrainedConfig):
    """A draft network's settings; `settings["system"]` names it, as in `mmdec.drafters.registry`."""

    model_type = DRAFTER

    def __init__(self, **settings: Any) -> None:
        self.settings = _own(settings)
        named: dict[str, Any] = {"name_or_path": str(settings.get("name_or_path") or "")}
        super().__init__(**named)


def _own(settings: dict[str, Any]) -> dict[str, Any]:
    """What the folder says, without what transformers adds; once more what `to_dict` gave."""
    inner = settings.get("settings")
    if isinstance(inner, dict):
        return dict(inner)
    added = {"name_or_path", "model_type", "transformers_version", "dtype", "torch_dtype"}
    return {name: value for name, value in settings.items() if name not in added and not name.startswith("_")}


AutoConfig.register(DASPEECH, DASpeechModelConfig, exist_ok=True)
AutoConfig.register(DRAFTER, DrafterModelConfig, exist_ok=True)
