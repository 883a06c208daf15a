"""A corpus of a dozen tones in LibriSpeech's layout."""

from __future__ import annotations

from pathlib import Path

import torch

from mmdec.io.audio import save_audio

TEXTS = ["Where is the station?", "The station is near.", "Two teas, please.", "It's five o'clock."]


def write_english(root: Path) -> Path:
    """Write chapters of four tones: two in train, one in train_everyday, one in dev."""
    for split, chapters in (("train", 2), ("train_everyday", 1), ("dev", 1)):
        for chapter in range(chapters):
            folder = root / split / "0001" / str(chapter)
            lines = []
            for index, text in enumerate(TEXTS):
                tone = 0.3 * torch.sin(torch.arange(16000) * 2 * torch.pi * (200 + 100 * index + 30 * chapter) / 16000)
                save_audio(folder / f"0001-{chapter}-{index:04d}.flac", tone)
                lines.append(f"0001-{chapter}-{index:04d} {text}")
            (folder / f"0001-{chapter}.trans.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root
