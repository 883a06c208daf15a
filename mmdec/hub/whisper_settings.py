"""The settings in a Whisper's folder that would fail, or ask for endless memory, in the middle of a call."""

from __future__ import annotations

from pathlib import Path

from mmdec.checks.errors import InputError
from mmdec.checks.weights import read_settings

LARGEST = {  # of the feature extractor: 128 mels and FFTs of 400 in published models
    "feature_size": 1024,
    "n_fft": 2**14,
    "hop_length": 2**14,
    "chunk_length": 3600,
    "sampling_rate": 192_000,
}
EXTRACTORS = ("processor_config.json", "preprocessor_config.json")  # of today, and of before


def check_extractor(folder: Path) -> None:
    """Raise InputError for sizes of the feature extractor that no Whisper has: its filters would fill the memory."""
    for name in EXTRACTORS:
        if not (folder / name).is_file():
            continue
        settings = read_settings(folder / name)
        sizes = settings.get("feature_extractor", settings)
        for key, most in LARGEST.items():
            value = sizes.get(key, 1) if isinstance(sizes, dict) else None
            if type(value) is not int or not 1 <= value <= most:
                raise InputError(
                    f"`{key}` must be a whole number from 1 to {most}, but {name} of '{folder}' has {value!r:.100}. "
                    "Fetch it again."
                )
