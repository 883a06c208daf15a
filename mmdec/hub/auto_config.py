"""Configuration classes for `AutoConfig` of transformers: one for translators, one for drafters.

`mmdec.register` registers them. They hold the settings of the folder's config.json unchanged; mmdec's own loaders check
them and build the networks.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

DASPEECH, DRAFTER = "mmdec-daspeech", "mmdec-drafter"


class DASpeechModelConfig(PreTrainedConfig):
    """The configuration of a translator: `architecture`, `vocoder`, `decoding`."""

    model_type = DASPEECH

    def __init__(self, **settings: Any) -> None:
        self.settings = _own(settings)
        named: dict[str, Any] = {"name_or_path": str(settings.get("name_or_path") or "")}
        super().__init__(**named)


class DrafterModelConfig(PreTrainedConfig):
    """The configuration of a draft network; `settings["system"]` names its class, as in `mmdec.drafters.registry`."""

    model_type = DRAFTER

    def __init__(self, **settings: Any) -> None:
        self.settings = _own(settings)
        named: dict[str, Any] = {"name_or_path": str(settings.get("name_or_path") or "")}
        super().__init__(**named)


def _own(settings: dict[str, Any]) -> dict[str, Any]:
    """The folder's own settings, without those that transformers adds; also undoes `to_dict`."""
    inner = settings.get("settings")
    if isinstance(inner, dict):
        return dict(inner)
    added = {"name_or_path", "model_type", "transformers_version", "dtype", "torch_dtype"}
    return {name: value for name, value in settings.items() if name not in added and not name.startswith("_")}


AutoConfig.register(DASPEECH, DASpeechModelConfig, exist_ok=True)
AutoConfig.register(DRAFTER, DrafterModelConfig, exist_ok=True)
