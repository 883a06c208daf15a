"""Copies sample recordings and pictures to the file names that a documentation page's code uses."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

SAMPLES = Path(__file__).parents[2] / "data" / "samples"


def put_samples(folder: Path, code: str) -> None:
    """Copy a sample to each name of a wav, flac or png file (without a folder) in the code, except files that the code
    writes."""
    french = sorted(SAMPLES.glob("*.wav"))
    english = SAMPLES / "english" / "austen.flac"
    for number, name in enumerate(sorted(set(re.findall(r"\"(\w+\.(?:wav|flac))\"", code)))):
        if f'.save("{name}")' not in code:
            shutil.copy(french[number % len(french)] if name.endswith(".wav") else english, folder / name)
    for name in set(re.findall(r"\"(\w+\.png)\"", code)):
        if (SAMPLES / "images" / name).is_file():
            shutil.copy(SAMPLES / "images" / name, folder / name)
